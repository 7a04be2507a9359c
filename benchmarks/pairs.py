"""Paired measurements on a machine that others use too: interleaved runs, ratios pair by pair, medians and bounds."""

import json
import math
import os
import platform
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, stdev

from rich.console import Console
from rich.table import Table

# Student's t, two-sided 95 %, for 19 and more degrees of freedom close enough to these.
_T95 = {4: 2.776, 6: 2.447, 8: 2.306, 9: 2.262, 14: 2.145, 19: 2.093, 29: 2.045, 39: 2.023, 59: 2.001}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Our figure against another's, pair by pair; `ratio` is ours / theirs, or as `what` says."""

    what: str
    ours: Sequence[float]
    theirs: Sequence[float]
    unit: str
    bar: float | None = None

    @property
    def ratios(self) -> list[float]:
        """The pairs' ratios, in the order of the runs."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]


def upper_bound(values: Sequence[float]) -> float:
    """The upper end of the mean's two-sided 95 % confidence interval."""
    degrees = len(values) - 1
    t = min((v for d, v in _T95.items() if d <= degrees), default=12.7)
    return fmean(values) + t * stdev(values) / math.sqrt(len(values))


def shuffled(names: Sequence[str], seed: int) -> list[str]:
    """The names in a random order, so that no contestant always runs after the same other."""
    order = list(names)
    random.Random(seed).shuffle(order)
    return order


def show(title: str, comparisons: Sequence[Comparison], json_file: Path | None, **conditions: object) -> None:
    """Prints a table of medians and ratios, and writes everything to a file as JSON."""
    table = Table(title=title)
    for head in ("comparison", "pairs", "ours", "theirs", "unit", "ratio: median", "min", "max", "bar"):
        table.add_column(head, justify="left" if head == "comparison" else "right")
    for c in comparisons:
        ratios = c.ratios
        figures = (f"{median(c.ours):.4g}", f"{median(c.theirs):.4g}", c.unit, f"{median(ratios):.3f}")
        bar = "" if c.bar is None else f">= {c.bar:g} {'met' if median(ratios) >= c.bar else 'MISSED'}"
        table.add_row(c.what, str(len(ratios)), *figures, f"{min(ratios):.3f}", f"{max(ratios):.3f}", bar)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if json_file is not None:
        machine = {"cpus": len(os.sched_getaffinity(0)), "kernel": platform.release(), "load": os.getloadavg()}
        rows = [{**asdict(c), "ratios": c.ratios, "median_ratio": median(c.ratios)} for c in comparisons]
        json_file.write_text(json.dumps({"title": title, **conditions, "machine": machine, "rows": rows}, indent=2))
