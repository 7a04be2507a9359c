"""The metrics as Prometheus scrapes them: fresh families from the current snapshot, no I/O, no state of their own."""

import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from exporter.present.metric import Kind, Labels, Metric
from exporter.present.metric_table import TABLE
from exporter.roofline.snapshot import Snapshot, View, view

_LOG = structlog.get_logger(__name__)

_ERRORS: Final = Metric(
    "collector_errors_total", "Metrics that could not be rendered because of a bug; see the log.", (), lambda _: []
)


class SnapshotCollector(Collector):
    """Renders the snapshot of the moment at every scrape.

    A metric that fails is logged once, counted in `collector_errors_total`, and left out; the others are rendered.

    Args:
        source: Gives the current snapshot.
        clock: Monotonic seconds, the clock of the snapshot's measurements.
        version: The exporter's version.
        table: What to render.
    """

    def __init__(
        self,
        source: Callable[[], Snapshot],
        clock: Callable[[], float],
        version: str,
        table: tuple[Metric, ...] = TABLE,
    ) -> None:
        self._source = source
        self._clock = clock
        build = (version, platform.python_version())
        self._build_info = Metric(
            "exporter_build_info",
            "The exporter's version and the Python that runs it, always 1.",
            ("version", "python_version"),
            lambda _: [(build, 1)],
        )
        self._table = table
        self._errors = 0
        self._logged: set[str] = set()

    def describe(self) -> Iterator[Family]:
        """Every family without samples: the registry checks names against them, and never scrapes to learn them."""
        for metric in (*self._table, self._build_info, _ERRORS):
            yield _family(metric)

    def collect(self) -> Iterator[Family]:
        """Every family of the current snapshot that has a sample."""
        try:
            seen = view(self._source(), self._clock())
        except Exception:  # noqa: BLE001 - one bug must not cost the whole scrape
            self._failed("view")
        else:
            for metric in (*self._table, self._build_info):
                if (family := self._render(metric, seen)) is not None and family.samples:
                    yield family
        yield _family(_ERRORS, [((), self._errors)])

    def _render(self, metric: Metric, seen: View) -> Family | None:
        try:
            return _family(metric, metric.series(seen))
        except Exception:  # noqa: BLE001 - one bug must not cost the whole scrape
            self._failed(metric.full_name)
            return None

    def _failed(self, what: str) -> None:
        self._errors += 1
        if what not in self._logged:
            self._logged.add(what)
            _LOG.exception("could not render a metric", metric=what)


def _family(metric: Metric, series: Sequence[tuple[Labels, float]] = ()) -> Family:
    if metric.kind is Kind.INFO:
        info = InfoMetricFamily(metric.full_name.removesuffix("_info"), metric.help, labels=())
        for labels, _ in series:
            info.add_metric((), dict(zip(metric.labels, labels, strict=True)))
        return info
    family_type = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = family_type(metric.full_name, metric.help, labels=metric.labels)
    for labels, value in series:
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} has labels {metric.labels}, not {labels}")
        family.add_metric(labels, value)
    return family


def build_registry(collector: Collector) -> CollectorRegistry:
    """A private registry with this collector and the process's own metrics, without `_created` series."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library leaves it untyped
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    return registry
