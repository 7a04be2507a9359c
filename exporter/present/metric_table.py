"""The one table of metrics. `metrics` renders it for Prometheus, `shapes` for JSON; no other place knows a name."""

from collections.abc import Callable
from typing import Final

from exporter.present.metric import (
    BATCH,
    KERNEL,
    PREFIX,
    SERVER,
    Keyed,
    Metric,
    Values,
    of_host,
    of_kernel,
    of_point,
    of_point_by,
    of_record,
    of_server,
    of_server_by,
)
from exporter.roofline.decode import marginal_stream_seconds
from exporter.roofline.reason import Outcome, Reason
from exporter.roofline.snapshot import Model, ServerState, ServerView, View

_VARIANT = "triad, copy, scale and add are a variant of STREAM."
_HOST_CACHED = f"Cached; see {PREFIX}memory_bandwidth_last_success_timestamp_seconds."
_HEALTH_CACHED = "Cached for one health interval."
_LIVE_CACHED = "Cached; gone 3 health intervals after the last of it."
_WITHHELD = "Absent for an implausible sample."
_CACHED = f"Cached; see {PREFIX}probe_last_success_timestamp_seconds."


def _reasons(outcome: Outcome) -> list[Reason]:
    return [reason for reason in Reason if reason.outcome is outcome]


def _counts(outcome: Outcome) -> Callable[[ServerView], Keyed]:
    """The counts of every reason of this outcome, 0 where it has not happened."""
    return lambda s: [(reason, s.server.counts.get(reason, 0)) for reason in _reasons(outcome)]


def _rejected_passes(view: View) -> Values:
    counts = view.snapshot.host.rejected_passes
    return [((reason,), counts.get(reason, 0)) for reason in _reasons(Outcome.NOT_MEASURED)]


def _array_bytes(view: View) -> float | None:
    newest = max(view.last, key=lambda b: b.measured_at, default=None)
    return newest.array_bytes if newest else None


def _bandwidth_info(view: View) -> Values:
    for b in view.in_force:
        yield (b.kernel, b.threads, str(b.thread_count), b.store, b.isa, b.pages, b.method, b.scope), 1


def _compute_peak(view: View) -> Values:
    return [((view.compute.precision,), view.compute.flops_per_second)] if view.compute else []


def _model_info(view: View) -> Values:
    for s in view.servers:
        if m := s.server.model:
            yield (s.server.name, m.name, m.quantization, m.build, m.footprint.source if m.footprint else ""), 1


def _of_model(value: Callable[[Model], float | None]) -> Callable[[ServerView], float | None]:
    return lambda s: value(s.server.model) if s.server.model else None


def _model_step_bytes(view: View) -> Values:
    for s in view.servers:
        if s.server.model and (footprint := s.server.model.footprint):
            for batch in sorted(s.server.batches):
                probed = s.points[batch].step_bytes if batch in s.points else None
                yield (s.server.name, str(batch)), footprint.step(batch, 0.0).bytes if probed is None else probed


def _marginal_stream_seconds(view: View) -> Values:
    for s in view.servers:
        for batch, seconds in marginal_stream_seconds(s.points).items():
            yield (s.server.name, str(batch)), seconds


def _below_threshold_samples(view: View) -> Values:
    """0 from the start; absent while the last sample is stale, for an old finding must not keep an alert alive."""
    for s in view.servers:
        for batch, record in sorted(s.server.batches.items()):
            if record.threshold is not None and (record.sample is None or batch in s.points):
                yield (s.server.name, str(batch)), record.below_threshold_samples


