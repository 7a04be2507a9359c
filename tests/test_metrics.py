"""The metrics as Prometheus meets them: golden values, both text formats, and what a bug or a gap does to a scrape."""

import json
import math
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import snapshots
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, enable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families as parse_text
from structlog.testing import capture_logs

from exporter.present.metric import Kind, Metric, of_host
from exporter.present.metric_table import TABLE
from exporter.present.metrics import SnapshotCollector, build_registry
from exporter.present.report import Format, report_text
from exporter.roofline.ceiling import CeilingSource, Device, RoofPolicy
from exporter.roofline.reason import Outcome, Reason
from exporter.roofline.snapshot import BatchRecord, ServerState, Snapshot, view

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def registry_of(snapshot: Snapshot, now: float = snapshots.NOW, table: tuple[Metric, ...] = TABLE) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(lambda: snapshot, lambda: now, "0.1.0", table))
    return registry


def by_openmetrics(registry: CollectorRegistry) -> Iterable[Family]:
    """The families as they come out of the OpenMetrics format."""
    text: str = openmetrics.generate_latest(registry).decode()  # type: ignore[no-untyped-call]
    families: Iterable[Family] = openmetrics_parser.text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    return families


def series_of(families: Iterable[Family]) -> Series:
    found = [((s.name, frozenset(s.labels.items())), s.value) for family in families for s in family.samples]
    assert len(dict(found)) == len(found), "a series came twice"
    return dict(found)


def scrape(snapshot: Snapshot, now: float = snapshots.NOW) -> Series:
    return series_of(parse_text(generate_latest(registry_of(snapshot, now)).decode()))


def value(series: Series, name: str, **labels: str) -> float:
    return series[(f"roofline_{name}", frozenset(labels.items()))]


