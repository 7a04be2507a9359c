"""A dashboard's frame: the grid that panels are placed on, the variables, the annotations, the head of the file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from board.panels import DATASOURCE, Json
from board.promql import Scope, largest

WIDTH: Final = 24
TAG: Final = "roofline"
SCHEMA_VERSION: Final = 39  # Grafana 10.4 and 11.0; newer ones migrate upwards
_LABEL_VALUES: Final = 1  # Grafana's number for the variable query editor's kind "label values"


@dataclass(frozen=True, slots=True)
class Line:
    """Panels side by side.

    Attributes:
        height: In grid units, the same for all.
        panels: Each with its width in grid units, from left to right.
    """

    height: int
    panels: Sequence[tuple[int, Json]]


@dataclass(frozen=True, slots=True)
class Row:
    """Lines of panels under a head; no head without a title."""

    title: str
    lines: Sequence[Line]


def even(height: int, *panels: Json) -> Line:
    """A line of panels of the same width."""
    return Line(height, [(WIDTH // len(panels), panel) for panel in panels])


def place(rows: Sequence[Row]) -> list[Json]:
    """Every panel with its id and place, from top to bottom."""
    placed: list[Json] = []
    top = 0
    for row in rows:
        head: Json = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        for line in (*([Line(1, [(WIDTH, head)])] if row.title else []), *row.lines):
            left = 0
            for width, panel in line.panels:
                grid = {"x": left, "y": top, "w": width, "h": line.height}
                placed.append({"id": len(placed) + 1, "gridPos": grid, **panel})
                left += width
            top += line.height
    return placed


def variable(name: str, title: str, label: str, selector: str, *, many: bool, numeric: bool = False) -> Json:
    """A variable with the values of a label; `many` allows several and All.

    All jobs are those that the variable found: `.+` would take in what other exporters' `up` and start times tell.
    """
    asked = f"label_values({selector}, {label})"
    made: Json = {
        "type": "query",
        "name": name,
        "label": title,
        "datasource": DATASOURCE,
        "definition": asked,
        "query": {"qryType": _LABEL_VALUES, "query": asked, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,  # when the time range changes: old instances can be looked at
        "sort": 3 if numeric else 1,
        "multi": many,
        "includeAll": many,
        "current": {},
        "options": [],
        "regex": "",
        "hide": 0,
        "skipUrlSync": False,
    }
    return {**made, "allValue": ".+"} if many and name != "job" else made


def _datasource() -> Json:
    return {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
        "refresh": 1,
        "current": {},
        "options": [],
        "regex": "",
        "hide": 0,
        "multi": False,
        "includeAll": False,
        "skipUrlSync": False,
    }


def _annotation(name: str, colour: str, expression: str, title: str, **more: object) -> Json:
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": colour,
        "expr": expression,
        "step": "60s",
        "titleFormat": title,
        **more,
    }


def annotations(scope: Scope, alert_matchers: str = "") -> list[Json]:
    """Firing alerts as regions, and starts of the exporter as marks."""
    alerts = scope.of("ALERTS", ", ".join(filter(None, ('alertstate="firing"', alert_matchers))))
    starts = f"max by (instance) ({scope.of('process_start_time_seconds')}) * 1000"
    return [
        _annotation(
            "Alerts",
            "red",
            f"max by (alertname, instance, server, batch, severity) ({alerts})",
            "{{alertname}}",
            textFormat="{{instance}} {{server}} {{batch}}",
            tagKeys="severity",
        ),
        _annotation(
            "Exporter started", "blue", starts, "Exporter started", textFormat="{{instance}}", useValueForTime=True
        ),
    ]


def outages(server: Scope) -> Json:
    """The times in which a server could not serve, as regions: each ends where it was back."""
    down = largest(server("server_up"), "instance", "server")
    return _annotation("Server down", "orange", f"{down} == 0", "Server down", textFormat="{{instance}} {{server}}")


def dashboard(
    uid: str, title: str, description: str, *, variables: Sequence[Json], marks: Sequence[Json], rows: Sequence[Row]
) -> Json:
    """The whole file, in the classic schema: the only one that file provisioning takes in every release."""
    return {
        "uid": uid,
        "id": None,
        "title": title,
        "description": description,
        "tags": [TAG, "llama.cpp"],
        "timezone": "browser",
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "title": "Roofline dashboards",
                "tags": [TAG],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
                "icon": "external link",
                "tooltip": "",
                "url": "",
            }
        ],
        "templating": {"list": [_datasource(), *variables]},
        "annotations": {"list": list(marks)},
        "panels": place(rows),
        "schemaVersion": SCHEMA_VERSION,
    }
