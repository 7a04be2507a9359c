"""Users' traffic from slots: by example, and on a simulated server with known truth."""

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.roofline.ceiling import CeilingSource, Roof
from exporter.roofline.footprint import Attention, BytesSource, Footprint
from exporter.roofline.live import (
    MAX_ERROR,
    MEMORY_SECONDS,
    LiveSample,
    LiveShare,
    LiveSource,
    LiveTrack,
    SlotPoll,
    interval,
    place_live,
)
from exporter.roofline.progress import PROMPT_PATIENCE_SECONDS, Progress
from exporter.roofline.slots import Slot


def generating(number: int, task: int, decoded: int, *, depth: int | None = None, speculative: bool = False) -> Slot:
    tokens = decoded + 10 if depth is None else depth
    return Slot(number, processing=True, task=task, decoded=decoded, tokens=tokens, speculative=speculative)


def idle(number: int, task: int | None = None) -> Slot:
    return Slot(number, processing=False, task=task)


def poll(at: float, *slots: Slot, round_trip: float = 0.0) -> SlotPoll:
    return SlotPoll(at, round_trip, slots)


def track(*polls: SlotPoll) -> LiveTrack:
    found = LiveTrack()
    for each in polls:
        found = found.add(each)
    return found


def steady(streams: int, polls: int, *, rate: int = 50, **how: bool) -> LiveTrack:
    """`streams` requests, each with `rate` tokens a second, polled once a second."""
    return track(*(poll(n, *(generating(s, s + 7, 1 + rate * n, **how) for s in range(streams))) for n in range(polls)))


class TestIntervals:
    """What counts, and what does not."""

    def test_the_same_requests_generating_at_both_ends_count(self) -> None:
        found = interval(
            poll(1.0, generating(0, 5, 10), generating(1, 6, 30), idle(2, 3)),
            poll(3.0, generating(0, 5, 110), generating(1, 6, 130), idle(2, 3)),
        )
        assert found is not None
        assert (found.seconds, found.tokens, found.steps) == (2.0, (100, 100), 100)
        assert found.depth_seconds == pytest.approx(2.0 * (10 + 110 + 30 + 130 + 40) / 4)

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ((idle(0, 4), idle(1)), (idle(0, 4), idle(1))),  # nothing runs
            ((idle(0, 4), idle(1)), (generating(0, 5, 9), idle(1))),  # it began
            ((generating(0, 5, 9), idle(1)), (idle(0, 5), idle(1))),  # it ended
            ((generating(0, 5, 9), idle(1)), (generating(0, 6, 20), idle(1))),  # another took its place
            ((generating(0, 5, 0), idle(1)), (generating(0, 5, 20), idle(1))),  # it was at its prompt
            ((generating(0, 5, 9), generating(1, 6, 0)), (generating(0, 5, 20), generating(1, 6, 0))),  # another is
            ((generating(0, 5, 9), generating(1, 6, 0)), (generating(0, 5, 20), generating(1, 6, 4))),  # another was
            ((generating(0, 5, 9), idle(1, 2)), (generating(0, 5, 20), idle(1, 8))),  # one came and went
            ((generating(0, 5, 30), idle(1)), (generating(0, 5, 20), idle(1))),  # the count fell
            ((generating(0, 5, 30), idle(1)), (generating(0, 5, 40),)),  # another server
        ],
    )
    def test_whatever_makes_the_time_of_generating_unknown_does_not(
        self, before: Sequence[Slot], after: Sequence[Slot]
    ) -> None:
        assert interval(poll(1.0, *before), poll(2.0, *after)) is None

    def test_a_clock_that_stands_still_gives_nothing(self) -> None:
        assert interval(poll(1.0, generating(0, 5, 9)), poll(1.0, generating(0, 5, 20))) is None


