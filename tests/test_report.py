"""What `report` and `bandwidth` print, and the exit code: golden figures, every format, and awkward servers."""

import csv
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from io import StringIO

import pytest
import snapshots
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from exporter.cli import main
from exporter.present.metric_table import DECODE
from exporter.present.report import (
    Format,
    bandwidth_json,
    bandwidth_text,
    report_exit_code,
    report_renderable,
    report_text,
    snapshot_json,
)
from exporter.present.study import budgeted, suggested_floor_fractions
from exporter.present.words import REASONS, STATES, age, binary_size, si, three_digits
from exporter.roofline.ceiling import BandwidthTrack, Kernel, ThreadScope
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import BatchRecord, Server, ServerState, Snapshot, View, view


def seen(*servers: Server, host: bool = True) -> View:
    return view(Snapshot(snapshots.host() if host else snapshots.empty().host, servers), snapshots.NOW)


def one_batch(step_seconds: float, threshold: float | None, batch: int = 1) -> Server:
    return replace(snapshots.cpu_server(), batches={batch: snapshots.record(batch, step_seconds, threshold=threshold)})


def csv_rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(text)))


# --- the study table ---------------------------------------------------------------------------------------------


def test_the_csv_has_the_figures_that_arithmetic_gives() -> None:
    rows = csv_rows(report_text(snapshots.rich_view(), Format.CSV))
    assert [(row["server"], row["batch"]) for row in rows] == [
        (server, batch) for server in ("local", "workstation") for batch in ("1", "2", "4")
    ]
    assert rows[2] == {
        "server": "local",
        "batch": "4",
        "intensity FLOP/byte": "13.1579",
        "tokens/s": "125.0",
        "step ms": "32.0",
        "GFLOP/s": "250.0",
        "per-token read GB/s": "75.0",
        "per-token % of triad": "187.5",
        "per-token % of read": "150.0",
        "per-token % of peak": "",
        "per-token % of sustained": "",
        "per-step read GB/s": "19.0",
        "per-step % of triad": "47.5",
        "per-step % of read": "38.0",
        "per-step % of peak": "",
        "per-step % of sustained": "",
        "floor ratio": "0.38",
        "reference": "read",
        "reason": "",
    }
    assert rows[4]["reason"] == "too_few_slots"
    assert rows[4]["tokens/s"] == ""


def test_the_table_fits_80_columns_and_loses_no_column_to_it() -> None:
    text = report_text(snapshots.rich_view(), Format.TABLE)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert re.search(r"^ +4 +13\.2 +125 +32\.0 +250 +0\.380$", text, re.MULTILINE)
    assert re.search(r"^ +4 +75\.0 +188 +150 +19\.0 +47\.5 +38\.0$", text, re.MULTILINE)


def test_a_wide_terminal_gets_one_table() -> None:
    text = report_text(snapshots.rich_view(), Format.TABLE, width=140)
    assert re.search(r"^ +4 +13\.2 +125 +32\.0 +250 +75\.0 +188 +150 +19\.0 +47\.5 +38\.0 +0\.380$", text, re.MULTILINE)


def test_every_percentage_says_which_accounting_and_which_ceiling() -> None:
    header = report_text(snapshots.rich_view(), Format.CSV).splitlines()[0].split(",")
    percentages = [head for head in header if "%" in head]
    assert len(percentages) == 8
    assert all(re.fullmatch(r"per-(token|step) % of (triad|read|peak|sustained)", head) for head in percentages)


def test_markdown_names_the_server_only_if_there_are_several() -> None:
    assert "| server | batch |" in report_text(snapshots.rich_view(), Format.MARKDOWN)
    alone = report_text(seen(snapshots.cpu_server()), Format.MARKDOWN)
    assert "| batch | intensity FLOP/byte | tokens/s |" in alone
    assert "| floor ratio of read |" in alone
    assert "| 4 | 13.2 | 125 | 32.0 | 250 | 75.0 | 188 | 150 | 19.0 | 47.5 | 38.0 | 0.380 |" in alone


def test_markdown_rows_all_have_the_columns_of_the_head() -> None:
    nasty = replace(snapshots.MODEL, name="a|b\nc", quantization="`x`")
    text = report_text(seen(snapshots.cpu_server(model=nasty), snapshots.gpu_server()), Format.MARKDOWN)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) == 2
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    assert r"Model a\|b c: \`x\`" in text


