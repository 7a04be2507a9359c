"""The proof that B streams decoded together, and the step time that follows from their own timings.

A stream's first token comes from the prompt's batch, so n tokens take n - 1 decode steps, in every llama.cpp build; the
server's own `predicted_per_second` counted n before b10406 and is never used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Final

from exporter.roofline.reason import Reason

MIN_STEPS: Final = 16
"""Fewer steps than this do not make a sample."""
MIN_OVERLAP: Final = 0.8
"""Least part of the answer's tokens that must lie where all streams generate; lockstep leaves 0.88 at least."""
MAX_DISAGREEMENT: Final = 0.1
"""Streams that share their steps agree on the step time; more than this apart, some steps were not shared."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream's own account of a completion, as the server gave it; None is what it did not say.

    Attributes:
        slot: The slot that generated it.
        predicted: Tokens generated, the first included.
        predicted_ms: Milliseconds from the first to the last token.
        token_ms: `predicted_ms` as told with each token, for single steps.
        first_event: The place of its first token among all tokens of the answer, in the order they came.
        last_event: The place of its last token.
        prompt_ms: Milliseconds from the start of its prompt to the first token.
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


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The step time of streams that were shown to have decoded together.

    Attributes:
        depth: Mean number of cached tokens of a stream over the timed steps.
    """

    step_seconds: float
    spread_ratio: float
    steps: int
    depth: float


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
    steps = tokens - 1
    times = [s.predicted_ms / 1e3 / steps for s in streams if s.predicted_ms is not None]
    step_seconds = median(times)
    if max(times) - min(times) > MAX_DISAGREEMENT * step_seconds:
        return Reason.NOT_TOGETHER
    # Step k of the n - 1 timed ones attends to the prompt and k generated tokens: n / 2 on average.
    return StepTiming(step_seconds, _spread(streams), steps, prompt_tokens + tokens / 2)


def _stream_fault(stream: Stream, tokens: int, prompt_tokens: int) -> Reason | None:
    """What makes one stream's account unusable."""
    if stream.predicted is None or stream.predicted_ms is None or not stream.predicted_ms > 0:
        return Reason.BAD_TIMINGS
    if stream.drafted:
        return Reason.SPECULATIVE
    if stream.predicted != tokens or stream.truncated or stream.stop_type not in {"limit", None}:
        return Reason.WRONG_LENGTH
    if stream.cached or stream.prompt not in {prompt_tokens, None}:
        return Reason.CACHED_PROMPT
    return None


def _apart(streams: Sequence[Stream]) -> Reason | None:
    """What speaks against one weight pass for all streams' tokens.

    With a split KV cache llama.cpp makes one pass for each run of adjacent slots, and HTTP does not tell how the cache
    is split: slots {0, 2} took two passes a step where {0, 1} took one (llama.cpp issue 25840, and measured).
    """
    slots = sorted({-1 if s.slot is None else s.slot for s in streams})
    if len(slots) != len(streams) or slots[0] < 0:
        return Reason.NOT_TOGETHER
    shared = min(s.last_event for s in streams) - max(s.first_event for s in streams)
    joint = max(s.last_event for s in streams) - min(s.first_event for s in streams)
    if joint <= 0 or shared < MIN_OVERLAP * joint:
        return Reason.NOT_TOGETHER
    return Reason.SCATTERED_SLOTS if slots[-1] - slots[0] >= len(slots) else None


def _spread(streams: Sequence[Stream]) -> float:
    """Interquartile range of the single step times / their median; 0 where the server does not time tokens."""
    steps = [after - before for s in streams for before, after in pairwise(s.token_ms)]
    if len(steps) < MIN_STEPS - 1:
        return 0.0
    low, middle, high = quantiles(steps, n=4)
    return (high - low) / middle if middle > 0 else 0.0


def steps_to_probe(seconds: float, step_seconds: float, most: int) -> int:
    """How many steps a probe takes: what fits into `seconds`, at least 16, at most `most`."""
    return max(MIN_STEPS, min(most, int(seconds / step_seconds)))
