#!/usr/bin/env python3
"""Writes docs/metrics.md from the metric table.

python tools/metrics_page.py            # writes it
python tools/metrics_page.py --check    # exit status 1 if the file is not what would be written
"""

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from exporter.present.metric import PREFIX, Metric
from exporter.present.metric_table import TABLE
from exporter.present.metrics import SnapshotCollector
from exporter.roofline.snapshot import Host, HostInfo, Snapshot

PAGE: Final = Path(__file__).parent.parent / "docs" / "metrics.md"

SOURCES: Final = (
    ("memory_bandwidth_|compute_peak_", "the kernels, run on this machine"),
    ("((reference_)?ceiling|ridge|server_compute_peak)_", "the kernels, or the configuration"),
    ("server_", "GET /health and /props"),
    ("model_", "the model's file, GET /v1/models, or the configuration"),
    ("decode_(tokens_per_second|step_seconds|step_spread_ratio|marginal)", "a probe: the timings of its own streams"),
    ("decode_floor_ratio_threshold", "the configuration"),
    ("decode_contended", "the kernel's counters during a probe"),
    ("decode_speculative", "a probe: the counts of its own streams"),
    ("decode_", "computed from a probe, the footprint and the ceilings"),
    ("live_floor_ratio", "computed from live traffic, the footprint and the ceiling"),
    ("live_", "GET /slots, or the server's own counters"),
    ("probe|config_|exporter_|collector_", "the exporter itself"),
)
"""Where the numbers come from, by the beginning of the name; the first that fits."""

UNITS: Final = (
    ("flops_per_byte", "FLOP/byte"),
    ("flops_per_second", "FLOP/s"),
    ("tokens_per_second", "tokens/s"),
    ("bytes_per_second", "bytes/s"),
    ("bytes_per_token", "bytes"),
    ("timestamp_seconds", "Unix seconds"),
    ("_seconds", "seconds"),
    ("_bytes", "bytes"),
    ("_ratio|_ratio_threshold", "ratio"),
    ("_total|_samples|_slots|_streams|_parameters|_tokens_per_step", "count"),
    ("_info", "always 1"),
    ("_up|_state|_contended|_implausible|_success|_successful|_mismatch", "0 or 1"),
)
"""The units, by the end of the name; the first that fits."""

INTRODUCTION: Final = """\
# Metrics

Made from the metric table by `tools/metrics_page.py`; a test compares the two. Every name begins with `roofline_`.
Values are in base units. A value that is not known, or has grown stale, is absent, never 0.
Counts and timestamps begin at 0.
"""

AFTERWORD: Final = """\
## Beside these

prometheus-client adds `process_*` (memory, CPU time, open files of the exporter).

Labels: `kernel` is triad, copy, scale, add or read; `threads` is single or all (the best of the thread counts
tried); `ceiling` is triad, read, peak or sustained; `part` is weights, output_head, kv_cache or overhead; `reason`
is one of a closed list, each with its sentence in the report. `server` and `batch` are the configuration's. No
label carries a URL, a prompt, a path or an error text.
"""


def page() -> str:
    """The page's text."""
    parts = [INTRODUCTION]
    for title, metrics in groups():
        parts += [f"## {title}\n", "| name | type | unit | labels | meaning | source |", "|---|---|---|---|---|---|"]
        parts += [*(row(metric) for metric in metrics), ""]
    return "\n".join([*parts, AFTERWORD])


def groups() -> Iterable[tuple[str, list[Metric]]]:
    """The metrics under their headings; each is under the first that fits."""
    headings = (
        ("This machine", "memory_bandwidth_|compute_peak_"),
        ("Decode", "decode_"),
        ("Live traffic", "live_"),
        ("The exporter", "probe|config_|exporter_|collector_"),
        ("Servers", ""),
    )
    left = [*TABLE, *own_metrics()]
    for title, beginning in headings:
        here = [metric for metric in left if re.match(beginning, metric.name)]
        left = [metric for metric in left if metric not in here]
        if here:
            yield title, here


def own_metrics() -> list[Metric]:
    """The metrics that the collector has beside the table: those that it renders when nothing is known."""
    nothing = Snapshot(Host(HostInfo("", 0, None, None, "", "")))
    known = {metric.full_name for metric in TABLE}
    return [
        Metric(sample.name.removeprefix(PREFIX), family.documentation, tuple(sample.labels), lambda _: [])
        for family in SnapshotCollector(lambda: nothing, lambda: 0.0, "").collect()
        for sample in family.samples
        if sample.name not in known
    ]


def row(metric: Metric) -> str:
    """One line of the table."""
    meaning = metric.help.replace("|", r"\|")
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    cells = (f"`{metric.name}`", metric.kind, unit(metric), labels, meaning, source(metric))
    return f"| {' | '.join(cells)} |"


def unit(metric: Metric) -> str:
    """The unit that the name tells."""
    return next(unit for end, unit in UNITS if re.search(f"({end})$", metric.name))


def source(metric: Metric) -> str:
    """Where the number comes from."""
    return next(source for beginning, source in SOURCES if re.match(beginning, metric.name))


def main() -> None:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description="Write docs/metrics.md from the metric table.")
    parser.add_argument("--check", action="store_true", help="only compare")
    if parser.parse_args().check:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page() else f"{PAGE}: run tools/metrics_page.py")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
