"""A scheduler on a manual clock, with a fake server and a meter that gives what it is told to give."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import snapshots
from fake_llama import FakeLlama

from exporter.config import BandwidthSettings, ProbeSettings, ServerSettings, Settings
from exporter.measure.host import ContentionMeter
from exporter.measure.llama import LlamaClient, open_session
from exporter.measure.manners import Manners
from exporter.measure.model import ModelHints, ModelReader
from exporter.measure.probe import DecodeProbe
from exporter.roofline.ceiling import BandwidthRun, ComputePeak, Kernel
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import HostInfo, Server, host_roof
from exporter.service.ceilings import HostWatch
from exporter.service.clocks import Clocks
from exporter.service.duty import DutyAccount
from exporter.service.scheduler import Scheduler
from exporter.service.watch import ServerWatch

GB = 1e9


@dataclass
class ManualTime:
    """A clock that moves when told, and sleep that moves it."""

    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now

    def unix(self) -> float:
        return self.now + 1.7e9

    async def sleep(self, seconds: float) -> None:
        """Only the measuring loop, which naps, moves the clock; the health loop checks once."""
        if seconds > 1:
            await asyncio.Event().wait()
        self.now += seconds
        await asyncio.sleep(0)

    @property
    def clocks(self) -> Clocks:
        return Clocks(self.monotonic, self.unix)


@dataclass
class FakeMeter:
    """Gives the run that it is told to give."""

    time: ManualTime
    read: float = 30 * GB
    problem: Reason | None = None
    cpus: tuple[int, ...] = (0, 1)
    runs: list[bool] = field(default_factory=list)
    cancelled: bool = False
    during: Callable[[], None] = lambda: None
    fourteen: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def measure(self, *, full: bool, progress: Callable[[str], None]) -> BandwidthRun:
        self.runs.append(full)
        if len(self.runs) == 14:
            self.loop.call_soon_threadsafe(self.fourteen.set)
        self.during()
        progress("read")
        rates = {} if self.problem else {Kernel.READ: self.read, Kernel.TRIAD: 0.9 * self.read}
        found = tuple(snapshots.bandwidth(k, r / GB, measured_at=self.time.now) for k, r in rates.items())
        peak = ComputePeak("fp32", 300e9, 0.0, 2, "avx2", self.time.now) if full and found else None
        rejected = {self.problem: 3} if self.problem else {}
        return BandwidthRun(found, peak, rejected, self.problem, 1 << 20, self.cpus)

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Bench:
    """A scheduler on a manual clock, with its fakes."""

    time: ManualTime
    meter: FakeMeter
    fake: FakeLlama
    scheduler: Scheduler
    machine: HostWatch
    watch: ServerWatch
    probe: DecodeProbe
    duty: DutyAccount

    @property
    def server(self) -> Server:
        return self.watch.record

    def state(self) -> str:
        return self.watch.record.state.value


@asynccontextmanager
async def bench(
    fake: FakeLlama,
    tmp_path: Path,
    *,
    server: dict[str, object] | None = None,
    probe: dict[str, object] | None = None,
    machine: dict[str, object] | None = None,
    sleep_idle: float | None = None,
) -> AsyncIterator[Bench]:
    moment = ManualTime()
    server_settings = ServerSettings.model_validate({"name": "local", "url": fake.url, **(server or {})})
    settings = Settings(
        servers=(server_settings,),
        probe=ProbeSettings.model_validate(probe or {}),
        bandwidth=BandwidthSettings.model_validate(machine or {}),
    )
    meter = FakeMeter(moment)
    async with open_session(fake.url, None) as session:
        client = LlamaClient(session, fake.url, None)

        duty = DutyAccount(settings.probe.max_duty_cycle, moment.monotonic)

        machine_watch = HostWatch(
            interval=settings.bandwidth.interval,
            meter=meter,
            info=HostInfo("cpu", 2, None, None, "6", "x86_64"),
            clocks=moment.clocks,
            progress=lambda _: None,
        )
        # Probes are timed by the real clock: the fake answers at once.
        contention = ContentionMeter(tmp_path, tmp_path, time.monotonic)
        manners = Manners(moment.monotonic, settings.probe.interval, settings.probe.health_interval, sleep_idle)
        maker = DecodeProbe(client, contention, moment.monotonic, seconds=0.5, timeout=5, manners=manners)
        watch = ServerWatch(
            settings=server_settings,
            probing=settings.probe,
            duty=duty,
            probe=maker,
            models=ModelReader(ModelHints()),
            roof=lambda policy: host_roof(machine_watch.host, policy, moment.monotonic()),
            clocks=moment.clocks,
            machine_compute_peak=settings.bandwidth.compute_peak,
        )
        scheduler = Scheduler(
            settings=settings,
            watches=[watch],
            duty=duty,
            machine=machine_watch,
            clocks=moment.clocks,
            sleep=moment.sleep,
        )
        yield Bench(moment, meter, fake, scheduler, machine_watch, watch, maker, duty)