HOST: Final = (
    of_kernel(
        "memory_bandwidth_bytes_per_second",
        f"Memory-bandwidth ceiling in force, bytes/s: the best of the last 24 hours. {_VARIANT} {_HOST_CACHED}",
        lambda view: view.in_force,
        lambda b: b.best_bytes_per_second,
    ),
    of_kernel(
        "memory_bandwidth_last_bytes_per_second",
        f"Memory bandwidth of the newest measurement's best pass, bytes/s. {_VARIANT} {_HOST_CACHED}",
        lambda view: view.last,
        lambda b: b.best_bytes_per_second,
    ),
    of_kernel(
        "memory_bandwidth_spread_ratio",
        f"(Median - best) / best pass time of the newest measurement, ratio; 0 when all passes agree. {_HOST_CACHED}",
        lambda view: view.last,
        lambda b: b.spread_ratio,
    ),
    Metric(
        "memory_bandwidth_info",
        f"How the ceiling in force was measured, always 1. {_VARIANT}",
        (*KERNEL, "thread_count", "store", "isa", "pages", "method", "scope"),
        _bandwidth_info,
    ),
    of_host(
        "memory_bandwidth_array_bytes",
        f"Size of one of the three arrays of the newest measurement, bytes. {_HOST_CACHED}",
        _array_bytes,
    ),
    of_host(
        "memory_bandwidth_last_success_timestamp_seconds",
        "Unix time of the last successful measurement of the ceilings, seconds; 0 before the first.",
        lambda view: view.snapshot.host.last_success_timestamp,
    ),
    of_host(
        "memory_bandwidth_runs_total",
        "Measurements of the ceilings that were started.",
        lambda view: view.snapshot.host.runs,
    ),
    Metric(
        "memory_bandwidth_rejected_passes_total",
        "Passes of the bandwidth and compute kernels that were not good enough to count, by reason.",
        ("reason",),
        _rejected_passes,
    ),
    Metric(
        "compute_peak_flops_per_second",
        f"Measured compute peak, FLOP/s: fused multiply-adds in registers, all threads. {_HOST_CACHED}",
        ("precision",),
        _compute_peak,
    ),
)

SERVERS: Final = (
    of_server(
        "server_up",
        f"1 if the server could serve a user (ready, busy or sleeping), else 0. {_HEALTH_CACHED}",
        lambda s: s.server.state.up,
    ),
    of_server_by(
        "state",
        "server_state",
        f"1 for the state that the server is in, 0 for the others. {_HEALTH_CACHED}",
        lambda s: [(state, state is s.server.state) for state in ServerState],
    ),
    of_server(
        "server_slots",
        f"Streams that the server can decode together. {_HEALTH_CACHED}",
        lambda s: s.server.slots,
    ),
    Metric(
        "model_info",
        "The server's model and build, and where its bytes are known from (file, configured, server), always 1.",
        (*SERVER, "model", "quantization", "build", "bytes_source"),
        _model_info,
    ),
    of_server("model_parameters", "All parameters of the model.", _of_model(lambda m: m.parameters)),
    of_server("model_weight_bytes", "Size of all tensors of the model, bytes.", _of_model(lambda m: m.weight_bytes)),
    of_server(
        "model_file_mismatch",
        "1 when a model file was found whose bytes or parameters are not the server's: the server's figures are used.",
        _of_model(lambda m: m.file_mismatch),
    ),
    of_server(
        "model_kv_bytes_per_token",
        "KV cache that a decode step reads for each cached token of a stream, bytes.",
        _of_model(lambda m: m.footprint.kv_bytes_per_token if m.footprint else None),
    ),
    Metric(
        "model_step_bytes",
        "What one decode step must move, bytes: weights, and KV cache at the last probe's depth (empty without one).",
        BATCH,
        _model_step_bytes,
    ),
    of_server_by(
        "ceiling",
        "ceiling_bytes_per_second",
        "Memory-bandwidth ceilings of the server's processor, bytes/s: triad (a variant of STREAM) and read measured"
        f" here, peak from the spec sheet, sustained an estimate. {_HOST_CACHED}",
        lambda s: s.roof.ceilings.items(),
    ),
    of_server_by(
        "ceiling",
        "reference_ceiling_bytes_per_second",
        f"Reference: the ceiling that the floor uses (read, triad, sustained or peak), bytes/s. {_HOST_CACHED}",
        lambda s: [(s.roof.reference, s.roof.reference_bytes_per_second)],
    ),
    of_server_by(
        "source",
        "server_compute_peak_flops_per_second",
        "Compute peak of the server's processor, FLOP/s, by where it is known from (measured, configured).",
        lambda s: [(s.roof.compute_source, s.roof.compute_flops_per_second)] if s.roof.compute_source else [],
    ),
    of_server(
        "ridge_flops_per_byte",
        f"Compute peak / reference ceiling, FLOP/byte; below this intensity memory is the limit. {_HOST_CACHED}",
        lambda s: s.roof.ridge_flops_per_byte,
    ),
)

