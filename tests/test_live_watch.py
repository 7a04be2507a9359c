"""Following a server's users: when it is asked and when not, what the watch learns, and stalls."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest
from benches import Bench, ManualTime, bench
from fake_llama import Behaviour, FakeLlama, Phase
from fake_llama_answers import Model

from exporter.config import ServerSettings
from exporter.measure.live import LiveReader
from exporter.measure.probe import Identity
from exporter.roofline.decode import DecodeSample
from exporter.roofline.live import LivePoint, LiveSample, LiveSource, SlotPoll
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import ServerState, view
from exporter.service.live import AFTER_PROBE_SECONDS, LONGEST_PAUSE_SECONDS, PACE_SECONDS, LiveWatch

HERE: frozenset[Phase] = frozenset({"before", "during", "after"})
"""Other people's requests are there, whatever we do."""
NOBODY: frozenset[Phase] = frozenset()


@dataclass
class Scene:
    """A fake server on a clock of our own, its watch, and what follows its users."""

    bench: Bench
    live: LiveWatch

    @property
    def fake(self) -> FakeLlama:
        return self.bench.fake

    async def follow(self, seconds: float) -> list[float]:
        """Polls as it would, for some time; the pauses."""
        pauses, until = [], self.bench.time.now + seconds
        while self.bench.time.now < until and self.live._mode != "off":
            pauses.append(await self.live.tick())
            self.bench.time.now += pauses[-1]
        return pauses

    def seen(self) -> LivePoint | None:
        (server,) = view(self.bench.scheduler._freeze(), self.bench.time.now).servers
        return server.live

    def sample(self) -> LiveSample:
        found = self.seen()
        assert found is not None
        return found.sample


@asynccontextmanager
async def scene(tmp_path: Path, behaviour: Behaviour | None = None, **server: object) -> AsyncIterator[Scene]:
    moment = ManualTime()
    async with (
        FakeLlama(behaviour, clock=moment.monotonic) as fake,
        bench(fake, tmp_path, server=dict(server)) as b,
    ):
        # One clock for both: what the users generate follows it.
        b.time.now = moment.now
        fake._clock = b.time.monotonic
        await b.watch.check()
        settings = ServerSettings.model_validate({"name": "local", "url": fake.url, **server})
        reader = LiveReader(b.probe.client, b.time.monotonic)
        yield Scene(b, LiveWatch(settings, b.watch, reader, clock=b.time.monotonic))


async def test_users_are_seen_and_measured(tmp_path: Path) -> None:
    async with scene(tmp_path, Behaviour(foreign=HERE, foreign_slots=2, step_seconds=lambda _: 0.02)) as s:
        assert s.bench.state() == "ready"
        pauses = await s.follow(12)
        assert s.bench.state() == "busy"
        assert set(pauses[1:]) == {PACE_SECONDS}
        sample = s.sample()
        assert sample.source is LiveSource.SLOTS
        assert sample.streams == 2
        assert sample.step_seconds == pytest.approx(0.02, rel=0.01)
        assert sample.tokens_per_second == pytest.approx(100, rel=0.01)


