"""A batch counts only when its streams are shown to have decoded together."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.roofline.proof import MIN_STEPS, StepTiming, Stream, prove, steps_to_probe
from exporter.roofline.reason import Reason

TOKENS, PROMPT = 33, 16


def stream(slot: int, step_ms: float = 20.0, start: int = 0) -> Stream:
    elapsed = (TOKENS - 1) * step_ms
    return Stream(
        slot=slot,
        predicted=TOKENS,
        predicted_ms=elapsed,
        prompt=PROMPT,
        cached=0,
        drafted=None,
        stop_type="limit",
        truncated=False,
        token_ms=tuple(i * step_ms for i in range(TOKENS)),
        first_event=start,
        last_event=start + 2 * TOKENS - 2,
    )


PAIR = (stream(2), stream(3, start=1))


def test_step_time_counts_one_step_less_than_tokens() -> None:
    """The first token comes from the prompt's batch."""
    timing = prove(PAIR, 2, TOKENS, PROMPT)
    assert isinstance(timing, StepTiming)
    assert timing.step_seconds == pytest.approx(0.020)
    assert timing.steps == TOKENS - 1
    assert timing.depth == PROMPT + TOKENS / 2
    assert timing.spread_ratio == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("streams", "reason"),
    [
        (PAIR[:1], Reason.STREAM_CUT),
        ((stream(2), stream(2)), Reason.NOT_TOGETHER),
        ((stream(2), replace(stream(3), slot=None)), Reason.NOT_TOGETHER),
        ((stream(2), replace(stream(3), slot=-1)), Reason.NOT_TOGETHER),
        ((stream(0), stream(2)), Reason.SCATTERED_SLOTS),
        ((stream(2), stream(3, start=20)), Reason.NOT_TOGETHER),
        ((stream(2), stream(3, step_ms=23.0)), Reason.NOT_TOGETHER),
        ((stream(2), replace(stream(3), predicted=TOKENS - 1)), Reason.WRONG_LENGTH),
        ((stream(2), replace(stream(3), stop_type="eos")), Reason.WRONG_LENGTH),
        ((stream(2), replace(stream(3), truncated=True)), Reason.WRONG_LENGTH),
        ((stream(2), replace(stream(3), cached=4)), Reason.CACHED_PROMPT),
        ((stream(2), replace(stream(3), prompt=PROMPT - 4)), Reason.CACHED_PROMPT),
        ((stream(2), replace(stream(3), drafted=5)), Reason.SPECULATIVE),
        ((stream(2), replace(stream(3), predicted_ms=0.0)), Reason.BAD_TIMINGS),
        ((stream(2), replace(stream(3), predicted_ms=-1.0)), Reason.BAD_TIMINGS),
        ((stream(2), replace(stream(3), predicted_ms=None)), Reason.BAD_TIMINGS),
        ((stream(2), replace(stream(3), predicted=None)), Reason.BAD_TIMINGS),
    ],
)
def test_what_voids_a_sample(streams: tuple[Stream, ...], reason: Reason) -> None:
    assert prove(streams, 2, TOKENS, PROMPT) is reason


def test_older_builds_that_say_less_are_believed_where_the_rest_agrees() -> None:
    """No stop_type, no cache count, no prompt count, no token timings: still a proven pair."""
    old = tuple(replace(s, stop_type=None, cached=None, prompt=None, token_ms=()) for s in PAIR)
    timing = prove(old, 2, TOKENS, PROMPT)
    assert isinstance(timing, StepTiming)
    assert timing.step_seconds == pytest.approx(0.020)


def test_a_single_stream_needs_no_slot() -> None:
    assert isinstance(prove((replace(stream(0), slot=None),), 1, TOKENS, PROMPT), StepTiming)


@given(st.lists(st.floats(5.0, 50.0), min_size=TOKENS - 1, max_size=TOKENS - 1))
def test_spread_is_relative_to_the_median(steps: list[float]) -> None:
    marks = [0.0]
    for step in steps:
        marks.append(marks[-1] + step)
    one = replace(stream(0), token_ms=tuple(marks), predicted_ms=marks[-1])
    timing = prove((one,), 1, TOKENS, PROMPT)
    assert isinstance(timing, StepTiming)
    assert 0 <= timing.spread_ratio <= 9
    assert min(steps) / 1e3 <= timing.step_seconds * 1.000001
    assert timing.step_seconds <= max(steps) / 1e3 * 1.000001


@given(st.floats(0.1, 60), st.floats(1e-5, 10), st.integers(MIN_STEPS, 1000))
def test_steps_fit_the_time_but_are_never_too_few(seconds: float, step: float, most: int) -> None:
    steps = steps_to_probe(seconds, step, most)
    assert MIN_STEPS <= steps <= most
    assert steps == MIN_STEPS or steps * step <= seconds * 1.000001
