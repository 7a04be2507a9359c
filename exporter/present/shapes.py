"""The JSON shapes of `report`, `/api/v1/snapshot` and `bandwidth`. Metric names come from the metric table."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Final, TypeAlias

from exporter.present.metric import BATCH, SERVER, Kind, Metric
from exporter.present.metric_table import HOST, TABLE
from exporter.present.study import measurements
from exporter.roofline.ceiling import Bandwidth, CeilingSource, ComputePeak
from exporter.roofline.footprint import Attention, Experts, Footprint
from exporter.roofline.live import LiveSample, LiveShare
from exporter.roofline.prefill import PrefillPoint
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import ServerView, View
from exporter.roofline.verdict import Check, Prediction, Verdict

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
JsonObject: TypeAlias = dict[str, Json]

_MODEL = "model_"
_SAID_OTHERWISE = (BATCH[1:], ("state",), ("ceiling",))
"""What a server's metrics may be about beside the server, and its object says in a form of its own."""
_CHECKED: Final = {
    Prediction.INTENSITY_BELOW_RIDGE: "intensity_flops_per_byte",
    Prediction.SINGLE_STREAM_ABOVE_40_PERCENT: "floor_ratio",
    Prediction.BATCHING_RAISES_THROUGHPUT: "tokens_per_second_ratio",
}
"""What a prediction's value is, in its unit; its limit has the same name behind `limit_`."""


def bandwidth_json(view: View) -> JsonObject:
    """The ceilings in force and the machine that they were measured on."""
    return {
        "measurements": [_measurement(b) for b in measurements(view)],
        "compute": [_compute(view.compute)] if view.compute else [],
        "host": _host(view),
    }


def snapshot_json(view: View) -> JsonObject:
    """Everything that is known: the host, and each server with its model, ceilings and batches."""
    return {
        "host": {
            **_host(view),
            **_unlabelled(view),
            "memory_bandwidth": [_measurement(b) for b in measurements(view)],
            "compute": [_compute(view.compute)] if view.compute else [],
        },
        "servers": [_server(view, s) for s in view.servers],
    }


def _host(view: View) -> JsonObject:
    return {**asdict(view.snapshot.host.info), "problem": view.snapshot.host.problem}


def _unlabelled(view: View) -> JsonObject:
    return {metric.name: _number(value) for metric in HOST if not metric.labels for _, value in metric.series(view)}


def _measurement(b: Bandwidth) -> JsonObject:
    return {
        "kernel": b.kernel,
        "threads": b.threads,
        "best_bytes_per_second": b.best_bytes_per_second,
        "median_bytes_per_second": b.median_bytes_per_second,
        "spread_ratio": b.spread_ratio,
        "thread_count": b.thread_count,
        "store": b.store,
        "isa": b.isa,
        "pages": b.pages,
        "method": b.method,
        "scope": b.scope,
        "array_bytes": b.array_bytes,
        "passes": b.passes,
        "flags": list(b.flags),
    }


def _compute(peak: ComputePeak) -> JsonObject:
    return {
        "precision": peak.precision,
        "flops_per_second": peak.flops_per_second,
        "spread_ratio": peak.spread_ratio,
        "thread_count": peak.thread_count,
        "isa": peak.isa,
    }


def _server(view: View, s: ServerView) -> JsonObject:
    of_server = [m for m in TABLE if m.labels[:1] == SERVER and m.labels[1:2] not in _SAID_OTHERWISE]
    figures = _figures(view, of_server, (s.server.name,))
    # A model's figures stand in an object of their own, where their common first word would only repeat its name.
    model: JsonObject = {}
    for key in [key for key in figures if key.startswith(_MODEL)]:
        value = figures.pop(key)
        model.update(value if isinstance(value, dict) else {key.removeprefix(_MODEL): value})
    return {
        "server": s.server.name,
        "state": s.server.state,
        "state_reason": s.server.state_reason,
        **({"state_detail": s.server.state_detail} if s.server.state_detail else {}),
        "model": model,
        "footprint": _footprint(s.server.model.footprint if s.server.model else None),
        "reference": s.roof.reference,
        "ceilings": [_ceiling(s, source, value) for source, value in s.roof.ceilings.items()],
        **figures,
        "batches": [_batch(view, s, batch) for batch in sorted(s.server.batches)],
        "verdict": _verdict(s.verdict),
        **({} if s.live is None else {"live": _live(s.live.sample)}),
        **({} if s.prefill is None else {"prefill": _prefill(s.prefill)}),
    }


def _live(sample: LiveSample) -> JsonObject:
    """Where the figures of users' traffic come from, and what they are the means of."""
    return {"source": sample.source, "shares": [_share(share) for share in sample.shares]}


def _share(share: LiveShare) -> JsonObject:
    return {
        "streams": share.streams,
        "seconds": share.seconds,
        "tokens": share.tokens,
        "steps": share.steps,
        "depth_tokens": share.depth,
    }


