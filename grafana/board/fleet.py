"""*Fleet*: one row for each server, the slowest first; the worst machines; how the floor ratios are distributed."""

from typing import Final

from board import decode
from board.layout import Line, Row, annotations, dashboard, even, variable
from board.panels import TOKENS_PER_SECOND, Json, bargauge, limits, now, panel, query, rows, stat, timeseries
from board.promql import DOWN, UP, Scope, age, largest, reference_ceiling
from board.tables import BELOW, COLOURED, Column, table

ALL: Final = Scope('job=~"$job", instance=~"$instance"')
BATCH: Final = 'batch="$batch"'
KEY: Final = ("instance", "server")
RATIO: Final = largest(ALL("decode_floor_ratio", BATCH), *KEY)
WORST: Final = 10
STATES: Final = [
    {"type": "regex", "options": {"pattern": pattern, "result": {"color": colour, "index": n}}}
    for n, (pattern, colour) in enumerate(((UP, "green"), (DOWN, "red")))
]


def _overview() -> Row:
    up = largest(ALL("server_up"), *KEY)
    below = largest(ALL("decode_below_threshold_samples"), *KEY)
    scraped = ALL.of("up")

    def figure(title: str, description: str, expression: str, unit: str = "short", **colours: float) -> Json:
        return stat(title, description, now(expression, title), unit=unit, defaults=limits(**colours))

    return Row(
        "",
        [
            even(
                4,
                figure("Servers up", "Servers that could serve a user.", f"sum({up})"),
                figure("Servers down", "Servers that could not.", f"count({up} == 0) or vector(0)", red=1),
                figure(
                    "Below threshold",
                    "Servers with a batch whose last sample is below its threshold.",
                    f"count({below} > 0) or vector(0)",
                    orange=1,
                ),
                figure(
                    "Up without a sample",
                    "Servers that are up and have no fresh sample of batch $batch.",
                    f"count({up} == 1 unless {RATIO}) or vector(0)",
                    orange=1,
                ),
                figure(
                    "Exporters unreachable",
                    "Exporters that Prometheus could not scrape.",
                    f"count(max by (instance) ({scraped}) == 0) or vector(0)",
                    red=1,
                ),
                figure(
                    "Median floor ratio",
                    "Half of the servers are below: floor / step time at batch $batch.",
                    f"quantile(0.5, {RATIO})",
                    "percentunit",
                ),
            )
        ],
    )


def _servers() -> Row:
    link: Json = {
        "title": "Roofline of this server",
        "url": f"/d/{decode.UID}?${{datasource:queryparam}}&var-instance=${{__data.fields.Instance}}"
        "&var-server=${__data.fields.Server}&${__url_time_range}",
        "targetBlank": False,
    }
    return Row(
        "Servers",
        [
            even(
                12,
                table(
                    "Servers by floor ratio",
                    "One row for each server, the lowest floor ratio at batch $batch first; a server without a fresh"
                    " sample has none. Choose a server to see its roofline.",
                    {
                        "instance": "Instance",
                        "server": "Server",
                        "model": "Model",
                        "quantization": "Quantization",
                        "state": "State",
                        "ceiling": "Reference",
                    },
                    [
                        Column("Floor ratio", RATIO, "percentunit"),
                        Column("", f"{largest(ALL('server_state'), *KEY, 'state')} == 1"),
                        Column("", largest(ALL("model_info"), *KEY, "model", "quantization")),
                        Column("Threshold", largest(ALL("decode_floor_ratio_threshold", BATCH), *KEY), "percentunit"),
                        Column(
                            "Samples below",
                            largest(ALL("decode_below_threshold_samples", BATCH), *KEY),
                            settings=BELOW,
                        ),
                        Column("Rate", largest(ALL("decode_tokens_per_second", BATCH), *KEY), TOKENS_PER_SECOND),
                        Column("Step", largest(ALL("decode_step_seconds", BATCH), *KEY), "s"),
                        Column("Reference ceiling", reference_ceiling(ALL, *KEY, "ceiling"), "Bps"),
                        Column("Age", age(ALL("probe_last_success_timestamp_seconds", BATCH), *KEY), "s"),
                    ],
                    settings={"Server": {"links": [link]}, "State": {"mappings": STATES, **COLOURED}},
                ),
            )
        ],
    )