DECODE: Final = (
    of_point(
        "decode_tokens_per_second",
        f"Decode rate of all streams of the batch together, tokens/s. {_CACHED}",
        lambda p: p.sample.tokens_per_second,
    ),
    of_point(
        "decode_step_seconds",
        f"Time of one decode step, which gives every stream one token, seconds. {_CACHED}",
        lambda p: p.sample.step_seconds,
    ),
    of_point(
        "decode_speculative_tokens_per_step",
        f"Tokens that a step gave each stream where the server drafts tokens; absent where it does not. {_CACHED}",
        lambda p: p.sample.tokens_per_step if p.sample.speculative else None,
    ),
    of_point(
        "decode_step_spread_ratio",
        f"Interquartile range of the single step times / their median, ratio. {_CACHED}",
        lambda p: p.sample.step_spread_ratio,
    ),
    of_point(
        "decode_floor_seconds",
        f"Least time that a step can take, seconds: step bytes / reference ceiling. {_WITHHELD} {_CACHED}",
        lambda p: p.floor_seconds,
    ),
    of_point(
        "decode_step_bytes_per_second",
        f"Per step (physical): step bytes / step time, bytes/s; streams share one weight read. {_CACHED}",
        lambda p: p.step_bytes_per_second,
    ),
    of_point(
        "decode_token_read_bytes_per_second",
        f"Per token (bookkeeping): weight bytes x tokens/s, bytes/s; credits a weight read to every token. {_CACHED}",
        lambda p: p.token_read_bytes_per_second,
    ),
    of_point_by(
        "ceiling",
        "decode_ceiling_ratio",
        f"Per step (physical): step bytes/s / ceiling, ratio. {_WITHHELD} {_CACHED}",
        lambda p: p.ceiling_ratio.items(),
    ),
    of_point(
        "decode_floor_ratio",
        "Floor / step time, ratio: how near decode is to its reference ceiling, which it may exceed a little."
        f" {_WITHHELD} {_CACHED}",
        lambda p: p.floor_ratio,
    ),
    of_point_by(
        "ceiling",
        "decode_token_read_ratio",
        f"Per token (bookkeeping): per-token read / ceiling, ratio; batching takes it above 1. {_WITHHELD} {_CACHED}",
        lambda p: p.token_read_ratio.items(),
    ),
    of_point(
        "decode_intensity_flops_per_byte",
        f"FLOPs of a step / bytes of a step, FLOP/byte. {_CACHED}",
        lambda p: p.intensity_flops_per_byte,
    ),
    of_point(
        "decode_flops_per_second",
        f"FLOPs of a step / step time, FLOP/s. {_CACHED}",
        lambda p: p.flops_per_second,
    ),
    of_point_by(
        "ceiling",
        "decode_attainable_tokens_per_second",
        f"Decode rate of all streams that the roofline allows under this ceiling, tokens/s. {_WITHHELD} {_CACHED}",
        lambda p: p.attainable_tokens_per_second.items(),
    ),
    of_point_by(
        "part",
        "decode_budget_seconds",
        "Step time by part, seconds: weights, output head and KV cache at the reference ceiling, overhead the rest;"
        f" where the floor ratio is above 1, no overhead, and the parts share the step. {_WITHHELD} {_CACHED}",
        lambda p: p.budget_seconds.items(),
    ),
    Metric(
        "decode_marginal_stream_seconds",
        f"What one more stream adds to a step, seconds: against the next smaller batch. {_CACHED}",
        BATCH,
        _marginal_stream_seconds,
    ),
    of_point(
        "decode_contended",
        f"1 if the processors were under pressure during the probe (the sample is true), else 0. {_CACHED}",
        lambda p: p.sample.contended,
    ),
    of_point(
        "decode_implausible",
        "1 if the step bytes/s exceed what the ceiling allows, and floor, attainable rates, ratios and budget are"
        f" withheld, else 0; absent while bytes or ceiling are not known. {_CACHED}",
        lambda p: p.implausible,
    ),
    of_record(
        "decode_floor_ratio_threshold",
        "Configured floor ratio below which the operator wants to be told, ratio.",
        lambda record: record.threshold,
    ),
    Metric(
        "decode_below_threshold_samples",
        f"Consecutive published samples with a floor ratio below the threshold. {_CACHED}",
        BATCH,
        _below_threshold_samples,
    ),
)

