"""Every fault over real HTTP: its reason, no number, and an exporter that goes on answering."""

from __future__ import annotations

import ast
import asyncio
import math
import re
import time
import tracemalloc
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fake_llama import Behaviour, FakeLlama, Raw
from fake_llama_faults import FAULTS, HARMLESS, WEIRD, Case, answer, chunked, props
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stations import Station, station

from exporter.measure.answers import Props
from exporter.measure.llama import LlamaClient, open_session
from exporter.roofline.counters import Counters
from exporter.roofline.proof import Stream
from exporter.roofline.reason import Outcome, Reason
from exporter.roofline.slots import Slot
from exporter.service.clocks import Clocks

if TYPE_CHECKING:
    from collections.abc import Awaitable

METRICS_SECONDS = 0.3
TRIES = 5
HERE = Path(__file__).parent


async def scraped_during(running: Station, work: Awaitable[object]) -> float:
    """The slowest that /metrics can have been while the work went on, seconds; each answer parses.

    A scrape waits for what holds the event loop, whenever it comes: so that counts too.
    """
    task, lags, times = asyncio.ensure_future(work), [0.0], []

    async def watch_the_loop() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - began)

    watcher = asyncio.create_task(watch_the_loop())
    try:
        while not task.done():
            times.append((await running.scrape())[1])
            await asyncio.wait({task}, timeout=0.05)
    finally:
        watcher.cancel()
    await task
    return max(*times, *lags)


