"""The demo: a real llama.cpp server on a small real model, with the exporter beside it."""

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from exporter.config import parse
from exporter.present.report import report_renderable
from exporter.roofline.snapshot import view
from exporter.service.daemon import serve
from exporter.service.demo_model import DemoModelError, assemble_model
from exporter.service.llama_child import LlamaChild, LlamaChildError
from exporter.service.scheduler import Scheduler
from exporter.service.wiring import CLOCKS

_LOAD_SECONDS = 60.0


class DemoError(Exception):
    """The demo's server or model cannot be had."""


def cache_directory() -> Path:
    """Where the demo's model is kept: under XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "roofline-exporter"


async def run_demo(addresses: Sequence[tuple[str, int]], model: Path | None) -> None:
    """Starts the server, serves until SIGTERM or Ctrl-C, and stops the server.

    Args:
        addresses: Where the exporter listens.
        model: A GGUF file, or None for the demo's own.

    Raises:
        DemoError: llama.cpp or the model is not installed, damaged, or does not start.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        if model is None:
            console.print("checking the demo's model ...")
            model = await asyncio.to_thread(assemble_model, cache_directory())
        console.print(f"starting llama.cpp on {model} ...")
        child = await LlamaChild.start(model=model)
        try:
            await child.wait_ready(_LOAD_SECONDS)
            settings = parse(f"servers: [{{name: demo, url: '{child.url}'}}]", "demo")
            console.print(f"llama.cpp listens on {child.url} (pid {child.pid})")
            await serve(
                settings,
                addresses,
                progress=lambda step: console.print(f"  measuring {step}"),
                beside=partial(_tell, console),
            )
        finally:
            await child.stop()
    except (DemoModelError, LlamaChildError) as error:
        raise DemoError(str(error)) from error
    console.print("stopped both.")


async def _tell(console: Console, scheduler: Scheduler, urls: Sequence[str]) -> None:
    """Prints where to look and, after the first cycle, the study table."""
    for url in urls:
        console.print(f"exporter: {url}/   metrics: {url}/metrics")
    await scheduler.first_cycle_done.wait()
    Console().print(report_renderable(view(scheduler.snapshot, CLOCKS.monotonic())))
    console.print("It goes on measuring; Ctrl-C ends both.")
