"""Measures this machine's memory-bandwidth ceilings and compute peak.

A full run proves that memory and not a cache is measured, sweeps the thread counts and the ways of writing, and
remembers the winners; a short run measures `read` and `triad` again with those. Both block, and run in one thread of
their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from exporter.measure.cgroup import quota_cpus
from exporter.measure.host import huge_pages_given, memory_budget_bytes, steal_seconds, was_robbed
from exporter.measure.kernels import FULL_PASSES, LEAST_PASSES, KernelRunner
from exporter.measure.membench import Engine, Membench
from exporter.measure.plateau import proven_bytes
from exporter.measure.topology import (
    assumed_cache_bytes,
    last_level_cache_bytes,
    private_cache_bytes,
    thread_sets,
)
from exporter.measure.whose import CpuSet, measured_cpus
from exporter.roofline.ceiling import Bandwidth, BandwidthRun, ComputePeak, Kernel
from exporter.roofline.passes import (
    ENOUGH_THREADS,
    EVICT_MEMORY_SHARE,
    EvictPlan,
    Method,
    Size,
    SizePlan,
    Store,
    fastest,
    plan_evict,
    plan_sizes,
)
from exporter.roofline.reason import Reason

REST_SECONDS: Final = 0.01
"""Sleep between two passes, so that a server's work interleaves."""
QUOTA_REST_SECONDS: Final = 0.12
"""The same under a CPU quota: longer than the usual period (100 ms), so that a pass begins with a fresh quota."""

_READ_STORES: Final = (Store.PLAIN,)
_TRACKED: Final = (Kernel.READ, Kernel.TRIAD)
_BY_IMPORTANCE: Final = (*_TRACKED, Kernel.COPY, Kernel.SCALE, Kernel.ADD)


@dataclass(frozen=True, slots=True)
class _Calibration:
    """What a full run found out: valid while the process may use the same CPUs.

    Attributes:
        array_bytes: A size that was proven to lie in memory, with this method; so does every larger one.
        best: The fastest measurement of each kernel, `read` among them, for its thread count and its way of writing.
    """

    cpus: tuple[int, ...]
    array_bytes: int
    best: Mapping[Kernel, Bandwidth]

    @property
    def method(self) -> Method:
        return Method(self.best[Kernel.READ].method)


@dataclass(frozen=True, slots=True)
class _Found:
    """What a run measured, and what each kernel got for all threads: its measurement, or why there is none."""

    array_bytes: int | None
    best: Mapping[Kernel, Bandwidth | Reason]
    single: tuple[Bandwidth, ...] = ()