def _worst() -> Row:
    best = largest(ALL("memory_bandwidth_bytes_per_second", 'kernel="read", threads="all"'), "instance")
    newest = largest(ALL("memory_bandwidth_last_bytes_per_second", 'kernel="read", threads="all"'), "instance")
    return Row(
        "Worst machines",
        [
            even(
                9,
                bargauge(
                    "Lowest reference ceilings",
                    f"The {WORST} servers whose memory allows least: only more bandwidth or a smaller model helps.",
                    now(
                        f"bottomk({WORST}, {reference_ceiling(ALL, *KEY, 'ceiling')})",
                        "{{instance}} {{server}}: {{ceiling}}",
                    ),
                    unit="Bps",
                ),
                bargauge(
                    "Furthest below their own ceiling",
                    f"The {WORST} machines whose newest read bandwidth is the smallest part of their own"
                    " ceiling: throttling, a neighbour, or memory that was changed.",
                    now(f"bottomk({WORST}, {newest} / {best})", "{{instance}}"),
                    unit="percentunit",
                    defaults={"max": 1},
                ),
                timeseries(
                    "Lowest floor ratios",
                    f"The {WORST} lowest floor ratios at batch $batch at each moment.",
                    [query(f"bottomk({WORST}, {RATIO})", "{{instance}} {{server}}")],
                    unit="percentunit",
                ),
            )
        ],
    )


def _distribution() -> Row:
    histogram = panel(
        "histogram",
        "Distribution of the floor ratios",
        "How many servers are how near to their floor now, at batch $batch.",
        [rows(RATIO)],
        unit="percentunit",
        options={
            "bucketSize": 0.05,
            "bucketOffset": 0,
            "combine": False,
            "legend": {"showLegend": False, "displayMode": "list", "placement": "bottom", "calcs": []},
            "tooltip": {"mode": "single", "sort": "none"},
        },
        custom={
            "lineWidth": 1,
            "fillOpacity": 80,
            "gradientMode": "none",
            "stacking": {"mode": "none", "group": "A"},
            "hideFrom": {"legend": False, "tooltip": False, "viz": False},
        },
        transformations=[
            {
                "id": "organize",
                "options": {
                    "excludeByName": {"Time": True, **dict.fromkeys(KEY, True)},
                    "indexByName": {},
                    "renameByName": {"Value": "Floor ratio"},
                },
            }
        ],
    )
    over_time = timeseries(
        "Floor ratios over time",
        "The lowest, the lowest tenth, the median and the highest tenth of the servers at batch $batch.",
        [
            query(f"min({RATIO})", "Lowest"),
            *(
                query(f"quantile({q}, {RATIO})", name)
                for q, name in ((0.1, "Lowest tenth"), (0.5, "Median"), (0.9, "Highest tenth"))
            ),
        ],
        unit="percentunit",
    )
    return Row("Distribution", [Line(9, [(10, histogram), (14, over_time)])])


def fleet() -> Json:
    """The dashboard."""
    up = "server_up"
    return dashboard(
        "roofline-fleet",
        "Fleet of llama.cpp servers",
        "Every llama.cpp server that is watched, the one furthest from its floor first.",
        variables=[
            variable("job", "Job", "job", Scope("")(up), many=True),
            variable("instance", "Instance", "instance", Scope('job=~"$job"')(up), many=True),
            variable("batch", "Batch", "batch", ALL("probe_success"), many=False, numeric=True),
        ],
        marks=annotations(ALL),
        rows=[_overview(), _servers(), _worst(), _distribution()],
    )
