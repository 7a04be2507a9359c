"""What is said around the study table, one sentence a line, the same on a terminal, in Markdown and on the page."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from exporter.present.study import (
    Row,
    Standing,
    disturbed_batches,
    measurements,
    rows,
    standing,
    suggested_floor_fractions,
)
from exporter.present.words import (
    BYTES_SOURCES,
    REASONS,
    binary_size,
    implausible_cause,
    si,
    state_words,
    three_digits,
)
from exporter.roofline.ceiling import Bandwidth, CeilingSource, Kernel, ThreadScope
from exporter.roofline.prefill import PREFILL_TOKENS
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import ServerView, View

ACCOUNTING: Final = (
    "Per step is physical: the streams of a batch share one read of the weights. Per token is bookkeeping: it credits"
    " every token with a read of its own, and passes 100 % of a ceiling when streams share."
)

NO_SERVERS: Final = (
    "No servers: only this machine's ceilings are measured; add servers: to the configuration (config.yaml shows how)."
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
        if found := [b for b in measurements(view) if b.threads is scope]:
            yield f"Memory bandwidth, {words}: {', '.join(map(_ceiling, found))}"


def _ceiling(b: Bandwidth) -> str:
    return f"{b.kernel} {si(b.best_bytes_per_second, 'B/s')}"


def server_lines(s: ServerView) -> Iterable[str]:
    """The server's state, its model, and the roof that it decodes under."""
    server = s.server
    slots = f", {server.slots} slot{'s' if server.slots != 1 else ''}" if server.slots else ""
    detail = f" ({server.state_detail})" if server.state_detail else ""
    yield f"{server.state.capitalize()}{slots}: {state_words(server.state, server.state_reason)}{detail}."
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
    reason = row.record.reason
    # What the server's own line has just said.
    why = REASONS[reason] if reason is not None and reason is not row.server.server.state_reason else None
    if row.point is None:
        if not _is_explained(row):
            missing = (
                "its last sample is too old to be shown" if row.record.last_success_timestamp else "not probed yet"
            )
            yield why or missing
        return
    if (found := implausible_cause(row.point, row.server.roof)) is not None:
        ratio, cause = found
        yield f"implausible, {three_digits(ratio)} x the ceiling: {cause}; floor, ratios and budget are withheld"
    if row.point.floor_ratio is not None and row.point.floor_ratio > 1:
        yield "faster than the reference: its budget has no overhead, and the parts share the step by their bytes"
    if row.point.sample.contended:
        yield "contended, other processes wanted the processors meanwhile"
    if row.point.sample.speculative:
        gain = three_digits(row.point.sample.tokens_per_step)
        yield (
            f"speculative, {gain} tokens a step: steps and floor are the model's own, and what drafting reads and"
            " computes is not counted"
        )
    if reason is not None:
        yield f"an earlier sample is shown; since then {why}" if why else "an earlier sample is shown"


def _is_explained(row: Row) -> bool:
    """Whether the server's state says already why the batch has no sample."""
    server, reason = row.server.server, row.record.reason
    return not server.state.up if reason is None else reason is server.state_reason


def standing_lines(s: ServerView) -> Iterable[str]:
    """How each batch with a threshold stands to it."""
    return (line for row in rows([s]) if (line := standing_line(row)) is not None)


def standing_line(row: Row) -> str | None:
    """How the batch stands to its threshold; None where it has none, or where the server's state says why not."""
    stands, threshold, point = standing(row), row.record.threshold, row.point
    if stands is None:
        return None
    if point is None and _is_explained(row):
        return None
    if point is None or point.floor_ratio is None:
        return f"Batch {row.batch}: no floor ratio to hold against its threshold {threshold:g}."
    words = "at or above" if stands is Standing.MET else "BELOW"
    return f"Batch {row.batch}: floor ratio {three_digits(point.floor_ratio)}, {words} its threshold {threshold:g}."


def suggestion_lines(s: ServerView) -> Iterable[str]:
    """Thresholds to put into the configuration, from undisturbed samples, and which of them would hide a finding."""
    suggested = suggested_floor_fractions(s)
    if suggested:
        values = ", ".join(f"{batch}: {fraction:g}" for batch, fraction in suggested.items())
        yield f"Suggested floor_fraction (0.8 x measured): {{{values}}}"
    if disturbed := disturbed_batches(s):
        were = f"batches {', '.join(map(str, disturbed))} were" if len(disturbed) > 1 else f"batch {disturbed[0]} was"
        yield f"No suggestion: {were} disturbed; run report on a quiet machine."
    for row in rows([s]):
        if row.batch in suggested and standing(row) is Standing.BELOW:
            yield f"Batch {row.batch} is below its threshold: {suggested[row.batch]:g} would accept the present state."


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
