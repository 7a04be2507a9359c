"""The image as a sidecar: beside a real llama.cpp server, in its network namespace, hardened and small."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from container.engine import Container, Docker, container
from processes import running, wait_for
from real import require

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest_plugins = ["container.fixtures"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

PORT = 8080
BATCHES = ("1", "2", "4")
CONFIG = f"""
bandwidth: {{interval: 5s}}
probe: {{interval: 5s, health_interval: 1s, seconds: 0.5, max_duty_cycle: 0.5}}
servers: [{{name: local, url: 'http://127.0.0.1:{PORT}'}}]
"""
STOP_SECONDS = 1.0


@pytest.fixture(scope="module")
def llama_beside(docker: Docker, base: str, real_model: Path) -> Iterator[str]:
    """The name of a container in whose network namespace, without any other network, a real server listens."""
    require(shutil.which("nsenter"), "nsenter is not installed")
    with container(docker, base, command=("sleep", "infinity")) as pause:
        server = (sys.executable, "-m", "exporter.service.llama_child", "--model", real_model, "--port", str(PORT))
        enter = ("nsenter", f"--net=/proc/{pause.pid}/ns/net")
        with running((*enter, *map(str, server)), stderr=subprocess.DEVNULL):
            yield pause.name


@contextmanager
def sidecar(docker: Docker, image: str, beside: str, directory: Path) -> Iterator[Container]:
    config = directory / "config.yaml"
    config.write_text(CONFIG)
    directory.chmod(0o755)
    config.chmod(0o644)
    mount = f"--volume={config}:/etc/roofline-exporter/config.yaml:ro"
    with container(docker, image, "--memory=128m", mount, network=f"container:{beside}") as found:
        yield found


def test_it_measures_the_server_beside_it_and_ends_in_a_second(
    docker: Docker, image: str, llama_beside: str, tmp_path: Path
) -> None:
    def value(name: str, **labels: str) -> float | None:
        return found.metrics().get((f"roofline_{name}", frozenset(labels.items())))

    with sidecar(docker, image, llama_beside, tmp_path) as found:
        wait_for("/metrics", 10, lambda: found.get("/metrics"))
        wait_for(
            "every batch under a ceiling",
            240,
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
        state = found.state()
        assert (state["Status"], state["OOMKilled"]) == ("running", False), found.logs()
        began = time.monotonic()
        status, _ = found.stop()
        assert status == 0, found.logs()
        assert time.monotonic() - began < STOP_SECONDS + 0.5, "docker's own bookkeeping included"
