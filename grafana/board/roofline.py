"""The roofline itself: an xychart panel on two logarithmic axes.

Williams, Waterman, Patterson, "Roofline", CACM 2009: attainable FLOP/s = min(compute peak, intensity x bandwidth).

The roof is a frame of vertices, the operating points are another, and a series of the chart picks its frame by index.
Lines join rows in their order, and vertices outside the visible range are dropped with their line: there are two
vertices a decade, so that a zoomed chart keeps its roof. All values are positive, as logarithmic axes need.
"""

from collections.abc import Sequence
from typing import Final

from board.panels import FLOP_PER_BYTE, Json, fixed, named, override, panel, rows
from board.promql import Scope, label, largest, reference_ceiling

INTENSITIES: Final = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
BATCHES: Final = ("1", "2", "4")  # of the shipped configuration; each has its own colour, the others share one
ROOF, RIDGE, X_OF_ROOF, X_OF_POINTS, OTHERS = "Roof", "Ridge", "Roof intensity", "Intensity", "Other batches"


def _vertices() -> str:
    """A vector of the roof's intensities, told apart by their label `vertex`."""
    return f"({' or '.join(label(f'vector({x})', 'vertex', str(x)) for x in INTENSITIES)})"


def roof_queries(scope: Scope) -> tuple[str, str, str]:
    """The roof's intensities, its FLOP/s, and the FLOP/s of the ridge; the last is empty without a compute peak."""
    ceiling = reference_ceiling(scope, "server")
    memory = f"{_vertices()} * on () group_left (server) ({ceiling})"
    peak = largest(scope("server_compute_peak_flops_per_second"), "server")
    compute = f"{_vertices()} * 0 + on () group_left (server) {peak}"
    ridge = largest(scope("ridge_flops_per_byte"), "server")
    at_ridge = label(peak, "vertex", "ridge")
    intensities = f"{_vertices()} + on () group_left (server) 0 * ({ceiling})"
    roof = f"min by (server, vertex) ({label(memory, 'limit', 'memory')} or {label(compute, 'limit', 'compute')})"
    return f"{intensities} or {label(ridge, 'vertex', 'ridge')}", f"{roof} or {at_ridge}", at_ridge


def _point(scope: Scope, name: str, matchers: str) -> str:
    """A decode metric of each batch, with the server's model."""
    model = largest(scope("model_info"), "server", "model")
    return f"{largest(scope(name, matchers), 'server', 'batch')} * on (server) group_left (model) {model}"


def point_queries(scope: Scope, matchers: str) -> list[str]:
    """The points' intensities, their FLOP/s for each named batch and for the others, and their floor ratios."""
    batches = (*(f'batch="{batch}"' for batch in BATCHES), f'batch!~"{"|".join(BATCHES)}"')
    return [
        _point(scope, "decode_intensity_flops_per_byte", matchers),
        *(_point(scope, "decode_flops_per_second", f"{matchers}, {batch}") for batch in batches),
        _point(scope, "decode_floor_ratio", matchers),
    ]


def _series(name: str, frame: int, x: str) -> Json:
    return {
        "name": {"fixed": name},
        "frame": {"matcher": {"id": "byIndex", "options": frame}},
        "x": {"matcher": {"id": "byName", "options": x}},
        "y": {"matcher": {"id": "byName", "options": name}},
    }


def _merge(ref_ids: Sequence[str]) -> Json:
    return {"id": "merge", "filter": {"id": "byRefId", "options": f"/^(?:{'|'.join(ref_ids)})$/"}, "options": {}}


def roofline(title: str, description: str, scope: Scope, matchers: str) -> Json:
    """The panel of one server."""
    queries = [*roof_queries(scope), *point_queries(scope, matchers)]
    per_batch = [f"Batch {batch}" for batch in BATCHES]
    heads = [X_OF_ROOF, ROOF, RIDGE, X_OF_POINTS, *per_batch, OTHERS, "Floor ratio"]
    letters = [chr(ord("A") + n) for n in range(len(queries))]
    colours = ("green", "blue", "purple", "yellow")
    return panel(
        "xychart",
        title,
        description,
        [rows(expression) for expression in queries],
        unit="flops",
        options={
            "mapping": "manual",
            "series": [
                _series(ROOF, 0, X_OF_ROOF),
                _series(RIDGE, 0, X_OF_ROOF),
                *(_series(name, 1, X_OF_POINTS) for name in (*per_batch, OTHERS)),
            ],
            "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
            "tooltip": {"mode": "single", "sort": "none"},
        },
        custom={
            "show": "points",
            "pointSize": {"fixed": 10},
            "pointShape": "circle",
            "pointStrokeWidth": 1,
            "fillOpacity": 70,
            "lineWidth": 2,
            "lineStyle": {"fill": "solid"},
            "axisPlacement": "auto",
            "axisLabel": "FLOP/s",
            "scaleDistribution": {"type": "log", "log": 10},
        },
        overrides=[
            override(
                "byRegexp",
                "/ntensity$/",
                unit=FLOP_PER_BYTE,
                custom__axisLabel="Arithmetic intensity (FLOP/byte)",
                min=INTENSITIES[0],
                max=INTENSITIES[-1],
            ),
            named(ROOF, custom__show="lines", color=fixed("semi-dark-orange")),
            named(RIDGE, custom__pointShape="square", color=fixed("semi-dark-orange")),
            *(named(name, color=fixed(colour)) for name, colour in zip((*per_batch, OTHERS), colours, strict=True)),
            named("Floor ratio", unit="percentunit", custom__scaleDistribution={"type": "linear"}),
        ],
        transformations=[
            _merge(letters[:3]),
            _merge(letters[3:]),
            {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": "Value #A", "desc": False}]}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": {"Time": True, "vertex": True, "server": True},
                    "indexByName": {},
                    "renameByName": {f"Value #{x}": head for x, head in zip(letters, heads, strict=True)},
                },
            },
        ],
    )
