"""Two published roofline tables, reproduced by the package's arithmetic and by its reports."""

import csv
import json
from dataclasses import replace
from io import StringIO

import pytest
import snapshots
import verify

from exporter.present.report import Format, report_text
from exporter.roofline.ceiling import (
    BandwidthTrack,
    CeilingSource,
    Device,
    Kernel,
    Roof,
    RoofPolicy,
    ThreadScope,
)
from exporter.roofline.decode import DecodePoint, DecodeSample, place
from exporter.roofline.footprint import Attention, BytesSource, Footprint, Part
from exporter.roofline.snapshot import BatchRecord, Host, Snapshot, View, view

# Table A prints neither parameters nor bytes: they are inferred from its intensity and GB/s columns.
A1 = Footprint(1.5437e9, 0.9895e9, BytesSource.CONFIGURED)
A2 = Footprint(0.49e9, 0.4914e9, BytesSource.CONFIGURED)
TABLE_A_ROOF = RoofPolicy(reference=CeilingSource.TRIAD).roof({Kernel.TRIAD: 221e9}, 2000e9)

# model, intensity, batch, tokens/s of all streams, GFLOP/s, per-token read GB/s, per-token read % of triad
TABLE_A = [
    (A1, 3.12, 1, 151, 466, 149, 67),
    (A1, 3.12, 2, 143, 442, 141, 64),
    (A1, 3.12, 4, 207, 639, 205, 92),
    (A2, 1.99, 1, 245, 240, 120, 54),
    (A2, 1.99, 2, 403, 395, 198, 90),
    (A2, 1.99, 4, 554, 542, 272, 123),
]


def sample(batch: int, tokens_per_second: float, depth: float = 0.0) -> DecodeSample:
    return DecodeSample(batch, batch / tokens_per_second, 0.0, 100, depth, contended=False, measured_at=0.0)


def printed(value: float | None, digits: int = 0) -> float:
    """The value in units of the last printed digit, so that `within one unit` is a difference of 1."""
    assert value is not None
    return value * 10.0**digits


@pytest.mark.parametrize(("model", "intensity", "batch", "tokens", "gflops", "gbytes", "percent"), TABLE_A)
def test_table_a(  # noqa: PLR0917
    model: Footprint, intensity: float, batch: int, tokens: float, gflops: float, gbytes: float, percent: float
) -> None:
    """Every printed figure is met within one unit of its last digit."""
    point = place(sample(batch, tokens), model, TABLE_A_ROOF)
    assert printed(model.step(1).intensity_flops_per_byte, 2) == pytest.approx(intensity * 100, abs=1)
    assert printed((point.flops_per_second or 0) / 1e9) == pytest.approx(gflops, abs=1)
    assert printed((point.token_read_bytes_per_second or 0) / 1e9) == pytest.approx(gbytes, abs=1)
    assert printed(point.token_read_ratio[CeilingSource.TRIAD] * 100) == pytest.approx(percent, abs=1)


def test_table_a_ridge() -> None:
    assert printed(TABLE_A_ROOF.ridge_flops_per_byte, 1) == pytest.approx(90, abs=1)


def test_table_a_step_accounting_is_physical() -> None:
    """A2 reads 123 % of triad by per-token accounting at batch 4, and a quarter of that in fact."""
    point = place(sample(4, 554), A2, TABLE_A_ROOF)
    assert point.ceiling_ratio[CeilingSource.TRIAD] == pytest.approx(1.23 / 4, abs=0.005)
    assert not point.implausible


def test_table_a_step_intensity_crosses_the_ridge_at_batch_4() -> None:
    point = place(sample(4, 207), A1, TABLE_A_ROOF)
    assert printed(point.intensity_flops_per_byte, 1) == pytest.approx(125, abs=1)
    assert (point.intensity_flops_per_byte or 0) > (TABLE_A_ROOF.ridge_flops_per_byte or 0)


TABLE_B_ROOF = RoofPolicy(device=Device.GPU, peak_bytes_per_second=640e9, sustained_fraction=0.8).roof({}, None)


