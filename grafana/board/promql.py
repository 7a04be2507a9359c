"""PromQL for the dashboards: every metric name is checked against the exporter's own table.

Every expression aggregates `by` our labels. That drops what Prometheus and its operator add (`pod`, `container`,
`endpoint`), keeps a join valid when an exporter is scraped by two jobs, and removes `__name__`, whose different values
would keep the table transformations from pairing rows.
"""

from dataclasses import dataclass
from typing import Final

from exporter.present.metric import PREFIX
from exporter.present.metric_table import TABLE

OF_THE_COLLECTOR: Final = frozenset({"exporter_build_info", "collector_errors_total"})
_NAMES: Final = {metric.name for metric in TABLE} | OF_THE_COLLECTOR

RATE: Final = "$__rate_interval"
RANGE: Final = "$__range"


def full_name(name: str) -> str:
    """The metric's name as Prometheus knows it; KeyError for a name that the exporter does not have."""
    if name not in _NAMES:
        raise KeyError(f"no metric {name} in the exporter's table")
    return PREFIX + name


@dataclass(frozen=True, slots=True)
class Scope:
    """Which series a dashboard is about: the matchers that every selector carries."""

    matchers: str

    def __call__(self, name: str, matchers: str = "") -> str:
        """The selector of one of our metrics."""
        return self.of(full_name(name), matchers)

    def of(self, metric: str, matchers: str = "") -> str:
        """The selector of any metric."""
        both = ", ".join(filter(None, (self.matchers, matchers)))
        return f"{metric}{{{both}}}" if both else metric


def largest(selector: str, *by: str) -> str:
    """The one value of each set of these labels: the same series from two jobs are one."""
    return f"max by ({', '.join(by)}) ({selector})"


def age(selector: str, *by: str) -> str:
    """Seconds since a timestamp; none while it is 0, which stands for never."""
    return f"time() - {largest(f'{selector} > 0', *by)}"


def happened(selector: str, window: str, *by: str) -> str:
    """How often something happened within the window, for what happened at all."""
    return f"sum by ({', '.join(by)}) (increase({selector}[{window}])) > 0"


def label(expression: str, name: str, value: str) -> str:
    """The series with one more label."""
    return f'label_replace({expression}, "{name}", "{value}", "", "")'


def reference_ceiling(scope: Scope, *by: str) -> str:
    """The memory bandwidth that the floor uses, bytes/s.

    No metric names the reference directly. It is the compute peak / ridge; where there is no compute peak, what a
    sample was placed under, step bytes / floor; before the first sample, the default of the server's device.
    """
    peak = largest(scope("server_compute_peak_flops_per_second"), *by)
    ridge = largest(scope("ridge_flops_per_byte"), *by)
    placed_under = largest(f"{scope('model_step_bytes')} / {scope('decode_floor_seconds')}", *by)
    default = largest(scope("ceiling_bytes_per_second", 'ceiling=~"read|sustained"'), *by)
    return f"{peak} / {ridge} or {placed_under} or {default}"
