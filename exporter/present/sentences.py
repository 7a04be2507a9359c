"""What is said around the study table, one sentence a line, the same on a terminal, in Markdown and on the page."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from exporter.present.study import Row, Standing, rows, standing, suggested_floor_fractions
from exporter.present.words import (
    BOUNDS,
    BYTES_SOURCES,
    DOUBTS,
    PREDICTIONS,
    PREDICTIONS_NEED,
    REASONS,
    REMEDIES,
    STATES,
    binary_size,
    implausible_cause,
    si,
    three_digits,
)
from exporter.roofline.ceiling import Bandwidth, CeilingSource, Kernel, ThreadScope
from exporter.roofline.decode import IMPLAUSIBLE_RATIO
from exporter.roofline.footprint import BytesSource
from exporter.roofline.prefill import PREFILL_TOKENS
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import ServerView, View
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

ACCOUNTING: Final = (
    "Per step is physical: the streams of a batch share one read of the weights. Per token is bookkeeping: it credits"
    " every token with a read of its own, and passes 100 % of a ceiling when streams share."
)

_SCOPES: Final = {ThreadScope.ALL: "all threads", ThreadScope.SINGLE: "one thread"}


def reads(view: View) -> bool:
    """Whether `read` on all threads, the reference of every CPU server, has a ceiling in force."""
    return any(b.kernel is Kernel.READ and b.threads is ThreadScope.ALL for b in view.in_force)


def host_lines(view: View) -> Iterable[str]:
    """The machine, and why its ceilings could not be measured if that is so."""
    info = view.snapshot.host.info
    yield ", ".join(
        [
            info.cpu_model or "unknown processor",
            f"{info.cpus} CPU{'s' if info.cpus != 1 else ''}",
            *([f"{binary_size(info.last_level_cache_bytes)} last-level cache"] if info.last_level_cache_bytes else []),
            *([f"{binary_size(info.memory_bytes)} memory"] if info.memory_bytes else []),
        ]
    )
    if view.snapshot.host.problem is not None:
        yield f"The last measurement gave no read ceiling: {REASONS[view.snapshot.host.problem]}."
        if reads(view):
            ended = datetime.fromtimestamp(view.snapshot.host.last_success_timestamp, UTC)
            yield f"The read ceiling in force is an earlier one; it was last measured {ended:%Y-%m-%d %H:%M} UTC."
    elif not view.in_force:
        yield "No ceiling has been measured yet."
    if view.compute:
        yield f"Compute peak {si(view.compute.flops_per_second, 'FLOP/s')} ({view.compute.precision})"


def ceiling_lines(view: View) -> Iterable[str]:
    """The measured bandwidths, a line for each thread scope."""
    for scope, words in _SCOPES.items():
        if found := [b for b in view.in_force if b.threads is scope]:
            yield f"Memory bandwidth, {words}: {', '.join(map(_ceiling, found))}"


def _ceiling(b: Bandwidth) -> str:
    return f"{b.kernel} {si(b.best_bytes_per_second, 'B/s')}"


def server_lines(s: ServerView) -> Iterable[str]:
    """The server's state, its model, and the roof that it decodes under."""
    server = s.server
    why = REASONS[server.state_reason] if server.state_reason else STATES[server.state]
    slots = f", {server.slots} slot{'s' if server.slots != 1 else ''}" if server.slots else ""
    detail = f" ({server.state_detail})" if server.state_detail else ""
    yield f"{server.state.capitalize()}{slots}: {why}{detail}."
    if (model := server.model) is not None:
        facts = [
            model.quantization,
            *([f"{si(model.parameters, '')} parameters"] if model.parameters else []),
            *([si(model.weight_bytes, "B")] if model.weight_bytes else []),
            f"build {model.build}" if model.build else "",
        ]
        yield f"Model {model.name}: {', '.join(filter(None, facts))}"
        if model.footprint is None:
            yield "The model's size is not known, so only rates are shown."
        else:
            yield BYTES_SOURCES[model.footprint.source]
        if model.unused:
            yield f"What the configuration says is not used: {model.unused}."
        if model.file_mismatch:
            yield "The model file that was found is not the server's model: its bytes or parameters differ."
    yield from _roof_line(s)
    yield from _live_line(s)


def _roof_line(s: ServerView) -> Iterable[str]:
    roof = s.roof
    facts = [f"{source} {si(value, 'B/s')}{_marked(source, roof.reference)}" for source, value in roof.ceilings.items()]
    if not facts:
        return
    if roof.compute_flops_per_second is not None:
        facts.append(f"compute {si(roof.compute_flops_per_second, 'FLOP/s')}")
    if roof.ridge_flops_per_byte is not None:
        facts.append(f"ridge {three_digits(roof.ridge_flops_per_byte)} FLOP/byte")
    yield f"Roof: {', '.join(facts)}"


def _live_line(s: ServerView) -> Iterable[str]:
    if s.live is None:
        return
    sample, ratio = s.live.sample, s.live.floor_ratio
    facts = [
        *([f"{three_digits(sample.streams)} streams"] if sample.streams is not None else []),
        *([f"{three_digits(sample.tokens_per_second)} tokens/s"] if sample.tokens_per_second is not None else []),
        *([f"{three_digits(sample.step_seconds * 1e3)} ms a step"] if sample.step_seconds is not None else []),
        *([f"floor ratio {three_digits(ratio)}"] if ratio is not None else []),
    ]
    yield f"Users' own traffic: {', '.join(facts)}"