def table_b(kv_bytes_per_token: float | None = None, depth: float = 0.0, roof: Roof = TABLE_B_ROOF) -> DecodePoint:
    attention = None if kv_bytes_per_token is None else (Attention(kv_bytes_per_token, 0.0),)
    model = Footprint(8e9, 5.5e9, BytesSource.CONFIGURED, attention=attention)
    return place(sample(1, 39.6, depth), model, roof)


def test_table_b() -> None:
    point = table_b()
    step_bytes = point.step_bytes or 0.0
    assert printed(step_bytes / TABLE_B_ROOF.ceilings[CeilingSource.PEAK] * 1e3, 1) == pytest.approx(86, abs=1)
    assert printed(point.attainable_tokens_per_second[CeilingSource.PEAK]) == pytest.approx(116, abs=1)
    assert printed((point.floor_seconds or 0) * 1e3, 1) == pytest.approx(107, abs=1)
    assert printed(point.attainable_tokens_per_second[CeilingSource.SUSTAINED]) == pytest.approx(93, abs=1)
    assert printed(point.sample.step_seconds * 1e3, 1) == pytest.approx(252, abs=1)
    assert printed(point.ceiling_ratio[CeilingSource.PEAK] * 100) == pytest.approx(34, abs=1)
    assert printed((point.floor_ratio or 0) * 100) == pytest.approx(43, abs=1)
    assert printed(point.budget_seconds[Part.OVERHEAD] * 1e3, 1) == pytest.approx(145, abs=1)


def test_table_b_kv_cache() -> None:
    """0.6 ms of the 14.5 ms that are not weight streaming read the KV cache."""
    kv_bytes = 0.6e-3 * 512e9
    budget = table_b(kv_bytes_per_token=kv_bytes / 4096, depth=4096).budget_seconds
    assert printed(budget[Part.KV_CACHE] * 1e3, 1) == pytest.approx(6, abs=1)
    assert printed((budget[Part.KV_CACHE] + budget[Part.OVERHEAD]) * 1e3, 1) == pytest.approx(145, abs=1)


def test_table_b_has_no_ridge_without_a_compute_peak() -> None:
    assert TABLE_B_ROOF.ridge_flops_per_byte is None


# --- the whole path: recorded inputs -> snapshot -> report -----------------------------------------------------------


def recorded(
    policy: RoofPolicy, models: dict[str, tuple[Footprint, dict[int, float]]], kernels: dict[str, float]
) -> View:
    """The view of a snapshot in which each model decodes at these tokens/s by batch."""
    tracks = {
        (Kernel.TRIAD, ThreadScope(threads)): BandwidthTrack(
            (snapshots.bandwidth(Kernel.TRIAD, rate, ThreadScope(threads)),)
        )
        for threads, rate in kernels.items()
    }
    servers = []
    for name, (footprint, rates) in models.items():
        batches = {
            b: BatchRecord(sample=replace(sample(b, rate), measured_at=snapshots.NOW)) for b, rate in rates.items()
        }
        model = replace(snapshots.MODEL, footprint=footprint)
        servers.append(replace(snapshots.cpu_server(name, model), policy=policy, batches=batches))
    return view(Snapshot(Host(snapshots.INFO, tracks), tuple(servers)), snapshots.NOW)


def table_a_view() -> View:
    policy = RoofPolicy(reference=CeilingSource.TRIAD, compute_flops_per_second=2000e9)
    models = {"a1": (A1, {1: 151.0, 2: 143.0, 4: 207.0}), "a2": (A2, {1: 245.0, 2: 403.0, 4: 554.0})}
    return recorded(policy, models, {"all": 221, "single": 124})