def names(series: Series) -> set[str]:
    return {name.removeprefix("roofline_") for name, _ in series}


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("memory_bandwidth_bytes_per_second", {"kernel": "triad", "threads": "all"}, 40e9),
        ("memory_bandwidth_last_bytes_per_second", {"kernel": "read", "threads": "single"}, 15e9),
        ("memory_bandwidth_spread_ratio", {"kernel": "read", "threads": "all"}, 0.02),
        ("memory_bandwidth_array_bytes", {}, 268435456),
        ("memory_bandwidth_runs_total", {}, 3),
        ("memory_bandwidth_rejected_passes_total", {"reason": "preempted"}, 2),
        ("memory_bandwidth_rejected_passes_total", {"reason": "unstable"}, 0),
        ("compute_peak_flops_per_second", {"precision": "fp32"}, 400e9),
        ("server_up", {"server": "workstation"}, 1),
        ("server_state", {"server": "workstation", "state": "busy"}, 1),
        ("server_state", {"server": "workstation", "state": "ready"}, 0),
        ("server_slots", {"server": "local"}, 4),
        ("model_parameters", {"server": "local"}, 1.1e9),
        ("model_weight_bytes", {"server": "local"}, 700e6),
        ("model_kv_bytes_per_token", {"server": "local"}, 20_000),
        ("model_step_bytes", {"server": "local", "batch": "4"}, 600e6 + 4 * 100 * 20_000),
        ("model_step_bytes", {"server": "workstation", "batch": "4"}, 4.8e9),
        ("ceiling_bytes_per_second", {"server": "workstation", "ceiling": "sustained"}, 512e9),
        ("reference_ceiling_bytes_per_second", {"server": "local", "ceiling": "read"}, 50e9),
        ("reference_ceiling_bytes_per_second", {"server": "workstation", "ceiling": "sustained"}, 512e9),
        ("server_compute_peak_flops_per_second", {"server": "local", "source": "measured"}, 400e9),
        ("ridge_flops_per_byte", {"server": "local"}, 8),
        ("decode_tokens_per_second", {"server": "local", "batch": "4"}, 125),
        ("decode_step_seconds", {"server": "local", "batch": "4"}, 0.032),
        ("decode_step_spread_ratio", {"server": "local", "batch": "4"}, 0.03),
        ("decode_floor_seconds", {"server": "local", "batch": "4"}, 608e6 / 50e9),
        ("decode_step_bytes_per_second", {"server": "local", "batch": "4"}, 19e9),
        ("decode_token_read_bytes_per_second", {"server": "local", "batch": "4"}, 75e9),
        ("decode_ceiling_ratio", {"server": "local", "batch": "4", "ceiling": "triad"}, 0.475),
        ("decode_floor_ratio", {"server": "local", "batch": "4"}, 0.38),
        ("decode_token_read_ratio", {"server": "local", "batch": "4", "ceiling": "read"}, 1.5),
        ("decode_intensity_flops_per_byte", {"server": "local", "batch": "4"}, 8e9 / 608e6),
        ("decode_flops_per_second", {"server": "local", "batch": "4"}, 250e9),
        ("decode_attainable_tokens_per_second", {"server": "local", "batch": "4", "ceiling": "read"}, 200),
        ("decode_budget_seconds", {"server": "local", "batch": "4", "part": "output_head"}, 0.002),
        ("decode_budget_seconds", {"server": "local", "batch": "4", "part": "overhead"}, 0.032 - 608e6 / 50e9),
        ("decode_marginal_stream_seconds", {"server": "local", "batch": "4"}, 0.0035),
        ("decode_contended", {"server": "local", "batch": "2"}, 1),
        ("decode_implausible", {"server": "local", "batch": "2"}, 0),
        ("decode_floor_ratio_threshold", {"server": "local", "batch": "1"}, 0.25),
        ("decode_below_threshold_samples", {"server": "local", "batch": "1"}, 0),
        ("probes_total", {"server": "local"}, 12),
        ("probe_failures_total", {"server": "local", "reason": "unreachable"}, 2),
        ("probes_rejected_total", {"server": "local", "reason": "foreign_request"}, 1),
        ("probes_skipped_total", {"server": "local", "reason": "busy"}, 5),
        ("probe_success", {"server": "workstation", "batch": "2"}, 0),
        ("probe_duration_seconds", {"server": "workstation", "batch": "1"}, 2.5),
        ("probe_last_success_timestamp_seconds", {"server": "local", "batch": "1"}, snapshots.WALL_NOW - 30),
        ("probe_interval_seconds", {"server": "local"}, 300),
        ("probe_duty_cycle_ratio", {}, 0.012),
        ("config_last_reload_successful", {}, 1),
        ("config_last_reload_success_timestamp_seconds", {}, snapshots.WALL_NOW - 3600),
        ("collector_errors_total", {}, 0),
    ],
)
def test_each_metric_has_the_value_that_arithmetic_gives(name: str, labels: dict[str, str], expected: float) -> None:
    assert value(scrape(snapshots.rich()), name, **labels) == pytest.approx(expected, rel=1e-12)


def test_the_budget_sums_to_the_step() -> None:
    series = scrape(snapshots.rich())
    for batch in ("1", "2", "4"):
        parts = [
            v
            for (name, labels), v in series.items()
            if name == "roofline_decode_budget_seconds" and {("server", "local"), ("batch", batch)} <= labels
        ]
        assert sum(parts) == pytest.approx(value(series, "decode_step_seconds", server="local", batch=batch))


def test_every_metric_of_the_table_is_rendered_by_the_rich_snapshot() -> None:
    series = scrape(snapshots.rich())
    assert names(series) == {m.name for m in TABLE} | {"exporter_build_info", "collector_errors_total"}


def references(snapshot: Snapshot) -> dict[tuple[str, str], float]:
    """The reference ceilings, by server and ceiling."""
    return {
        (dict(labels)["server"], dict(labels)["ceiling"]): v
        for (name, labels), v in scrape(snapshot).items()
        if name == "roofline_reference_ceiling_bytes_per_second"
    }


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (RoofPolicy(), {("local", "read"): 50e9}),
        (RoofPolicy(reference=CeilingSource.TRIAD), {("local", "triad"): 40e9}),
        (RoofPolicy(device=Device.GPU, peak_bytes_per_second=640e9), {("local", "sustained"): 512e9}),
        (
            RoofPolicy(device=Device.GPU, reference=CeilingSource.PEAK, peak_bytes_per_second=640e9),
            {("local", "peak"): 640e9},
        ),
        (RoofPolicy(device=Device.GPU), {}),
    ],
    ids=["read", "triad", "sustained", "peak", "unknown"],
)
def test_a_server_has_one_reference_ceiling_also_before_its_first_sample(
    policy: RoofPolicy, expected: dict[tuple[str, str], float]
) -> None:
    server = replace(snapshots.cpu_server(), policy=policy, batches={1: BatchRecord()}, model=None)
    assert references(Snapshot(snapshots.host(), (server,))) == expected


