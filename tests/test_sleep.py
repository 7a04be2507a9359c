"""When a server sleeps is read from its command line, so that nothing keeps a model awake that nobody uses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import odd_llama
import pytest
from benches import bench
from fake_llama import Behaviour, FakeLlama
from fake_llama_answers import Model, router_model
from fake_llama_behaviour import RouterModel
from fake_llama_faults import answer, at
from processes import exporter, free_port, running, wait_for
from real import require
from stations import station
from test_whose import TCP, listening

from exporter.measure.answers import Props
from exporter.measure.listing import told_sleep
from exporter.measure.live import LiveReader
from exporter.measure.sleep import SleepReader, seen_sleep
from exporter.roofline.reason import Reason
from exporter.service.live import LiveWatch


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        (["llama-server", "-m", "x", "--sleep-idle-seconds", "900", "--port", "1"], 900.0),
        (["--sleep-idle-seconds", "900", "--sleep-idle-seconds", "60"], 60.0),
        (["--sleep-idle-seconds", "900", "--sleep-idle-seconds", "-1"], None),
        (["--sleep-idle-seconds", "0"], None),
        (["--sleep-idle-seconds"], None),
        (["--sleep-idle-seconds", 900], None),
        (["--sleep-idle-seconds", "soon"], None),
        (["llama-server", "-m", "x"], None),
        ([], None),
    ],
)
def test_a_command_line(arguments: list[object], seconds: float | None) -> None:
    assert told_sleep(arguments) == seconds


def test_the_process_that_listens() -> None:
    with listening(TCP, "--sleep-idle-seconds", "600") as port:
        assert seen_sleep(f"http://127.0.0.1:{port}/prefix") == 600
    with listening(TCP) as port:
        assert seen_sleep(f"http://127.0.0.1:{port}") is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://192.0.2.1", "http://no-such-host.invalid", "unix:/no"])
def test_a_process_that_is_not_seen(url: str) -> None:
    assert seen_sleep(url) is None


def props(marker: str = "", sleep_idle: float | None = None) -> Props:
    return Props(
        4, 1024, "m", "", "", "", sleeping=False, has_slots_endpoint=True, marker=marker, sleep_idle=sleep_idle
    )


async def test_a_process_is_looked_at_once_for_each_start() -> None:
    looked: list[str] = []
    answers = iter([600.0, None, 60.0])

    def look(url: str) -> float | None:
        looked.append(url)
        return next(answers)

    reader = SleepReader("http://a", look)
    assert [await reader.read(props("x")) for _ in range(3)] == [600, 600, 600]
    assert looked == ["http://a"]
    assert [await reader.read(props("y")) for _ in range(3)] == [None, None, None]
    assert await reader.read(props("y", sleep_idle=900.0)) == 900, "a router tells"
    assert len(looked) == 2
    reader.forget()
    assert await reader.read(props("y")) == 60


async def test_a_server_whose_process_tells_is_left_alone(tmp_path: Path) -> None:
    async with FakeLlama() as fake, bench(fake, tmp_path) as b:
        b.watch.checkup.sleep = SleepReader(fake.url, lambda _: 600.0)
        live = LiveWatch(
            b.watch.settings, b.watch, LiveReader(b.probe.client, b.time.monotonic), clock=b.time.monotonic
        )
        await b.watch.cycle()
        assert b.server.succeeded == 3, "it is awake, and was not kept so"
        asked = fake.asked("/slots") + fake.asked("/completion")
        b.time.now += 300
        await live.run()
        await b.watch.cycle()
        await b.watch.has_users()
        assert fake.asked("/slots") + fake.asked("/completion") == asked
        assert b.server.counts == {Reason.KEEPS_AWAKE: 1}
        assert b.watch.due - b.time.now == pytest.approx(600 + 30 - 300)


async def test_what_the_operator_says_counts(tmp_path: Path) -> None:
    async with FakeLlama() as fake, bench(fake, tmp_path, server={"sleep_idle": "1h"}, sleep_idle=3600.0) as b:
        b.watch.checkup.sleep = SleepReader(fake.url, lambda _: 600.0)
        await b.watch.cycle()
        assert b.probe.manners.sleep_idle == 3600


async def test_a_server_started_anew_without_it_is_watched_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeLlama() as fake, bench(fake, tmp_path) as b:
        b.watch.checkup.sleep = SleepReader(fake.url, lambda _: told[0])
        told: list[float | None] = [600.0]

        def known() -> float | None:
            return b.probe.manners.sleep_idle

        await b.watch.check()
        assert known() == 600
        told[0] = None
        monkeypatch.setattr("fake_llama_answers.MEDIA_MARKER", "<__media_2__>")
        await b.watch.check()
        assert known() is None
        told[0] = 60.0
        fake.behaviour.faults = {"*": "drop"}
        await b.watch.check()
        fake.behaviour.faults = {}
        await b.watch.check()
        assert known() == 60, "it was away, and an older build has no word for each start"


async def test_a_router_tells_when_its_models_sleep(tmp_path: Path) -> None:
    listed = router_model(RouterModel(Model(), "loaded"), n_ctx=1024)
    for arguments, keeps in ((["--sleep-idle-seconds", "900"], True), ([], False), (None, False), (900, False)):
        status = {"value": "loaded", "args": arguments}
        models = answer(json.dumps({"data": [{**listed, "status": status}]}).encode())
        behaviour = Behaviour(router=[RouterModel(Model(), "loaded")], **at("/models", models))
        async with FakeLlama(behaviour) as fake, station([{"url": fake.url, "model": "tiny"}], tmp_path) as s:
            for _ in range(2):
                await s.watches[0].cycle()
            assert s.server.succeeded == (2 if keeps else 4)
            assert s.server.counts == ({Reason.KEEPS_AWAKE: 1} if keeps else {})


# the real server

CONFIG = """
bandwidth: {{interval: 1h, max_memory: 64MiB}}
probe: {{interval: 1h, health_interval: 1s, seconds: 0.3, batches: [1], max_duty_cycle: 0.5}}
servers: [{{name: demo, url: 'http://127.0.0.1:{port}'}}]
"""


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.parametrize("told", [True, False])
def test_a_real_server_falls_asleep_beside_the_exporter(real_model: Path, tmp_path: Path, *, told: bool) -> None:
    """Where its process tells; without that word, the looks at /slots keep it awake, as the README says."""
    require(importlib.util.find_spec("xllamacpp"), "xllamacpp is not installed")
    port = free_port()
    after = 4 if told else 20
    switches = {"hostnames": ["127.0.0.1"], "port": port, "n_ctx": 512, "n_parallel": 1, "sleep_idle_seconds": after}
    command: list[str | Path] = [sys.executable, Path(odd_llama.__file__), real_model, json.dumps(switches)]
    if told:
        command += ["--sleep-idle-seconds", str(after)]  # as llama-server would have been told; here nobody reads it
    with running(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        assert server.stdout.readline()
        with exporter(CONFIG.format(port=port), tmp_path) as found:

            def state() -> str:
                (told_of,) = json.loads(found.get("/api/v1/snapshot"))["servers"]
                return str(told_of["state"])

            wait_for("an answer", 120, lambda: state() != "unreachable")
            if told:
                wait_for("sleeping", 120, lambda: state() == "sleeping")
                time.sleep(5)
                assert state() == "sleeping"
            else:
                states = set()
                for _ in range(32):
                    time.sleep(1)
                    states.add(state())
                assert "sleeping" not in states
