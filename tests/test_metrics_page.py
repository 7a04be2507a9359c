"""docs/metrics.md is what the metric table says."""

import metrics_page
import pytest

from exporter.present.metric import Metric
from exporter.present.metric_table import TABLE


def test_the_page_is_what_the_table_says() -> None:
    assert metrics_page.PAGE.read_text(encoding="utf-8") == metrics_page.page(), "run tools/metrics_page.py"


@pytest.mark.parametrize("metric", TABLE, ids=lambda metric: metric.name)
def test_every_metric_is_on_the_page_once_with_its_unit_and_source(metric: Metric) -> None:
    rows = [line for line in metrics_page.page().splitlines() if line.startswith(f"| `{metric.name}` |")]
    assert len(rows) == 1
    assert metrics_page.unit(metric)
    assert metrics_page.source(metric)
