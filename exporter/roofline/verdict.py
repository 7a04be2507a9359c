"""What holds decode back: one rule, with its thresholds, and the published predictions held against the measurement.

With r = floor ratio at batch 1, t(B) = step time, B* = the largest measured batch, and the growth
g = (t(B*) - t(1)) / (t(1) x (B* - 1)), which is 0 when more streams cost nothing and 1 when each costs a whole step:

    implausible sample                                   -> above the ceiling: the ceiling or the bytes are wrong
    r >= 0.65                                            -> bandwidth-bound
    a disturbed sample, or t(B*) below t(1)              -> unknown: g is not to be trusted
    g >= 0.5                                             -> compute-bound
    g <= 0.2, or FLOPs(B*) / compute peak <= t(B*) / 10  -> overhead-bound
    otherwise, or when what the rule needs is unknown    -> unknown

A sample is disturbed when others wanted the processors meanwhile, or when its single steps differ widely. t(B*) is
below t(1) when it is so by more than the spreads of both explain. The first line that applies counts. With batch 1
alone it is bandwidth-bound or unknown (or above the ceiling). Intensity alone never says bandwidth-bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from exporter.roofline.ceiling import CeilingSource, Roof
from exporter.roofline.decode import DecodePoint, DecodeSample
from exporter.roofline.footprint import Part

BANDWIDTH_BOUND_FLOOR_RATIO: Final = 0.65
COMPUTE_BOUND_GROWTH: Final = 0.5
OVERHEAD_BOUND_GROWTH: Final = 0.2
OVERHEAD_BOUND_COMPUTE_SHARE: Final = 0.1
SINGLE_STREAM_RATIO: Final = 0.4
"""The published prediction: one stream reaches more than this share of the ceiling."""
NARROW_MARGIN: Final = 0.03
"""A value this near its limit, relatively, may be on either side of it: rates repeat within so much."""
UNEVEN_SPREAD: Final = 0.25
"""A sample whose steps spread further than this is disturbed: on a quiet machine they spread by a few percent."""
LARGE_PART: Final = 0.5
"""More than this share of the step is the large part of it, where a remedy is worth its trouble."""


class Bound(StrEnum):
    """What the verdict can be."""

    ABOVE_CEILING = "above-ceiling"
    BANDWIDTH = "bandwidth-bound"
    COMPUTE = "compute-bound"
    OVERHEAD = "overhead-bound"
    UNKNOWN = "unknown"


class Remedy(StrEnum):
    """What would help, given where the time is."""

    CHECK_CEILING = "check_ceiling"
    FEWER_WEIGHT_BYTES = "fewer_weight_bytes"
    FEWER_KV_BYTES = "fewer_kv_bytes"
    FEWER_KERNELS = "fewer_kernels"
    MORE_STREAMS = "more_streams"
    MORE_THREADS = "more_threads"
    FEWER_THREADS = "fewer_threads"
    MORE_BATCHES = "more_batches"


class Doubt(StrEnum):
    """Why what each stream costs cannot be told from the samples."""

    CONTENDED = "contended"
    UNEVEN = "uneven"
    FASTER_TOGETHER = "faster_together"


class Prediction(StrEnum):
    """The published predictions for decode: memory-bound, well used, and better used by more streams."""

    INTENSITY_BELOW_RIDGE = "intensity_below_ridge"
    SINGLE_STREAM_ABOVE_40_PERCENT = "single_stream_above_40_percent"
    BATCHING_RAISES_THROUGHPUT = "batching_raises_throughput"


@dataclass(frozen=True, slots=True)
class Check:
    """A prediction against the measurement: it holds when `value` passes `limit` in the predicted direction.

    The last two predictions can be falsified by measuring; their `value` is the falsifier's number.
    """

    prediction: Prediction
    holds: bool
    value: float
    limit: float

    @property
    def narrow(self) -> bool:
        """Whether the value is so near the limit that the next measurement may say the opposite."""
        return abs(self.value / self.limit - 1) < NARROW_MARGIN


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict, and every number that it rests on; None is what was not known.

    Attributes:
        floor_ratio: r, at batch 1.
        growth: g, at the largest batch.
        doubt: Why g is not to be trusted, or None.
        compute_share: FLOPs / compute peak / step time, at the largest batch.
        above_ceiling_ratio: The implausible samples' largest step bytes/s / the hard ceiling; None without any.
        crosses_ridge_at: The smallest measured batch whose own intensity is above the ridge.
    """

    bound: Bound
    largest_batch: int | None
    floor_ratio: float | None
    growth: float | None
    compute_share: float | None
    above_ceiling_ratio: float | None
    checks: tuple[Check, ...]
    crosses_ridge_at: int | None
    remedies: tuple[Remedy, ...]
    doubt: Doubt | None = None


def judge_server(points: Mapping[int, DecodePoint], roof: Roof) -> Verdict:
    """The verdict on one server from its placed samples by batch."""
    one = points.get(1)
    largest = max(points, default=None)
    ratio = one.floor_ratio if one is not None else None
    growth = share = None
    if one is not None and largest is not None and largest > 1:
        alone = one.sample.step_seconds
        growth = (points[largest].sample.step_seconds - alone) / (alone * (largest - 1))
        flops = points[largest].flops_per_second
        if flops is not None and roof.compute_flops_per_second is not None:
            share = flops / roof.compute_flops_per_second
    doubt = None if growth is None or one is None or largest is None else _doubt(one.sample, points[largest].sample)
    above = _above_ceiling(points, roof)
    bound = _bound(implausible=above is not None, ratio=ratio, growth=growth if doubt is None else None, share=share)
    return Verdict(
        bound=bound,
        largest_batch=largest,
        floor_ratio=ratio,
        growth=growth,
        compute_share=share,
        above_ceiling_ratio=above,
        checks=_checks(points, roof, doubt),
        crosses_ridge_at=_crossing(points, roof),
        remedies=_remedies(bound, one, growth, doubt, on_gpu=CeilingSource.PEAK in roof.ceilings) if points else (),
        doubt=doubt,
    )


