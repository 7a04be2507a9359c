"""Measuring or asking once, for the commands that end: progress on the terminal, a result returned."""

import urllib.request
from typing import Final
from urllib.parse import urlencode

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from exporter.config import Settings
from exporter.roofline.snapshot import View, view
from exporter.service.daemon import CLOCKS, measuring
from exporter.service.web import STATUS_HEADER

_TIMEOUT: Final = 10.0


class AskError(Exception):
    """A running exporter did not answer as one."""


async def measure_once(settings: Settings, *, probe: bool = True) -> View:
    """One bandwidth run and, with `probe`, one cycle of every server.

    On a terminal, stderr shows a progress bar; otherwise the log tells what goes on.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        if console.is_terminal:
            # Log lines would tear the bar apart, and the report says what they say.
            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(60))
        task = bar.add_task("starting", total=None)
        async with measuring(settings, lambda step: bar.update(task, description=step)) as scheduler:
            return view(await scheduler.run_once(probe=probe), CLOCKS.monotonic())


def fetch_report(url: str, form: str) -> tuple[str, int]:
    """The report of a running exporter, as text in that format, and its exit status.

    Raises:
        AskError: Nothing answers there, or not a roofline-exporter.
    """
    if not url.startswith(("http://", "https://")):
        raise AskError(f"--url {url}: write it as http://HOST:PORT")
    address = url.rstrip("/").removesuffix("/api/v1/snapshot") + "/api/v1/snapshot"
    try:
        # The scheme is checked above.
        with urllib.request.urlopen(f"{address}?{urlencode({'format': form})}", timeout=_TIMEOUT) as answer:  # noqa: S310
            status, text = answer.headers.get(STATUS_HEADER), answer.read().decode()
    except (OSError, ValueError) as error:
        raise AskError(f"{address}: {error}; does an exporter run there?") from error
    if status is None:
        raise AskError(f"{address}: this is not a roofline-exporter")
    return text, int(status)


def ask_health(address: tuple[str, int]) -> str | None:
    """Why the exporter listening at the address is not healthy, or None."""
    host, port = address
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://{f'[{local}]' if ':' in local else local}:{port}/-/healthy"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT):
            return None
    except (OSError, ValueError) as error:
        return f"{url}: {error}"
