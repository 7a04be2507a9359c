"""Full bandwidth runs, one after the other: how far apart are the values that the exporter itself calls clean?

    python benchmarks/repeatability.py --runs 10 --json repeatability.json

For each kernel and scope: the spread of the best values, (highest - lowest) / median, and how often there was none.
Also the machine time of the runs.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from exporter.measure.bandwidth import BandwidthMeter

BAR = 0.03


def main() -> None:
    """Runs the meter and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--short", action="store_true", help="tracking runs instead of full ones")
    parser.add_argument("--max-memory-mib", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    meter = BandwidthMeter(
        max_memory=options.max_memory_mib << 20,
        threads=None,
        proc=Path("/proc"),
        sys=Path("/sys"),
        clock=time.monotonic,
    )
    if options.short:
        meter.measure(full=True)
    values: dict[str, list[float]] = defaultdict(list)
    methods: dict[str, set[str]] = defaultdict(set)
    seconds, problems = [], []
    for _ in range(options.runs):
        began = time.monotonic()
        run = meter.measure(full=not options.short)
        seconds.append(time.monotonic() - began)
        problems.append(run.problem)
        for b in run.measurements:
            values[f"{b.kernel}, {b.threads}"].append(b.best_bytes_per_second / 1e9)
            methods[f"{b.kernel}, {b.threads}"].add(f"{b.method} {b.store} {b.isa}")
        if run.compute:
            values["fma"].append(run.compute.flops_per_second / 1e9)
    table = Table("what", "clean", "lowest", "median", "highest", "spread", f"bar {BAR:.0%}", "how")
    rows = {}
    for name, found in sorted(values.items()):
        spread = (max(found) - min(found)) / median(found)
        rows[name] = {"values": found, "spread": spread}
        figures = (f"{v:.1f}" for v in (min(found), median(found), max(found)))
        met = "met" if spread <= BAR else "MISSED"
        table.add_row(name, f"{len(found)}/{options.runs}", *figures, f"{spread:.1%}", met, ", ".join(methods[name]))
    console = Console(width=140)
    console.print(table)
    console.print(f"seconds of a run: median {median(seconds):.2f}, longest {max(seconds):.2f}; problems: {problems}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "seconds": seconds}, indent=2))


if __name__ == "__main__":
    main()