def test_the_reference_ceiling_is_the_one_that_the_json_marks() -> None:
    marked = {
        (server["server"], ceiling["ceiling"]): ceiling["bytes_per_second"]
        for server in json.loads(report_text(snapshots.rich_view(), Format.JSON))["servers"]
        for ceiling in server["ceilings"]
        if ceiling["reference"]
    }
    assert references(snapshots.rich()) == marked
    assert len(marked) == 2


def test_info_metrics_say_what_they_are_about_once() -> None:
    series = scrape(snapshots.rich())
    info = {
        "server": "local",
        "model": "tiny-1b-q4_k_m.gguf",
        "quantization": "Q4_K - Medium",
        "build": "b11434-abc",
        "bytes_source": "file",
    }
    assert value(series, "model_info", **info) == 1
    assert len([name for name, _ in series if name == "roofline_model_info"]) == 2
    (build,) = [dict(labels) for name, labels in series if name == "roofline_exporter_build_info"]
    assert build["version"] == "0.1.0"


def test_an_empty_snapshot_renders_and_claims_nothing() -> None:
    assert names(scrape(snapshots.empty())) == {
        "memory_bandwidth_last_success_timestamp_seconds",
        "memory_bandwidth_runs_total",
        "memory_bandwidth_rejected_passes_total",
        "probe_duty_cycle_ratio",
        "config_last_reload_successful",
        "config_last_reload_success_timestamp_seconds",
        "exporter_build_info",
        "collector_errors_total",
    }


def test_known_label_sets_start_at_zero() -> None:
    series = scrape(snapshots.unreachable())
    assert value(series, "server_up", server="two") == 0
    assert value(series, "probe_success", server="two", batch="2") == 0
    assert value(series, "probe_last_success_timestamp_seconds", server="two", batch="2") == 0
    assert value(series, "decode_below_threshold_samples", server="two", batch="1") == 0
    assert value(series, "probes_total", server="two") == 0
    counters = {
        Outcome.FAILED: "probe_failures_total",
        Outcome.REJECTED: "probes_rejected_total",
        Outcome.SKIPPED: "probes_skipped_total",
    }
    for reason in Reason:
        if reason.outcome is Outcome.NOT_MEASURED:
            assert value(series, "memory_bandwidth_rejected_passes_total", reason=reason) == 0
        else:
            assert value(series, counters[reason.outcome], server="two", reason=reason) == 0


def test_exactly_one_state_is_one() -> None:
    for state in ServerState:
        server = replace(snapshots.cpu_server(), state=state)
        series = scrape(Snapshot(snapshots.host(), (server,)))
        ones = {dict(labels)["state"] for (name, labels), v in series.items() if name == "roofline_server_state" and v}
        assert ones == {state}
        assert value(series, "server_up", server="local") == state.up


def test_a_stale_sample_leaves_but_its_timestamp_and_counters_stay() -> None:
    later = snapshots.NOW + 3 * 300 + 1
    series = scrape(snapshots.rich(), later)
    decode = {name for name in names(series) if name.startswith("decode_")}
    assert decode == {"decode_floor_ratio_threshold"}
    assert value(series, "probe_last_success_timestamp_seconds", server="local", batch="1") == snapshots.WALL_NOW - 30
    assert value(series, "probes_total", server="local") == 12
    assert value(series, "model_step_bytes", server="local", batch="4") == 600e6, "without a sample the cache is empty"


def test_plausibility_is_absent_while_no_ceiling_is_known() -> None:
    """0 would say that the sample was held against a ceiling."""
    rich = snapshots.rich()
    series = scrape(replace(rich, host=replace(rich.host, tracks={})))
    told = {dict(labels)["server"] for name, labels in series if name == "roofline_decode_implausible"}
    assert told == {"workstation"}, "a GPU's ceiling is its spec sheet's"
    assert value(series, "decode_step_seconds", server="local", batch="1") > 0


