"""The thresholds that a report suggests, what it says of a state, and its exit status."""

from dataclasses import replace

import pytest
import snapshots
from hypothesis import given
from hypothesis import strategies as st
from snapshots import one_batch, seen

from exporter.present.report import (
    Format,
    report_exit_code,
    report_text,
)
from exporter.present.study import suggested_floor_fractions
from exporter.present.words import REASONS
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import BatchRecord, Server, ServerState, view


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
