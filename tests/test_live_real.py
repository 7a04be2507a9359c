"""Live traffic and stalls with real parts: a llama.cpp server on a real model, and the exporter as a process."""

import asyncio
import json
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import verify
from processes import Exporter, exporter, free_port, llama, wait_for

from exporter.measure.live import LiveReader
from exporter.measure.llama import LlamaClient, open_session
from exporter.roofline.live import LiveTrack, SlotPoll
from exporter.service.live import PACE_SECONDS, QUICK_SECONDS

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

CONFIG = """
bandwidth: {{interval: 1h, max_memory: 128MiB, threads: 1}}
probe: {{interval: 1h, health_interval: 1s, seconds: 0.5, batches: [1], max_duty_cycle: 0.5}}
servers: [{{name: demo, url: 'http://127.0.0.1:{port}', live: {live}}}]
"""


def generate(port: int, streams: int, tokens: int) -> list[float]:
    """One request with that many streams; when each token came."""
    body = {
        "prompt": [[1000 + 100 * n, 2000, 3000] for n in range(streams)],
        "n_predict": tokens,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310 - our own server on this machine
        return [time.monotonic() for line in answer if line.startswith(b"data:") and b'"stop":false' in line]


@contextmanager
def users(port: int, streams: int) -> Iterator[None]:
    """Streams that come again as soon as they end: on a busy machine it may take long to see enough of them."""
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            generate(port, streams, 200)

    client = threading.Thread(target=go_on)
    client.start()
    try:
        yield
    finally:
        over.set()
        client.join()


def enough(port: int, streams: int) -> int:
    """Tokens of each stream for about six seconds, which is much for few on a busy machine."""
    arrivals = generate(port, streams, 16)
    step = (arrivals[-1] - arrivals[0]) / 15
    return max(100, min(700, int(6 / step)))


@dataclass
class Scene:
    """A server, and the exporter beside it after its first probes."""

    port: int
    exporter: Exporter

    def server(self) -> dict[str, Any]:
        (found,) = json.loads(self.exporter.get("/api/v1/snapshot"))["servers"]
        assert isinstance(found, dict)
        return found

    def state(self) -> str:
        return str(self.server()["state"])

    def settled(self) -> None:
        # Whether it gave a sample does not matter here; on a busy machine it may be rejected.
        wait_for("a probe", 240, lambda: self.server()["probes_total"])


@pytest.fixture
def scene(slow_model: Path, tmp_path: Path) -> Iterator[Scene]:
    port = free_port()
    with (
        llama(slow_model, port, "--threads", "1"),
        exporter(CONFIG.format(port=port, live="slots"), tmp_path) as running,
    ):
        found = Scene(port, running)
        found.settled()
        yield found


async def followed(client: LlamaClient, port: int, streams: int) -> tuple[LiveTrack, list[float]]:
    """What polls once a second saw of a load of our own, and when each of its tokens reached the client."""
    reader, track = LiveReader(client, time.monotonic), LiveTrack()
    tokens = await asyncio.to_thread(enough, port, streams)
    load = asyncio.create_task(asyncio.to_thread(generate, port, streams, tokens))
    while not load.done():
        polled = await reader.slots()
        assert isinstance(polled, SlotPoll)
        track = track.add(polled)
        await asyncio.sleep(PACE_SECONDS if track.clean else QUICK_SECONDS)
    return track, await load


@pytest.mark.parametrize("streams", [1, 2, 4])
async def test_tokens_per_second_are_within_three_percent(real_model: Path, streams: int) -> None:
    """Against the client's own count over the same time, for others use this machine too."""
    port = free_port()
    with llama(real_model, port):
        async with open_session(f"http://127.0.0.1:{port}", None) as session:
            client = LlamaClient(session, f"http://127.0.0.1:{port}", None)
            deviations = []
            for _ in range(4):
                track, arrivals = await followed(client, port, streams)
                sample = track.sample()
                assert sample is not None
                assert sample.streams == streams
                assert sample.tokens_per_second is not None
                seconds = sum(share.seconds for share in sample.shares)
                since = sample.measured_at - seconds
                counted = sum(since < arrival <= sample.measured_at for arrival in arrivals)
                deviations.append(sample.tokens_per_second / (counted / seconds) - 1)
                if abs(deviations[-1]) <= 0.03:
                    return
    pytest.fail(f"always apart: {deviations}")


def test_figures_agree_with_each_other_and_go_with_the_traffic(scene: Scene) -> None:
    wait_for("a ceiling", 240, lambda: scene.server()["ceilings"])
    with users(scene.port, 2):
        found = wait_for("figures", 120, lambda: s if "live_floor_ratio" in (s := scene.server()) else None)
        assert found is not None
        checked = verify.verify(json.loads(scene.exporter.get("/api/v1/snapshot")))
    assert found["live_streams"] == pytest.approx(2)
    assert found["live_tokens_per_second"] * found["live_step_seconds"] == pytest.approx(2, rel=0.03)
    assert 0 < found["live_floor_ratio"] < 1
    assert checked[1] == []
    wait_for("the end of the figures", 60, lambda: "live_step_seconds" not in scene.server())
    assert "roofline_live_" not in scene.exporter.get("/metrics")
    wait_for("ready", 60, lambda: scene.state() == "ready")


def test_users_are_seen_while_they_are_served(scene: Scene) -> None:
    wait_for("a ceiling", 240, lambda: scene.server()["ceilings"])
    with users(scene.port, 2):
        wait_for("busy", 60, lambda: scene.state() == "busy")
        wait_for("figures", 120, lambda: "roofline_live_floor_ratio" in scene.exporter.get("/metrics"))


def test_counters_of_a_server_without_slots(real_model: Path, tmp_path: Path) -> None:
    port = free_port()
    # One thread: neighbours on a busy machine slow it down in proportion, not by a hundred.
    arguments = ("--no-slots", "--metrics", "--threads", "1")
    with (
        llama(real_model, port, *arguments),
        exporter(CONFIG.format(port=port, live="metrics"), tmp_path) as running,
    ):
        scene = Scene(port, running)
        scene.settled()
        deviations: list[float] = []
        # A busy machine keeps polls waiting, and then there is no figure; or it slows down what only one side has seen.
        for _ in range(6):
            time.sleep(3)
            tokens = enough(port, 1)
            arrivals = generate(port, 1, tokens)
            step = (arrivals[-1] - arrivals[0]) / (tokens - 1)
            with suppress(AssertionError):
                wait_for("figures", 10, lambda: "live_step_seconds" in scene.server())
            found = scene.server()
            assert "live_floor_ratio" not in found
            if "live_step_seconds" in found:
                assert found["live"] == {"source": "metrics", "shares": []}
                deviations.append(found["live_step_seconds"] / step - 1)
                if abs(deviations[-1]) <= 0.05:
                    return
    pytest.fail(f"always apart, or no figure: {deviations}")


def test_a_stopped_server_is_stalled_and_recovers(real_model: Path, tmp_path: Path) -> None:
    port = free_port()
    with (
        llama(real_model, port) as server,
        exporter(CONFIG.format(port=port, live="slots"), tmp_path) as running,
    ):
        scene = Scene(port, running)
        scene.settled()
        probes = scene.server()["probes_total"]
        server.send_signal(signal.SIGSTOP)
        try:
            wait_for("stalled", 60, lambda: scene.state() == "stalled")
            assert 'roofline_server_up{server="demo"} 0.0' in running.get("/metrics")
            time.sleep(8)
            assert scene.state() == "stalled", "it stays so"
        finally:
            server.send_signal(signal.SIGCONT)
        wait_for("ready", 60, lambda: scene.state() == "ready")
        with users(port, 2):
            wait_for("users' figures", 120, lambda: "live_step_seconds" in scene.server())
        assert scene.server()["probes_total"] >= probes


def test_a_server_stopped_in_the_middle_of_an_answer_goes_on_with_it(real_model: Path, tmp_path: Path) -> None:
    port = free_port()
    with (
        llama(real_model, port) as server,
        exporter(CONFIG.format(port=port, live="slots"), tmp_path) as running,
    ):
        scene = Scene(port, running)
        scene.settled()
        with users(port, 1):
            wait_for("busy", 60, lambda: scene.state() == "busy")
            server.send_signal(signal.SIGSTOP)
            try:
                wait_for("stalled", 60, lambda: scene.state() == "stalled")
            finally:
                server.send_signal(signal.SIGCONT)
            wait_for("busy again", 60, lambda: scene.state() == "busy")
        wait_for("ready", 60, lambda: scene.state() == "ready")
