"""A probe is alone or void, over real HTTP: users who come and go, users who wait, drafts, restarts, and sleep."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from benches import bench
from fake_llama import Behaviour, FakeLlama, Intruder
from test_probe import client_of, probe_of

from exporter.measure.answers import Props
from exporter.measure.courtesy import complete_politely
from exporter.measure.llama import LlamaClient
from exporter.measure.probe import Identity, identify
from exporter.roofline.decode import DecodeSample
from exporter.roofline.reason import Reason
from exporter.roofline.slots import PROBE_SEED

LATE = Intruder(at_token=30, tokens=8)


async def seen(client: LlamaClient) -> Identity:
    identity = await identify(client)
    assert isinstance(identity, Identity)
    return identity


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("at_token", [2, 30, 60])
@pytest.mark.parametrize("slots_enabled", [True, False])
async def test_a_request_that_came_and_went_voids_the_probe(
    batch: int,
    at_token: int,
    slots_enabled: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    """Its slot shows another last request; without /slots, the steps that it shared show it."""
    behaviour = Behaviour(slots_enabled=slots_enabled, step_seconds=lambda b: 0.010 + 0.005 * b)
    async with FakeLlama(behaviour) as fake, client_of(fake) as client:
        probe, identity = probe_of(client, tmp_path), await seen(client)
        assert await probe.ready(identity, batch) is None
        assert isinstance(await probe.measure(identity, batch), DecodeSample)
        behaviour.intruders = (Intruder(at_token, 12),)
        assert await probe.ready(identity, batch) is None
        assert await probe.measure(identity, batch) is Reason.FOREIGN_REQUEST
        behaviour.intruders = ()
        assert await probe.ready(identity, batch) is None
        assert isinstance(await probe.measure(identity, batch), DecodeSample)


async def test_slots_bear_witness_where_steps_would_mislead(tmp_path: Path) -> None:
    """Steps that change their level, and no other request: with /slots the sample is true, without it is void."""
    for slots_enabled in (True, False):
        calls = iter(range(10**6))
        behaviour = Behaviour(
            slots_enabled=slots_enabled,
            step_seconds=lambda _, c=calls: 0.01 if next(c) % 80 < 40 else 0.02,  # type: ignore[misc]
        )
        async with FakeLlama(behaviour) as fake, client_of(fake) as client:
            probe, identity = probe_of(client, tmp_path), await seen(client)
            assert await probe.ready(identity, 1) is None
            result = await probe.measure(identity, 1)
            assert isinstance(result, DecodeSample) == slots_enabled
            assert slots_enabled or result is Reason.FOREIGN_REQUEST


async def test_probes_are_marked_so_that_none_is_taken_for_a_user(tmp_path: Path) -> None:
    """Another exporter, or the next start of this one, knows the slots that only probes used."""
    async with FakeLlama() as fake, client_of(fake) as client:
        identity = await seen(client)
        for _ in range(2):
            probe = probe_of(client, tmp_path)
            assert await probe.ready(identity, 4) is None
            assert isinstance(await probe.measure(identity, 4), DecodeSample)
        assert {body["seed"] for body in fake.bodies} == {PROBE_SEED}
        await client_of_user(fake, 4)
        assert await probe.ready(identity, 4) is Reason.SLOTS_IN_USE
        assert await probe_of(client, tmp_path).ready(identity, 4) is Reason.SLOTS_IN_USE


async def client_of_user(fake: FakeLlama, tokens: int, prompt: int = 8) -> None:
    """A user's request, from beginning to end."""
    async with client_of(fake) as user, asyncio.timeout(60):
        body = {"prompt": list(range(100, 100 + prompt)), "n_predict": tokens}
        async with user._session.post(fake.url + "/completion", json=body) as answer:
            await answer.read()


async def test_a_users_conversation_is_not_pushed_out(tmp_path: Path) -> None:
    async with FakeLlama() as fake, client_of(fake) as client:
        probe, identity = probe_of(client, tmp_path), await seen(client)
        await client_of_user(fake, 20, prompt=600)
        assert await probe.ready(identity, 2) is Reason.CACHE_IN_USE
        assert await probe.ready(identity, 1) is None
        assert isinstance(await probe.measure(identity, 1), DecodeSample)
        assert await probe.ready(identity, 2) is Reason.CACHE_IN_USE, "batch 1 took the slot used longest ago"


def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.measure.courtesy.POLITE_SECONDS", 0.2)
    monkeypatch.setattr("exporter.measure.courtesy.GLANCE_SECONDS", 0.1)