def test_an_implausible_sample_keeps_its_rates_and_loses_its_ratios() -> None:
    fast = replace(snapshots.cpu_server(), batches={1: BatchRecord(sample=snapshots.sample(1, 0.002), success=True)})
    series = scrape(Snapshot(snapshots.host(), (fast,)))
    assert value(series, "decode_implausible", server="local", batch="1") == 1
    assert value(series, "decode_tokens_per_second", server="local", batch="1") == 500
    withheld = {"decode_ceiling_ratio", "decode_floor_ratio", "decode_token_read_ratio", "decode_budget_seconds"}
    assert not withheld & names(series)


def test_unknown_and_not_a_number_are_left_out() -> None:
    table = (
        of_host("nan_bytes", "NaN.", lambda _: math.nan),
        of_host("infinite_bytes", "Infinite.", lambda _: math.inf),
        of_host("unknown_bytes", "Unknown.", lambda _: None),
        of_host("known_bytes", "Known.", lambda _: 7),
    )
    text = generate_latest(registry_of(snapshots.empty(), table=table)).decode()
    series = series_of(parse_text(text))
    assert names(series) == {"known_bytes", "exporter_build_info", "collector_errors_total"}


def test_a_failing_metric_costs_only_itself_and_is_logged_once() -> None:
    def broken(_: object) -> float:
        raise ZeroDivisionError

    wrong_labels = Metric("wrong_labels", "Two values for one label.", ("one",), lambda _: [(("a", "b"), 1)])
    table = (of_host("broken", "Broken.", broken), wrong_labels, of_host("fine", "Fine.", lambda _: 1))
    registry = registry_of(snapshots.empty(), table=table)
    with capture_logs() as logs:
        first = series_of(parse_text(generate_latest(registry).decode()))
        second = series_of(parse_text(generate_latest(registry).decode()))
    assert names(first) == {"fine", "exporter_build_info", "collector_errors_total"}
    assert value(first, "collector_errors_total") == 2
    assert value(second, "collector_errors_total") == 4
    assert [log["metric"] for log in logs] == ["roofline_broken", "roofline_wrong_labels"]


def test_a_failing_source_still_answers() -> None:
    def broken() -> Snapshot:
        raise RuntimeError

    registry = CollectorRegistry()
    registry.register(SnapshotCollector(broken, lambda: 0.0, "0.1.0"))
    with capture_logs() as logs:
        series = series_of(parse_text(generate_latest(registry).decode()))
    assert series == {("roofline_collector_errors_total", frozenset()): 1}
    assert len(logs) == 1


def test_every_scrape_shows_the_snapshot_of_the_moment() -> None:
    current = [snapshots.rich(), snapshots.empty()]
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(lambda: current.pop(0), lambda: snapshots.NOW, "0.1.0"))
    assert "server_up" in names(series_of(registry.collect()))
    assert "server_up" not in names(series_of(registry.collect()))


def test_registering_asks_for_no_snapshot_and_knows_every_name() -> None:
    def never() -> Snapshot:
        raise AssertionError("asked for a snapshot")

    collector = SnapshotCollector(never, lambda: 0.0, "0.1.0")
    registry = build_registry(collector)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(collector)
    described = {family.name for family in collector.describe()}
    suffixes = {Kind.GAUGE: "", Kind.COUNTER: "_total", Kind.INFO: "_info"}
    assert {m.full_name.removesuffix(suffixes[m.kind]) for m in TABLE} < described


def test_one_metric_can_be_asked_for_by_name() -> None:
    restricted = registry_of(snapshots.rich()).restricted_registry(["roofline_server_slots"])
    assert names(series_of(restricted.collect())) == {"server_slots"}


def test_the_registry_has_the_process_and_no_created_series() -> None:
    enable_created_metrics()  # type: ignore[no-untyped-call]
    registry = build_registry(SnapshotCollector(snapshots.rich, lambda: snapshots.NOW, "0.1.0"))
    Counter("direct", "A counter that has a time of creation.", registry=registry)
    text = generate_latest(registry).decode()
    assert "direct_total" in text
    assert "process_resident_memory_bytes" in text
    assert "_created" not in text


