"""PromQL for the dashboards: every metric name is checked against the exporter's own table.

Every expression aggregates `by` our labels. That drops what Prometheus and its operator add (`pod`, `container`,
`endpoint`), keeps a join valid when an exporter is scraped by two jobs, and removes `__name__`, whose different values
would keep the table transformations from pairing rows.
"""

from dataclasses import dataclass
from typing import Final

from exporter.present.metric import PREFIX
from exporter.present.metric_table import TABLE
from exporter.roofline.snapshot import ServerState

OF_THE_COLLECTOR: Final = frozenset({"exporter_build_info", "collector_errors_total"})
_NAMES: Final = {metric.name for metric in TABLE} | OF_THE_COLLECTOR

UP: Final = f"/^(?:{'|'.join(state for state in ServerState if state.up)})$/"
DOWN: Final = f"/^(?:{'|'.join(state for state in ServerState if not state.up)})$/"
"""Grafana's patterns for the states in which a server could, or could not, serve a user."""

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
    """The memory bandwidth that the floor uses, bytes/s; its label `ceiling` names it."""
    return largest(scope("reference_ceiling_bytes_per_second"), *by)
