"""Panels as plain dictionaries, in Grafana's classic dashboard schema; a panel's place is added by the layout."""

import re
from collections.abc import Sequence
from typing import Final, TypeAlias

Json: TypeAlias = dict[str, object]

DATASOURCE: Final[Json] = {"type": "prometheus", "uid": "${datasource}"}
# The first release with the xychart options used here; an empty version makes Grafana migrate the options away.
PLUGIN_VERSION: Final = "11.1.0"
# Probes are minutes apart and scrapes at most one: a smaller step leaves `rate` without two samples.
SLOW: Final[Json] = {"interval": "2m"}

TOKENS_PER_SECOND: Final = "suffix:tok/s"
FLOP_PER_BYTE: Final = "suffix:FLOP/B"

_METRIC: Final = re.compile(r"\b(?:roofline|process)_\w+|\bup(?={)")


def query(expression: str, legend: str = "") -> Json:
    """A query of the whole time range."""
    return {"expr": expression, "legendFormat": legend or "__auto", "range": True, "instant": False}


def now(expression: str, legend: str = "") -> Json:
    """A query of the newest values, one series each."""
    return {"expr": expression, "legendFormat": legend or "__auto", "range": False, "instant": True}


def rows(expression: str) -> Json:
    """A query of the newest values as a table: a column for each label, and the value."""
    return {"expr": expression, "format": "table", "range": False, "instant": True}


def override(matcher: str, options: str, **properties: object) -> Json:
    """Settings of the fields that a matcher picks; a dot in a setting's name is written as two underscores."""
    return {
        "matcher": {"id": matcher, "options": options},
        "properties": [{"id": name.replace("__", "."), "value": value} for name, value in properties.items()],
    }


def dashed(ref_id: str) -> Json:
    """What bounds a measurement is dashed."""
    return override("byFrameRefID", ref_id, custom__lineStyle={"fill": "dash", "dash": [8, 6]}, custom__fillOpacity=0)


def named(name: str, **properties: object) -> Json:
    """Settings of the field of that name."""
    return override("byName", name, **properties)


def fixed(colour: str) -> Json:
    """One colour, whatever the value."""
    return {"mode": "fixed", "fixedColor": colour}


def limits(**colours: float) -> Json:
    """The colour of plain text, and others from these values upwards, the smallest first."""
    steps = [{"color": "text", "value": None}, *({"color": name, "value": value} for name, value in colours.items())]
    return {"color": {"mode": "thresholds"}, "thresholds": {"mode": "absolute", "steps": steps}}


def yes_no(**colours: str) -> list[Json]:
    """1 and 0 in words; the answer that is bad has a colour: `yes="red"`."""
    answers = {str(n): {"text": word, "index": n} for n, word in enumerate(("no", "yes"))}
    for answer in answers.values():
        if (word := str(answer["text"])) in colours:
            answer["color"] = colours[word]
    return [{"type": "value", "options": answers}]


def panel(
    kind: str,
    title: str,
    description: str,
    targets: Sequence[Json],
    *,
    unit: str,
    options: Json,
    custom: Json | None = None,
    defaults: Json | None = None,
    overrides: Sequence[Json] = (),
    transformations: Sequence[Json] = (),
    more: Json | None = None,
) -> Json:
    """Any panel. The names of the metrics it reads are added to its description."""
    named_targets = [
        {"refId": chr(ord("A") + n), "datasource": DATASOURCE, **target} for n, target in enumerate(targets)
    ]
    field = {"unit": unit, "color": {"mode": "palette-classic"}, "noValue": "no data", **(defaults or {})}
    if custom is not None:
        field["custom"] = custom
    return {
        "type": kind,
        "title": title,
        "description": f"{description} {metrics_of(targets)}",
        "datasource": DATASOURCE,
        "pluginVersion": PLUGIN_VERSION,
        "targets": named_targets,
        "fieldConfig": {"defaults": field, "overrides": list(overrides)},
        "options": options,
        "transformations": list(transformations),
        **(more or {}),
    }


def metrics_of(targets: Sequence[Json]) -> str:
    """The sentence that ends a description: every metric that the queries name."""
    found = dict.fromkeys(name for target in targets for name in _METRIC.findall(str(target["expr"])))
    return f"Metric{'s' if len(found) > 1 else ''}: {', '.join(f'`{name}`' for name in found)}"


def stat(
    title: str,
    description: str,
    target: Json,
    *,
    unit: str,
    text: str = "value",
    defaults: Json | None = None,
    overrides: Sequence[Json] = (),
) -> Json:
    """The newest values as large figures, or as names where the series' name is the message."""
    return panel(
        "stat",
        title,
        description,
        [target],
        unit=unit,
        options={
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "orientation": "auto",
            "textMode": text,
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "auto",
            "wideLayout": True,
        },
        defaults={"color": fixed("text"), **(defaults or {})},
        overrides=overrides,
    )


def timeseries(
    title: str,
    description: str,
    targets: Sequence[Json],
    *,
    unit: str,
    stacked: bool = False,
    bars: bool = False,
    defaults: Json | None = None,
    overrides: Sequence[Json] = (),
    more: Json | None = None,
) -> Json:
    """Values over time from 0 upwards."""
    custom: Json = {
        "drawStyle": "bars" if bars else "line",
        "lineWidth": 1,
        "fillOpacity": 60 if stacked or bars else 0,
        "showPoints": "auto",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked or bars else "none", "group": "A"},
        "axisPlacement": "auto",
        "scaleDistribution": {"type": "linear"},
    }
    return panel(
        "timeseries",
        title,
        description,
        targets,
        unit=unit,
        options={
            "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
            "tooltip": {"mode": "multi", "sort": "none"},
        },
        custom=custom,
        defaults={"min": 0, **(defaults or {})},
        overrides=overrides,
        more=more,
    )


def counts(title: str, description: str, target: Json) -> Json:
    """How often something happened, as stacked bars over time."""
    return timeseries(
        title,
        description,
        [target],
        unit="short",
        bars=True,
        defaults={"decimals": 0, "noValue": "none"},
        more=SLOW,
    )


def bargauge(title: str, description: str, target: Json, *, unit: str, defaults: Json | None = None) -> Json:
    """The newest values as bars from the left."""
    return panel(
        "bargauge",
        title,
        description,
        [target],
        unit=unit,
        options={
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "orientation": "horizontal",
            "displayMode": "basic",
            "valueMode": "text",
            "showUnfilled": True,
            "namePlacement": "auto",
            "sizing": "auto",
            "minVizWidth": 8,
            "minVizHeight": 16,
            "maxVizHeight": 300,
        },
        defaults={"min": 0, "color": fixed("blue"), **(defaults or {})},
    )
