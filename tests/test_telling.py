"""What the log, the report and the page say of a sample that cannot be true, and of a server's state."""

from dataclasses import replace

import pytest
import snapshots
import structlog
from structlog.testing import capture_logs

from exporter.present.page import landing_page
from exporter.present.report import Format, report_text
from exporter.roofline.ceiling import Device, RoofPolicy
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import ServerState, Snapshot, View, view
from exporter.service.telling import tell_sample, tell_state

STEP_BYTES = 602e6
READ = 50e9

ON_GPU = "more than 1.3 x read: is this server on a GPU? set device: gpu"
WRONG = "the model's bytes are wrong or read is too low: set gguf, and measure read on a quiet machine"
PEAK_LOW = "peak_bandwidth is too low or the model's bytes are wrong: see the spec sheet, and set gguf"


def seen(ratio: float, device: Device) -> View:
    """A server whose only step reads `ratio` x the ceiling that no reader can pass."""
    server = replace(
        snapshots.cpu_server(),
        policy=RoofPolicy(device, peak_bytes_per_second=READ),
        batches={1: snapshots.record(1, STEP_BYTES / (ratio * READ))},
    )
    return view(Snapshot(snapshots.host(), (server,)), snapshots.NOW)


@pytest.mark.parametrize(
    ("ratio", "device", "told"),
    [
        (2.0, Device.CPU, f"2.00 x the ceiling: {ON_GPU}"),
        (1.31, Device.CPU, f"1.31 x the ceiling: {ON_GPU}"),
        (1.29, Device.CPU, f"1.29 x the ceiling: {WRONG}"),
        (1.06, Device.CPU, f"1.06 x the ceiling: {WRONG}"),
        (2.0, Device.GPU, f"2.00 x the ceiling: {PEAK_LOW}"),
        (1.1, Device.GPU, f"1.10 x the ceiling: {PEAK_LOW}"),
    ],
)
def test_an_implausible_sample_is_told_with_its_likely_cause(ratio: float, device: Device, told: str) -> None:
    shown = seen(ratio, device)
    (server,) = shown.servers
    with capture_logs() as lines:
        tell_sample(structlog.get_logger(), server.points[1], server.roof, 1.0)
    assert [(line["log_level"], line["event"]) for line in lines[1:]] == [("warning", f"implausible, {told}")]
    for text in (report_text(shown, Format.TABLE, 400), landing_page(shown, "0", 0.0).replace("&#39;", "'")):
        assert f"Batch 1: implausible, {told}" in text
        assert ("GPU" in text) == (told.endswith(ON_GPU)), "nothing else speaks of a GPU"


@pytest.mark.parametrize("device", list(Device))
def test_a_plausible_sample_is_no_warning(device: Device) -> None:
    (server,) = seen(1.04, device).servers
    with capture_logs() as lines:
        tell_sample(structlog.get_logger(), server.points[1], server.roof, 1.0)
    assert [line["log_level"] for line in lines] == ["info"]


def test_a_stalled_server_is_to_be_looked_at_by_its_processs_state_first() -> None:
    """Its reason, that it did not answer in time, tells to raise a limit: that helps no stopped process."""
    ready = snapshots.cpu_server()
    stalled = replace(ready, state=ServerState.STALLED, state_reason=Reason.TIMEOUT)
    with capture_logs() as lines:
        tell_state(structlog.get_logger(), stalled, ready)
    shown = view(Snapshot(snapshots.host(), (stalled,)), snapshots.NOW)
    for text in (lines[0]["means"], report_text(shown, Format.TABLE, 400), landing_page(shown, "0", 0.0)):
        assert "ps -o pid,stat -C llama-server" in text
        assert "T is stopped" in text
        assert "probe.timeout" not in text