LIVE: Final = (
    of_server(
        "live_step_seconds",
        f"Users' own traffic: mean time of one decode step, prompts excluded, seconds. {_LIVE_CACHED}",
        lambda s: s.live.sample.step_seconds if s.live else None,
    ),
    of_server(
        "live_streams",
        f"Users' own traffic: mean number of streams that generate together. {_LIVE_CACHED}",
        lambda s: s.live.sample.streams if s.live else None,
    ),
    of_server(
        "live_tokens_per_second",
        f"Users' own traffic: tokens/s of all streams together while they generate. {_LIVE_CACHED}",
        lambda s: s.live.sample.tokens_per_second if s.live else None,
    ),
    of_server(
        "live_floor_ratio",
        f"Users' own traffic: floor / step time at its own streams and depths, ratio; 1 is the best. {_LIVE_CACHED}",
        lambda s: s.live.floor_ratio if s.live else None,
    ),
)

EXPORTER: Final = (
    of_server("probes_total", "Decode probes made: succeeded, failed and rejected ones.", lambda s: s.server.probes),
    of_server_by(
        "reason",
        "probe_failures_total",
        "Probes that the server did not answer as llama-server does, by reason.",
        _counts(Outcome.FAILED),
    ),
    of_server_by(
        "reason",
        "probes_rejected_total",
        "Probes whose answer does not prove the batch or the timing, by reason.",
        _counts(Outcome.REJECTED),
    ),
    of_server_by(
        "reason",
        "probes_skipped_total",
        "Probes that were due and not made, by reason.",
        _counts(Outcome.SKIPPED),
    ),
    of_record("probe_success", "1 if the last probe gave a sample, else 0.", lambda record: bool(record.success)),
    of_record("probe_duration_seconds", "Duration of the last probe, seconds.", lambda record: record.duration_seconds),
    of_record(
        "probe_last_success_timestamp_seconds",
        "Unix time of the last probe that gave a sample, seconds; 0 before the first.",
        lambda record: record.last_success_timestamp,
    ),
    of_server(
        "probe_interval_seconds",
        "Effective time between probes, seconds: as configured, or longer to keep the duty cycle.",
        lambda s: s.server.interval_seconds,
    ),
    of_host(
        "probe_duty_cycle_ratio",
        "Time spent probing in the last hour / that hour, ratio.",
        lambda view: view.snapshot.duty_cycle_ratio,
    ),
    of_host(
        "config_last_reload_successful",
        "1 if the last (re)load of the configuration succeeded, else 0.",
        lambda view: view.snapshot.config_reload_ok,
    ),
    of_host(
        "config_last_reload_success_timestamp_seconds",
        "Unix time of the last successful (re)load of the configuration, seconds.",
        lambda view: view.snapshot.config_reload_timestamp,
    ),
)

TABLE: Final = (*HOST, *SERVERS, *DECODE, *LIVE, *EXPORTER)