def test_the_budget_is_told_in_milliseconds_and_drawn_to_scale() -> None:
    text = report_text(seen(snapshots.cpu_server()), Format.TABLE)
    drawn = re.findall(r"^ +\d +(\S+) +10\.0 +2\.00 +\S+ +(\S+) +([█▓▒░]+)$", text, re.MULTILINE)
    assert [(step, overhead) for step, overhead, _ in drawn] == [("20.0", "7.96"), ("25.0", "12.9"), ("32.0", "19.8")]
    assert [len(bar) for _, _, bar in drawn] == [15, 19, 24]


# --- words -------------------------------------------------------------------------------------------------------


def test_every_reason_and_state_has_a_sentence_of_its_own() -> None:
    assert set(REASONS) == set(Reason)
    assert set(STATES) == set(ServerState)
    sentences = [*REASONS.values(), *STATES.values()]
    assert len(set(sentences)) == len(sentences)
    for sentence in REASONS.values():
        what, remedy = sentence.split("; ")
        assert what
        assert remedy


def test_a_run_without_a_read_ceiling_says_which_one_is_in_force() -> None:
    failed = replace(snapshots.host(), problem=Reason.CACHE_SUSPECT)
    text = report_text(view(Snapshot(failed), snapshots.NOW), Format.TABLE, 300)
    assert f"gave no read ceiling: {REASONS[Reason.CACHE_SUSPECT]}." in text
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(failed.last_success_timestamp))
    assert f"The read ceiling in force is an earlier one; it was last measured {when} UTC." in text
    others = {key: track for key, track in failed.tracks.items() if key != (Kernel.READ, ThreadScope.ALL)}
    assert others
    text = report_text(view(Snapshot(replace(failed, tracks=others)), snapshots.NOW), Format.TABLE, 300)
    assert "gave no read ceiling" in text
    assert "in force" not in text


def test_batches_without_a_sample_say_why_in_words() -> None:
    text = report_text(snapshots.rich_view(), Format.TABLE, width=200)
    assert f"Batch 2, 4: {REASONS[Reason.TOO_FEW_SLOTS]}." in text
    assert "--parallel 4" in REASONS[Reason.TOO_FEW_SLOTS]


def test_remarks_tell_contention_staleness_implausibility_and_old_samples() -> None:
    old = replace(snapshots.sample(4, 0.03), measured_at=0.0)
    server = replace(
        snapshots.cpu_server(),
        batches={
            1: BatchRecord(sample=snapshots.sample(1, 0.001)),
            2: replace(snapshots.record(2, 0.025, contended=True), reason=Reason.BUSY),
            4: BatchRecord(sample=old, last_success_timestamp=1.0),
            8: BatchRecord(),
        },
    )
    text = report_text(seen(server), Format.TABLE, width=250)
    assert "Batch 1: implausible" in text
    assert "Batch 2: contended" in text
    assert f"Batch 2: an earlier sample is shown; since then {REASONS[Reason.BUSY]}." in text
    assert "Batch 4: its last sample is too old to be shown." in text
    assert "Batch 8: not probed yet." in text


@pytest.mark.parametrize("problem", [Reason.NO_MEMORY, Reason.PREEMPTED])
def test_a_host_that_could_not_be_measured_says_why(problem: Reason) -> None:
    seen_host = view(Snapshot(replace(snapshots.empty().host, problem=problem)), snapshots.NOW)
    for text in (report_text(seen_host, Format.TABLE, 200), bandwidth_text(seen_host, Format.TABLE, 200)):
        assert REASONS[problem] in text
    assert snapshot_json(seen_host)["host"] == bandwidth_json(seen_host)["host"] | snapshot_json(seen_host)["host"]  # type: ignore[operator]
    assert json.loads(bandwidth_text(seen_host, Format.JSON))["host"]["problem"] == problem


def test_a_state_tells_its_reason_and_otherwise_what_it_means() -> None:
    assert f"Unreachable: {REASONS[Reason.UNREACHABLE]}." in report_text(
        view(snapshots.unreachable(), snapshots.NOW), Format.TABLE, 200
    )
    assert f"Ready, 4 slots: {STATES[ServerState.READY]}." in report_text(snapshots.rich_view(), Format.TABLE, 200)


def test_square_brackets_in_a_name_are_not_markup() -> None:
    model = replace(snapshots.MODEL, name="[bold]x[/bold][link")
    assert "[bold]x[/bold][link" in report_text(seen(snapshots.cpu_server(model=model)), Format.TABLE, 200)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0"),
        (1234, "1230"),
        (99.96, "100"),
        (9.996, "10.0"),
        (0.012345, "0.0123"),
        (-2.5, "-2.50"),
        (1e12, "1000000000000"),
    ],
)
def test_numbers_have_three_significant_digits(number: float, expected: str) -> None:
    assert three_digits(number) == expected


