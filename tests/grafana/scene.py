"""What the dashboards are asked about: a real llama.cpp server with users, the exporter, and a Prometheus as shipped.

One exporter watches the same server as a CPU's and as a GPU's, whose compute peak is unknown, and a server that is
down. The shipped job scrapes it under two addresses, another job scrapes it once more with its operator's labels, and
there is a job that is somebody else's. Everything that a dashboard can show is made to happen, and then one moment is
kept, so that whatever is asked agrees.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from sys import executable
from typing import TYPE_CHECKING, Any

import transforms
from answers import SPAN_SECONDS, Answers
from boards import filled_in
from processes import exporter, free_port, get, llama, prometheus_as_shipped, running, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from http.client import HTTPResponse
    from pathlib import Path

BATCHES = ("1", "2", "3", "4")
CONFIG = """
# Of a machine that others keep busy: on one CPU most passes are clean, and hardly one that measures the compute peak.
bandwidth: {{interval: 15s, threads: 1, compute_peak: 100GFLOP/s}}
probe:
  interval: 15s
  health_interval: 1s
  batches: [1, 2, 3, 4, 8]
  seconds: 0.3
  max_duty_cycle: 0.5
servers:
  - {{name: cpu, url: "http://127.0.0.1:{port}", floor_fraction: {{1: 0.01, 4: 0.99}}}}
  - {{name: gpu, url: "http://localhost:{port}", device: gpu, peak_bandwidth: 1TB/s}}
  - {{name: down, url: "http://127.0.0.1:{nobody}"}}
"""
OPERATORS = {"namespace": "llm", "pod": "llama-0", "container": "exporter", "endpoint": "metrics"}
JOB = "roofline"
"""The shipped one."""
PATIENCE_SECONDS = 400.0
"""For each thing to happen; a machine that is busy otherwise is slow, and its samples are rejected."""


@dataclass(frozen=True)
class Scene:
    """A Prometheus that holds a moment of everything, and the address that is scraped."""

    answers: Answers
    instance: str

    @property
    def shipped(self) -> str:
        """Matchers of the series that the shipped job scrapes at that address."""
        return f'job="{JOB}", instance="{self.instance}"'

    def choices(self, board: str) -> list[dict[str, str]]:
        """What a reader chooses in the variables: each server, or the fleet at batch 1."""
        jobs = self.answers.label_values("roofline_server_up", "job")  # All, as Grafana writes it
        span = f"{SPAN_SECONDS}s"
        common = {"job": f"({'|'.join(jobs)})", "__rate_interval": span, "__range": span}
        if board == "fleet":
            return [{**common, "instance": ".+", "batch": "1"}]
        return [
            {**common, "instance": self.instance, "server": server, "batch": ".+"} for server in ("cpu", "gpu", "down")
        ]

    def shown(self, wanted: Sequence[tuple[dict[str, Any], Mapping[str, str]]]) -> list[transforms.Shown]:
        """What panels show, each with what is chosen."""
        jobs = []
        for panel, chosen in wanted:
            found = {t["refId"]: self.answers.now(filled_in(t["expr"], chosen)) for t in panel["targets"]}
            jobs.append((panel, transforms.table_frames(found)))
        return transforms.run(jobs)

    def of(self, server: str) -> str:
        """Matchers of one server, as the shipped job scrapes it."""
        return f'{self.shipped}, server="{server}"'

    def one(self, expression: str) -> float:
        """The value of an expression with one series."""
        ((_, value),) = self.answers.now(expression)
        return value


def post(port: int, **body: object) -> HTTPResponse:
    """A completion, begun."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=60)  # noqa: S310 - the same
    return answer


def two_users(port: int, over: threading.Event) -> None:
    """Two streams, read as they come."""
    with post(
        port, prompt=[[1000, 2000, 3000], [1100, 2000, 3000]], n_predict=800, ignore_eos=True, stream=True
    ) as read:
        for _ in read:
            if over.is_set():  # the server ends what nobody reads
                return


