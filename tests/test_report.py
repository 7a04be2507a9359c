"""What `report` prints: golden figures, words, and awkward servers."""

import csv
import json
import re
import time
from dataclasses import replace
from io import StringIO

import pytest
import snapshots
from hypothesis import given
from hypothesis import strategies as st
from snapshots import one_batch, seen

from exporter.present.metric_table import DECODE
from exporter.present.report import (
    Format,
    bandwidth_json,
    bandwidth_text,
    report_text,
    snapshot_json,
)
from exporter.present.study import budgeted
from exporter.present.words import REASONS, STATES, age, binary_size, si, three_digits
from exporter.roofline.ceiling import Kernel, ThreadScope
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import BatchRecord, ServerState, Snapshot, view

# --- the study table ---------------------------------------------------------------------------------------------


def test_the_csv_has_the_figures_that_arithmetic_gives() -> None:
    rows = list(csv.DictReader(StringIO(report_text(snapshots.rich_view(), Format.CSV))))
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
