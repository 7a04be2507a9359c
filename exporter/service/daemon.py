"""The daemon: one scheduler after the other, as the configuration changes, the web server, and signals."""

import asyncio
import errno
import logging
import os
import platform
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Final

import structlog
from aiohttp import web
from aiohttp.http import HttpProcessingError

from exporter.config import Settings, to_yaml
from exporter.present.metrics import SnapshotCollector, build_registry
from exporter.roofline.snapshot import Snapshot
from exporter.service.ceilings import Progress
from exporter.service.reload import Reloader
from exporter.service.scheduler import Scheduler
from exporter.service.web import Served, build_app
from exporter.service.wiring import CLOCKS, measuring

log = structlog.get_logger()

VERSION: Final = version("roofline-exporter")
END_SECONDS: Final = 0.4
"""From the signal to the end at most. It takes a tenth of that; a busy machine, or clients, could make it any time."""
MAX_THREADS: Final = 64
"""Begun only when every other is at work; asyncio's own 4 and one for each CPU are few."""
_PATIENCE_SECONDS: Final = 0.1
"""How long, twice, the end waits for clients that do not take their answers."""


class ListenError(Exception):
    """An address cannot be listened on."""


async def serve(
    settings: Settings,
    addresses: Sequence[tuple[str, int]],
    *,
    load: Callable[[], Settings] | None = None,
    progress: Progress = lambda _: None,
    beside: Callable[[Scheduler, Sequence[str]], Awaitable[None]] | None = None,
    leave: Callable[[], object] = lambda: None,
) -> None:
    """Runs the daemon until SIGTERM or SIGINT; SIGHUP reads the configuration again.

    Args:
        settings: The configuration, peaks looked up (peaks.py).
        addresses: Where to listen, host and port.
        load: Reads the configuration again; raises ConfigError. None when there is nothing to read.
        progress: Told what is being measured.
        beside: Runs beside the daemon, with the scheduler and the URLs that it is reached at.
        leave: Ends the process, where there is no more to it than the daemon: called once all is in order, or
            END_SECONDS after the signal.

    Raises:
        ListenError: An address is taken, or not this machine's.
    """
    stop = asyncio.Event()
    reloader = Reloader(settings, load, CLOCKS.unix)
    loop = asyncio.get_running_loop()
    # A look at a dead disk keeps its thread, one for each server: names are resolved, and kernels run, all the same.
    loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS))

    def end() -> None:
        if not stop.is_set():
            log.info("stopping")
            stop.set()
            loop.call_later(END_SECONDS, leave)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGHUP, reloader.reload_soon)
    before: Scheduler | None = None
    runner: web.AppRunner | None = None
    try:
        while not stop.is_set():
            settings = reloader.settings
            async with measuring(settings, progress, before, reloader.trusted) as scheduler:
                work = []
                if runner is None:
                    # Only now is there a snapshot to serve.
                    served = _Current(scheduler, reloader, settings)
                    runner = web.AppRunner(
                        served.app(), access_log=None, logger=_server_log(), shutdown_timeout=_PATIENCE_SECONDS
                    )
                    await runner.setup()
                    urls = [url for host, port in addresses for url in await _listen(runner, host, port)]
                    _tell_start(urls)
                    work = [beside(scheduler, urls)] if beside else []
                served.scheduler = before = scheduler
                served.settings = settings
                reloader.in_force(settings, scheduler.finish)
                await _until(stop, scheduler.run(), *work)
    finally:
        if runner is not None:
            await runner.cleanup()
    leave()


class _Current:
    """What the pages show: always of the scheduler that measures now."""

    def __init__(self, scheduler: Scheduler, reloader: Reloader, settings: Settings) -> None:
        self.scheduler = scheduler
        self.settings = settings
        self._reloader = reloader

    def snapshot(self) -> Snapshot:
        return self._reloader.stamped(self.scheduler.snapshot)

    def healthy(self) -> bool:
        return self.scheduler.healthy()

    def app(self) -> web.Application:
        served = Served(
            snapshot=self.snapshot,
            healthy=self.healthy,
            config_yaml=lambda: to_yaml(self.settings),
            reload=self._reloader.reload,
            version=VERSION,
            clocks=CLOCKS,
        )
        return build_app(served, build_registry(SnapshotCollector(self.snapshot, CLOCKS.monotonic, VERSION)))


def _tell_start(urls: Sequence[str]) -> None:
    log.info("listening", urls=urls, version=VERSION, pid=os.getpid(), python=platform.python_version())
    if os.geteuid() == 0:
        log.warning("running as root; no privilege is needed")


def _server_log() -> logging.Logger:
    """Where the web server logs: a page that fails is told in full, a client that speaks no HTTP to who debugs."""
    logger = logging.getLogger("roofline_exporter.web")
    logger.setLevel(logging.DEBUG)
    logger.addFilter(_clients_fault)
    return logger


def _clients_fault(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {error}", (), None
    return True


async def _listen(runner: web.AppRunner, host: str, port: int) -> list[str]:
    """Starts listening; the URL tells the real port where 0 was asked for, of each address where a name has several."""
    site, before = web.TCPSite(runner, host, port), len(runner.addresses)
    try:
        await site.start()
    except OSError as error:
        # A name that does not resolve has its own numbers, and words.
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        remedy = "choose another --web.listen-address"
        if error.errno == errno.EADDRINUSE:
            remedy += ", or stop what listens there"
        raise ListenError(f"cannot listen on {host}:{port}: {(why or str(error)).lower()}; {remedy}") from error
    bound = [address[:2] for address in runner.addresses[before:]]
    if len({port for _, port in bound}) == 1:
        bound = [(host, bound[0][1])]
    return [f"http://{f'[{name}]' if ':' in name else name}:{port}" for name, port in bound]


async def _until(stop: asyncio.Event, main: Awaitable[None], *beside: Awaitable[None]) -> None:
    """Runs the work until `stop`, or until the main work ends; what fails before then is raised."""
    waiter = asyncio.ensure_future(stop.wait())
    tasks = [asyncio.ensure_future(work) for work in (main, *beside)]
    try:
        pending = {waiter, *tasks}
        while not (waiter.done() or tasks[0].done()):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in (waiter, *tasks):
            task.cancel()
        await asyncio.gather(waiter, *tasks, return_exceptions=True)
