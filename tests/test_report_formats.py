"""The report and the ceilings as JSON and as tables of any width; every snapshot in every format."""

import csv
import json
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO

import pytest
import snapshots
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from snapshots import one_batch, seen

from exporter.cli import main
from exporter.present.metric_table import DECODE
from exporter.present.report import (
    Format,
    bandwidth_json,
    bandwidth_text,
    report_renderable,
    report_text,
    snapshot_json,
)
from exporter.roofline.ceiling import BandwidthTrack
from exporter.roofline.snapshot import Snapshot, View, view


def csv_rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(text)))


# --- JSON ----------------------------------------------------------------------------------------------------------


def test_the_snapshot_has_the_promised_shape() -> None:
    document = json.loads(report_text(snapshots.rich_view(), Format.JSON))
    assert set(document) == {"host", "servers"}
    assert document["host"]["cpu_model"] == "Example CPU 9000"
    assert len(document["host"]["memory_bandwidth"]) == 4
    assert document["host"]["problem"] is None
    local, workstation = document["servers"]
    assert (local["server"], local["state"], local["server_slots"]) == ("local", "ready", 4)
    assert local["model"] == {
        "model": "tiny-1b-q4_k_m.gguf",
        "quantization": "Q4_K - Medium",
        "build": "b11434-abc",
        "bytes_source": "file",
        "parameters": 1_100_000_000,
        "weight_bytes": 700_000_000,
        "file_mismatch": 0,
        "kv_bytes_per_token": 20_000,
    }
    assert local["ceilings"] == [
        {"ceiling": "triad", "bytes_per_second": 40e9, "reference": False},
        {"ceiling": "read", "bytes_per_second": 50e9, "reference": True},
    ]
    assert [b["batch"] for b in local["batches"]] == [1, 2, 4]
    first = local["batches"][0]
    assert first["decode_ceiling_ratio"] == pytest.approx({"triad": 0.7525, "read": 0.602})
    assert first["decode_budget_seconds"]["output_head"] == pytest.approx(0.002)
    assert first["reason"] is None
    missing = workstation["batches"][1]
    assert (missing["batch"], missing["reason"], missing["probe_success"]) == (2, "too_few_slots", 0)
    assert not [key for key in missing if key.startswith("decode_")]


def test_a_measured_batch_has_every_decode_metric_under_its_own_name() -> None:
    batch = snapshot_json(seen(snapshots.cpu_server()))["servers"][0]["batches"][2]  # type: ignore[index,call-overload]
    drafting_only = {"decode_speculative_tokens_per_step"}
    assert {m.name for m in DECODE} - drafting_only <= set(batch)  # type: ignore[arg-type]


def test_bandwidth_has_the_promised_shape() -> None:
    document = json.loads(bandwidth_text(snapshots.rich_view(), Format.JSON))
    assert set(document) == {"measurements", "compute", "host"}
    assert document["measurements"][0] == {
        "kernel": "triad",
        "threads": "all",
        "best_bytes_per_second": 40e9,
        "median_bytes_per_second": pytest.approx(40e9 / 1.02),
        "spread_ratio": 0.02,
        "thread_count": 8,
        "store": "nt",
        "isa": "avx2",
        "pages": "thp",
        "method": "stream",
        "scope": "process",
        "array_bytes": 268435456,
        "passes": 20,
        "flags": [],
    }
    assert document["compute"][0]["precision"] == "fp32"
    assert document["compute"][0]["flops_per_second"] == 400e9


def test_the_bandwidth_table_fits_80_columns() -> None:
    text = bandwidth_text(snapshots.rich_view(), Format.TABLE)
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"^read +single 1 +15\.0 +14\.7 +2\.00 +268 +avx2 nt +thp +stream$", text, re.MULTILINE)
    assert csv_rows(bandwidth_text(snapshots.rich_view(), Format.CSV))[1]["best GB/s"] == "50.0"
    assert "| read | all 8 | 50.0 | 49.0 | 2.00 | 268 | avx2 nt | thp | stream |" in bandwidth_text(
        snapshots.rich_view(), Format.MARKDOWN
    )


def flagged(*flags: str, isa: str = "avx512", store: str = "plain", method: str = "evict") -> View:
    """The host's ceilings, each with these words."""
    found = snapshots.host()
    tracks = {
        key: BandwidthTrack(tuple(replace(b, flags=flags, isa=isa, store=store, method=method) for b in track.samples))
        for key, track in found.tracks.items()
    }
    return view(Snapshot(replace(found, tracks=tracks)), snapshots.NOW)