class BandwidthMeter:
    """Measures when asked; keeps no memory and no thread in between.

    Args:
        max_memory: The most bytes for the kernels' arrays together.
        threads: The most threads, or None for as many as there are CPUs.
        proc: The root of procfs.
        sys: The root of sysfs.
        clock: Monotonic seconds.
        engine: The compiled kernels.
        cpus: Tells the CPUs to measure on, and whose they are; asked anew for each run.
        measure_compute: Whether full runs measure the compute peak too.
    """

    def __init__(
        self,
        *,
        max_memory: int,
        threads: int | None,
        proc: Path,
        sys: Path,
        clock: Callable[[], float],
        engine: Engine | None = None,
        cpus: Callable[[], CpuSet] = lambda: measured_cpus(()),
        measure_compute: bool = True,
    ) -> None:
        self._max_memory = max_memory
        self._threads = threads
        self._proc = proc
        self._sys = sys
        self._clock = clock
        self._engine = engine or Membench()
        self._cpus = cpus
        self._measure_compute = measure_compute
        self._calibration: _Calibration | None = None

    def cancel(self) -> None:
        """Ends the running measurement within milliseconds; callable from any thread.

        A cancel while nothing runs ends the next measurement at once, so that none slips past a shutdown.
        """
        self._engine.cancel()

    def measure(self, *, full: bool, progress: Callable[[str], None] | None = None) -> BandwidthRun:
        """Measures now, blocking: some seconds for a full run, about one for a short one.

        Args:
            full: Every kernel with one thread and with all, and the compute peak; else `read` and `triad` with all
                threads, as they were fastest before. Without a full run so far, or on other CPUs, all kernels again.
            progress: Told in a few words what is being measured.
        """
        tell = progress or (lambda _: None)
        chosen = self._cpus()
        cpus = chosen.cpus
        told = last_level_cache_bytes(self._sys, cpus)
        cache = told or assumed_cache_bytes(len(cpus))
        quota = quota_cpus(self._proc, self._sys) is not None
        swept = thread_sets(self._sys, cpus, self._threads)
        plan, skipped = self._plan_sets(cache, swept)
        swept = swept[skipped:]
        sets = swept if len(swept[-1]) == 1 else (*swept, swept[-1][:1])
        flags = (("cache_assumed", told is None), ("quota", quota), ("few_threads", skipped > 0))
        runner = KernelRunner(
            self._engine,
            self._proc,
            self._sys,
            self._clock,
            rest_seconds=QUOTA_REST_SECONDS if quota else REST_SECONDS,
            scope=chosen.scope,
            flags=tuple(name for name, on in flags if on),
        )
        compute: ComputePeak | Reason | None = None
        began, stolen = self._clock(), steal_seconds(self._proc, cpus)
        try:
            known = self._calibration
            if isinstance(plan, Reason):
                found = _nothing(runner.refuse(plan))
            elif full or known is None or known.cpus != cpus or known.method is not plan.method:
                # What was found with flushed arrays holds for those only, and the other way round.
                found = _measure_all(runner, plan, sets, tell)
            else:
                found = _measure_again(runner, plan, sets, known, tell)
            if was_robbed(stolen, steal_seconds(self._proc, cpus), self._clock() - began, len(cpus)):
                # Guests do not see the hypervisor's theft in their threads' CPU time, so no pass tells.
                found = _nothing(runner.refuse(Reason.PREEMPTED))
            self._remember(cpus, found)
            if full and self._measure_compute and not runner.cancelled():
                tell("compute peak")
                compute = runner.compute_peak(sets[0])
        finally:
            self._engine.resume()
        read = found.best[Kernel.READ]
        return BandwidthRun(
            measurements=(*_measured(found.best).values(), *found.single),
            compute=None if isinstance(compute, Reason) else compute,
            rejected=MappingProxyType(dict(runner.rejected)),
            problem=read if isinstance(read, Reason) else None,
            array_bytes=found.array_bytes,
            cpus=cpus,
            cache_bytes=cache,
            cache_assumed=told is None,
            unpinned_threads=runner.unpinned,
            compute_problem=compute if isinstance(compute, Reason) else None,
        )

    def _plan_sets(
        self, cache_bytes: int, swept: tuple[tuple[int, ...], ...]
    ) -> tuple[SizePlan | EvictPlan | Reason, int]:
        """The plan for the widest set of CPUs that memory suffices for, and how many wider ones it leaves out."""
        widest = self._plan(cache_bytes, swept[0])
        for skipped, cpus in enumerate(swept if isinstance(widest, Reason) else ()):
            # Many threads ask for much memory, and fewer still load every memory channel.
            if len(cpus) >= ENOUGH_THREADS and not isinstance(plan := self._plan(cache_bytes, cpus), Reason):
                return plan, skipped
        return widest, 0

    def _plan(self, cache_bytes: int, cpus: tuple[int, ...]) -> SizePlan | EvictPlan | Reason:
        """Large arrays where STREAM's rule fits into the budget; else small ones, flushed; else as large as may be."""
        by_size = plan_sizes(cache_bytes, memory_budget_bytes(self._proc, self._sys, self._max_memory))
        if not self._engine.evict_supported or (isinstance(by_size, SizePlan) and by_size.rule_met):
            return by_size
        budget = memory_budget_bytes(self._proc, self._sys, self._max_memory, EVICT_MEMORY_SHARE)
        private = private_cache_bytes(self._sys, cpus)
        return plan_evict(len(cpus), budget, private, huge_pages=huge_pages_given(self._sys)) or by_size

    def _remember(self, cpus: tuple[int, ...], found: _Found) -> None:
        """Keeps what was found fastest in the same way; a run without a `read` ceiling changes nothing."""
        best, known = _measured(found.best), self._calibration
        if found.array_bytes is not None and Kernel.READ in best:
            same = known is not None and (known.cpus, known.method) == (cpus, best[Kernel.READ].method)
            older = known.best if known and same else {}
            self._calibration = _Calibration(cpus, found.array_bytes, MappingProxyType({**older, **best}))