class TestSamples:
    """What is published of the intervals that count."""

    @pytest.mark.parametrize("streams", [1, 2, 4])
    def test_steady_streams(self, streams: int) -> None:
        sample = steady(streams, 20).sample()
        assert sample is not None
        assert sample.streams == streams
        assert sample.step_seconds == pytest.approx(1 / 50)
        assert sample.tokens_per_second == pytest.approx(50 * streams)
        (share,) = sample.shares
        assert 10.0 <= share.seconds <= 16.0, "about the newest ten seconds"
        assert sample.measured_at == 19.0

    def test_nothing_is_said_before_it_is_exact_enough(self) -> None:
        assert steady(1, 2, rate=20).sample() is None, "20 steps, one of which is uncertain"
        assert steady(1, 3, rate=20).sample() is not None

    def test_a_slow_server_is_watched_for_longer(self) -> None:
        def slow(seconds: int) -> LiveTrack:
            return track(*(poll(n, generating(0, 1, 1 + n // 2)) for n in range(seconds)))

        assert slow(60).sample() is None
        sample = slow(80).sample()
        assert sample is not None
        assert sample.step_seconds == pytest.approx(2.0, rel=MAX_ERROR)

    def test_slow_answers_are_uncertain_times(self) -> None:
        def late(round_trip: float, polls: int) -> LiveSample | None:
            return track(*(poll(n, generating(0, 1, 1 + 50 * n), round_trip=round_trip) for n in range(polls))).sample()

        assert late(0.0, 4) is not None
        assert late(0.5, 4) is None
        assert late(0.5, 40) is not None, "the longer it runs, the less they matter"

    def test_a_gap_is_not_bridged(self) -> None:
        first = track(*(poll(n, generating(0, 1, 1 + 50 * n)) for n in range(3)))
        gone = first.cut()
        for n in range(100, 103):
            gone = gone.add(poll(n, generating(0, 1, 1000 + 50 * n)))
        sample = gone.sample()
        assert sample is not None
        assert sample.shares[0].seconds == 4.0

    def test_what_is_old_is_forgotten(self) -> None:
        later = steady(1, 20).add(poll(19 + MEMORY_SECONDS + 1, idle(0)))
        assert later.runs == ()
        assert later.sample() is None

    def test_tokens_of_speculation_are_not_steps(self) -> None:
        sample = steady(1, 100, speculative=True).sample()
        assert sample is not None
        assert sample.tokens_per_second == pytest.approx(50)
        assert sample.step_seconds is None

    def test_streams_that_do_not_advance_together_have_no_common_step(self) -> None:
        apart = track(
            *(poll(n, generating(0, 1, 1 + 50 * n), generating(1, 2, 1 + 25 * n)) for n in range(20))
        ).sample()
        assert apart is not None
        assert apart.tokens_per_second == pytest.approx(75)
        assert apart.step_seconds is None

    def test_an_unknown_depth_is_not_taken_for_zero(self) -> None:
        slots = [Slot(0, processing=True, task=1, decoded=1 + 50 * n) for n in range(10)]
        sample = track(*(poll(n, slot) for n, slot in enumerate(slots))).sample()
        assert sample is not None
        assert sample.shares[0].depth is None
        assert place_live(sample, FOOTPRINT, ROOF).floor_ratio is None


FOOTPRINT = Footprint(parameters=1e9, weight_bytes=1e9, source=BytesSource.FILE, attention=(Attention(1e4, 0.0),))
ROOF = Roof({CeilingSource.READ: 100e9, CeilingSource.TRIAD: 80e9}, CeilingSource.READ)


class TestFloor:
    """The floor ratio at the streams and depths that were there."""

    def sample(self, seconds: float) -> LiveSample:
        shares = (LiveShare(1, seconds, 100, 100, 1000.0), LiveShare(4, seconds, 400, 100, 500.0))
        return LiveSample(LiveSource.SLOTS, 2.5, 250.0 / seconds, seconds / 100, 0.0, shares)

    def test_it_is_the_least_time_over_the_time_taken(self) -> None:
        least = 100 * ((1e9 + 1e7) + (1e9 + 4 * 5e6)) / 100e9
        assert place_live(self.sample(5.0), FOOTPRINT, ROOF).floor_ratio == pytest.approx(least / 10.0)

    def test_it_is_withheld_where_it_cannot_be(self) -> None:
        assert place_live(self.sample(0.5), FOOTPRINT, ROOF).floor_ratio is None, "faster than the memory"
        assert place_live(self.sample(5.0), None, ROOF).floor_ratio is None
        assert place_live(self.sample(5.0), FOOTPRINT, replace(ROOF, ceilings={})).floor_ratio is None
        assert place_live(replace(self.sample(5.0), step_seconds=None), FOOTPRINT, ROOF).floor_ratio is None
        told = LiveSample(LiveSource.METRICS, None, None, 0.01, 0.0)
        assert place_live(told, FOOTPRINT, ROOF).floor_ratio is None, "nobody tells how many streams there were"


@dataclass
class Simulated:
    """A server with requests that come at random; `history` is what GET /slots shows from each time on."""

    step_seconds: Callable[[int], float]
    history: list[tuple[float, tuple[Slot, ...]]]

    def at(self, time: float) -> tuple[Slot, ...]:
        return self.history[bisect_right(self.history, time, key=lambda entry: entry[0]) - 1][1]


def simulate(seed: int, *, seconds: float, gap: float, keeps_count: bool, step: float) -> Simulated:
    """Four slots; a new prompt holds all streams up for a while."""
    chance = random.Random(seed)
    shown = [idle(number) for number in range(4)]
    left = [0] * 4
    now, arrival, task = 0.0, chance.expovariate(1 / gap), 0
    found = Simulated(lambda batch: step * (0.5 + 0.5 * batch), [(0.0, tuple(shown))])
    while now < seconds:
        fresh = []
        while arrival <= now:
            free = [number for number in range(4) if not left[number]]
            if not free:
                break
            number = chance.choice(free)
            task, left[number] = task + 1, chance.randint(1, int(8 / step))
            shown[number] = Slot(number, processing=True, task=task, decoded=0, tokens=chance.randint(5, 500))
            fresh.append(number)
            arrival += chance.expovariate(1 / gap)
        running = [number for number in range(4) if left[number]]
        if not running:
            now = arrival
            continue
        found.history.append((now, tuple(shown)))
        now += chance.uniform(0.1, 1.5) if fresh else found.step_seconds(len(running))
        for number in running:
            slot = shown[number]
            shown[number] = replace(slot, decoded=slot.decoded + 1, tokens=(slot.tokens or 0) + 1)
            left[number] -= 1
            if not left[number]:
                count = shown[number].decoded if keeps_count else 0
                shown[number] = replace(shown[number], processing=False, decoded=count)
        found.history.append((now, tuple(shown)))
    return found


def watched(server: Simulated, seed: int, seconds: float) -> list[LiveTrack]:
    """The tracks after each poll, a poll about once a second, sooner after an interval that did not count."""
    chance = random.Random(seed)
    found, now = [LiveTrack()], 0.0
    while now < seconds:
        round_trip = chance.uniform(0.0005, 0.01)
        seen = server.at(now + chance.uniform(0, round_trip))
        found.append(found[-1].add(SlotPoll(now + round_trip / 2, round_trip, seen)))
        now += (1.0 if found[-1].clean else 0.3) * chance.uniform(0.95, 1.3)
    return found


def deviation(server: Simulated, sample: LiveSample) -> float:
    """Time that the sample says its steps took / the time that they took, - 1."""
    truth = sum((share.steps or 0.0) * server.step_seconds(share.streams) for share in sample.shares)
    return sum(share.seconds for share in sample.shares) / truth - 1


class TestAgainstTruth:
    """Prompts excluded, every published figure is that of pure decode."""

    @settings(max_examples=60)
    @given(
        seed=st.integers(0, 10**9),
        gap=st.floats(0.5, 20),
        step=st.floats(0.004, 0.08),
        keeps_count=st.booleans(),
    )
    def test_no_error_is_larger_than_all_of_its_parts_together(
        self, *, seed: int, gap: float, step: float, keeps_count: bool
    ) -> None:
        server = simulate(seed, seconds=40, gap=gap, keeps_count=keeps_count, step=step)
        for each in watched(server, seed, 40):
            for run in each.runs:
                assert run.steps is not None
                truth = run.steps * server.step_seconds(len(run.streams))
                assert abs(run.seconds - truth) <= server.step_seconds(len(run.streams)) + sum(run.round_trips) / 2
            if (sample := each.sample()) is not None:
                assert sample.tokens_per_second is not None
                assert sample.step_seconds is not None
                if len({share.streams for share in sample.shares}) == 1:
                    rate = sample.streams / sample.step_seconds if sample.streams else 0.0
                    assert sample.tokens_per_second == pytest.approx(rate, rel=2 * MAX_ERROR)

    def test_published_rates_are_within_three_percent(self) -> None:
        """Over many servers and hours: nearly always; and the median far closer."""
        errors = []
        for seed in range(60):
            gap, step = 1.0 + seed % 7, (0.008, 0.025, 0.06)[seed % 3]
            server = simulate(seed, seconds=60, gap=gap, keeps_count=bool(seed % 2), step=step)
            samples = [s for s in (t.sample() for t in watched(server, seed, 60)) if s is not None]
            errors += [abs(deviation(server, sample)) for sample in samples]
        assert len(errors) > 1000
        assert median(errors) < 0.01
        assert sum(error > MAX_ERROR for error in errors) / len(errors) < 0.005


class TestStall:
    """Work in progress without progress."""

    def frozen(self, slot: Slot, seconds: float, *, step_seconds: float = 0.02, interval: float = 1.0) -> bool:
        progress = Progress(0.0)
        now = 0.0
        while now <= seconds:
            progress = progress.seen((slot, idle(1)), now)
            now += 1.0
        return progress.stalled(now, interval, step_seconds)

    def test_a_count_that_stands_still_is_a_stall(self) -> None:
        assert not self.frozen(generating(0, 1, 9), 10)
        assert self.frozen(generating(0, 1, 9), 17)

    def test_patience_grows_with_the_steps_and_the_health_interval(self) -> None:
        assert not self.frozen(generating(0, 1, 9), 39, step_seconds=2.0)
        assert self.frozen(generating(0, 1, 9), 42, step_seconds=2.0)
        assert not self.frozen(generating(0, 1, 9), 44, interval=15.0)

    def test_a_long_prompt_is_not_a_stall(self) -> None:
        assert not self.frozen(generating(0, 1, 0), PROMPT_PATIENCE_SECONDS - 2)
        assert self.frozen(generating(0, 1, 0), PROMPT_PATIENCE_SECONDS + 2)
        assert not self.frozen(generating(0, 1, 0), 900, step_seconds=0.5), "a prompt batch may take 2048 steps' time"

    def test_a_prompt_that_advances_is_progress(self) -> None:
        progress = Progress(0.0)
        for n in range(300):
            progress = progress.seen((replace(generating(0, 1, 0), prompt_done=512 * (n // 100)),), float(n))
        assert not progress.stalled(300.0, 1.0, 0.02)

    def test_idle_servers_wait_for_nothing(self) -> None:
        assert not self.frozen(idle(0, 1), 1000)

    def test_a_server_that_hangs_with_its_slots_is_given_a_prompts_time(self) -> None:
        progress = Progress(0.0).seen((generating(0, 1, 9),), 1.0).unanswered()
        assert not progress.stalled(100.0, 1.0, 0.02)
        assert progress.stalled(122.0, 1.0, 0.02)
