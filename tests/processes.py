"""Real processes for tests: the exporter as its user starts it, a llama.cpp server, a Prometheus."""

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import yaml
from real import missing

SHIPPED = Path(__file__).parent.parent / "deploy/prometheus"

_T = TypeVar("_T")


def wait_for(what: str, seconds: float, ask: Callable[[], _T]) -> _T:
    """The first answer that is true, asked for until the time is up."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if answer := ask():
                return answer
            problem = str(answer)
        except OSError as error:
            problem = str(error)
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s: {problem}"
        time.sleep(0.1)


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to no outgoing connection in the meantime."""
    range_of_clients = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    below = range(max(1024, int(range_of_clients[0]) - 20_000), int(range_of_clients[0]))
    for port in random.sample(below, min(100, len(below))):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    with socket.create_server(("127.0.0.1", 0)) as listener:
        given: int = listener.getsockname()[1]
        return given


def needs_ipv6() -> None:
    """An IPv6 loopback is a part that may be missing, as it often is in containers."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        missing("this machine has no IPv6")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - our own servers on this machine
        text: str = answer.read().decode()
        return text


@contextmanager
def running(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended when the test is, whatever happened."""
    process = subprocess.Popen([str(part) for part in command], text=True, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


class Exporter:
    """A running `roofline-exporter serve`; its log lines are read as they come."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.started = time.monotonic()
        self.log: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = str(wait_for("listening", 60, lambda: self.logged("listening"))[0]["urls"][0])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(json.loads(line) if line.startswith("{") else {"event": "?", "text": line})

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.log if line["event"] == event]

    def get(self, path: str) -> str:
        return get(self.url + path)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Sends a signal; the exit status and how long the end took, seconds."""
        began = time.monotonic()
        self.process.send_signal(number)
        status = self.process.wait(60)
        seconds = time.monotonic() - began
        self._reader.join(60)
        return status, seconds


COMMAND = (sys.executable, "-m", "exporter")
NOBODY = "servers: [{name: local, url: 'http://127.0.0.1:1'}]"
"""A configuration whose server is not there."""


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return subprocess.run((*COMMAND, *arguments), capture_output=True, text=True, check=False, cwd=cwd, timeout=240)


@contextmanager
def exporter(config: str, directory: Path) -> Iterator[Exporter]:
    """The exporter with that configuration, on a free port."""
    file = directory / "config.yaml"
    file.write_text(config)
    arguments = ("--config.file", str(file), "--web.listen-address", "127.0.0.1:0", "--log.format", "json")
    with running((*COMMAND, *arguments), stderr=subprocess.PIPE) as process:
        yield Exporter(process)


@contextmanager
def llama(model: Path, port: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A real llama.cpp server, ready."""
    module = "exporter.service.llama_child"
    command = (sys.executable, "-m", module, "--model", str(model), "--port", str(port), *arguments)
    with running(command, stderr=subprocess.DEVNULL) as process:
        wait_for("llama.cpp", 120, lambda: get(f"http://127.0.0.1:{port}/health"))
        yield process


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The instant vector of an expression."""
        answer = json.loads(get(f"{self.url}/api/v1/query?{urlencode({'query': expression})}"))
        assert answer["status"] == "success", answer
        return [(series["metric"], float(series["value"][1])) for series in answer["data"]["result"]]


@contextmanager
def prometheus_scraping(program: str, target: str, directory: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the target every two seconds; on a busy machine one may not be enough for an answer."""
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
        "scrape_configs": [{"job_name": "roofline", "static_configs": [{"targets": [target]}]}],
    }
    with prometheus_running(program, config, directory) as prometheus:
        yield prometheus


@contextmanager
def prometheus_running(
    program: str, config: Mapping[str, Any], directory: Path, *options: str, port: int | None = None
) -> Iterator[Prometheus]:
    """A Prometheus with that configuration; its files are below `directory`."""
    file, port = directory / "prometheus.yml", port or free_port()
    file.write_text(json.dumps(config))  # JSON is YAML
    command = (
        program,
        f"--config.file={file}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
        *options,
    )
    with running(command) as process:
        url = f"http://127.0.0.1:{port}"
        wait_for("Prometheus", 120, lambda: get(f"{url}/-/ready"))
        yield Prometheus(url)
        process.send_signal(signal.SIGTERM)


@contextmanager
def prometheus_as_shipped(
    program: str,
    target: str,
    directory: Path,
    *,
    alertmanagers: Sequence[str] = (),
    more_targets: Sequence[Mapping[str, Any]] = (),
    more_jobs: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Prometheus]:
    """A Prometheus with the shipped configuration and rules; of these, only addresses and intervals are ours.

    Args:
        program: The path of Prometheus.
        target: The exporter's address, in place of the shipped one.
        directory: For its files.
        alertmanagers: Where alerts go, in place of the shipped address.
        more_targets: What the shipped job scrapes beside it.
        more_jobs: What is scraped beside the shipped job.
    """
    config = yaml.safe_load((SHIPPED / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(SHIPPED / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}, *more_targets]
    config["scrape_configs"] += more_jobs
    config["alerting"]["alertmanagers"] = [{"static_configs": [{"targets": list(alertmanagers)}]}]
    # A resolved alert is told at once all the same; this keeps the rest brisk.
    with prometheus_running(program, config, directory, "--rules.alert.resend-delay=1s") as prometheus:
        yield prometheus