def _measure_all(
    runner: KernelRunner, plan: SizePlan | EvictPlan, sets: tuple[tuple[int, ...], ...], tell: Callable[[str], None]
) -> _Found:
    """Every kernel on every set of CPUs (the last is a single CPU), with arrays proven to lie in memory."""
    size = _proven(runner, plan, sets, tell)
    if isinstance(size, Reason):
        return _nothing(size)
    # A line that a plain store left in a cache is written back after the pass, so flushing first proves nothing.
    writes = (Store.NT,) if isinstance(plan, EvictPlan) else tuple(Store)
    stores = {kernel: _READ_STORES if kernel is Kernel.READ else writes for kernel in _BY_IMPORTANCE}
    results = [_measure_set(runner, cpus, size, stores, tell) for cpus in sets]
    return _Found(
        size.largest(sets),
        {kernel: fastest([result[kernel] for result in results]) for kernel in _BY_IMPORTANCE},
        tuple(_measured(results[-1]).values()),
    )


def _measure_again(
    runner: KernelRunner,
    plan: SizePlan | EvictPlan,
    sets: tuple[tuple[int, ...], ...],
    known: _Calibration,
    tell: Callable[[str], None],
) -> _Found:
    """The kernels that ceilings come from, as they were fastest. A smaller budget than before needs a new proof."""
    if isinstance(plan, SizePlan) and known.array_bytes <= plan.largest:
        size: Size | Reason = Size(Method.STREAM, whole=known.array_bytes)
    else:
        size = _proven(runner, plan, sets, tell)
    if isinstance(size, Reason):
        return _nothing(size)
    best: dict[Kernel, Bandwidth | Reason] = {}
    ways = {kernel: known.best.get(kernel, known.best[Kernel.READ]).thread_count for kernel in _TRACKED}
    for cpus in sets:
        stores = {
            kernel: (Store(known.best[kernel].store),) if kernel in known.best else tuple(Store)
            for kernel in _TRACKED
            if ways[kernel] == len(cpus)
        }
        if stores:
            best |= _measure_set(runner, cpus, size, stores, tell, passes=LEAST_PASSES)
    return _Found(size.largest(sets), {kernel: fastest([result]) for kernel, result in best.items()})


def _proven(
    runner: KernelRunner, plan: SizePlan | EvictPlan, sets: tuple[tuple[int, ...], ...], tell: Callable[[str], None]
) -> Size | Reason:
    """A size at which memory is measured: cold by construction, or shown by comparing sizes."""
    if isinstance(plan, EvictPlan):
        return Size(Method.EVICT, part=plan.slice_bytes, refill=plan.refill_bytes)
    tell("array size")
    proven = proven_bytes(runner, plan, sets)
    return proven if isinstance(proven, Reason) else Size(Method.STREAM, whole=proven)


def _measure_set(
    runner: KernelRunner,
    cpus: tuple[int, ...],
    size: Size,
    stores: Mapping[Kernel, tuple[Store, ...]],
    tell: Callable[[str], None],
    *,
    passes: int = FULL_PASSES,
) -> dict[Kernel, Bandwidth | Reason]:
    """Some kernels on one set of CPUs. One that fails does not keep the others from being measured."""
    if runner.cancelled():
        return dict.fromkeys(stores, Reason.CANCELLED)
    arrays = runner.open(cpus, size.of(cpus), size.method, size.refill)
    if isinstance(arrays, Reason):
        return dict.fromkeys(stores, arrays)
    results: dict[Kernel, Bandwidth | Reason] = dict.fromkeys(stores, Reason.CANCELLED)
    try:
        for kernel in stores:
            if runner.cancelled():
                break
            tell(f"{kernel}, {len(cpus)} {'thread' if len(cpus) == 1 else 'threads'}")
            results[kernel] = runner.bandwidth(arrays, kernel, stores[kernel], passes)
    finally:
        arrays.bench.close()
    return results


def _nothing(reason: Reason) -> _Found:
    return _Found(None, dict.fromkeys(Kernel, reason))


def _measured(results: Mapping[Kernel, Bandwidth | Reason]) -> dict[Kernel, Bandwidth]:
    return {kernel: result for kernel, result in results.items() if isinstance(result, Bandwidth)}