@pytest.mark.parametrize("build", [snapshots.rich, snapshots.empty, snapshots.unreachable])
def test_both_formats_carry_the_same_values(build: Callable[[], Snapshot]) -> None:
    registry = build_registry(SnapshotCollector(build, lambda: snapshots.NOW, "0.1.0"))
    own = CollectorRegistry()
    own.register(SnapshotCollector(build, lambda: snapshots.NOW, "0.1.0"))
    text = series_of(parse_text(generate_latest(own).decode()))
    parsed = list(by_openmetrics(own))
    assert series_of(parsed) == text
    assert {family.type for family in parsed if family.name.endswith("_info") or family.name == "roofline_model"} <= {
        "info"
    }
    list(by_openmetrics(registry))


@pytest.mark.parametrize("build", [snapshots.rich, snapshots.empty, snapshots.unreachable])
@pytest.mark.real
def test_promtool_has_nothing_to_say(build: Callable[[], Snapshot], promtool: str) -> None:
    registry = build_registry(SnapshotCollector(build, lambda: snapshots.NOW, "0.1.0"))
    run = subprocess.run(
        [promtool, "check", "metrics"], input=generate_latest(registry), capture_output=True, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")


def test_help_states_the_unit_and_where_a_value_is_cached() -> None:
    words = {
        "_bytes_per_second": "bytes/s",
        "_flops_per_second": "FLOP/s",
        "_tokens_per_second": "tokens/s",
        "_flops_per_byte": "FLOP/byte",
        "_ratio": "ratio",
        "_seconds": "seconds",
    }
    for metric in TABLE:
        for suffix, unit in words.items():
            if metric.name.endswith(suffix):
                assert unit in metric.help, metric.name
                break
        if "ratio" in metric.name and "ceiling" in metric.labels:
            assert metric.help.startswith(("Per step", "Per token")), metric.name
        if metric.name.startswith("decode_") and metric.name != "decode_floor_ratio_threshold":
            assert "Cached; see roofline_probe_last_success_timestamp_seconds." in metric.help, metric.name
        if metric.labels[:1] == ("kernel",) and metric.name.endswith(("_bytes_per_second", "_info")):
            assert "variant of STREAM" in metric.help, metric.name


def test_names_are_unique_and_no_label_belongs_to_the_operator() -> None:
    assert len({m.name for m in TABLE}) == len(TABLE)
    reserved = {"endpoint", "instance", "job", "pod", "namespace", "container", "cluster", "service", "env", "type"}
    assert not reserved & {label for m in TABLE for label in m.labels}


@given(
    st.text(min_size=1).filter(lambda s: s.isprintable() or "\n" in s),
    st.sampled_from(['"', "\\", "\n", "{}", "a,b=c"]),
)
def test_any_model_name_survives_both_formats(name: str, nasty: str) -> None:
    model = replace(snapshots.MODEL, name=name + nasty, quantization=nasty)
    registry = registry_of(Snapshot(snapshots.host(), (snapshots.cpu_server(model=model),)))
    for parsed in (
        parse_text(generate_latest(registry).decode()),
        by_openmetrics(registry),
    ):
        (labels,) = [s.labels for family in parsed for s in family.samples if s.name == "roofline_model_info"]
        assert (labels["model"], labels["quantization"]) == (name + nasty, nasty)


@given(
    st.integers(1, 64),
    st.floats(1e-5, 10, allow_nan=False),
    st.floats(0, 1e6),
    st.sampled_from([None, snapshots.MODEL]),
    st.booleans(),
)
def test_no_sample_makes_a_scrape_fail(
    batch: int,
    step_seconds: float,
    depth: float,
    model: object,
    has_host: bool,  # noqa: FBT001
) -> None:
    sample = replace(snapshots.sample(batch, step_seconds), depth=depth)
    server = replace(
        snapshots.cpu_server(), batches={batch: BatchRecord(sample=sample)}, model=snapshots.MODEL if model else None
    )
    host = snapshots.host() if has_host else snapshots.empty().host
    series = scrape(Snapshot(host, (server,)))
    assert value(series, "collector_errors_total") == 0
    assert value(series, "decode_step_seconds", server="local", batch=str(batch)) == step_seconds
    assert all(math.isfinite(v) for v in series.values())
    seen = view(Snapshot(host, (server,)), snapshots.NOW).servers[0].points[batch]
    assert ("decode_floor_ratio" in names(series)) == (seen.floor_ratio is not None)
