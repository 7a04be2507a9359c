"""The proof that B streams decoded together, and the step time that follows from their own timings.

A stream's first token comes from the prompt's batch, so n tokens take n - 1 decode steps, in every llama.cpp build; the
server's own `predicted_per_second` counted n before b10406 and is never used. Where the server drafts tokens, a step
may give several: the steps of the model itself are n - 1 less the drafts that it accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, quantiles
from typing import Final

from exporter.roofline.reason import Reason

MIN_STEPS: Final = 16
"""Fewer steps than this do not make a sample."""
WARM_UP_STEPS: Final = 3
"""The first steps after a prompt are slower: buffers are planned anew, and threads wake up."""
TRIMMED: Final = 0.1
"""The part of the single step times that is left out at either end before the mean is taken."""
MIN_OVERLAP: Final = 0.8
"""Least part of the answer's tokens that must lie where all streams generate; lockstep leaves 0.88 at least."""
MAX_HEAD_START: Final = 4
"""Steps that a stream may begin before the last one does: prompts share a batch, but for the models that split it."""
MAX_DISAGREEMENT: Final = 0.1
"""Streams that share their steps agree on the step time; more than this apart, some steps were not shared."""
MAX_UNACCOUNTED: Final = 0.02
"""The single steps must add up to the whole, but for this part of it and one step."""
LEAST_MS: Final = 1e-3
"""The server counts in microseconds: a shorter generation, or step, is not its own figure but a clock that stands."""
_SPREAD_STEPS: Final = 4
"""Fewer steps than this have no quartiles."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream's own account of a completion, as the server gave it; None is what it did not say.

    Attributes:
        slot: The slot that generated it.
        predicted: Tokens generated, the first included.
        predicted_ms: Milliseconds from the first to the last token.
        drafted: Tokens that a draft proposed.
        token_ms: `predicted_ms` as told with each token, for single steps.
        first_event: The place of its first token among all tokens of the answer, in the order they came.
        last_event: The place of its last token.
        prompt_ms: Milliseconds from the start of its prompt to the first token.
        accepted: Drafted tokens that the model accepted.
    """

    slot: int | None
    predicted: int | None
    predicted_ms: float | None
    prompt: int | None
    cached: int | None
    drafted: int | None
    stop_type: str | None
    truncated: bool
    token_ms: tuple[float, ...]
    first_event: int
    last_event: int
    prompt_ms: float | None = None
    accepted: int | None = None


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The step time of streams that were shown to have decoded together.

    Attributes:
        step_seconds: The trimmed mean of the single steps after the warm-up; the mean of all where they are not told.
        spread_ratio: Interquartile range of the single step times / their median; 0 where they are not told.
        steps: Steps of the model itself: each reads its weights once.
        depth: Mean number of cached tokens of a stream over the timed steps.
        step_ms: The single step times, means over the streams, the warm-up included; empty where they are not told.
        tokens_per_step: Tokens that a step gave each stream: 1, or more where drafts were accepted.
        speculative: The server drafted tokens.
        mean_seconds: The mean of all single steps after the warm-up, stalls included; None where they are not told.
    """

    step_seconds: float
    spread_ratio: float
    steps: int
    depth: float
    step_ms: tuple[float, ...] = ()
    tokens_per_step: float = 1.0
    speculative: bool = False
    mean_seconds: float | None = None

    def seconds(self, *, contended: bool) -> float:
        """The step time to publish. On a contended machine the stalls are what users get, so they count in full.

        Without the stalls, a sample was 10 to 16 % faster than a long run on a machine that six others used.
        """
        return self.mean_seconds if contended and self.mean_seconds is not None else self.step_seconds


def prove(streams: Sequence[Stream], batch: int, tokens: int, prompt_tokens: int) -> StepTiming | Reason:
    """The step time of `batch` streams, or why it is not known.

    Args:
        streams: The finished streams.
        batch: Streams asked for.
        tokens: Tokens asked of each stream.
        prompt_tokens: Length of each prompt.
    """
    if len(streams) != batch:
        return Reason.STREAM_CUT
    for stream in streams:
        if (reason := _stream_fault(stream, tokens, prompt_tokens)) is not None:
            return reason
    if batch > 1 and (reason := _apart(streams)) is not None:
        return reason
    # Step k of the n - 1 timed ones attends to the prompt and k generated tokens: n / 2 on average.
    depth = prompt_tokens + tokens / 2
    if any(s.drafted for s in streams):
        return _speculative(streams, tokens, depth)
    steps = tokens - 1
    means = [s.predicted_ms / steps for s in streams if s.predicted_ms is not None]
    if max(means) - min(means) > MAX_DISAGREEMENT * median(means):
        return Reason.NOT_TOGETHER
    if any(len(s.token_ms) != tokens for s in streams):
        # An older build that does not time every token.
        return StepTiming(median(means) / 1e3, 0.0, steps, depth)
    step_ms = tuple(fmean(same) for same in zip(*(_single_steps(s.token_ms) for s in streams), strict=True))
    if (usual := typical(step_ms)) < LEAST_MS:
        return Reason.BAD_TIMINGS
    mean = fmean(step_ms[WARM_UP_STEPS:] or step_ms) / 1e3
    return StepTiming(usual / 1e3, _spread(step_ms), steps, depth, step_ms, mean_seconds=mean)


def typical(step_ms: Sequence[float]) -> float:
    """The step time that stands for a run: the trimmed mean after the warm-up.

    The median leaves out what belongs to every long run (a step in some is slower: the cache grows by a block, the
    sampler's memory moves) and was 2 to 3 % short of a long run's mean; the mean takes one stall of a busy machine for
    the model's own time. Without a tenth at either end both stay out.
    """
    settled = sorted(step_ms[WARM_UP_STEPS:] or step_ms)
    cut = int(TRIMMED * len(settled))
    return fmean(settled[cut : len(settled) - cut])


def _single_steps(token_ms: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(token_ms)]


def _stream_fault(stream: Stream, tokens: int, prompt_tokens: int) -> Reason | None:
    """What makes one stream's account unusable."""
    if stream.predicted is None or stream.predicted_ms is None or not stream.predicted_ms >= LEAST_MS:
        return Reason.BAD_TIMINGS
    if stream.predicted != tokens or stream.truncated or stream.stop_type not in {"limit", None}:
        return Reason.WRONG_LENGTH
    if stream.cached or stream.prompt not in {prompt_tokens, None}:
        return Reason.CACHED_PROMPT
    return _contradiction(stream.token_ms, stream.predicted_ms, tokens)


def _contradiction(token_ms: Sequence[float], total_ms: float, tokens: int) -> Reason | None:
    """Single times that run backwards, or that do not add up to the whole."""
    steps = _single_steps(token_ms)
    if not steps:
        return None
    if min(steps) < 0 or token_ms[0] < 0 or len(token_ms) > tokens:
        return Reason.BAD_TIMINGS
    if len(token_ms) < tokens:
        # Some tokens came without a time, the first or last ones perhaps.
        return Reason.BAD_TIMINGS if token_ms[-1] > total_ms * (1 + MAX_UNACCOUNTED) else None
    unaccounted = abs(total_ms - (token_ms[-1] - token_ms[0]))
    return Reason.BAD_TIMINGS if unaccounted > MAX_UNACCOUNTED * total_ms + total_ms / len(steps) else None


def _apart(streams: Sequence[Stream]) -> Reason | None:
    """What speaks against one weight pass for all streams' tokens.

    With a split KV cache llama.cpp makes one pass for each run of adjacent slots, and HTTP does not tell how the cache
    is split: slots {0, 2} took two passes a step where {0, 1} took one (llama.cpp issue 25840, and measured).
    """
    slots = sorted({-1 if s.slot is None else s.slot for s in streams})
    if len(slots) != len(streams) or slots[0] < 0:
        return Reason.NOT_TOGETHER
    first, last = max(s.first_event for s in streams), min(s.last_event for s in streams)
    joint = max(s.last_event for s in streams) - (begin := min(s.first_event for s in streams))
    if joint <= 0 or last - first < MIN_OVERLAP * joint or first - begin > MAX_HEAD_START * len(streams):
        return Reason.NOT_TOGETHER
    return Reason.SCATTERED_SLOTS if slots[-1] - slots[0] >= len(slots) else None


def _speculative(streams: Sequence[Stream], tokens: int, depth: float) -> StepTiming | Reason:
    """A single stream's steps of the model itself, each of which checked a draft.

    Several streams accept different numbers of tokens in the same step and so part ways: no batch is proven.
    """
    (stream, *more) = streams
    if more:
        return Reason.SPECULATIVE
    drafted, accepted, total = stream.drafted or 0, stream.accepted, stream.predicted_ms or 0.0
    if accepted is None or not 0 <= accepted <= min(drafted, tokens - 2):
        return Reason.BAD_TIMINGS
    steps = tokens - 1 - accepted
    gain = (tokens - 1) / steps
    if len(stream.token_ms) != tokens:
        return StepTiming(total / steps / 1e3, 0.0, steps, depth, tokens_per_step=gain, speculative=True)
    # The tokens of one step come at once, so the longest waits are the steps.
    waits = _single_steps(stream.token_ms)
    longest = sorted(sorted(range(len(waits)), key=waits.__getitem__)[-steps:])
    step_ms = tuple(waits[i] for i in longest)
    if sum(step_ms) < (1 - MAX_DISAGREEMENT) * total or min(step_ms) < MAX_DISAGREEMENT * fmean(step_ms):
        # Waits within a step that long are steps of their own, and steps that short are none: the count is wrong.
        return Reason.BAD_TIMINGS
    # The mean, not the typical one: steps differ in the length of their drafts, and tokens/s needs them all.
    return StepTiming(total / steps / 1e3, _spread(step_ms), steps, depth, (), gain, speculative=True)


def _spread(step_ms: Sequence[float]) -> float:
    settled = step_ms[WARM_UP_STEPS:]
    if len(settled) < _SPREAD_STEPS:
        return 0.0
    low, middle, high = quantiles(settled, n=4)
    return (high - low) / middle if middle >= LEAST_MS else 0.0


def steps_to_probe(seconds: float, step_seconds: float, most: int) -> int:
    """How many steps a probe takes: what fits into `seconds`, at least 16, at most `most`."""
    return max(MIN_STEPS, min(most, int(seconds / step_seconds)))