def test_table_a_as_reported() -> None:
    """The columns of the printed table, in CSV and in JSON, within one unit of the last printed digit."""
    seen = table_a_view()
    rows = list(csv.DictReader(StringIO(report_text(seen, Format.CSV))))
    assert len(rows) == len(TABLE_A)
    for row, (_, intensity, batch, tokens, gflops, gbytes, percent) in zip(rows, TABLE_A, strict=True):
        assert int(row["batch"]) == batch
        assert float(row["tokens/s"]) == pytest.approx(tokens, abs=1)
        assert float(row["GFLOP/s"]) == pytest.approx(gflops, abs=1)
        assert float(row["per-token read GB/s"]) == pytest.approx(gbytes, abs=1)
        assert float(row["per-token % of triad"]) == pytest.approx(percent, abs=1)
        # The printed intensity is one token's; the report's is the step's own.
        assert float(row["intensity FLOP/byte"]) / batch == pytest.approx(intensity, abs=0.01)
    a1, a2 = json.loads(report_text(seen, Format.JSON))["servers"]
    assert a1["ridge_flops_per_byte"] == pytest.approx(9.0, abs=0.1)
    assert a1["batches"][2]["decode_flops_per_second"] == pytest.approx(639e9, abs=1e9)
    assert a2["batches"][2]["decode_token_read_ratio"]["triad"] == pytest.approx(1.23, abs=0.01)
    assert a1["verdict"]["evidence"]["ridge_crossed_at_batch"] == 4
    assert a1["batches"][2]["decode_intensity_flops_per_byte"] == pytest.approx(12.5, abs=0.1)


def test_table_a_as_told() -> None:
    text = report_text(table_a_view(), Format.TABLE, 1000)
    assert "Memory bandwidth, all threads: triad 221 GB/s" in text
    assert "Memory bandwidth, one thread: triad 124 GB/s" in text
    assert "At batch 4 the step's own intensity crosses the ridge, 12.5 > 9.05 FLOP/byte." in text
    a1, a2 = text[text.index("\na1\n") : text.index("\na2\n")], text[text.index("\na2\n") :]
    assert (
        "Bandwidth-bound, for reading the memory fills most of the step: batch 1's floor ratio is 0.676 of triad" in a1
    )
    # A2 reads 54 % of triad, and each stream more costs 0.256 of a step: neither bandwidth nor compute nor overhead.
    assert "What holds decode back is not known: batch 1's floor ratio is 0.545 of triad" in a2
    assert "batch 4 has 1.37 x the tokens/s of batch 1" in a1
    assert "crosses" not in a2


def table_b_view() -> View:
    policy = RoofPolicy(device=Device.GPU, peak_bytes_per_second=640e9, sustained_fraction=0.8)
    return recorded(policy, {"b": (Footprint(8e9, 5.5e9, BytesSource.CONFIGURED), {1: 39.6})}, {})


def test_table_b_as_reported() -> None:
    seen = table_b_view()
    (row,) = csv.DictReader(StringIO(report_text(seen, Format.CSV)))
    assert float(row["step ms"]) == pytest.approx(25.2, abs=0.1)
    assert float(row["per-step % of peak"]) == pytest.approx(34, abs=1)
    assert float(row["per-step % of sustained"]) == pytest.approx(43, abs=1)
    assert float(row["floor ratio"]) == pytest.approx(0.43, abs=0.01)
    assert row["reference"] == "sustained"
    (server,) = json.loads(report_text(seen, Format.JSON))["servers"]
    (batch,) = server["batches"]
    assert {c["ceiling"]: c["bytes_per_second"] for c in server["ceilings"]} == {"peak": 640e9, "sustained": 512e9}
    assert batch["model_step_bytes"] / 640e9 * 1e3 == pytest.approx(8.6, abs=0.1)
    assert batch["decode_attainable_tokens_per_second"]["peak"] == pytest.approx(116, abs=1)
    assert batch["decode_floor_seconds"] * 1e3 == pytest.approx(10.7, abs=0.1)
    assert batch["decode_attainable_tokens_per_second"]["sustained"] == pytest.approx(93, abs=1)
    assert batch["decode_budget_seconds"]["overhead"] * 1e3 == pytest.approx(14.5, abs=0.1)
    assert server["verdict"]["bound"] == "unknown", "one batch below the threshold tells no more"
    assert [(p["prediction"], p["holds"]) for p in server["verdict"]["predictions"]] == [
        ("single_stream_above_40_percent", True)
    ]


@pytest.mark.parametrize("seen", [table_a_view(), table_b_view()], ids=["A", "B"])
def test_the_tables_reports_verify(seen: View) -> None:
    checked, wrong = verify.verify(json.loads(report_text(seen, Format.JSON)))
    assert wrong == []
    assert checked > 20