def _ceiling(s: ServerView, source: CeilingSource, value: float) -> JsonObject:
    found: JsonObject = {"ceiling": source, "bytes_per_second": value, "reference": source is s.roof.reference}
    if source is CeilingSource.SUSTAINED:
        found["peak_fraction_ratio"] = s.server.policy.sustained_fraction
    return found


def _footprint(footprint: Footprint | None) -> JsonObject | None:
    """What the step bytes and FLOPs are made of, so that a reader can follow them; equal layers once, with a count."""
    if footprint is None:
        return None
    experts, attention = Counter(footprint.experts), Counter(footprint.attention or ())
    return {
        "parameters": footprint.parameters,
        "weight_bytes": footprint.weight_bytes,
        "head_bytes": footprint.head_bytes,
        "experts": [_experts(e, layers) for e, layers in experts.items()],
        "attention": None if footprint.attention is None else [_attention(a, n) for a, n in attention.items()],
        "state_bytes": footprint.state_bytes,
        "head_parameters": footprint.head_parameters,
    }


def _experts(experts: Experts, layers: int) -> JsonObject:
    return {
        "layers": layers,
        "bytes": experts.bytes,
        "parameters": experts.parameters,
        "count": experts.count,
        "used": experts.used,
    }


def _attention(attention: Attention, layers: int) -> JsonObject:
    return {
        "layers": layers,
        "kv_bytes_per_token": attention.kv_bytes_per_token,
        "flops_per_token": attention.flops_per_token,
        "window_tokens": attention.window,
    }


def _verdict(verdict: Verdict) -> JsonObject:
    """The bound, the known figures that it rests on, the judged predictions and what would help."""
    evidence: dict[str, int | float | str | None] = {
        "largest_batch": verdict.largest_batch,
        "floor_ratio": verdict.floor_ratio,
        "growth_ratio": verdict.growth,
        "compute_ratio": verdict.compute_share,
        "above_ceiling_ratio": verdict.above_ceiling_ratio,
        "ridge_crossed_at_batch": verdict.crosses_ridge_at,
        "doubt": verdict.doubt,
    }
    return {
        "bound": verdict.bound,
        "evidence": {name: value for name, value in evidence.items() if value is not None},
        "predictions": [_prediction(check) for check in verdict.checks],
        "remedies": list(verdict.remedies),
    }


def _prefill(found: PrefillPoint | Reason) -> JsonObject:
    """The long prompt with what follows from it, as far as it is known, or the reason why there is none."""
    if isinstance(found, Reason):
        return {"reason": found}
    known: JsonObject = {
        "flops": found.flops,
        "bytes": found.bytes,
        "intensity_flops_per_byte": found.intensity_flops_per_byte,
        "flops_per_second": found.flops_per_second,
        "bytes_per_second": found.bytes_per_second,
        "above_ridge": found.above_ridge,
        "compute_ratio": found.compute_ratio,
    }
    return {
        "reason": None,
        "tokens": found.sample.tokens,
        "seconds": found.sample.seconds,
        "contended": found.sample.contended,
        "tokens_per_second": found.sample.tokens_per_second,
        **{name: value for name, value in known.items() if value is not None},
    }


def _prediction(check: Check) -> JsonObject:
    name = _CHECKED[check.prediction]
    outcome: JsonObject = {"prediction": check.prediction, "holds": check.holds, "narrow": check.narrow}
    return {**outcome, name: check.value, f"limit_{name}": check.limit}


def _batch(view: View, s: ServerView, batch: int) -> JsonObject:
    of_batch = [m for m in TABLE if m.labels[:2] == BATCH]
    sample = s.points[batch].sample if batch in s.points else None
    return {
        "batch": batch,
        "reason": s.server.batches[batch].reason,
        **({"depth_tokens": sample.depth, "steps": sample.steps} if sample else {}),
        **_figures(view, of_batch, (s.server.name, str(batch))),
    }


def _figures(view: View, metrics: Iterable[Metric], about: tuple[str, ...]) -> JsonObject:
    """The metrics whose first labels are `about`, by name; one more label makes an object keyed by its value."""
    found: JsonObject = {}
    rest = len(about)
    for metric in metrics:
        series = [(labels[rest:], value) for labels, value in metric.series(view) if labels[:rest] == about]
        if not series:
            continue
        if metric.kind is Kind.INFO:
            found[metric.name] = dict(zip(metric.labels[rest:], series[0][0], strict=True))
        elif len(metric.labels) == rest:
            found[metric.name] = _number(series[0][1])
        else:
            found[metric.name] = {key: _number(value) for (key,), value in series}
    return found


def _number(value: float) -> int | float:
    """The number as JSON shows it: a count without a decimal point."""
    return int(value) if value.is_integer() else value
