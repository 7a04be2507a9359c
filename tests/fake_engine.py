"""The engine of the bandwidth meter without the library: kernels that take the time that they are told to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trees import Machine

from exporter.measure.bandwidth import BandwidthMeter
from exporter.measure.membench import Bench, KernelRun, Way
from exporter.measure.whose import CpuSet
from exporter.roofline.ceiling import Bandwidth, BandwidthRun, Kernel, ThreadScope
from exporter.roofline.passes import (
    Method,
    Pass,
    Store,
)
from exporter.roofline.reason import Reason

MIB, GIB = 1 << 20, 1 << 30
GROUP = "sys/fs/cgroup"
PROC, SYS = Path("/proc"), Path("/sys")

Spoil = Callable[["Call", Pass], Pass]


@dataclass(frozen=True)
class Call:
    """One run of the fake: what was asked, and the how manyth run of it this is."""

    cpus: tuple[int, ...]
    kernel: Kernel
    store: Store
    array_bytes: int
    repeat: int
    method: Method = Method.STREAM
    isa: str = "fake"


@dataclass
class FakeEngine:
    """A machine whose memory gives each CPU 10 GB/s, saturates at 30, and has a cache of three times that rate."""

    cache_bytes: int = 32 * MIB
    plain_share: float = 0.75
    spoil: Spoil = lambda _, timed: timed
    fail: Callable[[Call], Reason | None] = lambda _: None
    refuse: Callable[[tuple[int, ...], int], Reason | None] = lambda _cpus, _size: None
    on_run: Callable[["FakeEngine"], None] = lambda _: None
    touch: Callable[[int], None] = lambda _: None
    isas: tuple[str, ...] = ("fake",)
    evict_supported: bool = False
    calls: list[Call] = field(default_factory=list)
    opened: int = 0
    closed: int = 0
    most_mapped: int = 0
    refills: set[int] = field(default_factory=set)
    stopped: bool = False

    def open(self, cpus: Sequence[int], array_bytes: int, refill_bytes: int = 0) -> Bench | Reason:
        reason = self.refuse(tuple(cpus), array_bytes)
        if reason is not None:
            return reason
        self.opened += 1
        mapped = 3 * array_bytes + len(cpus) * refill_bytes
        self.most_mapped = max(self.most_mapped, mapped * (self.opened - self.closed))
        self.refills.add(refill_bytes)
        return FakeBench(self, tuple(cpus), array_bytes)

    def fma(self, cpus: Sequence[int], isa: str, *, passes: int, pass_seconds: float) -> KernelRun:
        timed = Pass(pass_seconds, 1.0, 1.0, 0, 0)
        return KernelRun((timed,) * passes, len(cpus) * 1e9 * self.isa_share(isa))

    def isa_share(self, isa: str) -> float:
        """The last named one is the fastest."""
        return (1 + self.isas.index(isa)) / len(self.isas)

    def cancel(self) -> None:
        self.stopped = True

    def resume(self) -> None:
        self.stopped = False

    def cancelled(self) -> bool:
        return self.stopped


@dataclass
class FakeBench:
    engine: FakeEngine
    cpus: tuple[int, ...]
    array_bytes: int
    unpinned: int = 0

    def run(self, kernel: Kernel, way: Way, *, passes: int, rest_seconds: float, budget_seconds: float) -> KernelRun:
        assert rest_seconds > 0
        assert budget_seconds > 0
        engine = self.engine
        store = way.store
        same = Call(self.cpus, kernel, store, self.array_bytes, 0, way.method, way.isa)
        call = replace(same, repeat=sum(replace(c, repeat=0) == same for c in engine.calls))
        engine.calls.append(call)
        engine.on_run(engine)
        if engine.stopped:
            return KernelRun(error=Reason.CANCELLED)
        reason = engine.fail(call)
        if reason is not None:
            return KernelRun(error=reason)
        engine.touch(3 * self.array_bytes)
        rate = min(10e9 * len(self.cpus), 30e9) * engine.isa_share(way.isa)
        if 3 * self.array_bytes <= engine.cache_bytes and way.method is Method.STREAM:
            rate *= 3
        if kernel is not Kernel.READ and store is Store.PLAIN:
            rate *= engine.plain_share
        amount = 3 * self.array_bytes
        warm_up = Pass(2 * amount / rate, 0.5, 3.0, 7, 9)
        timed = [engine.spoil(call, Pass(amount / rate, 1.0, 1.0, 0, 0)) for _ in range(passes - 1)]
        return KernelRun((warm_up, *timed), amount)

    def close(self) -> None:
        self.engine.closed += 1
        self.engine.touch(0)


def meter(
    machine: Machine, engine: FakeEngine, *, cpus: int = 2, max_memory: int = GIB, threads: int | None = None
) -> BandwidthMeter:
    return BandwidthMeter(
        max_memory=max_memory,
        threads=threads,
        proc=machine.proc,
        sys=machine.sys,
        clock=lambda: 7.0,
        engine=engine,
        cpus=lambda: CpuSet(tuple(range(cpus)), "exporter"),
    )


def by(run: BandwidthRun, kernel: Kernel, scope: ThreadScope) -> Bandwidth:
    """The measurement of one kernel and scope."""
    return next(b for b in run.measurements if (b.kernel, b.threads) == (kernel, scope))