@pytest.mark.parametrize("width", range(60, 121))
def test_no_width_cuts_a_ceilings_figures_or_flags(width: int) -> None:
    flags = ("unpinned", "cache_assumed", "quota", "contended", "few_threads")
    text = bandwidth_text(flagged(*flags), Format.TABLE, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    words = text.split()
    for word in ("evict", "avx512", "plain", *flags, "40.0", "39.2", "2.00", "268"):
        assert words.count(word) >= (4 if word not in {"40.0", "39.2"} else 1), word


@pytest.mark.parametrize("width", range(40, 121))
def test_no_width_cuts_a_figure_of_the_report(width: int) -> None:
    text = report_text(snapshots.rich_view(), Format.TABLE, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for figure in ("13.2", "125", "32.0", "250", "75.0", "188", "150", "19.0", "47.5", "38.0", "0.380", "0.0400"):
        assert re.search(rf"(^| ){re.escape(figure)}( |$)", text, re.MULTILINE), figure
    assert ("░" in text) == (width >= 56), "bars where there is room, the fewest figures at 56"


def test_ceilings_stand_in_one_order_whenever_they_were_measured() -> None:
    """A run may find `read` at last, after the others."""
    found = snapshots.host()
    late = replace(found, tracks=dict(reversed(list(found.tracks.items()))))
    seen_late, expected = (
        view(Snapshot(late), snapshots.NOW),
        [
            ("triad", "all"),
            ("read", "all"),
            ("triad", "single"),
            ("read", "single"),
        ],
    )
    assert [(b.kernel, b.threads) for b in seen_late.in_force] != expected
    for document in (bandwidth_json(seen_late), {"measurements": snapshot_json(seen_late)["host"]["memory_bandwidth"]}):  # type: ignore[index,call-overload]
        assert [(m["kernel"], m["threads"]) for m in document["measurements"]] == expected  # type: ignore[index,union-attr,call-overload]
    table = re.findall(r"^(\w+) +(all|single) ", bandwidth_text(seen_late, Format.TABLE), re.MULTILINE)
    assert table == expected
    assert [row["kernel"] for row in csv_rows(bandwidth_text(seen_late, Format.CSV))] == ["triad", "read"] * 2
    lines = report_text(seen_late, Format.TABLE, 200)
    assert "all threads: triad 40.0 GB/s, read 50.0 GB/s" in lines


def test_a_pipe_gets_a_wide_table(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(*_: object, **__: object) -> View:
        return snapshots.rich_view()

    monkeypatch.setattr("exporter.service.once.measure_once", measured)
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = r"^ +4 +13\.2 +125 +32\.0 +250 +75\.0 +188 +150 +19\.0 +47\.5 +38\.0 +0\.380$"
    assert re.search(whole, CliRunner().invoke(main, ["report"]).stdout.replace(" \n", "\n"), re.MULTILINE)
    narrow = CliRunner().invoke(main, ["report"], env={"COLUMNS": "80"}).stdout
    assert not re.search(whole, narrow, re.MULTILINE)
    assert max(map(len, narrow.splitlines())) <= 80


# --- anything goes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [snapshots.rich, snapshots.empty, snapshots.unreachable])
@pytest.mark.parametrize("format_", list(Format))
def test_every_snapshot_prints_in_every_format(build: Callable[[], Snapshot], format_: Format) -> None:
    for text in (
        report_text(view(build(), snapshots.NOW), format_),
        bandwidth_text(view(build(), snapshots.NOW), format_),
    ):
        assert text.endswith("\n")
        assert not text.endswith("\n\n")
        assert "None" not in text
        assert "nan" not in text


@given(st.integers(1, 64), st.floats(1e-5, 100), st.booleans(), st.booleans(), st.integers(60, 200))
def test_any_measured_batch_prints_at_any_width(
    batch: int,
    step_seconds: float,
    has_model: bool,  # noqa: FBT001
    has_host: bool,  # noqa: FBT001
    width: int,
) -> None:
    server = replace(one_batch(step_seconds, 0.5, batch), model=snapshots.MODEL if has_model else None)
    shown = seen(server, host=has_host)
    for format_ in Format:
        assert report_text(shown, format_, width)
    assert (
        json.loads(report_text(shown, Format.JSON))["servers"][0]["batches"][0]["decode_step_seconds"] == step_seconds
    )
    assert max(map(len, report_text(shown, Format.TABLE, width).splitlines())) <= width


def test_the_renderable_prints_with_colours_on_a_terminal() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=100, color_system="truecolor")
    with console.capture() as capture:
        console.print(report_renderable(snapshots.rich_view()))
    assert "\x1b[31m" in capture.get(), "a batch below its threshold is red"