def _marked(source: CeilingSource, reference: CeilingSource) -> str:
    return " (the floor's reference)" if source is reference else ""


def notes(s: ServerView) -> Iterable[str]:
    """What a reader must know about the server's rows: what is missing and why, and what to think of the rest."""
    batches: dict[str, list[int]] = {}
    for row in rows([s]):
        for note in _row_notes(row):
            batches.setdefault(note, []).append(row.batch)
    for note, of in batches.items():
        yield f"Batch {', '.join(map(str, of))}: {note}."


def _row_notes(row: Row) -> Iterable[str]:
    why = REASONS[row.record.reason] if row.record.reason is not None else None
    if row.point is None:
        missing = "its last sample is too old to be shown" if row.record.last_success_timestamp else "not probed yet"
        yield why or missing
        return
    if (found := implausible_cause(row.point, row.server.roof)) is not None:
        ratio, cause = found
        yield f"implausible, {three_digits(ratio)} x the ceiling: {cause}"
    if row.point.sample.contended:
        yield "contended, other processes wanted the processors meanwhile"
    if row.point.sample.speculative:
        gain = three_digits(row.point.sample.tokens_per_step)
        yield (
            f"speculative, {gain} tokens a step: steps and floor are the model's own, and what drafting reads and"
            " computes is not counted"
        )
    if why is not None:
        yield f"an earlier sample is shown; since then {why}"


def standing_lines(s: ServerView) -> Iterable[str]:
    """How each batch with a threshold stands to it."""
    return (line for row in rows([s]) if (line := standing_line(row)) is not None)


def standing_line(row: Row) -> str | None:
    """How the batch stands to its threshold; None where it has none."""
    stands, threshold, point = standing(row), row.record.threshold, row.point
    if stands is None:
        return None
    if point is None or point.floor_ratio is None:
        return f"Batch {row.batch}: no floor ratio to hold against its threshold {threshold:g}."
    words = "at or above" if stands is Standing.MET else "BELOW"
    return f"Batch {row.batch}: floor ratio {three_digits(point.floor_ratio)}, {words} its threshold {threshold:g}."


def suggestion_lines(s: ServerView) -> Iterable[str]:
    """Thresholds to put into the configuration, if any floor ratio is known."""
    if suggested := suggested_floor_fractions(s):
        values = ", ".join(f"{batch}: {fraction:g}" for batch, fraction in suggested.items())
        yield f"Suggested floor_fraction (0.8 x measured): {{{values}}}"


def prefill_lines(s: ServerView) -> Iterable[str]:
    """The long prompt's rate and its place under the roof, or why there is none; nothing where it was not asked for."""
    prefill = s.prefill
    if prefill is None:
        return
    if isinstance(prefill, Reason):
        yield f"Prefill, {PREFILL_TOKENS} tokens: not measured; {REASONS[prefill]}."
        return
    sample = prefill.sample
    facts = [f"{three_digits(sample.tokens_per_second)} tokens/s", f"{three_digits(1e3 * sample.seconds)} ms"]
    if prefill.flops_per_second is None or prefill.intensity_flops_per_byte is None:
        facts.append("its operating point needs the model's file")
    else:
        facts.append(f"{si(prefill.flops_per_second, 'FLOP/s')}")
        if prefill.compute_ratio is not None:
            facts[-1] += f" ({three_digits(100 * prefill.compute_ratio)} % of the compute peak)"
        facts.append(f"{three_digits(prefill.intensity_flops_per_byte)} FLOP/byte at most")
        if prefill.above_ridge is not None:
            facts[-1] += f", {'above' if prefill.above_ridge else 'below'} the ridge"
    contended = "; contended, other processes wanted the processors meanwhile" if sample.contended else ""
    yield f"Prefill, {sample.tokens} tokens: {', '.join(facts)}{contended}."


def verdict_lines(s: ServerView) -> Iterable[str]:
    """What holds decode back with its evidence, how the predictions fare, and what would help; nothing unmeasured."""
    if not s.points:
        return
    verdict = s.verdict
    yield f"{BOUNDS[verdict.bound]}: {'; '.join(_evidence(s))}."
    judged = {check.prediction: check for check in verdict.checks}
    for prediction, words in PREDICTIONS.items():
        if (check := judged.get(prediction)) is None:
            yield f"Prediction not judged, {words}: needs {PREDICTIONS_NEED[prediction]}."
        else:
            yield f"Prediction {_outcome(check)}, {words}: {_figures(s, check)}."
    if (crossed := verdict.crosses_ridge_at) is not None:
        own = three_digits(s.points[crossed].intensity_flops_per_byte or 0.0)
        ridge = three_digits(s.roof.ridge_flops_per_byte or 0.0)
        yield f"At batch {crossed} the step's own intensity crosses the ridge, {own} > {ridge} FLOP/byte."
    if verdict.remedies:
        yield f"What would help: {'; '.join(REMEDIES[remedy] for remedy in verdict.remedies)}."


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