async def test_an_idle_server_is_asked_once_a_health_interval(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        assert await s.follow(300) == [15.0] * 20
        assert s.fake.asked("/slots") == 20
        assert s.seen() is None


async def test_a_server_once_seen_asleep_is_not_polled_by_the_watch_of_a_new_configuration(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        s.bench.watch.probe.manners.see_sleep(sleeping=True)
        assert await s.follow(60) == [0.0]
        assert s.fake.asked("/slots") == 0


async def test_the_probe_of_another_exporter_is_nobodys_traffic(tmp_path: Path) -> None:
    async with scene(tmp_path, Behaviour(foreign=HERE)) as s:
        ask = s.live._reader.slots

        async def probes() -> SlotPoll | Reason:
            found = await ask()
            assert isinstance(found, SlotPoll)
            return replace(found, slots=tuple(replace(slot, probe=True) for slot in found.slots))

        s.live._reader.slots = probes  # type: ignore[method-assign]
        await s.follow(20)
        assert s.bench.state() == "ready"
        assert s.seen() is None


async def test_figures_go_when_the_traffic_has_gone(tmp_path: Path) -> None:
    async with scene(tmp_path, Behaviour(foreign=HERE)) as s:
        await s.follow(20)
        s.fake.behaviour.foreign = NOBODY
        await s.follow(16)
        assert s.bench.state() == "ready"
        assert s.seen() is not None, "a scrape may come late"
        await s.follow(45)
        assert s.seen() is None


async def test_prompts_are_excluded(tmp_path: Path) -> None:
    async with scene(tmp_path, Behaviour(foreign=HERE, foreign_prefilling=True)) as s:
        await s.follow(20)
        assert s.bench.state() == "busy"
        assert s.seen() is None


async def test_a_sleeping_model_is_never_woken(tmp_path: Path) -> None:
    async with scene(tmp_path, Behaviour(sleeping=True)) as s:
        await s.follow(100)
        assert (s.fake.asked("/slots"), s.fake.woken, s.live._mode) == (0, 0, "off")


async def test_a_model_that_fell_asleep_since_the_last_check_is_not_woken_and_left_alone_ever_after(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as s:
        await s.follow(30)
        asked = s.fake.asked("/slots")
        s.fake.behaviour.sleeping = True
        await s.follow(30)
        s.fake.behaviour.sleeping = False
        await s.live.run()
        assert (s.fake.asked("/slots"), s.fake.woken) == (asked, 0)


@pytest.mark.parametrize("mode", ["slots", "metrics"])
async def test_a_server_that_is_known_to_sleep_is_not_asked(tmp_path: Path, mode: str) -> None:
    async with scene(tmp_path, live=mode) as s:
        # What the configuration would say.
        settings = ServerSettings(name="local", url=s.fake.url, live=mode)
        settings = settings.model_copy(update={"sleep_idle": 600.0})
        reader = LiveReader(s.bench.probe.client, s.bench.time.monotonic)
        before = len(s.fake.requests)
        await LiveWatch(settings, s.bench.watch, reader, clock=s.bench.time.monotonic).run()
        assert len(s.fake.requests) == before


async def test_off_is_off(tmp_path: Path) -> None:
    async with scene(tmp_path, live="off") as s:
        before = len(s.fake.requests)
        await s.live.run()
        assert len(s.fake.requests) == before


@pytest.mark.parametrize(
    "refusing",
    [Behaviour(slots_enabled=False), Behaviour(faults={"/slots": "html"}), Behaviour(faults={"/slots": "500"})],
)
async def test_an_endpoint_that_refuses_is_asked_rarely_and_told_of_once(
    tmp_path: Path, refusing: Behaviour, capsys: pytest.CaptureFixture[str]
) -> None:
    async with scene(tmp_path, refusing) as s:
        await s.follow(1800)
        told = [line for line in capsys.readouterr().out.splitlines() if "cannot be read" in line]
        assert len(told) == 1
        assert s.fake.asked("/slots") <= 1800 / 15 + 5
        assert s.bench.state() == "ready"
        s.fake.behaviour.slots_enabled, s.fake.behaviour.faults = True, {}
        s.fake.behaviour.foreign = HERE
        await s.follow(LONGEST_PAUSE_SECONDS + 20)
        assert s.seen() is not None, "it was started anew, with its slots"


async def test_counters_stand_in_where_there_are_no_slots(tmp_path: Path) -> None:
    """Users' requests of 400 tokens, one after another."""
    async with scene(tmp_path, Behaviour(slots_enabled=False, step_seconds=lambda _: 0.02), live="metrics") as s:
        await s.follow(5)
        async with aiohttp.ClientSession() as session:
            for _ in range(3):
                body = {"prompt": [5, 6, 7], "n_predict": 401, "ignore_eos": True}
                async with session.post(f"{s.fake.url}/completion", json=body) as answer:
                    await answer.read()
                s.bench.time.now += 8.0
                await s.follow(1)
        sample = s.sample()
        assert sample.source is LiveSource.METRICS
        assert sample.step_seconds == pytest.approx(0.02, rel=0.05)
        seen = s.seen()
        assert seen is not None
        assert seen.floor_ratio is None


async def test_neither_slots_nor_counters_is_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path, Behaviour(slots_enabled=False, metrics_enabled=False), live="metrics") as s:
        await s.follow(1500)
        assert s.fake.asked("/slots") == 1
        assert s.fake.asked("/metrics") <= 4
        assert s.seen() is None


async def test_probes_of_our_own_are_not_users(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        measure, polled = s.bench.probe.measure, []

        async def slow(identity: Identity, batch: int) -> DecodeSample | Reason:
            before = s.fake.asked("/slots")
            assert await s.live.tick() == AFTER_PROBE_SECONDS
            polled.append(s.fake.asked("/slots") - before)
            s.bench.time.now += 1
            return await measure(identity, batch)

        s.bench.probe.measure = slow  # type: ignore[method-assign]
        await s.bench.watch.cycle()
        assert polled == [0, 0, 0]
        before = s.fake.asked("/slots")
        await s.live.tick()
        assert s.fake.asked("/slots") == before, "a cancelled request may still be in its slot"
        s.bench.time.now += AFTER_PROBE_SECONDS + 0.1
        await s.live.tick()
        assert s.fake.asked("/slots") == before + 1
        assert s.bench.state() == "ready"


async def test_a_probe_that_began_during_a_poll_voids_it(tmp_path: Path) -> None:
    async with scene(tmp_path, Behaviour(foreign=HERE)) as s:
        await s.follow(5)
        ask = s.live._reader.slots

        async def meanwhile() -> object:
            found = await ask()
            s.bench.watch._generating = True
            return found

        s.live._reader.slots = meanwhile  # type: ignore[method-assign, assignment]
        await s.live.tick()
        assert s.live._track.last is None


async def test_users_are_seen_between_two_cycles(tmp_path: Path) -> None:
    """The state follows them without a probe."""
    async with scene(tmp_path) as s:
        for here, state in ((HERE, "busy"), (NOBODY, "ready"), (HERE, "busy")):
            s.fake.behaviour.foreign = here
            await s.follow(16)
            assert s.bench.state() == state
            await s.bench.watch.check()
            assert s.bench.state() == state


class TestStalled:
    """Work in progress without progress."""

    async def test_slots_that_stand_still(self, tmp_path: Path) -> None:
        async with scene(tmp_path, Behaviour(foreign=HERE)) as s:
            await s.follow(10)
            frozen = s.bench.time.now
            s.fake._clock = lambda: frozen
            await s.follow(40)
            assert s.bench.state() == "busy", "3 health intervals of patience"
            await s.follow(10)
            assert s.bench.state() == "stalled"
            assert not s.bench.server.state.up
            await s.bench.watch.check()
            assert s.bench.state() == "stalled", "that /health says ok is no news"
            await s.bench.watch.cycle()
            assert s.bench.server.counts == {Reason.TIMEOUT: 1}
            s.fake._clock = s.bench.time.monotonic
            await s.follow(2)
            assert s.bench.state() == "busy"
            assert s.bench.watch.due <= s.bench.time.now, "it is probed as soon as users let it"
            s.fake.behaviour.foreign = NOBODY
            await s.follow(16)
            assert s.bench.state() == "ready"

    async def test_a_server_that_dies_of_it_is_unreachable(self, tmp_path: Path) -> None:
        async with scene(tmp_path, Behaviour(foreign=HERE)) as s:
            frozen = s.bench.time.now
            s.fake._clock = lambda: frozen
            await s.follow(60)
            assert s.bench.state() == "stalled"
            await s.fake.stop()
            await s.follow(5)
            await s.bench.watch.check()
            await s.follow(5)
            assert s.bench.state() == "unreachable"

    async def test_silence_of_a_server_that_was_well(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async with scene(tmp_path) as s:
            monkeypatch.setattr("exporter.measure.probe.ASK_TIMEOUT", 0.1)
            s.fake.behaviour.faults = {"*": "hang"}
            await s.bench.watch.check()
            assert s.bench.state() == "stalled"
            await s.bench.watch.check()
            assert s.bench.state() == "stalled"
            s.fake.behaviour.faults = {}
            monkeypatch.undo()
            await s.bench.watch.check()
            assert s.bench.state() == "ready"

    async def test_silence_of_a_server_that_never_answered(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("exporter.measure.probe.ASK_TIMEOUT", 0.1)
        async with scene(tmp_path, Behaviour(faults={"*": "hang"})) as s:
            assert s.bench.state() == "unreachable"


async def test_users_of_a_server_in_real_time(tmp_path: Path) -> None:
    """Two streams over HTTP, against the client's own account of them, which takes longer than what the polls see."""
    off = []
    for _ in range(5):  # a machine that others load may stand still in the time that only one of them sees
        off.append(await off_in_real_time(tmp_path))
        if off[-1] < 0.05:
            break
    assert min(off) < 0.05


async def off_in_real_time(tmp_path: Path) -> float:
    """How far the polls' tokens/s are from the client's."""
    behaviour = Behaviour(real_time=True, step_seconds=lambda _: 0.01)
    async with FakeLlama(behaviour) as fake, bench(fake, tmp_path) as b:
        await b.watch.check()
        settings = ServerSettings(name="local", url=fake.url)
        live = LiveWatch(settings, b.watch, LiveReader(b.probe.client, time.monotonic), clock=time.monotonic)
        async with aiohttp.ClientSession() as session:
            body = {"prompt": [[5, 6, 7], [8, 9]], "n_predict": 400, "ignore_eos": True, "stream": True}
            async with session.post(f"{fake.url}/completion", json=body) as answer:
                following = asyncio.create_task(live.run())
                arrivals = [time.monotonic() async for line in answer.content if b'"stop": false' in line]
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        sample = b.watch.record.live
        assert sample is not None
        assert sample.tokens_per_second is not None
        assert sample.streams == 2
        return abs(sample.tokens_per_second * (arrivals[-1] - arrivals[0]) / (len(arrivals) - 2) - 1)


async def test_what_hangs_in_the_loop_grows_stale(tmp_path: Path) -> None:
    """With the loops dead, nothing of the server's state or traffic stays, and the exporter is not healthy."""
    async with scene(tmp_path, Behaviour(foreign=HERE)) as s:
        await s.follow(20)
        snapshot = replace(s.bench.scheduler._freeze())
        assert view(snapshot, s.bench.time.now).servers[0].live is not None
        s.bench.time.now += 61
        (server,) = view(snapshot, s.bench.time.now).servers
        assert server.live is None
        assert server.server.state is ServerState.UNREACHABLE
        assert not s.bench.scheduler.healthy()


async def test_what_was_seen_of_another_model_is_forgotten_with_it(tmp_path: Path) -> None:
    async with scene(tmp_path, Behaviour(foreign=HERE)) as s:
        await s.follow(20)
        assert s.seen() is not None
        s.fake.behaviour.model = Model(alias="other", size=123456789, n_params=1000)
        await s.bench.watch.check()
        await s.live.tick()
        assert s.seen() is None
        await s.follow(10)
        assert s.seen() is not None


async def test_after_a_failure_the_next_health_check_tells_who_is_there(tmp_path: Path) -> None:
    async with scene(tmp_path, Behaviour(foreign=HERE)) as s:
        await s.follow(5)
        s.fake.behaviour.faults = {"/slots": "drop"}
        await s.live.tick()
        s.fake.behaviour.faults = {}
        before = s.fake.asked("/slots")
        await s.follow(10)
        assert s.fake.asked("/slots") == before
        await s.bench.watch.check()
        await s.follow(10)
        assert s.fake.asked("/slots") > before


async def test_a_poll_that_is_not_answered_does_not_end_a_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path, Behaviour(foreign=HERE)) as s:
        await s.follow(5)
        for module in ("probe", "live"):
            monkeypatch.setattr(f"exporter.measure.{module}.ASK_TIMEOUT", 0.1)
        s.fake.behaviour.faults = {"*": "hang"}
        await s.bench.watch.check()
        await s.live.tick()
        assert s.bench.state() == "stalled"
        s.fake.behaviour.faults = {}
        monkeypatch.undo()
        await s.live.tick()
        assert s.bench.state() == "busy"


async def test_a_measuring_loop_that_hangs_is_seen_though_health_checks_go_on(tmp_path: Path) -> None:
    """Kernels that never return: what was measured expires, and the exporter is not healthy."""
    async with scene(tmp_path) as s:
        b = s.bench
        snapshot = await b.scheduler.run_once()
        assert view(snapshot, b.time.now).servers[0].points
        release, measuring, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()

        def hang() -> None:
            loop.call_soon_threadsafe(measuring.set)
            release.wait(120)

        b.meter.during = hang
        b.time.now += 3600
        running = asyncio.create_task(b.scheduler.run())
        try:
            async with asyncio.timeout(60):
                await measuring.wait()
            assert b.scheduler.healthy(), "a run is given its time"
            b.time.now += 600
            await b.watch.check()
            assert not b.scheduler.healthy()
            (server,) = view(b.scheduler._freeze(), b.time.now).servers
            assert server.server.state.up
            assert not server.points
        finally:
            release.set()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