@pytest.mark.parametrize(
    ("change", "gives_way"),
    [
        ({}, False),
        ({"foreign": frozenset({"during"})}, True),
        ({"faults": {"/slots": "hang", "/metrics": "hang"}}, False),
        ({"slots_enabled": False, "foreign": frozenset({"during"})}, True),
        ({"slots_enabled": False, "metrics_enabled": False, "foreign": frozenset({"during"})}, False),
    ],
    ids=["alone", "a user in another slot", "nobody tells", "told by the metrics", "not told"],
)
async def test_a_long_probe_gives_way_to_a_user(
    change: dict[str, object],
    gives_way: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It looks once it takes long, closes its connection, and the server stops generating for it."""
    hurried(monkeypatch)
    async with FakeLlama(Behaviour(real_time=True, step_seconds=lambda _: 0.05)) as fake, client_of(fake) as client:
        identity = await seen(client)
        for name, value in change.items():
            setattr(fake.behaviour, name, value)
        identity = replace(identity, props=told(identity.props, fake.behaviour))
        result = await complete_politely(client, identity.props, [[1, 2, 3]], 41, 30)
        assert (result is Reason.GAVE_WAY) == gives_way
        fake.behaviour.faults, fake.behaviour.foreign = {}, frozenset()
        async with asyncio.timeout(60):
            while fake.engine._running:  # noqa: ASYNC110 - the fake has no event for it
                await asyncio.sleep(0.05)


def told(props: Props, behaviour: Behaviour) -> Props:
    return replace(props, has_slots_endpoint=behaviour.slots_enabled, has_metrics_endpoint=behaviour.metrics_enabled)


async def test_with_every_slot_ours_a_waiting_user_shows_in_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    hurried(monkeypatch)
    behaviour = Behaviour(real_time=True, step_seconds=lambda _: 0.05, n_slots=2)
    async with FakeLlama(behaviour) as fake, client_of(fake) as client:
        props = (await seen(client)).props
        ours = asyncio.ensure_future(complete_politely(client, props, [[1, 2], [3, 4]], 200, 60))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await client_of_user(fake, 2)
        assert time.monotonic() - began < 8, "10 s of decoding were ahead of the user"
        assert await ours is Reason.GAVE_WAY


async def test_a_probe_that_gave_way_is_counted_and_retried(fake_llama: FakeLlama, tmp_path: Path) -> None:
    async with bench(fake_llama, tmp_path) as b:

        async def polite(identity: Identity, batch: int) -> DecodeSample | Reason:
            assert identity.props.slots >= batch
            b.time.now += 4.0
            return Reason.GAVE_WAY

        measure, b.probe.measure = b.probe.measure, polite  # type: ignore[method-assign]
        await b.watch.cycle()
        assert b.server.counts == {Reason.GAVE_WAY: 1}
        assert b.server.probes == 1
        assert b.state() == "busy"
        assert 0 < b.watch.due - b.time.now < 60
        assert b.duty.ratio() == pytest.approx(4 / 3600)
        b.probe.measure = measure  # type: ignore[method-assign]
        b.time.now = b.watch.due
        await b.watch.cycle()
        assert b.server.succeeded == 3


# --- speculative decoding ------------------------------------------------------------------------------------------


async def test_with_drafts_batch_1_is_published_and_larger_ones_are_not(tmp_path: Path) -> None:
    """Three tokens a step at 10 ms: 300 tokens/s, 10 ms a step."""
    behaviour = Behaviour(accepted=(2, 1, 3), step_seconds=lambda _: 0.010)
    async with FakeLlama(behaviour) as fake, bench(fake, tmp_path) as b:
        await b.scheduler.run_once()
        one = b.server.batches[1].sample
        assert one is not None
        assert one.speculative
        assert one.step_seconds == pytest.approx(0.010, rel=0.01)
        assert one.tokens_per_step == pytest.approx(3.0, rel=0.05)
        assert one.tokens_per_second == pytest.approx(300, rel=0.06)
        assert one.steps >= 16
        assert b.server.batches[2].reason is Reason.SPECULATIVE


async def test_a_probe_of_a_slow_drafting_server_grows_until_it_has_enough_steps(tmp_path: Path) -> None:
    """16 tokens of a slow model are too few steps where drafts give four of them at once."""
    behaviour = Behaviour(accepted=(3,), step_seconds=lambda _: 0.2)
    async with FakeLlama(behaviour) as fake, client_of(fake) as client:
        probe, identity = probe_of(client, tmp_path), await seen(client)
        results = [await probe.measure(identity, 1) for _ in range(2)]
        assert isinstance(results[-1], DecodeSample)
        assert results[-1].steps >= 16


async def test_drafts_that_are_all_rejected_are_still_told(tmp_path: Path) -> None:
    async with FakeLlama(Behaviour(accepted=(0,))) as fake, client_of(fake) as client:
        result = await probe_of(client, tmp_path).measure(await seen(client), 1)
        assert isinstance(result, DecodeSample)
        assert (result.speculative, result.tokens_per_step) == (True, 1.0)


# --- restarts and sleep --------------------------------------------------------------------------------------------


async def test_a_sample_of_a_server_that_was_restarted_meanwhile_is_void(
    fake_llama: FakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy may hide the cut connection; the word that each start makes up does not come back."""
    async with bench(fake_llama, tmp_path) as b:
        measure = b.probe.measure

        async def restarted(identity: Identity, batch: int) -> DecodeSample | Reason:
            result = await measure(identity, batch)
            monkeypatch.setattr("fake_llama_answers.MEDIA_MARKER", f"<__media_{batch}__>")
            return result

        b.probe.measure = restarted  # type: ignore[method-assign]
        await b.watch.cycle()
        assert b.server.succeeded == 0
        assert b.server.batches[1].sample is None
        assert b.watch.due <= b.time.now
        b.probe.measure = measure  # type: ignore[method-assign]
        await b.watch.cycle()
        assert b.server.succeeded == 3


async def test_a_server_that_sleeps_when_left_alone_is_probed_in_longer_gaps(
    fake_llama: FakeLlama, tmp_path: Path
) -> None:
    """It would be awake for ever otherwise: nothing that resets its timer is asked until it must have slept."""
    async with bench(fake_llama, tmp_path, sleep_idle=600.0) as b:
        await b.watch.cycle()
        assert b.server.succeeded == 3
        b.time.now += 300
        asked = fake_llama.asked("/slots") + fake_llama.asked("/completion")
        await b.watch.cycle()
        await b.watch.has_users()
        await b.watch.check()
        assert fake_llama.asked("/slots") + fake_llama.asked("/completion") == asked
        assert b.server.counts == {Reason.KEEPS_AWAKE: 1}
        assert b.server.batches[1].success is True, "no failure"
        assert b.watch.due - b.time.now == pytest.approx(600 + 30 - 300)
        b.time.now = b.watch.due
        await b.watch.cycle()
        assert b.server.succeeded == 6, "still awake, so a user keeps it so"


async def test_once_seen_asleep_a_server_is_probed_once_after_each_user(fake_llama: FakeLlama, tmp_path: Path) -> None:
    async with bench(fake_llama, tmp_path) as b:
        fake_llama.behaviour.sleeping = True
        await b.watch.cycle()
        assert b.server.counts == {Reason.SLEEPING: 1}
        fake_llama.behaviour.sleeping = False
        await b.watch.check()
        assert b.watch.due <= b.time.now, "this may be the only time"
        await b.watch.cycle()
        assert b.server.succeeded == 3
        for _ in range(3):
            b.time.now += 3600
            await b.watch.cycle()
        assert b.server.succeeded == 3
        assert b.server.counts[Reason.KEEPS_AWAKE] == 3
        assert fake_llama.woken == 0
        fake_llama.behaviour.sleeping = True
        await b.watch.check()
        fake_llama.behaviour.sleeping = False
        await b.watch.check()
        await b.watch.cycle()
        assert b.server.succeeded == 6


async def test_a_hung_server_costs_the_loop_one_wait_and_is_told_once(
    fake_llama: FakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with bench(fake_llama, tmp_path) as b:
        await b.watch.check()
        monkeypatch.setattr("exporter.measure.probe.ASK_TIMEOUT", 3.0)
        fake_llama.behaviour.faults = {"*": "hang"}
        pauses = []
        began = time.monotonic()
        for _ in range(5):
            await b.watch.cycle()
            pauses.append(b.watch.due - b.time.now)
            b.time.now = b.watch.due
        assert time.monotonic() - began < 12, "the first cycle alone waits"
        assert pauses == sorted(pauses)
        assert pauses[-1] > 8 * pauses[0]
        assert capsys.readouterr().out.count("no probe") == 1
        assert b.server.counts == {Reason.TIMEOUT: 5}
