"""The landing page: self-contained, honest, and safe with names that a stranger chose."""

from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from math import log10

import pytest
import snapshots
from hypothesis import given
from hypothesis import strategies as st

from exporter.present.page import landing_page
from exporter.present.plot import roofline_plot
from exporter.present.words import REASONS, STATES
from exporter.roofline.ceiling import Device, RoofPolicy
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import ServerState, Snapshot, view

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Collects the tags, attributes and text, and insists that tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def values(self, attribute: str) -> list[str | None]:
        return [value for _, name, value in self.attributes if name == attribute]


def page(snapshot: Snapshot, wall_now: float = snapshots.WALL_NOW) -> Page:
    return Page(landing_page(view(snapshot, snapshots.NOW), "0.1.0", wall_now))


@pytest.mark.parametrize("build", [snapshots.rich, snapshots.empty, snapshots.unreachable])
def test_every_snapshot_makes_a_whole_page(build: Callable[[], Snapshot]) -> None:
    shown = page(build())
    assert "roofline-exporter" in shown.text
    assert "0.1.0" in shown.text
    assert "None" not in shown.text
    assert shown.values("href") == ["metrics", "api/v1/snapshot", "config", "-/healthy", "-/ready"]


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    html = landing_page(snapshots.rich_view(), "0.1.0", snapshots.WALL_NOW)
    shown = Page(html)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _, _ in shown.attributes}
    assert not shown.values("src")
    assert "url(" not in html
    assert "@import" not in html
    assert "http://" not in html
    assert "https://" not in html
    assert ("meta", "http-equiv", "refresh") in shown.attributes
    assert "prefers-color-scheme: dark" in html


def test_the_page_has_the_study_table_and_the_age_of_the_last_success() -> None:
    text = page(snapshots.rich()).text
    assert "4 0.380 13.2 125 32.0 250 75.0 188 150 19.0 47.5 38.0" in text
    assert "last successful probe 30 s ago" in text
    assert "ceilings measured 60 s ago" in text
    assert f"Ready, 4 slots: {STATES[ServerState.READY]}." in text
    assert f"Batch 2, 4: {REASONS[Reason.TOO_FEW_SLOTS]}." in text
    assert "Batch 4: floor ratio 0.380, BELOW its threshold 0.5." in text


def test_a_configuration_that_was_not_taken_is_said_at_the_top() -> None:
    refused = replace(snapshots.rich(), config_reload_ok=False, config_reload_timestamp=1_790_000_000.0)
    text = page(refused).text
    words = (
        "The configuration file was not taken: the exporter goes on with that of 2026-09-21 14:13:20 UTC; its log has"
        " every error."
    )
    assert text.index(words) < text.index("This machine")
    assert "was not taken" not in page(snapshots.rich()).text


def test_only_a_batch_below_its_threshold_is_alarming() -> None:
    assert page(snapshots.rich()).values("class").count("low") == 1
    assert page(snapshots.unreachable()).values("class").count("low") == 0


def test_what_never_succeeded_says_so() -> None:
    text = page(snapshots.unreachable()).text
    assert text.count("last successful probe never") == 2
    assert "ceilings measured never" in text
    assert f"Unreachable: {REASONS[Reason.UNREACHABLE]}." in text
    assert (
        "No servers: only this machine's ceilings are measured; add servers: to the configuration"
        in page(snapshots.empty()).text
    )


def test_the_bars_are_to_scale() -> None:
    shown = page(Snapshot(snapshots.host(), (snapshots.cpu_server(),)))
    widths = [
        float(value.removeprefix("width:").removesuffix("%")) for value in shown.values("style") if value is not None
    ]
    assert len(widths) == 3 * 4
    assert sum(widths[:4]) == pytest.approx(100 * 20 / 32, abs=0.1)
    assert sum(widths[8:]) == pytest.approx(100, abs=0.1)
    assert widths[:4] == pytest.approx([31.25, 6.25, 0.125, 24.875], abs=0.01)


