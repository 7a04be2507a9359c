"""Whose CPUs a ceiling is measured on: the server's where its process can be seen, else the exporter's own."""

import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil

from exporter.measure.host import allowed_cpus
from exporter.measure.listener import owner, tcp_sockets, unix_sockets

SERVER_NAME: Final = "llama-server"
FORWARDERS: Final = frozenset(
    {"docker-proxy", "rootlessport", "slirp4netns", "pasta", "ssh", "kubectl", "nginx", "haproxy"}
)
"""Programs that listen for a server elsewhere; their CPUs say nothing."""


@dataclass(frozen=True, slots=True)
class CpuSet:
    """The CPUs to measure on, and whose they are: `server` or `exporter`."""

    cpus: tuple[int, ...]
    scope: str


def measured_cpus(
    urls: Sequence[str], allowed: Callable[[], tuple[int, ...]] = allowed_cpus, proc: Path = Path("/proc")
) -> CpuSet:
    """The CPUs that the servers decode on, as far as this process may use them too.

    All servers must be seen and agree: one machine has one set of ceilings here. Seeing them takes a shared PID
    namespace (`shareProcessNamespace`, `--pid container:`).

    Args:
        urls: The servers that decode on this machine's CPUs.
        allowed: The CPUs that this process may use.
        proc: The root of procfs.
    """
    own = allowed()
    found = {_affinity(url, proc) for url in urls}
    if len(found) == 1 and (theirs := found.pop()) is not None and set(theirs) <= set(own):
        return CpuSet(theirs, "server")
    return CpuSet(own, "exporter")


def _affinity(url: str, proc: Path) -> tuple[int, ...] | None:
    """The CPUs of the process that listens at the URL; None when it is not seen."""
    try:
        pid = listener_of(url, proc)
        process = None if pid is None else psutil.Process(pid)
        if process is None or process.name() in FORWARDERS:
            return None
        return tuple(sorted(process.cpu_affinity() or ())) or None
    except (psutil.Error, OSError):
        return None


def listener_of(url: str, proc: Path) -> int | None:
    """The process that listens at the URL, if it is seen in this network namespace."""
    if url.startswith("unix:"):
        return owner(proc, unix_sockets(proc, url.removeprefix("unix:")))
    parts = urlsplit(url)
    port = parts.port or {"https": 443}.get(parts.scheme, 80)
    if not _is_local(parts.hostname or ""):
        return None
    listening = tcp_sockets(proc, port)
    seen = owner(proc, listening)
    # Another user's sockets have no owner in /proc for us, but its processes have names and arguments.
    return seen if seen is not None or not listening else _by_name(psutil.process_iter(), port)


def _by_name(processes: Iterable[psutil.Process], port: int) -> int | None:
    """The only llama-server, or the only one that was told this port."""
    servers = {}
    for process in processes:
        try:
            if process.name() == SERVER_NAME:
                servers[process.pid] = process.cmdline()
        except psutil.Error:
            continue
    told = [pid for pid, arguments in servers.items() if str(port) in arguments or f"--port={port}" in arguments]
    candidates = told or list(servers)
    return candidates[0] if len(candidates) == 1 else None


def on_this_machine(url: str) -> bool:
    """Whether the server at the URL runs on this machine."""
    return url.startswith("unix:") or _is_local(urlsplit(url).hostname or "")


def _is_local(host: str) -> bool:
    """Whether the host is this machine, by a loopback address or one of its own."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    own = {address.address for family in psutil.net_if_addrs().values() for address in family}
    return any(ipaddress.ip_address(str(a).partition("%")[0]).is_loopback or a in own for a in addresses)