@given(st.floats(1e-9, 1e15))
def test_a_shown_number_is_within_half_a_percent(number: float) -> None:
    assert float(three_digits(number)) == pytest.approx(number, rel=0.00501)
    assert "e" not in three_digits(number)


def test_sizes_and_ages_read_as_people_write_them() -> None:
    assert [binary_size(n) for n in (512, 2048, 32 * 2**20, 3 * 2**29)] == ["512 B", "2 KiB", "32 MiB", "1.50 GiB"]
    assert [si(n, "B/s") for n in (5, 1.5e3, 40e9, 1.2e13)] == ["5.00 B/s", "1.50 kB/s", "40.0 GB/s", "12.0 TB/s"]
    assert si(1.1e9, "") == "1.10 G"
    assert [age(n) for n in (-3, 45, 119, 120, 7200, 200_000)] == ["0 s", "45 s", "119 s", "2 min", "2 h", "2 d"]


@pytest.mark.parametrize(("step_seconds", "faster"), [(0.0117, True), (0.0125, False)])
def test_a_step_faster_than_the_reference_says_what_its_budget_is(step_seconds: float, faster: bool) -> None:  # noqa: FBT001
    """Its bytes take 12.04 ms at the reference."""
    text = report_text(seen(one_batch(step_seconds, None)), Format.TABLE, 200)
    said = (
        "Batch 1: faster than the reference: its budget has no overhead, and the parts share the step by their bytes."
    )
    assert (said in text) == faster
    overhead = re.search(r"^ +1 +\S+ +\S+ +\S+ +\S+ +(\S+) +█", text, re.MULTILINE)
    assert overhead is not None
    assert (float(overhead[1]) == 0) == faster


def test_a_step_without_a_budget_has_no_row_in_it() -> None:
    """Batch 1 is implausible."""
    batches = {1: snapshots.record(1, 0.008), 2: snapshots.record(2, 0.025)}
    shown = seen(replace(snapshots.cpu_server(), batches=batches))
    assert [row.batch for row, _ in budgeted(shown.servers)] == [2]
    markdown = report_text(shown, Format.MARKDOWN).split("Where the time of a step goes:")[1]
    assert re.findall(r"^\| (\d) ", markdown, re.MULTILINE) == ["2"]


def test_an_implausible_sample_says_what_is_withheld() -> None:
    text = report_text(seen(one_batch(0.008, None)), Format.TABLE, 200)
    assert "; floor, ratios and budget are withheld." in text
    batch = snapshot_json(seen(one_batch(0.008, None)))["servers"][0]["batches"][0]  # type: ignore[index,call-overload]
    withheld = {m.name for m in DECODE if "Absent for an implausible sample." in m.help}
    assert len(withheld) == 6
    plausible = snapshot_json(seen(one_batch(0.02, None)))["servers"][0]["batches"][0]  # type: ignore[index,call-overload]
    assert set(plausible) - set(batch) == withheld  # type: ignore[arg-type]


# --- suggestion and exit code --------------------------------------------------------------------------------------


def test_the_suggestion_is_four_fifths_rounded_down() -> None:
    server = seen(snapshots.cpu_server()).servers[0]
    assert suggested_floor_fractions(server) == {1: 0.48, 4: 0.3}
    text = report_text(seen(snapshots.cpu_server()), Format.TABLE)
    assert "Suggested floor_fraction (0.8 x measured): {1: 0.48, 4: 0.3}" in text


def test_a_disturbed_sample_suggests_nothing() -> None:
    text = report_text(seen(snapshots.cpu_server()), Format.TABLE)
    assert "No suggestion: batch 2 was disturbed; run report on a quiet machine." in text
    uneven = BatchRecord(sample=replace(snapshots.sample(1, 0.02), step_spread_ratio=0.26))
    batches = {1: uneven, 2: snapshots.record(2, 0.025, contended=True)}
    text = report_text(seen(replace(snapshots.cpu_server(), batches=batches)), Format.TABLE)
    assert "Suggested" not in text
    assert "No suggestion: batches 1, 2 were disturbed; run report on a quiet machine." in text


def test_a_sample_that_cannot_be_typical_suggests_nothing() -> None:
    batches = {b: BatchRecord(sample=snapshots.sample(b, t)) for b, t in {1: 0.020, 2: 0.021, 4: 0.018}.items()}
    shown = seen(replace(snapshots.cpu_server(), batches=batches))
    assert suggested_floor_fractions(shown.servers[0]) == {2: 0.46}
    assert "No suggestion: batches 1, 4 were disturbed" in report_text(shown, Format.TABLE)