def unpublished(samples: dict[tuple[str, frozenset[tuple[str, str]]], float]) -> None:
    """No number of this server's decode is told."""
    told = {name for name, _ in samples if name.startswith("roofline_decode_")}
    assert told <= {"roofline_decode_floor_ratio_threshold", "roofline_decode_below_threshold_samples"}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_has_its_reason_and_gives_no_number(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case: Case = FAULTS[name]
    slowest = []
    # Short where waiting is the fault, long where a machine that others load must not make it one.
    timeout = 0.4 if Reason.TIMEOUT in {case.reason, *case.also} else 20.0
    monkeypatch.setattr("exporter.measure.probe.ASK_TIMEOUT", timeout)
    for _ in range(TRIES):  # a machine that others load may be slow once
        async with FakeLlama(case.behaviour()) as fake:
            servers = [{"url": fake.url, **case.keys}]
            async with station(servers, tmp_path, timeout=timeout, batches=(2,)) as running:
                slowest.append(await scraped_during(running, running.scheduler.run_once()))
                assert set(running.server.counts) <= {case.reason} | case.also
                assert sum(running.server.counts.values()) == 1
                samples, _ = await running.scrape()
                unpublished(samples)
                (reason,) = running.server.counts
                kind = {Outcome.FAILED: "failures", Outcome.REJECTED: "rejected", Outcome.SKIPPED: "skipped"}
                metric = f"roofline_probe{'s' * (reason.outcome is not Outcome.FAILED)}_{kind[reason.outcome]}_total"
                assert samples[metric, frozenset({("server", "s0"), ("reason", reason.value)})] == 1
                for path in ("/", "/api/v1/snapshot", "/api/v1/snapshot?format=markdown"):
                    assert (await running.web.get(path)).status == 200
        if slowest[-1] < METRICS_SECONDS:
            break
    assert min(slowest) < METRICS_SECONDS


@pytest.mark.parametrize("name", HARMLESS)
async def test_an_odd_but_right_answer_is_measured(name: str, tmp_path: Path) -> None:
    behaviour = Behaviour(**HARMLESS[name])
    async with FakeLlama(behaviour) as fake, station([{"url": fake.url}], tmp_path, batches=(2,)) as running:
        await running.scheduler.run_once()
        samples, _ = await running.scrape()
        assert running.server.counts == {}
        assert samples["roofline_decode_step_seconds", frozenset({("server", "s0"), ("batch", "2")})] > 0
        assert all(math.isfinite(value) for value in samples.values()), "a number or nothing"


async def test_a_name_arrives_whole_as_far_as_it_can_be_printed(tmp_path: Path) -> None:
    """Quotes, backslashes, braces and characters beyond 16 bits stay; what no terminal prints is replaced."""
    behaviour = Behaviour(**HARMLESS["a name of quotes, newlines and braces"])
    async with FakeLlama(behaviour) as fake, station([{"url": fake.url}], tmp_path, batches=(1,)) as running:
        await running.scheduler.run_once()
        samples, _ = await running.scrape()
        (labels,) = (dict(labels) for name, labels in samples if name == "roofline_model_info")
        assert labels["model"] == re.sub("[\n\r\x00\x85\u2028\ud800]", "\N{REPLACEMENT CHARACTER}", WEIRD)
        for path in ("/", "/api/v1/snapshot", "/api/v1/snapshot?format=csv", "/api/v1/snapshot?format=table"):
            page = await running.web.get(path)
            assert page.status == 200
            assert "\x00" not in await page.text()


def _names(tree: ast.AST) -> set[str]:
    """The reasons named in it."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Reason"
    }


class _Raised(ast.NodeVisitor):
    """Collects the reasons that code gives; those that it compares with, sorts by or lists in a set are not given."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.found |= _names(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Asks for a reason."""

    def visit_Set(self, node: ast.Set) -> None:
        """Groups reasons."""

    def visit_MatchValue(self, node: ast.MatchValue) -> None:
        """Asks for a reason."""

    def visit_Dict(self, node: ast.Dict) -> None:
        for value in node.values:
            self.visit(value)


def _raised() -> set[Reason]:
    """The reasons that measuring code gives."""
    rooms = [p for room in ("measure", "service", "roofline") for p in (HERE.parent / "exporter" / room).glob("*.py")]
    visitor = _Raised()
    for path in rooms:
        if path.name != "reason.py":
            visitor.visit(ast.parse(path.read_text()))
    return {reason for reason in Reason if reason.name in visitor.found}


def test_every_reason_is_given_somewhere() -> None:
    """A reason that nothing gives is a series that is always 0."""
    assert set(Reason) - _raised() == set()


def test_every_reason_that_a_probe_can_give_is_provoked() -> None:
    """By this table; or, where it comes of what the exporter remembers, by a test of its own."""
    by_table = {case.reason for case in FAULTS.values()}
    probing = {reason for reason in _raised() if reason.outcome is not Outcome.NOT_MEASURED}
    assert len(by_table) > 20
    others = [p for p in HERE.glob("test_*.py") if p.name != Path(__file__).name]
    named = set().union(*(_names(ast.parse(path.read_text())) for path in others))
    assert {reason.name for reason in probing - by_table} <= named
    remembered = {Reason.GAVE_WAY, Reason.KEEPS_AWAKE, Reason.CACHE_IN_USE, Reason.SLOTS_IN_USE}
    assert probing - by_table <= remembered | {Reason.SCATTERED_SLOTS, Reason.CERTIFICATE_REFUSED}


async def test_a_healthy_server_among_faulty_ones_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty servers, each broken in its own way, and one that is well."""
    monkeypatch.setattr("exporter.measure.probe.ASK_TIMEOUT", 4.0)
    names = [name for name, case in FAULTS.items() if not case.keys][::3][:40]
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeLlama(FAULTS[name].behaviour())) for name in names]
        fakes.append(await stack.enter_async_context(FakeLlama()))
        servers: list[dict[str, object]] = [{"url": fake.url} for fake in fakes]
        running = await stack.enter_async_context(station(servers, tmp_path, timeout=4, batches=(2,)))
        await scraped_during(running, running.scheduler.run_once())
        for _ in range(TRIES):  # those that flood may have kept the loop from it for 4 s
            if not running.watches[-1].record.succeeded:
                await running.watches[-1].cycle()
        samples, _ = await running.scrape()
        for name, watch in zip(names, running.watches, strict=False):
            assert set(watch.record.counts) <= {FAULTS[name].reason, Reason.TIMEOUT, *FAULTS[name].also}, name
            assert watch.record.succeeded == 0, name
        measured = {dict(labels)["server"] for name, labels in samples if name == "roofline_decode_step_seconds"}
        assert measured == {f"s{len(names)}"}


@pytest.mark.parametrize("name", ["tokens without end", "a body that never ends", "an error that never ends"])
async def test_what_never_ends_is_left_before_its_time_is_up(name: str) -> None:
    async with FakeLlama(FAULTS[name].behaviour()) as fake, open_session(fake.url, None) as session:
        client = LlamaClient(session, fake.url, None)
        async with asyncio.timeout(60):
            found = await (client.props(120) if "body" in name else client.complete([[1, 2]], 16, 120))
        assert found is FAULTS[name].reason


@pytest.mark.parametrize("name", ["a packed bomb", "packed events", "three million brackets", "a deep event"])
async def test_a_small_answer_does_not_take_much_memory(name: str) -> None:
    async with FakeLlama(FAULTS[name].behaviour()) as fake, open_session(fake.url, None) as session:
        client = LlamaClient(session, fake.url, None)
        tracemalloc.start()
        try:
            assert await client.props(20) is not None
            assert await client.complete([[1, 2], [3, 4]], 16, 20) is not None
            assert tracemalloc.get_traced_memory()[1] < 24 << 20
        finally:
            tracemalloc.stop()


async def test_cookies_are_not_kept() -> None:
    async with FakeLlama(Behaviour(**HARMLESS["cookies"])) as fake:
        url = fake.url.replace("127.0.0.1", "localhost")  # no cookie is kept of a bare address anyway
        async with open_session(url, None) as session:
            client = LlamaClient(session, url, None)
            for _ in range(2):
                assert isinstance(await client.props(20), Props)
        assert not any("cookie" in request.headers for request in fake.requests)


async def test_a_server_that_restarts_within_a_probe(tmp_path: Path) -> None:
    """The probe is void; the next one, of the same server on the same port, counts."""
    behaviour = Behaviour(real_time=True, step_seconds=lambda _: 0.02)
    async with (
        FakeLlama(behaviour) as fake,
        station([{"url": fake.url}], tmp_path, timeout=20, batches=(1,)) as running,
    ):
        cycle = asyncio.create_task(running.watches[0].cycle())
        while not fake.bodies:  # noqa: ASYNC110 - the fake has no event for it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await fake.stop()
        await scraped_during(running, cycle)
        assert set(running.server.counts) <= {Reason.STREAM_CUT, Reason.UNREACHABLE}
        assert sum(running.server.counts.values()) == 1
        await running.watches[0].check()
        assert not running.server.state.up
        await fake.start(int(fake.url.rsplit(":", 1)[1]))
        behaviour.real_time = False
        await running.watches[0].check()
        await running.watches[0].cycle()
        assert running.server.batches[1].success is True


class Steps:
    """Clocks that jump within everything that is measured with them."""

    def __init__(self, monotonic: float, unix: float) -> None:
        self.jumps = (monotonic, unix)
        self.asked = 0

    def monotonic(self) -> float:
        self.asked += 1
        return time.monotonic() + self.asked * self.jumps[0]

    def unix(self) -> float:
        self.asked += 1
        return time.time() + self.asked * self.jumps[1]


@pytest.mark.parametrize(("monotonic", "unix"), [(1800.0, 0.0), (0.0, 1e6), (0.0, -1e6), (0.5, -3600.0)])
async def test_a_step_of_a_clock_gives_no_wrong_number(monotonic: float, unix: float, tmp_path: Path) -> None:
    """Suspend makes the one jump, NTP the other. Step times are the server's own, so they hold."""
    clocks = Steps(monotonic, unix)
    behaviour = Behaviour(step_seconds=lambda _: 0.01)
    async with FakeLlama(behaviour) as fake:
        servers: list[dict[str, object]] = [{"url": fake.url}]
        async with station(servers, tmp_path, batches=(1, 2), clocks=Clocks(clocks.monotonic, clocks.unix)) as running:
            for _ in range(3):
                await running.watches[0].check()
                await running.watches[0].cycle()
                samples, _ = await running.scrape()
                steps = [v for (name, _), v in samples.items() if name == "roofline_decode_step_seconds"]
                assert all(step == pytest.approx(0.01) for step in steps)
                assert all(
                    v >= 0 for (name, _), v in samples.items() if name.endswith(("_seconds", "_ratio", "_total"))
                )
            assert running.server.counts == {}
            assert running.server.succeeded >= 4


CALLS: dict[str, bytes] = {
    "/health": b'{"status": "ok"}',
    "/props": props(is_sleeping=False, build_info="b1-x"),
    "/slots": b'[{"id": 0, "is_processing": false, "next_token": [{"n_decoded": 3}]}]',
    "/metrics": b"# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 1\n"
    b"llamacpp:tokens_predicted_total 1.5e+06\nllamacpp:tokens_predicted_seconds_total 12.5\n",
    "/completion": b"data: null\n\n"
    b'data: {"index": 0, "stop": false, "timings": {"predicted_ms": 0.001}}\n\n'
    b'data: {"index": 0, "stop": true, "id_slot": 1, "timings": {"predicted_n": 9, "predicted_ms": 80.0}}\n\n',
}


@st.composite
def mangled(draw: st.DrawFn) -> tuple[str, bytes]:
    """A right answer with some bytes cut out, repeated or overwritten."""
    path = draw(st.sampled_from(sorted(CALLS)))
    text = bytearray(draw(st.sampled_from([answer(CALLS[path]), chunked(CALLS[path]), chunked(CALLS[path], size=7)])))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = start + draw(st.integers(0, 12))
        text[start:end] = draw(st.binary(max_size=12) | st.just(bytes(text[start:end]) * 2))
    return path, bytes(text)


@given(mangled())
@settings(max_examples=300, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_answer_is_an_exception(case: tuple[str, bytes]) -> None:
    """Whatever comes is a value or a reason: an exception here would end the exporter."""
    path, body = case

    async def ask() -> Any:
        async with FakeLlama(Behaviour(faults={path: Raw((body,))})) as fake, open_session(fake.url, None) as session:
            client = LlamaClient(session, fake.url, None)
            if path == "/completion":
                return await client.complete([[1, 2]], 9, 0.5)
            if path == "/metrics":
                return await client.counters(0.5, 0.0)
            return await {"/health": client.health, "/props": client.props, "/slots": client.slots}[path](0.5)

    found = asyncio.run(ask())
    if isinstance(found, tuple):
        assert all(isinstance(one, Slot | Stream) for one in found)
    else:
        assert found is None or isinstance(found, Reason | Props | Counters)
