"""Measuring once, for the commands that end: progress on the terminal, a result returned."""

import logging
from dataclasses import replace

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from exporter.config import Settings
from exporter.present.sentences import reads
from exporter.roofline.snapshot import View, view
from exporter.service.wiring import CLOCKS, measuring


async def measure_once(settings: Settings, *, probe: bool = True, prefill: bool = False) -> View:
    """One bandwidth run and, with `probe`, one cycle of every server; with `prefill`, then a long prompt to each.

    On a terminal, stderr shows a progress bar; otherwise the log tells what goes on.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        if console.is_terminal:
            # Log lines would tear the bar apart, and the report says what they say.
            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
        task = bar.add_task("starting", total=None)
        async with measuring(settings, lambda step: bar.update(task, description=step)) as scheduler:
            return _whole(view(await scheduler.run_once(probe=probe, prefill=prefill), CLOCKS.monotonic()))


def _whole(seen: View) -> View:
    """Without the last run's problem where any gave `read`: all of them were this command's, a moment ago."""
    if not reads(seen):
        return seen
    host = replace(seen.snapshot.host, problem=None)
    return replace(seen, snapshot=replace(seen.snapshot, host=host))
