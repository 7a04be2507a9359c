"""Users' traffic from slots and from counters: by example, and on a simulated server with known truth."""

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.measure.counters import parse_counters
from exporter.roofline.ceiling import CeilingSource, Roof
from exporter.roofline.counters import MAX_COUNTER_ERROR, Counters, CounterTrack, quantum
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
from exporter.roofline.reason import Reason
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


def reading(at: float, tokens: float, seconds: float, processing: int = 0, **how: object) -> Counters:
    known = Counters(at, "1", tokens, seconds, 0.0, processing, 500.0)
    return replace(known, **how)  # type: ignore[arg-type]


def counted(*readings: Counters) -> LiveSample | None:
    found = CounterTrack()
    for each in readings:
        found = found.add(each)
    return found.sample()


class TestCounters:
    """Six digits, resets, and requests that count when they end."""

    def test_one_request_from_idle_to_idle(self) -> None:
        sample = counted(
            *(reading(float(n), 1000.0, 50.0, 1 if 0 < n < 41 else 0) for n in range(41)),
            reading(41.0, 1000.0 + 2001, 50.0 + 40.0, 0),
        )
        assert sample is not None
        assert sample.step_seconds == pytest.approx(40.0 / 2000)
        assert sample.tokens_per_second == pytest.approx(2001 / 40, rel=0.03)
        assert sample.streams == pytest.approx(1.0, rel=0.03)
        assert (sample.source, sample.shares) == (LiveSource.METRICS, ())

    def test_a_count_that_moved_too_little_waits_for_more(self) -> None:
        first, second, third = (
            reading(0, 2e6, 4e4, 1),
            reading(1, 2e6 + 100, 4e4 + 5, 1),
            reading(2, 2e6 + 1e3, 4e4 + 50),
        )
        assert counted(first, second) is None, "a printed digit is 10 tokens of 100"
        sample = counted(first, second, third)
        assert sample is not None
        assert sample.step_seconds == pytest.approx(45 / 899)

    @pytest.mark.parametrize(
        "after",
        [
            reading(1, 9000.0, 500.0, restart="2"),
            reading(1, 500.0, 500.0),
            reading(1, 9000.0, 10.0),
            reading(1, 9000.0, 500.0, accepted=None),
        ],
    )
    def test_a_restart_drops_the_window(self, after: Counters) -> None:
        before = reading(0, 1000.0, 50.0, 1)
        assert counted(before, after) is None
        assert counted(before, reading(1, 9000.0, 500.0)) is not None

    def test_accepted_drafts_are_not_steps(self) -> None:
        sample = counted(reading(0, 0, 0, 1), reading(1, 3001, 30.0, 0, accepted=2000.0))
        assert sample is not None
        assert sample.step_seconds == pytest.approx(30.0 / 1000)

    def test_without_the_speculation_counters_a_token_may_be_no_step(self) -> None:
        old = [reading(float(n), 0.0, 0.0, 1, accepted=None) for n in range(1, 41)]
        sample = counted(reading(0, 0, 0, 0, accepted=None), *old, reading(41, 2001, 40.0, 0, accepted=None))
        assert sample is not None
        assert sample.step_seconds is None
        assert sample.tokens_per_second == pytest.approx(2001 / 40, rel=0.03)

    def test_how_many_requests_ended_is_part_of_the_error(self) -> None:
        def ended(tokens: float) -> LiveSample | None:
            return counted(reading(0, 0, 0, 20), reading(1, tokens, 10.0, 19, longest=None))

        assert ended(100) is None, "between 1 and 20 first tokens"
        assert ended(1000) is not None

    def test_short_answers_between_unknown_ends_have_no_rate(self) -> None:
        sample = counted(reading(0, 0, 0, 2), reading(1, 2000, 30.0, 2))
        assert sample is not None
        assert sample.step_seconds is not None
        assert (sample.tokens_per_second, sample.streams) == (None, None)

    @given(value=st.floats(1e-6, 1e9), whole=st.booleans())
    def test_printing_never_moves_a_value_by_more_than_half_a_quantum(self, *, value: float, whole: bool) -> None:
        exact = float(int(value)) if whole else value
        assert abs(float(f"{exact:.6g}") - exact) <= 0.5 * quantum(exact, whole=whole) * 1.2 + 1e-12

    @given(
        seed=st.integers(0, 10**9),
        tokens=st.floats(0, 3e7).map(int),
        step=st.floats(0.005, 0.2),
        streams=st.integers(1, 4),
    )
    def test_what_is_published_is_within_its_error(self, seed: int, tokens: int, step: float, streams: int) -> None:
        """Requests of at least 50 tokens, read once a second through six digits."""
        chance = random.Random(seed)
        total, seconds, now = float(tokens), tokens * step, 0.0
        found, running = CounterTrack(), [chance.uniform(0, 5) for _ in range(streams)]
        for _ in range(120):
            printed = (float(f"{total:.6g}"), float(f"{seconds:.6g}"))
            found = found.add(Counters(now, "t", *printed, 0.0, streams, 5000.0))
            if (sample := found.sample()) is not None and sample.step_seconds is not None:
                assert sample.step_seconds == pytest.approx(step, rel=MAX_COUNTER_ERROR + 0.021)
            now += 1.0
            for number, until in enumerate(running):
                if until <= now:
                    length = chance.randint(max(50, int(1 / step)), 600)
                    total, seconds = total + length, seconds + (length - 1) * step
                    running[number] = now + length * step


RECORDED = b"""# HELP llamacpp:tokens_predicted_total Number of generation tokens processed
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 1.23457e+06
# TYPE llamacpp:tokens_predicted_seconds_total counter
llamacpp:tokens_predicted_seconds_total 0.24653
# TYPE llamacpp:n_tokens_max counter
llamacpp:n_tokens_max 63
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 1
# TYPE llamacpp:n_busy_slots_per_decode gauge
llamacpp:n_busy_slots_per_decode -nan
"""


class TestParsing:
    """GET /metrics of several years."""

    def test_the_text(self) -> None:
        found = parse_counters(RECORDED, "2273383613", 5.0)
        assert found == Counters(5.0, "2273383613", 1234570.0, 0.24653, None, 1, 63.0)

    def test_a_json_string_of_november_2025(self) -> None:
        quoted = b'"' + RECORDED.replace(b"\n", b"\\n") + b'"'
        assert parse_counters(quoted, "1", 5.0) == parse_counters(RECORDED, "1", 5.0)

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            (b"", Reason.NOT_LLAMA),
            (b"<html>502</html>", Reason.NOT_LLAMA),
            (b"up 1\n", Reason.NOT_LLAMA),
            (b'"unterminated', Reason.BAD_ANSWER),
            (RECORDED.replace(b"0.24653", b"many"), Reason.BAD_ANSWER),
            (b"\xff\xfe", Reason.BAD_ANSWER),
            (RECORDED.replace(b"0.24653", b"nan"), Reason.BAD_ANSWER),
            (RECORDED.replace(b"0.24653", b"-1"), Reason.BAD_ANSWER),
            (RECORDED.replace(b"_processing 1", b"_processing inf"), Reason.BAD_ANSWER),
        ],
    )
    def test_anything_else_is_a_reason(self, body: bytes, reason: Reason) -> None:
        assert parse_counters(body, None, 0.0) is reason

    @given(st.binary(max_size=300))
    def test_no_body_is_an_exception(self, body: bytes) -> None:
        assert parse_counters(body, None, 0.0) in {Reason.NOT_LLAMA, Reason.BAD_ANSWER}
