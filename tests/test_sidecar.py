"""The image as a sidecar: beside a real llama.cpp server, in its network and PID namespaces, hardened and small."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from container.engine import ENOUGH_MEMORY, USER, Container, Docker, container
from container.engine import PORT as EXPORTER_PORT
from processes import running, wait_for
from real import require

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

pytest_plugins = ["container.fixtures"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

PORT = 8080
BATCHES = ("1", "2", "4")
CONFIG = f"""
bandwidth: {{interval: 5s}}
probe: {{interval: 5s, health_interval: 1s, seconds: 0.5, max_duty_cycle: 0.5}}
servers:
  - name: local
    url: http://127.0.0.1:{PORT}
    api_key_file: /etc/roofline-exporter/llama.key
    floor_fraction: {{}}
"""
STOP_SECONDS = 1.0


@dataclass(frozen=True)
class Llama:
    """A real server in the network and PID namespaces of a container, as root; the exporter is somebody else there.

    Attributes:
        container: The container's name. It has no other network.
        pid: The server's process, as this machine numbers it.
        key: The file of its API key.
    """

    container: str
    pid: int
    key: Path

    def pin(self, cpus: set[int]) -> None:
        """Keeps every thread of the server to these CPUs, as a cpuset would."""
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cpus)


@pytest.fixture(scope="module")
def llama(docker: Docker, base: str, slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    """The server, listening."""
    require(shutil.which("nsenter"), "nsenter is not installed")
    key = tmp_path_factory.mktemp("key") / "llama.key"
    key.write_text("sk-sidecar\n")
    with container(docker, base, command=("sleep", "infinity")) as pause:
        server = (sys.executable, "-m", "exporter.service.llama_child", "--model", slow_model)
        listen = ("--port", str(PORT), "--api-key-file", key)
        enter = ("nsenter", f"--net=/proc/{pause.pid}/ns/net", f"--pid=/proc/{pause.pid}/ns/pid")
        with running((*enter, *server, *listen), stderr=subprocess.DEVNULL) as entering:
            wait_for("llama.cpp", 120, lambda: pause.get("/health", PORT))
            (process,) = psutil.Process(entering.pid).children()
            yield Llama(pause.name, process.pid, key)


@contextmanager
def sidecar(docker: Docker, image: str, *options: str, beside: Llama, directory: Path) -> Iterator[Container]:
    config, key = directory / "config.yaml", directory / "llama.key"
    config.write_text(CONFIG)
    config.chmod(0o644)
    shutil.copyfile(beside.key, key)
    key.chmod(0o400)
    os.chown(key, USER, USER)
    directory.chmod(0o755)
    mount = f"--volume={directory}:/etc/roofline-exporter:ro"
    network = f"container:{beside.container}"
    with container(docker, image, f"--memory={ENOUGH_MEMORY}", mount, *options, network=network) as found:
        wait_for("/metrics", 60, lambda: found.get("/metrics"))
        yield found


def scopes(found: Container) -> set[tuple[str, str]]:
    """Whose CPUs the kernels were measured on, and how many threads they took; none so far."""
    told = [dict(labels) for name, labels in found.metrics() if name == "roofline_memory_bandwidth_info"]
    return {(labels["scope"], labels["thread_count"]) for labels in told}


def ended_within_a_second(found: Container) -> bool:
    status, seconds = found.stop()
    assert status == 0, found.logs()
    return seconds < STOP_SECONDS


def test_it_measures_the_server_beside_it_and_ends_in_a_second(
    docker: Docker, image: str, llama: Llama, tmp_path: Path
) -> None:
    def value(name: str, **labels: str) -> float | None:
        return found.metrics().get((f"roofline_{name}", frozenset(labels.items())))

    def beside_it() -> AbstractContextManager[Container]:
        return sidecar(docker, image, f"--pid=container:{llama.container}", beside=llama, directory=tmp_path)

    def again() -> bool:
        """A machine that others load may be slow once."""
        with beside_it() as another:
            return ended_within_a_second(another)

    with beside_it() as found:
        wait_for(
            "every batch under a ceiling",
            600,
            lambda: all(value("decode_floor_ratio", server="local", batch=batch) for batch in BATCHES),
        )
        read = value("memory_bandwidth_bytes_per_second", kernel="read", threads="all")
        assert read is not None
        assert read > 1e9
        for batch in BATCHES:
            ratio = value("decode_floor_ratio", server="local", batch=batch)
            assert ratio is not None
            assert 0 < ratio < 1.05
        assert value("server_up", server="local") == 1
        # As in the README: a second process, within the same memory.
        url = f"http://127.0.0.1:{EXPORTER_PORT}"
        report = docker.run("exec", found.name, "roofline-exporter", "report", "--url", url, "--format", "table")
        assert "What holds decode back" in report
        state = found.state()
        assert (state["Status"], state["OOMKilled"]) == ("running", False), found.logs()
        assert ended_within_a_second(found) or any(again() for _ in range(2))


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "apart"])
def test_it_measures_on_the_servers_cpus_where_it_sees_its_process(
    docker: Docker, image: str, llama: Llama, tmp_path: Path, *, shared: bool
) -> None:
    """The server is another user's, so its open files are hidden: it is known by its name, and by nothing else."""
    cpus = os.sched_getaffinity(llama.pid)
    options = (f"--pid=container:{llama.container}",) if shared else ()
    llama.pin({max(cpus)})
    try:
        with sidecar(docker, image, *options, beside=llama, directory=tmp_path) as found:
            told = wait_for("a measurement", 300, lambda: scopes(found))
    finally:
        llama.pin(cpus)
    if shared:
        assert told == {("server", "1")}
    else:
        assert {scope for scope, _ in told} == {"exporter"}
