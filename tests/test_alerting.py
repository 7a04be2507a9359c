"""A fault makes the alert ring, with real parts: llama.cpp, the exporter, Prometheus and Alertmanager as shipped.

Of the shipped files only addresses and intervals are replaced; the rules and Alertmanager's configuration are taken as
they are.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import threading
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest
import yaml
from processes import (
    COMMAND,
    SHIPPED,
    Exporter,
    Prometheus,
    exporter,
    free_port,
    get,
    llama,
    prometheus_as_shipped,
    running,
    wait_for,
)
from real import missing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

RUNBOOK = Path(__file__).parent.parent / "docs/runbook.md"
CONFIG = """
# On one CPU, and often: while other tests keep the machine busy, many passes are disturbed.
bandwidth: {{interval: 15s, threads: 1}}
probe: {{interval: 1s, health_interval: 1s, batches: [1], seconds: 0.5, max_duty_cycle: 0.5}}
servers: [{{name: demo, url: 'http://127.0.0.1:{port}', floor_fraction: {{1: {threshold}}}}}]
"""
SLOWER = 6
"""The server gets one part in so many of its time at first, ..."""
TWICE_AS_SLOW_SECONDS = 40.0
"""... and half of that after every so many seconds: the threshold may be of a time when the machine was busier."""


class Alertmanager:
    """A running Alertmanager."""

    def __init__(self, url: str) -> None:
        self.url = url

    def alerts(self) -> dict[str, dict[str, Any]]:
        """Alerts that ring now, by name; an alert that has ended is not among them."""
        query = urlencode({"active": "true", "silenced": "true", "inhibited": "true"})
        found: list[dict[str, Any]] = json.loads(get(f"{self.url}/api/v2/alerts?{query}"))
        return {alert["labels"]["alertname"]: alert for alert in found}

    def post(self, alerts: Sequence[Mapping[str, object]]) -> None:
        """Makes alerts ring, or end, as Prometheus would."""
        request = urllib.request.Request(  # noqa: S310 - our own server on this machine
            f"{self.url}/api/v2/alerts", json.dumps(alerts).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - the same
            assert answer.status == 200


def wait_for_alert(alertmanager: Alertmanager, name: str) -> dict[str, Any]:
    """The alert, once Alertmanager has heard of it."""
    return wait_for(f"{name} in Alertmanager", 60, lambda: alertmanager.alerts().get(name, {}))


@contextmanager
def alertmanager_running(program: str, directory: Path) -> Iterator[Alertmanager]:
    """An Alertmanager with the shipped configuration, on a free port."""
    port = free_port()
    command = (
        program,
        f"--config.file={SHIPPED / 'alertmanager.yaml'}",
        f"--storage.path={directory / 'alertmanager'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
        "--log.level=error",
    )
    with running(command) as process:
        url = f"http://127.0.0.1:{port}"
        wait_for("Alertmanager", 120, lambda: get(f"{url}/-/ready"))
        yield Alertmanager(url)
        process.send_signal(signal.SIGTERM)


@contextmanager
def slowed(process: subprocess.Popen[str]) -> Iterator[None]:
    """The process gets a small part of its time, in slices shorter than its decode steps."""
    over, began = threading.Event(), time.monotonic()

    def take_turns() -> None:
        run_seconds = 0.002
        while not over.is_set():
            slower = SLOWER * 2 ** min(3, int((time.monotonic() - began) / TWICE_AS_SLOW_SECONDS))
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep((slower - 1) * run_seconds)
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(run_seconds)

    thread = threading.Thread(target=take_turns, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5)
        os.kill(process.pid, signal.SIGCONT)


def measured_floor_ratio(port: int, directory: Path) -> float:
    """What `report` says, as an operator would ask before setting a threshold; the median of three.

    A neighbour on the machine may cost a report its ceiling (exit status 3), so that some are asked for again.
    """
    file = directory / "report.yaml"
    file.write_text(CONFIG.format(port=port, threshold=0.0001))
    command = (*COMMAND, "--config.file", str(file), "report", "--format", "json")
    ratios: list[float] = []
    for _ in range(8):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode in {0, 3}, done.stdout + done.stderr
        if done.returncode == 0:
            ((batch,),) = [server["batches"] for server in json.loads(done.stdout)["servers"]]
            ratios.append(float(batch["decode_floor_ratio"]))
        if len(ratios) == 3:
            return statistics.median(ratios)
    pytest.fail("the machine was too busy to measure its ceiling")


@dataclass
class Scene:
    """The parts, with a healthy server."""

    server: subprocess.Popen[str]
    exporter: Exporter
    prometheus: Prometheus
    alertmanager: Alertmanager
    threshold: float

    @property
    def healthy(self) -> str:
        """PromQL: the newest sample, if it is above the threshold."""
        return f'roofline_decode_floor_ratio{{server="demo",batch="1"}} > {self.threshold}'

    def firing(self, alert: str) -> list[dict[str, str]]:
        """Labels of the alerts of that name that Prometheus says are firing."""
        query = f'ALERTS{{alertname="{alert}",alertstate="firing"}}'
        return [labels for labels, _ in self.prometheus.query(query)]


@pytest.fixture(scope="session")
def alertmanager_program() -> str:
    """The path of an Alertmanager: Debian names it after its package."""
    path = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    return path if path is not None else missing("prometheus-alertmanager is not on the PATH")


@pytest.fixture
def alertmanager(alertmanager_program: str, tmp_path: Path) -> Iterator[Alertmanager]:
    with alertmanager_running(alertmanager_program, tmp_path) as started:
        yield started


@pytest.fixture(scope="module")
def scene(
    slow_model: Path, prometheus: str, alertmanager_program: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    directory, port = tmp_path_factory.mktemp("alerting"), free_port()
    # One thread: while other tests keep the machine busy, two threads wait for each other far more than they work.
    with llama(slow_model, port, "--threads", "1") as server:
        # Well below what was measured: other processes of the machine must not ring, and SLOWER must.
        threshold = round(0.4 * measured_floor_ratio(port, directory), 4)
        with (
            alertmanager_running(alertmanager_program, directory) as manager,
            exporter(CONFIG.format(port=port, threshold=threshold), directory) as watching,
            prometheus_as_shipped(
                prometheus,
                watching.url.removeprefix("http://"),
                directory,
                alertmanagers=[manager.url.removeprefix("http://")],
            ) as scraper,
        ):
            found = Scene(server, watching, scraper, manager, threshold)
            wait_for("a sample above the threshold", 120, lambda: scraper.query(found.healthy))
            yield found


def test_every_expression_of_the_runbook_holds_on_real_series(scene: Scene) -> None:
    """Joins included: Prometheus refuses an ambiguous one only when it meets the series."""
    expressions = re.findall(r"^```promql\n(.*?)^```", RUNBOOK.read_text(), flags=re.MULTILINE | re.DOTALL)
    answers = {line: scene.prometheus.query(line) for block in expressions for line in block.splitlines()}
    assert len(answers) > 25
    assert sum(bool(answer) for answer in answers.values()) > 12, "the rest asks for what is not wrong here"


def test_the_rules_are_evaluated_without_an_error(scene: Scene) -> None:
    def rules() -> list[dict[str, Any]]:
        groups = json.loads(get(f"{scene.prometheus.url}/api/v1/rules"))["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    groups = yaml.safe_load((SHIPPED / "rules.yaml").read_text())["groups"]
    assert len(rules()) == sum(len(group["rules"]) for group in groups) > 10
    # The groups with an interval of their own first run up to a minute, or 5, after the start; no error shows before.
    soon = sum(len(group["rules"]) for group in groups if "interval" not in group)
    wait_for("an evaluation", 60, lambda: sum(rule["health"] != "unknown" for rule in rules()) >= soon)
    evaluated = [rule for rule in rules() if rule["health"] != "unknown"]
    assert {rule["health"] for rule in evaluated} == {"ok"}
    ringing = {rule["name"] for rule in evaluated if rule["state"] == "firing"}
    assert ringing <= {"CeilingDropped", "DecodeBelowFloor"}, "a busy machine may ring these"


def test_a_slowed_server_rings_and_a_recovered_one_resolves(scene: Scene) -> None:
    wait_for("no alert", 60, lambda: not scene.firing("DecodeBelowFloor"))

    with slowed(scene.server):
        (labels,) = wait_for("DecodeBelowFloor in Prometheus", 240, lambda: scene.firing("DecodeBelowFloor"))
        told = wait_for_alert(scene.alertmanager, "DecodeBelowFloor")
    assert (labels["server"], labels["batch"], labels["severity"]) == ("demo", "1", "warning")
    assert told["labels"]["job"] == "roofline"
    assert told["status"]["state"] == "active"
    percent = f"{100 * scene.threshold:.4g}%"
    assert f"floor ratio below the threshold of {percent}" in told["annotations"]["description"]
    assert told["annotations"]["runbook_url"].endswith("runbook.md#decodebelowfloor")

    wait_for("the alert resolved in Prometheus", 120, lambda: not scene.firing("DecodeBelowFloor"))
    wait_for("it ended", 120, lambda: "DecodeBelowFloor" not in scene.alertmanager.alerts())
    wait_for("a good sample", 120, lambda: scene.prometheus.query(scene.healthy))


HOST = {"job": "roofline", "instance": "10.0.0.5:10470"}
SERVER = {**HOST, "server": "local"}
CPU_READ = {"kernel": "read", "threads": "all"}


@pytest.mark.parametrize(
    ("cause", "effect", "labels"),
    [
        ("CeilingDropped", "DecodeBelowFloor", {**HOST, **CPU_READ}),
        ("CeilingDropped", "DecodeRegressed", {**HOST, **CPU_READ}),
        ("CeilingDropped", "LiveBelowFloor", {**HOST, **CPU_READ}),
        ("ServerDown", "LiveBelowFloor", SERVER),
        ("ServerDown", "FloorUnknown", SERVER),
        ("DecodeStalled", "LiveBelowFloor", SERVER),
        ("DecodeBelowFloor", "LiveBelowFloor", {**SERVER, "batch": "1"}),
        ("ServerDown", "DecodeBelowFloor", SERVER),
        ("ServerDown", "DecodeRegressed", SERVER),
        ("ServerDown", "ProbesFailing", SERVER),
        ("ServerDown", "ResultsStale", SERVER),
        ("ProbesFailing", "ResultsStale", SERVER),
        ("DecodeStalled", "DecodeBelowFloor", SERVER),
        ("DecodeStalled", "DecodeRegressed", SERVER),
    ],
)
def test_a_cause_silences_its_effect_and_no_other(
    alertmanager: Alertmanager, cause: str, effect: str, labels: dict[str, str]
) -> None:
    """With the labels of the rules: of no other machine, and of another server only where the machine is the cause."""
    of_batch = {"batch": "1"} if effect.startswith("Decode") else {}
    both = {"component": "roofline", "cluster": "c1"}
    ends = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()

    def state_of(server: dict[str, str]) -> str:
        ringing = {"alertname": effect, **both, **server, **of_batch}
        alertmanager.post([{"labels": ringing, "endsAt": ends}])
        found = wait_for_alert(alertmanager, effect)
        alertmanager.post([{"labels": ringing, "endsAt": datetime.now(UTC).isoformat()}])
        wait_for("its end", 60, lambda: effect not in alertmanager.alerts())
        return str(found["status"]["state"])

    assert state_of(SERVER) != "suppressed", "before the cause rings"
    alertmanager.post([{"labels": {"alertname": cause, **both, **labels}, "endsAt": ends}])
    wait_for(cause, 60, lambda: cause in alertmanager.alerts())
    wait_for(f"{effect} suppressed", 60, lambda: state_of(SERVER) == "suppressed")
    assert state_of({**SERVER, "instance": "10.0.0.6:10470"}) != "suppressed"
    assert state_of({**SERVER, "cluster": "c2"}) != "suppressed"
    other_server = state_of({**SERVER, "server": "other"})
    assert (other_server == "suppressed") == (cause == "CeilingDropped")
