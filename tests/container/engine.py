"""A docker daemon, started where none runs, and what the tests do with its containers."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from processes import get
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterator

START_SECONDS = 60.0
LOCK_SECONDS = 900.0
PORT = 10470
USER = 65532
"""The exporter's."""
CPUS = sorted(os.sched_getaffinity(0))
ENOUGH_MEMORY = f"{max(128, 70 + 7 * len(CPUS))}m"
"""As README reckons it for the CPUs of this machine."""

# Isolated: its own socket, state and storage, no bridge and no packet filter, hence no trace on this machine's network.
DAEMON_FLAGS = ("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--log-level=warn")

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class EngineError(Exception):
    """Docker, or a part that it needs, does not work here."""


class Docker:
    """The docker client.

    Args:
        host: The daemon's address; None for the client's own choice.
    """

    def __init__(self, host: str | None = None) -> None:
        # The classic builder: it needs no plugin, and it is in every daemon that Debian ships.
        self.environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
        if host is not None:
            self.environment["DOCKER_HOST"] = host

    def run(self, *arguments: str, seconds: float = 60, command: str = "docker") -> str:
        """What a docker command prints.

        Raises:
            EngineError: It failed; with the end of what it said.
        """
        try:
            done = subprocess.run(
                (command, *arguments),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=seconds,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"{command} {arguments[0]}: {error}") from error
        if done.returncode != 0:
            said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
            raise EngineError(f"{command} {arguments[0]}: exit status {done.returncode}:\n{said}")
        return done.stdout

    def answers(self) -> bool:
        """Whether there is a daemon."""
        try:
            self.run("version", "--format", "{{.Server.Version}}", seconds=10)
        except EngineError:
            return False
        return True

    def inspect(self, thing: str) -> dict[str, Any]:
        """Everything about an image or a container."""
        found: dict[str, Any] = json.loads(self.run("inspect", thing))[0]
        return found


@contextmanager
def daemon() -> Iterator[Docker]:
    """The daemon that runs already, or one of our own that ends with the session.

    Ours keeps images between sessions, below the user's cache directory, and serves one session at a time.

    Raises:
        EngineError: There is none, and none can be started.
    """
    if shutil.which("docker") and (docker := Docker()).answers():
        yield docker
        return
    for program in ("docker", "dockerd", "setpriv"):
        if shutil.which(program) is None:
            raise EngineError(f"{program} is not on the PATH")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roofline-exporter" / "docker"
    cache.mkdir(parents=True, exist_ok=True)
    # A socket's path may have 108 bytes at most: /tmp, not pytest's deep directories.
    with (
        _locked(cache / "lock"),
        tempfile.TemporaryDirectory(prefix="dockerd-") as scratch,
        _dockerd(cache / "data", Path(scratch)) as docker,
    ):
        docker.run("container", "prune", "--force")  # of a session that was killed
        yield docker


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive use of the daemon's storage; another session's daemon is waited for."""
    deadline = time.monotonic() + LOCK_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EngineError(f"another session has held {path} for {LOCK_SECONDS:.0f} s") from None
                time.sleep(1)
        yield


@contextmanager
def _dockerd(data: Path, scratch: Path) -> Iterator[Docker]:
    docker = Docker(f"unix://{scratch}/docker.sock")
    log = scratch / "dockerd.log"
    command = (
        *("setpriv", "--pdeathsig", "TERM", "--"),  # it ends even when pytest is killed
        *("dockerd", f"--host=unix://{scratch}/docker.sock", f"--data-root={data}", f"--exec-root={scratch}/exec"),
        *(f"--pidfile={scratch}/dockerd.pid", *DAEMON_FLAGS),
    )
    with log.open("w") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not docker.answers():
            if process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(log.read_text().splitlines()[-5:])
                raise EngineError(f"dockerd does not start here:\n{tail}")
            time.sleep(0.2)
        yield docker
    finally:
        # Its containerd is its child and ends with it.
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        _unmount(scratch)


def _unmount(below: Path) -> None:
    """Takes away the mounts that dockerd leaves behind, such as network namespaces."""
    points = [Path(line.split()[1]) for line in Path("/proc/self/mounts").read_text().splitlines()]
    for point in reversed(points):
        if point.is_relative_to(below):
            subprocess.run(("umount", "--lazy", str(point)), check=False)


@dataclass(frozen=True)
class Container:
    """A started container of the image.

    Attributes:
        docker: Its daemon's client.
        name: Its id.
        pid: Its first process, as this machine numbers it.
    """

    docker: Docker
    name: str
    pid: int

    def state(self) -> dict[str, Any]:
        """Docker's view: Status, ExitCode, OOMKilled, Health."""
        found: dict[str, Any] = self.docker.inspect(self.name)["State"]
        return found

    def health(self) -> str:
        """Healthy, unhealthy or starting, in Docker's lower case."""
        return str(self.state()["Health"]["Status"])

    def logs(self) -> str:
        """What it has said so far."""
        return self.docker.run("logs", "--tail", "20", self.name, command="docker")

    def get(self, path: str, port: int = PORT) -> str:
        """What is served in its network, by default by the exporter, asked from inside by a thread of ours.

        Nothing is started in the container, and next to nothing outside: a process for each question would disturb
        the measurement that is waited for.

        Raises:
            OSError: It does not answer.
        """
        with ThreadPoolExecutor(1) as thread:  # the thread is never used for anything else
            return thread.submit(self._get, f"http://127.0.0.1:{port}{path}").result()

    def _get(self, url: str) -> str:
        with Path(f"/proc/{self.pid}/ns/net").open() as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        return get(url)

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Every sample of /metrics by name and labels."""
        families = text_string_to_metric_families(self.get("/metrics"))
        return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}

    def stop(self) -> tuple[int, float]:
        """Stops it as operators do, with SIGTERM; its exit code, and the seconds until the process was gone.

        Docker notes that moment; what it tidies up afterwards takes tenths of a second on a busy machine.
        """
        began = datetime.now(UTC)
        self.docker.run("stop", "--time", "10", self.name)
        state = self.state()
        return int(state["ExitCode"]), (datetime.fromisoformat(state["FinishedAt"]) - began).total_seconds()


HARDENED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
"""What the image promises to work with, in every test."""


@contextmanager
def container(
    docker: Docker, image: str, *options: str, command: tuple[str, ...] = (), network: str = "none"
) -> Iterator[Container]:
    """A running container of the image, hardened and without a network of its own; removed at the end."""
    name = docker.run("run", "--detach", f"--network={network}", *HARDENED, *options, image, *command).strip()
    try:
        yield Container(docker, name, int(docker.inspect(name)["State"]["Pid"]))
    finally:
        docker.run("rm", "--force", "--volumes", name)
