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


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure and what it has to keep to: at most `bar`. `note` tells how it was come by."""

    what: str
    value: float
    unit: str
    bar: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """The bar and whether it was met; empty without one."""
        return "" if self.bar is None else f"<= {self.bar:.4g} {'met' if self.value <= self.bar else 'MISSED'}"


def quantile(values: Sequence[float], fraction: float) -> float:
    """The smallest of the values that this fraction of them does not exceed (no interpolation: a p99 happened)."""
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]


def show_figures(title: str, figures: Sequence[Figure], json_file: Path | None, **conditions: object) -> None:
    """Prints a table of figures with their bars, and writes everything to a file as JSON."""
    table = Table(title=title)
    for head in ("figure", "value", "unit", "bar", "how"):
        table.add_column(head, justify="right" if head in {"value", "bar"} else "left")
    for f in figures:
        table.add_row(f.what, f"{f.value:.4g}", f.unit, f.verdict, f.note)
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    if json_file is not None:
        rows = [{**asdict(f), "verdict": f.verdict} for f in figures]
        json_file.write_text(json.dumps({"title": title, **conditions, "machine": _machine(), "rows": rows}, indent=2))


def _machine() -> dict[str, object]:
    return {"cpus": len(os.sched_getaffinity(0)), "kernel": platform.release(), "load": os.getloadavg()}


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
        rows = [{**asdict(c), "ratios": c.ratios, "median_ratio": median(c.ratios)} for c in comparisons]
        json_file.write_text(json.dumps({"title": title, **conditions, "machine": _machine(), "rows": rows}, indent=2))