def intruder(port: int, over: threading.Event) -> None:
    """One short request as soon as the server is at work, which is for a probe."""
    while not any(slot["is_processing"] for slot in json.loads(get(f"http://127.0.0.1:{port}/slots"))):
        if over.wait(0.02):
            return
    post(port, prompt=[1200, 2000], n_predict=4).close()


@contextmanager
def clients(act: Callable[[int, threading.Event], None], port: int) -> Iterator[None]:
    """Clients of the server that act again and again, until the end."""
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            act(port, over)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def neighbours() -> Iterator[None]:
    """Every CPU is busy with something else."""
    spin = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    with ExitStack() as stack:
        for cpu in os.sched_getaffinity(0):
            stack.enter_context(running((executable, "-c", spin, str(cpu))))
        yield


class Happenings:
    """What is made to happen, as PromQL that has a series once it did, and for some time after."""

    def __init__(self, found: Scene, port: int) -> None:
        self._answers, self._shipped, self._port = found.answers, found.shipped, port
        self._by_itself = (
            f"count({self._mine('decode_floor_ratio')}) == {2 * len(BATCHES)}",
            'ALERTS{alertname="DecodeBelowFloor", alertstate="firing"}',
            self._went_up("probe_failures", "down"),
            "count(up == 0) == 1",
        )
        self._passes_rejected = self._went_up("memory_bandwidth_rejected_passes")
        self._probes_rejected = self._went_up("probes_rejected")
        self._users_served = f"count_over_time({self._mine('live_floor_ratio', 'cpu')}[{SPAN_SECONDS}s]) > 2"
        self._probes_skipped = self._went_up("probes_skipped", "cpu")

    def _mine(self, name: str, server: str = ".*") -> str:
        return f'roofline_{name}{{{self._shipped}, server=~"{server}"}}'

    def _went_up(self, name: str, server: str = ".*") -> str:
        return f"sum(increase({self._mine(f'{name}_total', server)}[{SPAN_SECONDS}s])) > 0"

    def _until(self, what: str, meanwhile: AbstractContextManager[None]) -> None:
        if not self._answers.now(what):
            with meanwhile:
                wait_for(what, PATIENCE_SECONDS, partial(self._answers.now, what))

    def at_one_moment(self) -> bool:
        """Makes happen what did not, of late; whether there was a moment that has everything."""
        for each in self._by_itself:
            self._until(each, nullcontext())
        made = {
            self._passes_rejected: neighbours(),
            self._probes_rejected: clients(intruder, self._port),
            self._users_served: clients(two_users, self._port),
            self._probes_skipped: clients(two_users, self._port),
        }
        for each, how in made.items():
            self._until(each, how)
        return self._answers.settle(" and on () ".join(f"({each})" for each in (*self._by_itself, *made)))


@contextmanager
def set_up(model: Path, prometheus: str, directory: Path) -> Iterator[Scene]:
    """Starts all parts, makes everything happen, and keeps the moment."""
    port = free_port()
    with llama(model, port, "--threads", "1"), exporter(CONFIG.format(port=port, nobody=free_port()), directory) as own:
        target = own.url.removeprefix("http://")
        more = {
            "llm/roofline": {"targets": [target], "labels": OPERATORS},
            "somebody else's": {"targets": [f"localhost:{free_port()}"]},
        }
        with prometheus_as_shipped(
            prometheus,
            target,
            directory,
            more_targets=[{"targets": [f"localhost:{target.rpartition(':')[2]}"]}],
            more_jobs=[{"job_name": name, "static_configs": [found]} for name, found in more.items()],
        ) as server:
            found = Scene(Answers(server.url), target)
            wait_for("a moment of everything", 2 * PATIENCE_SECONDS, Happenings(found, port).at_one_moment)
            yield found
