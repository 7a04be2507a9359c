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


def timed(steps: list[float], **changes: object) -> Stream:
    """A stream with these single steps, milliseconds."""
    marks = [0.0]
    for step in steps:
        marks.append(marks[-1] + step)
    return replace(stream(0), token_ms=tuple(marks), predicted_ms=marks[-1], **changes)  # type: ignore[arg-type]


def test_warm_up_and_single_stalls_do_not_move_the_step_time() -> None:
    """Three slow steps at the start, and two stalls of a busy machine among 32 steps."""
    steps = [20.0] * (TOKENS - 1)
    steps[:3] = [60.0, 40.0, 30.0]
    steps[12] = steps[25] = 90.0
    timing = prove((timed(steps),), 1, TOKENS, PROMPT)
    assert isinstance(timing, StepTiming)
    assert timing.step_seconds == pytest.approx(0.020)
    assert timing.spread_ratio == pytest.approx(0, abs=1e-9)
    assert timing.seconds(contended=False) == timing.step_seconds
    assert timing.seconds(contended=True) == pytest.approx((27 * 0.020 + 2 * 0.090) / 29), "users get the stalls too"


def test_steps_that_belong_to_every_long_run_count() -> None:
    """One step in five is a third slower: a median would leave that out, the mean of a long run has it."""
    steps = [26.0 if i % 5 == 0 else 20.0 for i in range(TOKENS - 1)]
    timing = prove((timed(steps),), 1, TOKENS, PROMPT)
    assert isinstance(timing, StepTiming)
    assert timing.step_seconds == pytest.approx(0.0212, rel=0.03)
    assert timing.step_seconds > 0.0205


@pytest.mark.parametrize(
    "token_ms",
    [
        (0.0, 20.0, 10.0, *(20.0 * i for i in range(3, TOKENS))),
        tuple(-20.0 + 20.0 * i for i in range(TOKENS)),
        tuple(10.0 * i for i in range(TOKENS)),
        tuple(30.0 * i for i in range(TOKENS)),
        tuple(20.0 * i for i in range(TOKENS + 1)),
        (0.0, 700.0),
    ],
    ids=["backwards", "negative", "half of the whole", "more than the whole", "a token too many", "later than the end"],
)
def test_single_times_that_contradict_the_whole(token_ms: tuple[float, ...]) -> None:
    assert prove((replace(stream(0), token_ms=token_ms),), 1, TOKENS, PROMPT) is Reason.BAD_TIMINGS


def test_a_stream_that_began_some_steps_earlier_was_alone_meanwhile() -> None:
    """Six steps before the other: somebody held a slot until then."""
    late = replace(PAIR[1], first_event=12, last_event=PAIR[1].last_event + 12)
    assert prove((PAIR[0], late), 2, TOKENS, PROMPT) is Reason.NOT_TOGETHER
    split = replace(PAIR[1], first_event=5, last_event=PAIR[1].last_event + 4)
    assert isinstance(prove((PAIR[0], split), 2, TOKENS, PROMPT), StepTiming)


def drafting(per_step: list[int], step_ms: float = 20.0) -> Stream:
    """A stream whose steps gave these numbers of tokens each, those of a step 0.01 ms apart."""
    marks = [0.0]
    for number, tokens in enumerate(per_step, start=1):
        marks += [number * step_ms + 0.01 * i for i in range(tokens)]
    accepted = sum(per_step) - len(per_step)
    return replace(
        stream(0),
        predicted=len(marks),
        predicted_ms=marks[-1],
        token_ms=tuple(marks),
        drafted=4 * len(per_step),
        accepted=accepted,
    )


@given(st.lists(st.integers(1, 5), min_size=4, max_size=60))
def test_with_drafts_a_step_is_one_of_the_model_itself(per_step: list[int]) -> None:
    one = drafting(per_step)
    assert one.predicted is not None
    timing = prove((one,), 1, one.predicted, PROMPT)
    assert isinstance(timing, StepTiming)
    assert timing.speculative
    assert timing.steps == len(per_step)
    assert timing.step_seconds == pytest.approx(0.020, rel=0.02)
    assert timing.tokens_per_step == pytest.approx(sum(per_step) / len(per_step))


def test_what_drafts_leave_unproven() -> None:
    one = drafting([3, 1, 5, 2, 2, 4, 1, 1])
    assert one.predicted is not None
    other = replace(one, slot=1)
    assert prove((one, other), 2, one.predicted, PROMPT) is Reason.SPECULATIVE
    for accepted in (None, -1, one.predicted - 1, 2):
        assert prove((replace(one, accepted=accepted),), 1, one.predicted, PROMPT) is Reason.BAD_TIMINGS
    untimed = prove((replace(one, token_ms=()),), 1, one.predicted, PROMPT)
    assert isinstance(untimed, StepTiming)
    assert untimed.step_seconds == pytest.approx(0.020, rel=0.01)


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
