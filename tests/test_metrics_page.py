"""docs/metrics.md is what the metric table says."""

import metrics_page
import pytest
import snapshots

from exporter.present.metric import Kind, Metric
from exporter.present.metric_table import TABLE
from exporter.present.metrics import SnapshotCollector
from exporter.roofline.snapshot import view


def test_the_page_is_what_the_table_says() -> None:
    assert metrics_page.PAGE.read_text(encoding="utf-8") == metrics_page.page(), "run tools/metrics_page.py"


EVERY = [*TABLE, *metrics_page.own_metrics()]


@pytest.mark.parametrize("metric", EVERY, ids=lambda metric: metric.name)
def test_every_metric_is_on_the_page_once_with_its_unit_and_source(metric: Metric) -> None:
    rows = [line for line in metrics_page.page().splitlines() if line.startswith(f"| `{metric.name}` |")]
    assert len(rows) == 1
    assert metrics_page.unit(metric)
    assert metrics_page.source(metric)


def test_every_metric_that_can_be_scraped_is_on_the_page() -> None:
    """Also those that no table has."""
    collector = SnapshotCollector(snapshots.rich, lambda: snapshots.NOW, "1")
    scraped = {sample.name for family in collector.collect() for sample in family.samples}
    assert {"roofline_exporter_build_info", "roofline_collector_errors_total"} <= scraped
    assert scraped <= {metric.full_name for metric in EVERY}


@pytest.mark.parametrize("metric", EVERY, ids=lambda metric: metric.name)
def test_a_unit_is_what_the_metric_can_be(metric: Metric) -> None:
    """An info metric has one value, and speaks through its labels."""
    assert (metrics_page.unit(metric) == "always 1") == (metric.kind is Kind.INFO)
    values = {value for _, value in metric.series(view(snapshots.rich(), snapshots.NOW))}
    if metrics_page.unit(metric) in {"always 1", "0 or 1"}:
        assert values <= ({1.0} if metric.kind is Kind.INFO else {0.0, 1.0})
