"""The exporter in this process, on real HTTP: real clients, probes, watches, scheduler and web server.

Only the kernels are not run: the ceiling is given.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import snapshots
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from exporter.config import ProbeSettings, ServerSettings, Settings
from exporter.measure.host import ContentionMeter
from exporter.measure.llama import LlamaClient, open_session
from exporter.measure.model import ModelHints, ModelReader
from exporter.measure.probe import DecodeProbe
from exporter.present.metrics import SnapshotCollector, build_registry
from exporter.roofline.ceiling import BandwidthRun, Kernel, Roof, RoofPolicy
from exporter.roofline.snapshot import HostInfo, Server
from exporter.service.ceilings import HostWatch
from exporter.service.clocks import Clocks
from exporter.service.duty import DutyAccount
from exporter.service.scheduler import Scheduler
from exporter.service.watch import ServerWatch
from exporter.service.web import Served, build_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path

    from aiohttp.web import Application, Request
    from fake_llama import FakeLlama

CLOCKS = Clocks(time.monotonic, time.time)
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class GivenCeiling:
    """A meter that measures nothing: 30 GB/s."""

    def measure(self, *, full: bool, progress: Callable[[str], None]) -> BandwidthRun:
        progress("full" if full else "short")
        found = snapshots.bandwidth(Kernel.READ, 30, measured_at=time.monotonic())
        return BandwidthRun((found,), None, {}, None, 1 << 20, (0, 1))

    def cancel(self) -> None:
        """Nothing runs."""


@dataclass
class Station:
    """A running exporter."""

    scheduler: Scheduler
    watches: Sequence[ServerWatch]
    web: TestClient[Request, Application]

    @property
    def server(self) -> Server:
        """What is known of the first server."""
        return self.watches[0].record

    async def scrape(self) -> tuple[Samples, float]:
        """The samples of /metrics, which parse in both formats, and how long the text took to come, seconds."""
        self.scheduler.snapshot = self.scheduler._freeze()
        began = time.perf_counter()
        answer = await self.web.get("/metrics")
        text = await answer.text()
        seconds = time.perf_counter() - began
        assert answer.status == 200, text
        samples = {(s.name, frozenset(s.labels.items())): s.value for f in parse_text(text) for s in f.samples}
        modern = await self.web.get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"})
        families = parse_openmetrics(await modern.text())  # type: ignore[no-untyped-call]
        assert {s.name for f in families for s in f.samples} >= {name for name, _ in samples}
        return samples, seconds


@asynccontextmanager
async def station(
    servers: Sequence[dict[str, object]],
    empty: Path,
    *,
    timeout: float = 20.0,
    seconds: float = 0.3,
    batches: Sequence[int] = (1, 2),
    clocks: Clocks = CLOCKS,
) -> AsyncIterator[Station]:
    """An exporter that watches these servers.

    Args:
        servers: The keys of each in the configuration, without `name`.
        empty: A directory without /proc and /sys: nothing is known of contention.
        timeout: Of one completion, seconds.
        seconds: Target time of one probe.
        batches: The batches to probe.
        clocks: The clocks of watches and scheduler.
    """
    named = [{"name": f"s{n}", **keys} for n, keys in enumerate(servers)]
    settings = Settings(
        servers=tuple(ServerSettings.model_validate(keys) for keys in named),
        probe=ProbeSettings.model_validate({"batches": list(batches)}),
    )
    duty = DutyAccount(0.5, clocks.monotonic)
    async with AsyncExitStack() as stack:
        made: list[ServerWatch] = []
        for server in settings.servers:
            session = await stack.enter_async_context(open_session(server.url, server.ca_file))
            client = LlamaClient(session, server.url, server.api_key_file, server.model)
            contention = ContentionMeter(empty, empty, time.monotonic)
            made.append(
                ServerWatch(
                    settings=server,
                    probing=settings.probe,
                    duty=duty,
                    probe=DecodeProbe(client, contention, clocks.monotonic, seconds=seconds, timeout=timeout),
                    models=ModelReader(ModelHints()),
                    roof=_roof,
                    clocks=clocks,
                )
            )
        machine = HostWatch(
            interval=settings.bandwidth.interval,
            meter=GivenCeiling(),
            info=HostInfo("cpu", 2, None, None, "6", "x86_64"),
            clocks=clocks,
            progress=lambda _: None,
        )
        scheduler = Scheduler(
            settings=settings,
            watches=made,
            duty=duty,
            machine=machine,
            clocks=clocks,
        )
        collector = SnapshotCollector(lambda: scheduler.snapshot, clocks.monotonic, "1")
        served = Served(
            snapshot=lambda: scheduler.snapshot,
            healthy=scheduler.healthy,
            config_yaml=lambda: "",
            reload=_nothing_to_read,
            version="1",
            clocks=clocks,
        )
        app = build_app(served, build_registry(collector))
        web = await stack.enter_async_context(TestClient(TestServer(app)))
        yield Station(scheduler, made, web)


async def _nothing_to_read() -> tuple[str, ...]:
    return ()


def _roof(policy: RoofPolicy) -> Roof:
    return policy.roof({Kernel.READ: 30e9}, None)


@asynccontextmanager
async def watching(
    fake: FakeLlama, empty: Path, *servers: Mapping[str, object], batches: tuple[int, ...] = (1, 2)
) -> AsyncIterator[Station]:
    """An exporter that watches this fake server, under one or several configurations."""
    keys = [{"url": fake.url, **server} for server in servers or ({},)]
    async with station(keys, empty, batches=batches) as running:
        yield running


def measured(running: Station, number: int = 0) -> dict[int, float]:
    """The step times by batch."""
    batches = running.watches[number].record.batches
    return {b: r.sample.step_seconds for b, r in batches.items() if r.sample is not None}
