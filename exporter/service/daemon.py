"""Wires the daemon together: sessions, meter, scheduler, web server, signals."""

import asyncio
import contextlib
import os
import platform
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

import structlog
from aiohttp import web

from exporter.config import Settings, to_yaml
from exporter.measure.bandwidth import BandwidthMeter
from exporter.measure.host import ContentionMeter, host_info
from exporter.measure.live import LiveReader
from exporter.measure.llama import LlamaClient, open_session
from exporter.measure.manners import Manners
from exporter.measure.model import ModelHints, ModelReader
from exporter.measure.probe import DecodeProbe
from exporter.measure.whose import measured_cpus
from exporter.present.metrics import SnapshotCollector, build_registry
from exporter.roofline.ceiling import Roof, RoofPolicy
from exporter.service.duty import DutyAccount
from exporter.service.live import LiveWatch
from exporter.service.peaks import with_peaks
from exporter.service.scheduler import Progress, Scheduler
from exporter.service.watch import Clocks, ServerWatch
from exporter.service.web import Served, build_app

log = structlog.get_logger()

VERSION: Final = version("roofline-exporter")
CLOCKS: Final = Clocks(time.monotonic, time.time)
PROC: Final = Path("/proc")
SYS: Final = Path("/sys")


class ListenError(Exception):
    """An address cannot be listened on."""


@asynccontextmanager
async def measuring(settings: Settings, progress: Progress = lambda _: None) -> AsyncIterator[Scheduler]:
    """A scheduler with everything it needs, released afterwards.

    Raises:
        PeakError: A GPU server's bandwidth is not known.
    """
    settings = with_peaks(settings)
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for server in settings.servers:
            session = await stack.enter_async_context(open_session(server.url, server.ca_file))
            clients.append(LlamaClient(session, server.url, server.api_key_file, server.model))
        executor = ThreadPoolExecutor(1, "membench")
        # Cancelled by then, the last call ends within a chunk; queued ones must not start.
        stack.callback(executor.shutdown, wait=True, cancel_futures=True)
        duty = DutyAccount(settings.probe.max_duty_cycle, CLOCKS.monotonic)
        contention = ContentionMeter(PROC, SYS, CLOCKS.monotonic)

        def watches(roof: Callable[[RoofPolicy], Roof]) -> Sequence[ServerWatch]:
            return [
                ServerWatch(
                    settings=server,
                    probing=settings.probe,
                    duty=duty,
                    probe=DecodeProbe(
                        client,
                        contention,
                        CLOCKS.monotonic,
                        seconds=settings.probe.seconds,
                        timeout=settings.probe.timeout,
                        manners=Manners(
                            CLOCKS.monotonic,
                            settings.probe.interval,
                            settings.probe.health_interval,
                            server.sleep_idle,
                        ),
                    ),
                    models=ModelReader(
                        ModelHints(server.gguf, server.active_weight_bytes, server.cache_type_k, server.cache_type_v)
                    ),
                    roof=roof,
                    clocks=CLOCKS,
                    machine_compute_peak=settings.bandwidth.compute_peak,
                )
                for server, client in zip(settings.servers, clients, strict=True)
            ]

        by_name = {s.name: (s, c) for s, c in zip(settings.servers, clients, strict=True)}

        async def live(watch: ServerWatch, changed: Callable[[], None]) -> None:
            server, client = by_name[watch.record.name]
            reader = LiveReader(client, CLOCKS.monotonic)
            await LiveWatch(server, watch, reader, clock=CLOCKS.monotonic, changed=changed).run()

        yield Scheduler(
            settings=settings,
            watches=watches,
            duty=duty,
            meter=BandwidthMeter(
                max_memory=settings.bandwidth.max_memory,
                threads=settings.bandwidth.threads,
                proc=PROC,
                sys=SYS,
                clock=CLOCKS.monotonic,
                cpus=partial(measured_cpus, [server.url for server in settings.servers if server.device == "cpu"]),
                measure_compute=settings.bandwidth.compute_peak is None,
            ),
            executor=executor,
            info=host_info(PROC, SYS),
            clocks=CLOCKS,
            progress=progress,
            live=live,
        )


async def serve(
    settings: Settings,
    addresses: Sequence[tuple[str, int]],
    *,
    progress: Progress = lambda _: None,
    beside: Callable[[Scheduler, Sequence[str]], Awaitable[None]] | None = None,
) -> None:
    """Runs the daemon until SIGTERM or SIGINT.

    Args:
        settings: The configuration.
        addresses: Where to listen, host and port.
        progress: Told what is being measured.
        beside: Runs beside the daemon, with the scheduler and the URLs that it is reached at.

    Raises:
        ListenError: An address is taken, or not this machine's.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(
        signal.SIGHUP, log.warning, "this version does not reload: restart to read the configuration"
    )
    async with measuring(settings, progress) as scheduler:
        collector = SnapshotCollector(lambda: scheduler.snapshot, CLOCKS.monotonic, VERSION)
        served = Served(lambda: scheduler.snapshot, scheduler.healthy, to_yaml(settings), VERSION, CLOCKS)
        runner = web.AppRunner(build_app(served, build_registry(collector)), access_log=None, shutdown_timeout=0.3)
        await runner.setup()
        try:
            urls = [await _listen(runner, host, port) for host, port in addresses]
            log.info("listening", urls=urls, version=VERSION, pid=os.getpid(), python=platform.python_version())
            if os.geteuid() == 0:
                log.warning("running as root; no privilege is needed")
            await _until(stop, scheduler.run(), *([beside(scheduler, urls)] if beside else []))
            log.info("stopping")
        finally:
            await runner.cleanup()


async def _listen(runner: web.AppRunner, host: str, port: int) -> str:
    """Starts listening; the URL tells the real port where 0 was asked for."""
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        # A name that does not resolve has its own numbers, and words.
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ListenError(f"cannot listen on {host}:{port}: {(why or str(error)).lower()}") from error
    bound = runner.addresses[-1][1]
    return f"http://{f'[{host}]' if ':' in host else host}:{bound}"


async def _until(stop: asyncio.Event, *work: Awaitable[None]) -> None:
    """Runs the work until `stop`; what fails before then is raised."""
    waiter = asyncio.ensure_future(stop.wait())
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        pending = {waiter, *tasks}
        while not waiter.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in (waiter, *tasks):
            task.cancel()
        await asyncio.gather(waiter, *tasks, return_exceptions=True)