def test_the_roofline_is_drawn_where_it_belongs() -> None:
    server = view(Snapshot(snapshots.host(), (snapshots.cpu_server(),)), snapshots.NOW).servers[0]
    plot = roofline_plot(server)
    assert plot is not None
    decade_x = plot.ticks_x[1].at - plot.ticks_x[0].at
    decade_y = plot.ticks_y[0].at - plot.ticks_y[1].at
    assert [tick.label for tick in plot.ticks_x] == ["1", "10", "100"]
    assert [tick.label for tick in plot.ticks_y] == ["10 G", "100 G", "1 T"]
    read = next(roof for roof in plot.roofs if roof.reference)
    start, ridge, end = [tuple(map(float, corner.split(","))) for corner in read.points.split()]
    assert start == pytest.approx((plot.left, plot.bottom - decade_y * log10(5)), abs=0.1), "50 GFLOP/s at 1 FLOP/byte"
    assert ridge == pytest.approx((plot.left + decade_x * log10(8), end[1]), abs=0.1)
    assert end == pytest.approx((plot.right, plot.bottom - decade_y * log10(40)), abs=0.1), "400 GFLOP/s"
    assert [point.label for point in plot.points] == ["batch 1", "batch 2", "batch 4"]
    assert plot.points[0].y == pytest.approx(plot.bottom - decade_y, abs=0.1), "100 GFLOP/s"
    assert plot.points[0].x == pytest.approx(plot.left + decade_x * log10(2e9 / 602e6), abs=0.1)


@given(st.floats(1e-5, 100), st.integers(1, 64), st.floats(1e6, 1e15), st.booleans(), st.floats(1e9, 1e16))
def test_the_roofline_stays_inside_its_frame(
    step_seconds: float,
    batch: int,
    peak: float,
    on_gpu: bool,  # noqa: FBT001
    compute: float,
) -> None:
    policy = RoofPolicy(
        Device.GPU if on_gpu else Device.CPU, peak_bytes_per_second=peak, compute_flops_per_second=compute
    )
    server = replace(snapshots.cpu_server(), policy=policy, batches={batch: snapshots.record(batch, step_seconds)})
    plot = roofline_plot(view(Snapshot(snapshots.host(), (server,)), snapshots.NOW).servers[0])
    assert plot is not None
    places = [f"{point.x},{point.y}" for point in plot.points]
    places += [corner for roof in plot.roofs for corner in roof.points.split()]
    for x, y in (map(float, place.split(",")) for place in places):
        assert plot.left - 0.1 <= x <= plot.right + 0.1
        assert plot.top - 0.1 <= y <= plot.bottom + 0.1


def test_without_a_ceiling_or_a_sample_there_is_no_picture() -> None:
    assert roofline_plot(view(snapshots.unreachable(), snapshots.NOW).servers[0]) is None
    cold = Snapshot(snapshots.empty().host, (snapshots.cpu_server(),))
    assert roofline_plot(view(cold, snapshots.NOW).servers[0]) is None
    assert "<svg" not in landing_page(view(cold, snapshots.NOW), "0.1.0", snapshots.WALL_NOW)


def test_a_hostile_model_name_stays_text() -> None:
    nasty = '<script>alert("1")</script>'
    server = snapshots.cpu_server(model=replace(snapshots.MODEL, name=nasty, build="'><b>"))
    html = landing_page(view(Snapshot(snapshots.host(), (server,)), snapshots.NOW), "<i>", snapshots.WALL_NOW)
    assert "<script" not in html
    assert nasty in Page(html).text
    assert "<i>" not in html.replace("<i class", "")


def test_a_clock_that_went_back_shows_no_negative_age() -> None:
    assert "last successful probe 0 s ago" in page(snapshots.rich(), snapshots.WALL_NOW - 100).text


def test_the_floor_ratio_comes_before_the_columns_that_a_phone_cuts() -> None:
    """Each row begins with its batch and the main figure; what is cut has a sign."""
    html = landing_page(view(Snapshot(snapshots.host(), (snapshots.cpu_server(),)), snapshots.NOW), "0.1.0", 0.0)
    text = Page(html).text
    assert "batch floor ratio of read intensity FLOP/byte tokens/s" in text
    assert html.count('class="wide') == html.count('class="more soft"') == 2, "the table and the picture"
    assert "@media (max-width: 60rem) { .table + .more { display: block; } }" in html
    narrow = html[html.index("@media (max-width: 38rem)") :].split("\n  }\n")[0]
    assert "svg { min-width: 34rem;" in narrow
    assert ".more { display: block; }" in narrow
