"""The measuring loop against a fake llama-server: cycles, skips, recovery, staleness, liveness."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from benches import GB, bench
from fake_llama import Behaviour, FakeLlama
from fake_llama_answers import Model
from structlog.testing import capture_logs

from exporter.measure.probe import Identity
from exporter.present.words import REASONS
from exporter.roofline.decode import DecodeSample
from exporter.roofline.prefill import PREFILL_TOKENS, PrefillSample
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import ServerState, Snapshot, view


async def test_one_cycle_places_every_batch_under_the_roof(fake_llama: FakeLlama, tmp_path: Path) -> None:
    fake_llama.behaviour.step_seconds = lambda b: 0.01 * (1 + b)
    async with bench(fake_llama, tmp_path) as b:
        seen = view(await b.scheduler.run_once(), b.time.now)
        (server,) = seen.servers
        assert set(server.points) == {1, 2, 4}
        weights = server.server.model.weight_bytes if server.server.model else None
        assert weights
        for batch, point in server.points.items():
            assert point.floor_ratio == pytest.approx(weights / (30 * GB) / (0.01 * (1 + batch)), rel=0.02)
        assert server.server.succeeded == 3
        assert server.server.probes == 3
        assert b.meter.cancelled


async def test_batches_above_the_slots_are_skipped_with_a_reason(fake_llama: FakeLlama, tmp_path: Path) -> None:
    fake_llama.behaviour.n_slots = 2
    async with bench(fake_llama, tmp_path) as b:
        await b.scheduler.run_once()
        assert b.server.counts == {Reason.TOO_FEW_SLOTS: 1}
        assert b.server.batches[4].reason is Reason.TOO_FEW_SLOTS
        assert b.server.batches[2].success is True
        assert b.server.probes == 2


async def test_a_server_that_is_down_is_counted_and_the_rest_goes_on(tmp_path: Path) -> None:
    fake = FakeLlama()
    await fake.start()
    await fake.stop()
    async with bench(fake, tmp_path) as b:
        seen = view(await b.scheduler.run_once(), b.time.now)
        assert seen.in_force
        assert b.server.state is ServerState.UNREACHABLE
        assert b.server.counts == {Reason.UNREACHABLE: 1}
        assert all(r.success is False for r in b.server.batches.values())


@pytest.mark.parametrize(
    ("behaviour", "state", "reason"),
    [
        (Behaviour(loading=True), ServerState.LOADING, Reason.LOADING),
        (Behaviour(api_key="secret"), ServerState.UNAUTHORIZED, Reason.UNAUTHORIZED),
        (Behaviour(faults={"*": "html_ok"}), ServerState.UNSUPPORTED, Reason.NOT_LLAMA),
    ],
)
async def test_each_state_has_its_counted_reason(
    behaviour: Behaviour, state: ServerState, reason: Reason, tmp_path: Path
) -> None:
    async with FakeLlama(behaviour) as fake, bench(fake, tmp_path) as b:
        await b.scheduler.run_once()
        assert b.server.state is state
        assert b.server.counts == {reason: 1}
        assert fake.asked("/completion") == 0


async def test_a_server_that_comes_back_is_probed_at_once(fake_llama: FakeLlama, tmp_path: Path) -> None:
    fake_llama.behaviour.loading = True
    async with bench(fake_llama, tmp_path) as b:
        await b.scheduler.run_once()
        assert b.watch.due > b.time.now
        fake_llama.behaviour.loading = False
        await b.watch.check()
        assert b.server.state is ServerState.READY
        assert b.watch.due <= b.time.now


async def test_a_busy_server_is_left_alone_and_asked_again_soon(fake_llama: FakeLlama, tmp_path: Path) -> None:
    """Nothing is generated, the skip is counted, and the time does not age the last sample."""
    async with bench(fake_llama, tmp_path) as b:
        await b.scheduler.run_once()
        sent = fake_llama.asked("/completion")
        fake_llama.behaviour.foreign = frozenset({"after"})
        for _ in range(4):
            b.time.now += 100
            await b.watch.cycle()
        assert fake_llama.asked("/completion") == sent
        assert b.state() == "busy"
        assert b.server.counts == {Reason.BUSY: 4}
        assert [r.busy_seconds for r in b.server.batches.values()] == pytest.approx([300, 300, 300])
        assert b.watch.due == pytest.approx(b.time.now + 15)
        await b.watch.check()
        assert b.state() == "busy", "health alone does not tell that users are gone"
        fake_llama.behaviour.foreign = frozenset()
        await b.watch.cycle()
        assert b.state() == "ready"
        assert not any(r.busy_seconds for r in b.server.batches.values())


async def test_decode_values_expire_but_time_spent_on_users_does_not_count(
    fake_llama: FakeLlama, tmp_path: Path
) -> None:
    async with bench(fake_llama, tmp_path) as b:
        snapshot = await b.scheduler.run_once()
        interval = b.server.interval_seconds
        assert view(snapshot, b.time.now + 3 * interval - 1).servers[0].points
        assert not view(snapshot, b.time.now + 3 * interval + 1).servers[0].points

        def busy(seconds: float) -> Snapshot:
            (server,) = snapshot.servers
            batches = {b: replace(r, busy_seconds=seconds) for b, r in server.batches.items()}
            return replace(snapshot, servers=(replace(server, batches=batches),))

        assert view(busy(500), b.time.now + 3 * interval + 499).servers[0].points
        assert not view(busy(1e9), b.time.now + 3 * interval + 3601).servers[0].points
        assert view(busy(1e9), b.time.now + 3 * interval + 3601).servers[0].server.succeeded == 3


async def test_a_server_that_is_checked_no_more_is_not_said_to_be_up(fake_llama: FakeLlama, tmp_path: Path) -> None:
    """A dead loop must not freeze `server_up`."""
    async with bench(fake_llama, tmp_path) as b:
        snapshot = await b.scheduler.run_once()
        assert view(snapshot, b.time.now + 59).servers[0].server.state.up
        assert not view(snapshot, b.time.now + 61).servers[0].server.state.up


async def test_the_duty_cycle_wins_over_the_interval(fake_llama: FakeLlama, tmp_path: Path) -> None:
    """Over an hour of probing whenever it is allowed, users coming and going, the promised share is kept."""
    fake_llama.behaviour.step_seconds = lambda _: 0.01
    async with bench(fake_llama, tmp_path, probe={"interval": "1s", "health_interval": "1s", "timeout": "10s"}) as b:
        measure, spent = b.probe.measure, 0.0

        async def slow(identity: Identity, batch: int) -> DecodeSample | Reason:
            nonlocal spent
            b.time.now += 2.0
            spent += 2.0
            # Every third probe is voided; after each, a user comes.
            fake_llama.behaviour.foreign = frozenset({"after"}) if spent % 6 else frozenset()
            return Reason.WRONG_LENGTH if spent % 6 else await measure(identity, batch)

        b.probe.measure = slow  # type: ignore[method-assign]
        began = b.time.now
        await b.scheduler.run_once()
        while b.time.now < began + 3600:
            if b.time.now >= b.watch.due and b.duty.free():
                await b.watch.cycle()
                fake_llama.behaviour.foreign = frozenset()
            b.time.now += 0.5
        assert spent > 10
        # The first round is not put off: three batches beyond the share.
        assert spent <= 0.02 * 3600 + 3 * 2.0
        assert b.scheduler._freeze().duty_cycle_ratio <= 0.022


async def test_a_round_that_users_interrupted_goes_on_where_it_stopped(fake_llama: FakeLlama, tmp_path: Path) -> None:
    fake_llama.behaviour.n_slots = 8
    async with bench(fake_llama, tmp_path) as b:
        measure, order = b.probe.measure, []

        async def noted(identity: Identity, batch: int) -> DecodeSample | Reason:
            order.append(batch)
            result = await measure(identity, batch)
            fake_llama.behaviour.foreign = frozenset({"after"})
            return result

        b.probe.measure = noted  # type: ignore[method-assign]
        for _ in range(6):
            await b.watch.cycle()
            fake_llama.behaviour.foreign = frozenset()
        assert order == [1, 2, 4, 1, 2, 4]


async def test_a_dead_server_costs_the_others_nothing(tmp_path: Path) -> None:
    """It is not asked again in the measuring loop, and takes no share of the duty cycle."""
    async with FakeLlama(Behaviour(faults={"*": "hang"})) as fake, bench(fake, tmp_path) as b:
        b.watch._checked = True
        before = len(fake.requests)
        await b.watch.cycle()
        assert len(fake.requests) == before
        assert b.duty.free()
        assert b.server.counts == {Reason.UNREACHABLE: 1}


async def test_a_probe_that_hung_does_not_silence_the_neighbours(fake_llama: FakeLlama, tmp_path: Path) -> None:
    """120 s of waiting would be 100 minutes of silence for every server at the default duty cycle."""
    async with bench(fake_llama, tmp_path) as b:

        async def hang(identity: Identity, batch: int) -> DecodeSample | Reason:
            assert identity.props.slots
            assert batch in {1, 2, 4}
            b.time.now += 120.0
            return Reason.TIMEOUT

        b.probe.measure = hang  # type: ignore[method-assign]
        await b.watch.cycle()
        assert 0 < b.duty.pause() <= 3 * 4 * 2.0 / 0.02
        assert b.server.interval_seconds >= b.duty.pause()


async def test_a_model_that_changes_within_a_round_is_measured_from_its_first_batch(
    fake_llama: FakeLlama, tmp_path: Path
) -> None:
    async with bench(fake_llama, tmp_path) as b:
        measure, order = b.probe.measure, []

        async def swapped(identity: Identity, batch: int) -> DecodeSample | Reason:
            order.append(batch)
            result = await measure(identity, batch)
            if order == [1, 2]:
                fake_llama.behaviour.model = Model(alias="other", size=123456789, n_params=1000)
                await b.watch.check()
            return result

        b.probe.measure = swapped  # type: ignore[method-assign]
        await b.watch.cycle()
        assert b.watch.due <= b.time.now
        assert all(r.sample is None for r in b.server.batches.values())
        await b.watch.cycle()
        assert order == [1, 2, 1, 2, 4]
        assert all(r.sample for r in b.server.batches.values())


async def test_a_skipped_batch_is_not_a_failed_probe(fake_llama: FakeLlama, tmp_path: Path) -> None:
    fake_llama.behaviour.n_slots = 1
    async with bench(fake_llama, tmp_path) as b:
        await b.scheduler.run_once()
        skipped = b.server.batches[2]
        assert (skipped.success, skipped.duration_seconds, skipped.reason) == (None, None, Reason.TOO_FEW_SLOTS)


async def test_a_configured_compute_peak_of_the_machine_is_its_servers(fake_llama: FakeLlama, tmp_path: Path) -> None:
    async with bench(fake_llama, tmp_path, machine={"compute_peak": "2000GFLOP/s"}) as b:
        (server,) = view(await b.scheduler.run_once(), b.time.now).servers
        assert (server.roof.compute_flops_per_second, server.roof.compute_source) == (2e12, "configured")


async def test_a_failed_probe_is_a_warning_when_it_is_new(fake_llama: FakeLlama, tmp_path: Path) -> None:
    """`--log.level warning` must not hide that nothing is measured any more; nor may each failure ring again."""
    fake_llama.behaviour.faults = {"/completion": "500"}
    async with bench(fake_llama, tmp_path) as b:
        with capture_logs() as logs:
            for _ in range(3):
                await b.watch.cycle()
            fake_llama.behaviour.faults = {}
            await b.watch.cycle()
            fake_llama.behaviour.faults = {"/completion": "500"}
            await b.watch.cycle()
        told = [(line["batch"], line["log_level"]) for line in logs if line["event"] == "probe"]
        for batch in (1, 2, 4):
            levels = [level for of, level in told if of == batch]
            assert levels == ["warning", "info", "info", "info", "warning"]
        first = next(line for line in logs if line["event"] == "probe")
        assert first["means"] == REASONS[Reason(first["reason"])]


async def test_a_skipped_batch_is_no_warning(fake_llama: FakeLlama, tmp_path: Path) -> None:
    fake_llama.behaviour.n_slots = 1
    async with bench(fake_llama, tmp_path) as b:
        with capture_logs() as logs:
            await b.watch.cycle()
        assert {line["log_level"] for line in logs} == {"info"}


async def test_a_new_model_removes_the_old_samples(fake_llama: FakeLlama, tmp_path: Path) -> None:
    async with bench(fake_llama, tmp_path) as b:
        await b.scheduler.run_once()
        assert b.server.batches[1].sample
        fake_llama.behaviour.model = Model(alias="other", size=123456789, n_params=1000)
        await b.watch.check()
        assert b.server.model
        assert b.server.model.name == "other"
        assert all(r.sample is None for r in b.server.batches.values())
        assert b.watch.due <= b.time.now


async def test_samples_below_the_threshold_are_counted_and_the_first_confirmed_soon(
    fake_llama: FakeLlama, tmp_path: Path
) -> None:
    fake_llama.behaviour.step_seconds = lambda _: 0.001
    async with bench(fake_llama, tmp_path, server={"floor_fraction": {1: 0.5}}) as b:
        b.meter.read = 300 * GB
        await b.scheduler.run_once()
        assert b.server.batches[1].below_threshold_samples == 0
        fake_llama.behaviour.step_seconds = lambda _: 1.0
        for expected in (1, 2, 3):
            await b.watch.cycle()
            assert b.server.batches[1].below_threshold_samples == expected
            pause = b.watch.due - b.time.now
            assert (pause < b.server.interval_seconds) == (expected == 1)
        assert b.server.batches[2].below_threshold_samples == 0
        fake_llama.behaviour.step_seconds = lambda _: 0.001
        await b.watch.cycle()
        assert b.server.batches[1].below_threshold_samples == 0


async def test_the_loop_measures_bandwidth_first_then_probes_and_goes_on(fake_llama: FakeLlama, tmp_path: Path) -> None:
    """Full at the start and each hour, short in between; kernels and probes never at the same time."""
    async with bench(fake_llama, tmp_path) as b:
        probing_during_kernels: list[int] = []
        b.meter.during = lambda: probing_during_kernels.append(fake_llama._open_completions)
        task = asyncio.create_task(b.scheduler.run())
        async with asyncio.timeout(60):
            await b.meter.fourteen.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert b.meter.runs[0] is True
        assert b.meter.runs[1:12] == [False] * 11
        assert b.meter.runs[12] is True
        assert set(probing_during_kernels) == {0}
        assert b.server.succeeded >= 30
        assert b.scheduler.snapshot.duty_cycle_ratio >= 0
        assert b.meter.cancelled


async def test_each_attempt_of_the_first_run_has_its_time(fake_llama: FakeLlama, tmp_path: Path) -> None:
    """Three attempts of 50 s each are slow, and the loop is alive."""
    alive: list[bool] = []
    async with bench(fake_llama, tmp_path) as b:
        b.meter.problem = Reason.PREEMPTED

        def slow() -> None:
            alive.append(b.scheduler.healthy())
            b.time.now += 50

        b.meter.during = slow
        await b.scheduler.run_once(probe=False)
        assert alive == [True, True, True]
        assert b.scheduler.healthy()


async def test_a_hung_loop_is_not_healthy(fake_llama: FakeLlama, tmp_path: Path) -> None:
    async with bench(fake_llama, tmp_path) as b:
        assert b.scheduler.healthy()
        b.time.now += 3 * 15 + 1
        assert not b.scheduler.healthy()


async def test_a_long_prompt_is_sent_only_when_asked_for(fake_llama: FakeLlama, tmp_path: Path) -> None:
    async with bench(fake_llama, tmp_path) as b:
        (server,) = (await b.scheduler.run_once()).servers
        assert server.prefill is None
        assert all(len(prompt) < 100 for prompt in fake_llama_prompts(fake_llama))
        (server,) = (await b.scheduler.run_once(prefill=True)).servers
        assert isinstance(server.prefill, PrefillSample)
        assert server.prefill.tokens == PREFILL_TOKENS
        assert server.prefill.seconds == pytest.approx(0.03)
        assert [len(prompt) for prompt in fake_llama_prompts(fake_llama) if len(prompt) > 100] == [PREFILL_TOKENS]


def fake_llama_prompts(fake: FakeLlama) -> list[list[int]]:
    """Every prompt that was sent."""
    bodies = [r.body for r in fake.requests if r.path == "/completion"]
    return [prompt for body in bodies if isinstance(body, dict) for prompt in body["prompt"]]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Behaviour(foreign=frozenset({"before"})), Reason.BUSY),
        (Behaviour(sleeping=True), Reason.SLEEPING),
        (Behaviour(loading=True), Reason.LOADING),
        (Behaviour(n_ctx=PREFILL_TOKENS), Reason.CONTEXT_TOO_SMALL),
    ],
)
async def test_a_long_prompt_that_cannot_be_sent_says_why(behaviour: Behaviour, reason: Reason, tmp_path: Path) -> None:
    async with FakeLlama(behaviour) as fake, bench(fake, tmp_path) as b:
        (server,) = view(await b.scheduler.run_once(prefill=True), b.time.now).servers
        assert server.prefill is reason
        assert all(len(prompt) < 100 for prompt in fake_llama_prompts(fake))
