"""What is said of the verdict: its evidence, how the published predictions fare, and what would help."""

from collections.abc import Iterable

from exporter.present.words import (
    BOUNDS,
    DOUBTS,
    PREDICTIONS,
    REMEDIES,
    three_digits,
)
from exporter.roofline.decode import IMPLAUSIBLE_RATIO
from exporter.roofline.footprint import BytesSource
from exporter.roofline.snapshot import ServerView
from exporter.roofline.verdict import (
    BANDWIDTH_BOUND_FLOOR_RATIO,
    COMPUTE_BOUND_GROWTH,
    NARROW_MARGIN,
    OVERHEAD_BOUND_COMPUTE_SHARE,
    OVERHEAD_BOUND_GROWTH,
    Bound,
    Check,
    Prediction,
)


def verdict_lines(s: ServerView) -> Iterable[str]:
    """What holds decode back with its evidence, how the predictions fare, and what would help; nothing unmeasured."""
    if not s.points:
        return
    verdict = s.verdict
    yield f"{BOUNDS[verdict.bound]}: {'; '.join(_evidence(s))}."
    for check in verdict.checks:
        yield f"Prediction {_outcome(check)}, {PREDICTIONS[check.prediction]}: {_figures(s, check)}."
    yield from _not_judged(s)
    if (crossed := verdict.crosses_ridge_at) is not None:
        own = three_digits(s.points[crossed].intensity_flops_per_byte or 0.0)
        ridge = three_digits(s.roof.ridge_flops_per_byte or 0.0)
        yield f"At batch {crossed} the step's own intensity crosses the ridge, {own} > {ridge} FLOP/byte."
    if verdict.remedies:
        yield f"What would help: {'; '.join(REMEDIES[remedy] for remedy in verdict.remedies)}."


def _not_judged(s: ServerView) -> Iterable[str]:
    """The predictions that could not be judged, those that lack the same together."""
    judged = {check.prediction for check in s.verdict.checks}
    lacking: dict[str, list[str]] = {}
    for prediction, words in PREDICTIONS.items():
        if prediction not in judged:
            lacking.setdefault(", ".join(_missing(s, prediction)), []).append(words)
    for missing, of in lacking.items():
        head, needs = ("Predictions", "need") if len(of) > 1 else ("Prediction", "needs")
        yield f"{head} not judged, {'; '.join(of)}: {needs} {missing}."


def _missing(s: ServerView, prediction: Prediction) -> Iterable[str]:
    """What a prediction that could not be judged lacks, and nothing that is there."""
    one, most = s.points.get(1), s.verdict.largest_batch
    batch_1 = ["batch 1"] if one is None else []
    match prediction:
        case Prediction.INTENSITY_BELOW_RIDGE:
            yield from _missing_floor(s)
            if s.roof.compute_flops_per_second is None:
                yield "the compute peak (compute_peak)"
            yield from batch_1
        case Prediction.SINGLE_STREAM_ABOVE_40_PERCENT:
            yield from (*_missing_floor(s), *batch_1)
            if one is not None and one.implausible:
                yield "a plausible sample of batch 1"
            elif one is not None and one.floor_ratio is not None:
                yield "an undisturbed sample of batch 1"
        case Prediction.BATCHING_RAISES_THROUGHPUT:
            yield from (*batch_1, *(["a larger batch"] if most == 1 else []))
            if s.verdict.doubt is not None:
                yield f"undisturbed samples of batch 1 and batch {most}"


def _missing_floor(s: ServerView) -> Iterable[str]:
    """What of a step's floor is not known."""
    if all(point.step_bytes is None for point in s.points.values()):
        yield "the model's size"
    if s.roof.reference_bytes_per_second is None:
        yield f"a ceiling ({s.roof.reference})"


def _evidence(s: ServerView) -> Iterable[str]:
    """The figures that the verdict rests on, each with the threshold that it is held against."""
    verdict, batch = s.verdict, s.verdict.largest_batch
    if verdict.above_ceiling_ratio is not None:
        yield (
            f"a step reads {three_digits(verdict.above_ceiling_ratio)} x what the memory can at most, and more than"
            f" {IMPLAUSIBLE_RATIO:g} x is implausible"
        )
        return
    if verdict.floor_ratio is None:
        yield "batch 1 has no floor ratio"
    else:
        yield f"{_floor_ratio(s, verdict.floor_ratio)} ({BANDWIDTH_BOUND_FLOOR_RATIO:g} or more is bandwidth-bound)"
    if verdict.bound is Bound.BANDWIDTH:
        return
    if verdict.growth is None:
        yield "batch 1 and a larger one were not both measured"
        return
    yield (
        f"each stream more, up to batch {batch}, costs {three_digits(verdict.growth)} of batch 1's step"
        f" ({COMPUTE_BOUND_GROWTH:g} or more is compute-bound, {OVERHEAD_BOUND_GROWTH:g} or less overhead-bound)"
    )
    if verdict.doubt is not None:
        yield DOUBTS[verdict.doubt].format(batch=batch)
        return
    if verdict.compute_share is not None and verdict.bound is not Bound.COMPUTE:
        yield (
            f"computing at its peak would take {three_digits(verdict.compute_share)} of batch {batch}'s step"
            f" ({OVERHEAD_BOUND_COMPUTE_SHARE:g} or less is overhead-bound)"
        )


def _floor_ratio(s: ServerView, ratio: float) -> str:
    """The floor ratio of batch 1, and whether it may be less because its bytes are an upper bound."""
    footprint = s.server.model.footprint if s.server.model else None
    bound = "at most " if footprint is not None and footprint.source is BytesSource.SERVER else ""
    return f"batch 1's floor ratio is {bound}{three_digits(ratio)} of {s.roof.reference}"


def _outcome(check: Check) -> str:
    outcome = "holds" if check.holds else "FAILS"
    return f"{outcome} by less than {NARROW_MARGIN * 100:g} %" if check.narrow else outcome


def _figures(s: ServerView, check: Check) -> str:
    """What was measured, and what would falsify the prediction."""
    value, limit = three_digits(check.value), f"{check.limit:g}"
    match check.prediction:
        case Prediction.INTENSITY_BELOW_RIDGE:
            return f"{value} FLOP/byte at batch 1, the ridge is {three_digits(check.limit)}"
        case Prediction.SINGLE_STREAM_ABOVE_40_PERCENT:
            return f"{_floor_ratio(s, check.value)}; falsified if {limit} or less"
        case Prediction.BATCHING_RAISES_THROUGHPUT:
            batch = s.verdict.largest_batch
            return f"batch {batch} has {value} x the tokens/s of batch 1; falsified if {limit} x or less"
