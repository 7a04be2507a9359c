"""A decode sample placed under its roof.

Step accounting is physical: one weight read for each step. Per-token accounting credits a whole weight read to every
token, as published tables do; it passes 100 % of a ceiling when streams share the read. The two never mix.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from exporter.roofline.ceiling import CeilingSource, Roof
from exporter.roofline.footprint import Footprint, Part

IMPLAUSIBLE_RATIO: Final = 1.05
"""Step bytes/s above this many times the hard ceiling mean that the ceiling or the footprint is wrong."""


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """What a probe measured: B streams, proven to have decoded together.

    Attributes:
        batch: Streams that generated together.
        step_seconds: Time of one step.
        step_spread_ratio: Interquartile range of the single step times / their median.
        steps: Timed steps of each stream.
        depth: Mean number of cached tokens of a stream over the timed steps.
        contended: The machine's processors were under pressure meanwhile; the sample is true all the same.
        measured_at: Monotonic seconds.
        speculative: The server drafted tokens, so that a step may have given several. What drafting itself reads and
            computes is not counted, nor the tokens that a step checks in vain: the floor is that of the model alone.
        tokens_per_step: Tokens that a step gave each stream.
    """

    batch: int
    step_seconds: float
    step_spread_ratio: float
    steps: int
    depth: float
    contended: bool
    measured_at: float
    speculative: bool = False
    tokens_per_step: float = 1.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s of all streams."""
        return self.batch * self.tokens_per_step / self.step_seconds


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A sample with everything that follows from it; what cannot be known is None or absent.

    Attributes:
        implausible: Whether the step bytes/s exceed what the memory can do; None where that is not known.
    """

    sample: DecodeSample
    step_bytes: float | None = None
    floor_seconds: float | None = None
    step_bytes_per_second: float | None = None
    token_read_bytes_per_second: float | None = None
    ceiling_ratio: Mapping[CeilingSource, float] = field(default_factory=dict)
    floor_ratio: float | None = None
    token_read_ratio: Mapping[CeilingSource, float] = field(default_factory=dict)
    intensity_flops_per_byte: float | None = None
    flops_per_second: float | None = None
    attainable_tokens_per_second: Mapping[CeilingSource, float] = field(default_factory=dict)
    budget_seconds: Mapping[Part, float] = field(default_factory=dict)
    implausible: bool | None = None


def place(sample: DecodeSample, footprint: Footprint | None, roof: Roof) -> DecodePoint:
    """Everything that follows from a sample, the model's footprint and the ceilings.

    Without a footprint, or with one of no bytes, only the measured rates are known. An implausible sample keeps its
    measured rates; what rests on the ceilings, one of which or the bytes must be wrong, is withheld: floor, attainable
    rates, ratios and budget.
    """
    if footprint is None or footprint.weight_bytes_of(1) <= 0:
        return DecodePoint(sample)
    batch, seconds = sample.batch, sample.step_seconds
    work = footprint.step(batch, sample.depth)
    step_rate = work.bytes / seconds
    token_read_rate = footprint.weight_bytes_of(1) * sample.tokens_per_second
    hard, reference, compute = (
        roof.hard_bytes_per_second,
        roof.reference_bytes_per_second,
        roof.compute_flops_per_second,
    )
    implausible = None if hard is None else step_rate > IMPLAUSIBLE_RATIO * hard
    shown = {} if implausible else roof.ceilings
    floor = None if reference is None or implausible else work.bytes / reference
    return DecodePoint(
        sample=sample,
        step_bytes=work.bytes,
        floor_seconds=floor,
        step_bytes_per_second=step_rate,
        token_read_bytes_per_second=token_read_rate,
        ceiling_ratio={source: step_rate / ceiling for source, ceiling in shown.items()},
        floor_ratio=None if floor is None else floor / seconds,
        token_read_ratio={source: token_read_rate / ceiling for source, ceiling in shown.items()},
        intensity_flops_per_byte=work.intensity_flops_per_byte,
        flops_per_second=work.flops / seconds,
        attainable_tokens_per_second={
            source: batch * sample.tokens_per_step / max(work.bytes / ceiling, work.flops / compute if compute else 0.0)
            for source, ceiling in shown.items()
        },
        budget_seconds={} if implausible or reference is None else _budget(work.bytes_by_part, reference, seconds),
        implausible=implausible,
    )


def _budget(bytes_by_part: Mapping[Part, float], reference: float, seconds: float) -> Mapping[Part, float]:
    """The step time by part: each part's bytes / reference ceiling, and overhead for the rest.

    A plausible step may be shorter than its bytes would take at the reference: triad and `sustained` may be exceeded,
    and `read` by a little. It was all reading then, at a rate above the reference: the parts share it by their bytes.
    """
    parts = {part: size / reference for part, size in bytes_by_part.items()}
    reading = sum(parts.values())
    if reading > seconds:
        parts = {part: seconds * (spent / reading) for part, spent in parts.items()}
    return {**parts, Part.OVERHEAD: max(0.0, seconds - reading)}


def marginal_stream_seconds(points: Mapping[int, DecodePoint]) -> dict[int, float]:
    """(t(B) - t(previous B)) / (B - previous B) for each batch that has a smaller one measured."""
    batches = sorted(points)
    return {b: (points[b].sample.step_seconds - points[a].sample.step_seconds) / (b - a) for a, b in pairwise(batches)}
