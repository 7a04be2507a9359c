"""Wires what measures: sessions, probes, watches, kernels and the scheduler, from the settings."""

import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from exporter.config import ServerSettings, Settings
from exporter.measure.bandwidth import BandwidthMeter
from exporter.measure.host import ContentionMeter, host_info
from exporter.measure.live import LiveReader
from exporter.measure.llama import LlamaClient, open_session
from exporter.measure.manners import Manners
from exporter.measure.model import ModelHints, ModelReader
from exporter.measure.probe import DecodeProbe
from exporter.measure.whose import measured_cpus
from exporter.roofline.snapshot import host_roof
from exporter.service.ceilings import HostWatch, Progress
from exporter.service.clocks import Clocks
from exporter.service.duty import DutyAccount
from exporter.service.live import LiveWatch
from exporter.service.policy import asked_alike
from exporter.service.record import carried_over
from exporter.service.scheduler import Scheduler
from exporter.service.watch import ServerWatch

CLOCKS: Final = Clocks(time.monotonic, time.time)
PROC: Final = Path("/proc")
SYS: Final = Path("/sys")


@asynccontextmanager
async def measuring(
    settings: Settings,
    progress: Progress = lambda _: None,
    before: Scheduler | None = None,
    trusted: Mapping[Path, ssl.SSLContext] = MappingProxyType({}),
) -> AsyncIterator[Scheduler]:
    """A scheduler with everything it needs, released afterwards.

    Args:
        settings: The configuration, peaks looked up (peaks.py).
        progress: Told what is being measured.
        before: The scheduler of an older configuration, ended by now; what it found and still holds is carried over.
        trusted: What was read of each `ca_file`; one that is not among them is read now.

    Raises:
        OSError: A `ca_file` that is to be read now cannot be.
    """
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for server in settings.servers:
            ca = None if server.ca_file is None else trusted.get(server.ca_file, server.ca_file)
            session = await stack.enter_async_context(open_session(server.url, ca))
            clients.append(LlamaClient(session, server.url, server.api_key_file, server.model))
        machine, duty = _machine(settings, progress, before), _duty(settings, before)
        contention = ContentionMeter(PROC, SYS, CLOCKS.monotonic)

        def watch(server: ServerSettings, client: LlamaClient) -> ServerWatch:
            probing, old = settings.probe, _watch_named(before, server.name)
            same = old is not None and asked_alike(old.settings, server)
            made = ServerWatch(
                settings=server,
                probing=probing,
                duty=duty,
                probe=DecodeProbe(
                    client,
                    contention,
                    CLOCKS.monotonic,
                    seconds=probing.seconds,
                    timeout=probing.timeout,
                    manners=_manners(settings, server, old if same else None),
                ),
                models=ModelReader(
                    ModelHints(server.gguf, server.active_weight_bytes, server.cache_type_k, server.cache_type_v),
                    server.name,
                ),
                roof=lambda policy: host_roof(machine.host, policy, CLOCKS.monotonic()),
                clocks=CLOCKS,
                machine_compute_peak=settings.bandwidth.compute_peak,
            )
            if old is not None:
                _go_on(made, old, same=same)
            return made

        async def live(watch: ServerWatch, changed: Callable[[], None]) -> None:
            reader = LiveReader(watch.probe.client, CLOCKS.monotonic)
            await LiveWatch(watch.settings, watch, reader, clock=CLOCKS.monotonic, changed=changed).run()

        yield Scheduler(
            settings=settings,
            watches=[watch(server, client) for server, client in zip(settings.servers, clients, strict=True)],
            duty=duty,
            machine=machine,
            clocks=CLOCKS,
            progress=progress,
            live=live,
        )


def _machine(settings: Settings, progress: Progress, before: Scheduler | None) -> HostWatch:
    """This machine's watch, with a meter as the configuration wants it."""
    interval = settings.bandwidth.interval
    meter = BandwidthMeter(
        max_memory=settings.bandwidth.max_memory,
        threads=settings.bandwidth.threads,
        proc=PROC,
        sys=SYS,
        clock=CLOCKS.monotonic,
        cpus=partial(measured_cpus, [server.url for server in settings.servers if server.device == "cpu"]),
        measure_compute=settings.bandwidth.compute_peak is None,
    )
    if before is not None:
        before.machine.configure(interval=interval, meter=meter)
        return before.machine
    return HostWatch(interval=interval, meter=meter, info=host_info(PROC, SYS), clocks=CLOCKS, progress=progress)


def _duty(settings: Settings, before: Scheduler | None) -> DutyAccount:
    """What probes took goes on counting under a new limit."""
    if before is None:
        return DutyAccount(settings.probe.max_duty_cycle, CLOCKS.monotonic)
    before.duty.limit = settings.probe.max_duty_cycle
    return before.duty


def _manners(settings: Settings, server: ServerSettings, old: ServerWatch | None) -> Manners:
    """What was seen of the same server's users goes on to count."""
    seen = Manners(CLOCKS.monotonic) if old is None else old.probe.manners
    probing = settings.probe
    return replace(
        seen, interval=probing.interval, health_interval=probing.health_interval, sleep_idle=server.sleep_idle
    )


def _go_on(watch: ServerWatch, old: ServerWatch, *, same: bool) -> None:
    """Lets a watch go on from that of an older configuration; `same` where that asked the server in the same way."""
    watch.record = carried_over(watch.record, old.record, same=same)
    if same:
        watch.checkup.go_on_from(old.checkup)
    if same and watch.record.batches.keys() == old.record.batches.keys():
        # What was measured holds for as long as the next round was planned to take.
        rounds, before = watch.rounds, old.rounds
        rounds.due, rounds.interval = before.due, max(rounds.interval, before.interval)
        watch.record = replace(watch.record, interval_seconds=rounds.interval)


def _watch_named(scheduler: Scheduler | None, name: str) -> ServerWatch | None:
    return next((w for w in scheduler.watches if w.record.name == name), None) if scheduler else None