def disturbance(sample: DecodeSample) -> Doubt | None:
    """What makes a sample, true as it is, no measure of the model's own step; None for one that is."""
    if sample.contended:
        return Doubt.CONTENDED
    return Doubt.UNEVEN if sample.step_spread_ratio > UNEVEN_SPREAD else None


def _doubt(one: DecodeSample, most: DecodeSample) -> Doubt | None:
    if (disturbed := disturbance(one) or disturbance(most)) is not None:
        return disturbed
    explained = sum(s.step_seconds * max(s.step_spread_ratio, NARROW_MARGIN) for s in (one, most))
    return Doubt.FASTER_TOGETHER if one.step_seconds - most.step_seconds > explained else None


def _above_ceiling(points: Mapping[int, DecodePoint], roof: Roof) -> float | None:
    hard = roof.hard_bytes_per_second
    rates = [p.step_bytes_per_second for p in points.values() if p.implausible and p.step_bytes_per_second is not None]
    return max(rates) / hard if rates and hard is not None else None


def _bound(*, implausible: bool, ratio: float | None, growth: float | None, share: float | None) -> Bound:
    if implausible:
        return Bound.ABOVE_CEILING
    if ratio is not None and ratio >= BANDWIDTH_BOUND_FLOOR_RATIO:
        return Bound.BANDWIDTH
    if ratio is None or growth is None:
        return Bound.UNKNOWN
    if growth >= COMPUTE_BOUND_GROWTH:
        return Bound.COMPUTE
    if growth <= OVERHEAD_BOUND_GROWTH or (share is not None and share <= OVERHEAD_BOUND_COMPUTE_SHARE):
        return Bound.OVERHEAD
    return Bound.UNKNOWN


def _checks(points: Mapping[int, DecodePoint], roof: Roof, doubt: Doubt | None) -> tuple[Check, ...]:
    """The predictions that can be judged from what was measured; a disturbed sample proves no shortfall."""
    found = []
    one, largest = points.get(1), max(points, default=1)
    ridge = roof.ridge_flops_per_byte
    if one is not None and one.intensity_flops_per_byte is not None and ridge is not None:
        intensity = one.intensity_flops_per_byte
        found.append(Check(Prediction.INTENSITY_BELOW_RIDGE, intensity < ridge, intensity, ridge))
    if one is not None and one.floor_ratio is not None:
        ratio = one.floor_ratio
        passes = ratio > SINGLE_STREAM_RATIO
        if passes or disturbance(one.sample) is None:
            found.append(Check(Prediction.SINGLE_STREAM_ABOVE_40_PERCENT, passes, ratio, SINGLE_STREAM_RATIO))
    if one is not None and largest > 1 and doubt is None:
        gain = points[largest].sample.tokens_per_second / one.sample.tokens_per_second
        found.append(Check(Prediction.BATCHING_RAISES_THROUGHPUT, gain > 1, gain, 1.0))
    return tuple(found)


def _crossing(points: Mapping[int, DecodePoint], roof: Roof) -> int | None:
    ridge = roof.ridge_flops_per_byte
    if ridge is None:
        return None
    above = (b for b, p in sorted(points.items()) if (p.intensity_flops_per_byte or 0.0) > ridge)
    return next(above, None)


def _remedies(
    bound: Bound, one: DecodePoint | None, growth: float | None, doubt: Doubt | None, *, on_gpu: bool
) -> tuple[Remedy, ...]:
    """What would help, the most promising first: only what the large part of the token and the evidence speak for."""
    ratio = (one.floor_ratio or 0.0) if one is not None else 0.0
    # Bytes are worth saving where reading them is most of the step; more streams where each costs less than half one.
    bytes_first = (_fewer_bytes(one),) if one is not None and ratio > LARGE_PART else ()
    streams = (Remedy.MORE_STREAMS,) if growth is not None and growth < COMPUTE_BOUND_GROWTH and not doubt else ()
    match bound:
        case Bound.ABOVE_CEILING:
            return (Remedy.CHECK_CEILING,)
        case Bound.BANDWIDTH:
            return (*bytes_first, *streams)
        case Bound.COMPUTE:
            # A GPU's threads are not the operator's to choose.
            return () if on_gpu else (Remedy.MORE_THREADS,)
        case Bound.OVERHEAD:
            return (*bytes_first, *streams, Remedy.FEWER_KERNELS)
        case Bound.UNKNOWN:
            if growth is None:
                return (Remedy.MORE_BATCHES,)
            # Threads that others keep from running hold up the rest at the end of every kernel.
            contended = doubt is Doubt.CONTENDED and not on_gpu
            return (*bytes_first, *streams, *((Remedy.FEWER_THREADS,) if contended else ()))


def _fewer_bytes(one: DecodePoint) -> Remedy:
    budget = one.budget_seconds
    weights = budget.get(Part.WEIGHTS, 0.0) + budget.get(Part.OUTPUT_HEAD, 0.0)
    return Remedy.FEWER_KV_BYTES if budget.get(Part.KV_CACHE, 0.0) > weights else Remedy.FEWER_WEIGHT_BYTES
