"""Growing windows as sums gives what looking at every window as a whole gives, without the time that it takes."""

import math
from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

from hypothesis import given
from hypothesis import strategies as st

from exporter.roofline.counters import MAX_COUNTER_ERROR, Counters, CounterTrack, quantum
from exporter.roofline.live import MAX_ERROR, WINDOW_SECONDS, LiveTrack, Run, SlotPoll
from exporter.roofline.slots import Slot


def step_of(window: Sequence[Counters]) -> float | None:
    first, last = window[0], window[-1]
    seconds, tokens = last.seconds - first.seconds, last.tokens - first.tokens
    if last.accepted is None or first.accepted is None:
        return None
    moved = [(a, b) for a, b in pairwise(window) if b.tokens > a.tokens]
    fewest = sum(max(1, a.processing - b.processing) for a, b in moved)
    most = sum(max(1, a.processing) for a, _ in moved)
    steps = tokens - (last.accepted - first.accepted) - (fewest + most) / 2
    if steps <= 0 or seconds <= 0:
        return None
    unsure = quantum(last.tokens, whole=True) + quantum(last.accepted, whole=True) + (most - fewest) / 2
    error = unsure / steps + (quantum(last.seconds, whole=False) + most * 1e-3) / seconds
    return seconds / steps if error < MAX_COUNTER_ERROR else None


def rate_of(window: Sequence[Counters]) -> tuple[float, float] | None:
    first, last = window[0], window[-1]
    tokens, across = last.tokens - first.tokens, max(first.processing, last.processing)
    full = [b.at - a.at for a, b in pairwise(window) if a.processing and b.processing]
    half = [
        (b.at - a.at) / 2
        for a, b in pairwise(window)
        if not (a.processing and b.processing) and (a.processing or b.processing or b.tokens > a.tokens)
    ]
    running = sum(full) + sum(half)
    if tokens <= 0 or running <= 0 or (across and last.longest is None):
        return None
    error = (quantum(last.tokens, whole=True) + across * (last.longest or 0.0)) / tokens + sum(half) / running
    return (tokens / running, (last.seconds - first.seconds) / running) if error < MAX_COUNTER_ERROR else None


# Quarters of seconds add up exactly in any order.
STEPS = st.tuples(
    st.integers(1, 8).map(lambda n: n / 4),
    st.just(0) | st.integers(0, 3000),
    st.integers(0, 3),
    st.just(None) | st.just(20.0),
)


@given(polls=st.lists(STEPS, max_size=40), tokens=st.sampled_from([0.0, 1e5, 2e6, 1e7]), told=st.booleans())
def test_counters_are_those_of_the_shortest_windows(
    *, polls: list[tuple[float, int, int, float | None]], tokens: float, told: bool
) -> None:
    readings, at, seconds = [], 0.0, tokens / 64
    for gap, more, processing, longest in polls:
        at, tokens, seconds = at + gap, tokens + more, seconds + more / 64
        readings.append(Counters(at, "1", tokens, seconds, 0.0 if told else None, processing, longest))
    sample = CounterTrack(tuple(readings)).sample()
    while len(readings) > 1 and readings[-1].tokens == readings[-2].tokens:
        readings.pop()
    windows = [readings[first:] for first in range(len(readings) - 2, -1, -1)]
    step = next((s for w in windows if (s := step_of(w)) is not None), None)
    rate = next((r for w in windows if (r := rate_of(w)) is not None), None)
    if step is None and rate is None:
        assert sample is None
        return
    assert sample is not None
    assert sample.step_seconds == step
    assert (sample.tokens_per_second, sample.streams) == (rate or (None, None))


def test_counters_beyond_every_number_give_nothing() -> None:
    readings = (Counters(float(n), "1", 1e3 * n, 10.0 * n, 0.0, int(1.7e308), 1.0) for n in range(4))
    assert CounterTrack(tuple(readings)).sample() is None


def error_of(runs: Sequence[Run]) -> float:
    apart: list[Run] = []
    for run in sorted(runs, key=lambda run: run.began):
        if apart and (apart[-1].ended, apart[-1].streams, apart[-1].speculative) == (
            run.began,
            run.streams,
            run.speculative,
        ):
            apart[-1] = apart[-1].then(run)
        else:
            apart.append(run)
    return sqrt(sum(run.error_seconds**2 for run in apart)) / sum(run.seconds for run in apart)


@given(
    polls=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40), st.integers(0, 5)), min_size=2, max_size=80),
    trip=st.floats(0, 0.05),
    drafts=st.booleans(),
)
def test_slots_are_those_of_the_fewest_runs(*, polls: list[tuple[int, int, int]], trip: float, drafts: bool) -> None:
    track, at, decoded, task = LiveTrack(), 0.0, 1, 0
    for quarters, tokens, change in polls:
        at += quarters / 4
        task, decoded = (task, decoded + tokens) if change else (task + 1, 1)
        track = track.add(
            SlotPoll(
                at,
                trip,
                (Slot(0, processing=True, task=task, decoded=decoded, tokens=100 + decoded, speculative=drafts),),
            )
        )
    newest = track.runs[::-1]
    enough = [n for n in range(1, len(newest) + 1) if error_of(newest[:n]) <= MAX_ERROR]
    long = [n for n in enough if sum(r.seconds for r in newest[:n]) >= WINDOW_SECONDS]
    taken = newest[: long[0]] if long else newest if len(newest) in enough else ()
    sample = track.sample()
    assert (sample is None) == (not taken)
    if sample is not None:
        assert math.isclose(sum(s.seconds for s in sample.shares), sum(r.seconds for r in taken))
