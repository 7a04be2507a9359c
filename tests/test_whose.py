"""Whose CPUs are measured: a server's process is found by the port or the socket that it listens on."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import running
from trees import Machine

from exporter.measure.host import allowed_cpus
from exporter.measure.listener import owner, tcp_sockets, unix_sockets
from exporter.measure.whose import CpuSet, measured_cpus

WAIT = "print(port, flush=True); sys.stdin.read()"
TCP = f"import socket, sys; s = socket.create_server(('127.0.0.1', 0)); port = s.getsockname()[1]; {WAIT}"
UNIX = f"import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); port = 0; {WAIT}"


@contextmanager
def listening(code: str, *arguments: str, cpus: set[int] | None = None) -> Iterator[int]:
    """A process that listens, kept to some CPUs; its port."""
    own = os.sched_getaffinity(0)
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)  # inherited
        with running(
            (sys.executable, "-c", code, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            os.sched_setaffinity(0, own)
            assert process.stdout
            yield int(process.stdout.readline())
            assert process.stdin
            process.stdin.close()
    finally:
        os.sched_setaffinity(0, own)


def test_a_server_kept_to_one_cpu_is_measured_there() -> None:
    one = {allowed_cpus()[-1]}
    with listening(TCP, cpus=one) as port:
        assert measured_cpus([f"http://127.0.0.1:{port}"]) == CpuSet(tuple(one), "server")
        assert measured_cpus([f"http://localhost:{port}/prefix"]) == CpuSet(tuple(one), "server")


def test_a_server_on_a_unix_socket_is_found(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with listening(UNIX, path, cpus={allowed_cpus()[0]}):
        assert measured_cpus([f"unix:{path}"]) == CpuSet((allowed_cpus()[0],), "server")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://192.0.2.1:80", "http://no-such-host.invalid:80", "unix:/no"]
)
def test_a_server_that_is_not_seen_leaves_the_exporters_own(url: str) -> None:
    assert measured_cpus([url]) == CpuSet(allowed_cpus(), "exporter")


def test_no_server_at_all_leaves_the_exporters_own() -> None:
    assert measured_cpus([]) == CpuSet(allowed_cpus(), "exporter")


def test_servers_that_disagree_leave_the_exporters_own() -> None:
    """One machine has one set of ceilings."""
    if len(allowed_cpus()) < 2:
        pytest.skip("one CPU cannot be two sets")
    with listening(TCP, cpus={allowed_cpus()[0]}) as one, listening(TCP, cpus={allowed_cpus()[1]}) as other:
        urls = [f"http://127.0.0.1:{port}" for port in (one, other)]
        assert measured_cpus(urls) == CpuSet(allowed_cpus(), "exporter")


def test_cpus_that_the_exporter_may_not_use_are_not_measured() -> None:
    with listening(TCP) as port:
        assert measured_cpus([f"http://127.0.0.1:{port}"], lambda: (997,)) == CpuSet((997,), "exporter")


def test_a_port_that_only_this_process_holds_is_this_processes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        port = own.getsockname()[1]
        assert measured_cpus([f"http://127.0.0.1:{port}"]).scope == "server"


class TestListener:
    """The kernel's tables, as they look."""

    TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0000 100 0 0 10 0
   1: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 4712 1 0000 20 4 30 10 -1
   2: 00000000:F1F9 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4713 1 0000 100 0 0 10 0
"""
    TCP6 = """  sl  local_address                         remote_address                        st
   0: 00000000000000000000000000000000:1F90 00000000000000000000000000000000:0000 0A 0:0 00:0 0 1000 0 4714 1
"""
    UNIX = """Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 4715 /run/llama.sock
0000000000000000: 00000003 00000000 00000000 0001 03 4716
"""

    def machine(self, tmp_path: Path) -> Machine:
        machine = Machine(tmp_path)
        machine.write("proc/net/tcp", self.TCP).write("proc/net/tcp6", self.TCP6).write("proc/net/unix", self.UNIX)
        descriptors = tmp_path / "proc/7/fd"
        descriptors.mkdir(parents=True)
        (descriptors / "0").symlink_to("/dev/null")
        (descriptors / "3").symlink_to("socket:[4714]")
        return machine

    def test_listening_sockets_of_a_port(self, tmp_path: Path) -> None:
        machine = self.machine(tmp_path)
        assert tcp_sockets(machine.proc, 8080) == {"4711", "4714"}
        assert tcp_sockets(machine.proc, 80) == frozenset()

    def test_sockets_of_a_path(self, tmp_path: Path) -> None:
        machine = self.machine(tmp_path)
        assert unix_sockets(machine.proc, "/run/llama.sock") == {"4715"}
        assert unix_sockets(machine.proc, "/run/llama") == frozenset()

    def test_the_process_that_holds_one(self, tmp_path: Path) -> None:
        machine = self.machine(tmp_path)
        assert owner(machine.proc, ("4711", "4714"), lambda: (5, 7)) == 7
        assert owner(machine.proc, ("4711",), lambda: (5, 7)) is None
        assert owner(machine.proc, (), lambda: (5, 7)) is None

    def test_missing_tables_tell_nothing(self, tmp_path: Path) -> None:
        assert tcp_sockets(tmp_path, 8080) == unix_sockets(tmp_path, "/s") == frozenset()