def test_a_suggestion_that_would_hide_a_finding_says_so() -> None:
    text = report_text(seen(snapshots.cpu_server()), Format.TABLE)
    assert text.count("would accept the present state") == 1
    assert "Batch 4 is below its threshold: 0.3 would accept the present state." in text
    quiet = report_text(seen(one_batch(0.02, 0.5)), Format.TABLE)
    assert "Suggested" in quiet
    assert "No suggestion" not in quiet
    assert "accept" not in quiet


@given(st.floats(1e-3, 1e3))
def test_a_suggestion_would_be_met_by_what_was_measured(step_seconds: float) -> None:
    server = seen(one_batch(step_seconds, None)).servers[0]
    for batch, fraction in suggested_floor_fractions(server).items():
        ratio = server.points[batch].floor_ratio
        assert ratio is not None
        assert 0 < fraction <= 0.8 * ratio + 1e-9
        assert fraction > 0.8 * ratio - 0.01 - 1e-9


def test_exact_four_fifths_are_not_rounded_below_themselves() -> None:
    # 602 MB in 17.2 ms is 35 GB/s, 0.7 of 50.
    assert suggested_floor_fractions(seen(one_batch(0.0172, None)).servers[0]) == {1: 0.56}


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        ([one_batch(0.02, 0.602)], 0),
        ([one_batch(0.02, 0.603)], 1),
        ([one_batch(0.02, None)], 0),
        ([snapshots.cpu_server(), snapshots.gpu_server()], 1),
        ([snapshots.gpu_server()], 0),
        ([], 3),
        ([replace(snapshots.cpu_server(), batches={1: BatchRecord()})], 3),
        ([replace(one_batch(0.02, 0.5), model=None)], 3),
        ([one_batch(0.02, 0.1), replace(snapshots.cpu_server("b"), batches={1: BatchRecord(threshold=0.1)})], 3),
        ([one_batch(0.02, 0.9), replace(snapshots.cpu_server("b"), batches={1: BatchRecord(threshold=0.1)})], 1),
        ([one_batch(0.001, 0.1)], 3),
    ],
    ids=[
        "exactly at the threshold",
        "just below it",
        "no threshold",
        "one of several below",
        "batches without threshold not measured",
        "no server",
        "nothing measured",
        "no floor ratio without a footprint",
        "one threshold not measured",
        "below wins over not measured",
        "implausible is not measured",
    ],
)
def test_the_exit_code(servers: list[Server], expected: int) -> None:
    assert report_exit_code(seen(*servers)) == expected


def test_the_report_says_what_the_exit_code_means() -> None:
    assert "Batch 4: floor ratio 0.380, BELOW its threshold 0.5." in report_text(snapshots.rich_view(), Format.TABLE)
    unprobed = replace(snapshots.cpu_server(), batches={1: BatchRecord(threshold=0.25)})
    assert "no floor ratio to hold against its threshold 0.25" in report_text(seen(unprobed), Format.TABLE)


@pytest.mark.parametrize("reason", [None, Reason.UNREACHABLE])
def test_what_the_servers_state_explains_is_said_once(reason: Reason | None) -> None:
    """Each of the two servers has a batch with a threshold."""
    gone = snapshots.unreachable()
    batches = {1: BatchRecord(success=False, reason=reason, threshold=0.25)}
    gone = replace(gone, servers=tuple(replace(s, batches=batches) for s in gone.servers))
    text = report_text(view(gone, snapshots.NOW), Format.TABLE, 400)
    assert text.count(REASONS[Reason.UNREACHABLE]) == 2
    assert "Batch" not in text
    slow = {1: replace(batches[1], reason=Reason.STREAM_CUT)}
    other = replace(gone, servers=tuple(replace(s, batches=slow) for s in gone.servers))
    text = report_text(view(other, snapshots.NOW), Format.TABLE, 400)
    assert text.count(f"Batch 1: {REASONS[Reason.STREAM_CUT]}.") == 2
    assert text.count("Batch 1: no floor ratio to hold against its threshold 0.25.") == 2


def test_an_old_sample_of_a_server_that_left_says_so() -> None:
    """The reason stands in the server's own line."""
    record = replace(snapshots.record(1, 0.02), reason=Reason.UNREACHABLE)
    server = replace(
        snapshots.cpu_server(),
        batches={1: record},
        state=ServerState.UNREACHABLE,
        state_reason=Reason.UNREACHABLE,
    )
    text = report_text(seen(server), Format.TABLE, 400)
    assert "Batch 1: an earlier sample is shown.\n" in text
    assert text.count(REASONS[Reason.UNREACHABLE]) == 1


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
