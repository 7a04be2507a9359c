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
from exporter.measure.host import allowed_cpus, memory_budget_bytes
from exporter.measure.kernels import FULL_PASSES, LEAST_PASSES, KernelRunner
from exporter.measure.membench import Engine, Membench
from exporter.measure.topology import assumed_cache_bytes, last_level_cache_bytes, thread_sets
from exporter.roofline.ceiling import Bandwidth, ComputePeak, Kernel
from exporter.roofline.passes import SizePlan, Store, fastest, plan_sizes
from exporter.roofline.reason import Reason

REST_SECONDS: Final = 0.01
"""Sleep between two passes, so that a server's work interleaves."""
QUOTA_REST_SECONDS: Final = 0.12
"""The same under a CPU quota: longer than the usual period (100 ms), so that a pass begins with a fresh quota."""

_READ_STORES: Final = (Store.PLAIN,)
_TRACKED: Final = (Kernel.READ, Kernel.TRIAD)
_BY_IMPORTANCE: Final = (*_TRACKED, Kernel.COPY, Kernel.SCALE, Kernel.ADD)


@dataclass(frozen=True, slots=True)
class BandwidthRun:
    """What one call of `BandwidthMeter.measure` gave.

    Attributes:
        measurements: At most one for each kernel and thread scope.
        compute: Full runs only.
        rejected: Passes, and whole kernels or sizes, that were not good enough, by reason.
        problem: Why there is no `read` ceiling for all threads, which every CPU server's floor needs; None when there
        is one. array_bytes: The size of each of the three arrays; None when none was settled on. cpus: The CPUs that
        could be used. cache_bytes: The last-level cache that the size was planned for. cache_assumed: The kernel did
        not tell the cache; `cache_bytes` is a guess (the plateau test still decides). unpinned_threads: Threads that
        the system did not let us pin; the numbers stand, with more spread.
    """

    measurements: tuple[Bandwidth, ...]
    compute: ComputePeak | None
    rejected: Mapping[Reason, int]
    problem: Reason | None
    array_bytes: int | None
    cpus: tuple[int, ...]
    cache_bytes: int
    cache_assumed: bool
    unpinned_threads: int = 0


@dataclass(frozen=True, slots=True)
class _Calibration:
    """What a full run found out: valid while the process may use the same CPUs.

    Attributes:
        array_bytes: A size that was proven to lie in memory; so does every larger one.
        best: The fastest measurement of each kernel, for its thread count and its way of writing.
    """

    cpus: tuple[int, ...]
    array_bytes: int
    best: Mapping[Kernel, Bandwidth]


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
        cpus: Tells the CPUs that this process may use.
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
        cpus: Callable[[], tuple[int, ...]] = allowed_cpus,
    ) -> None:
        self._max_memory = max_memory
        self._threads = threads
        self._proc = proc
        self._sys = sys
        self._clock = clock
        self._engine = engine or Membench()
        self._cpus = cpus
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
        cpus = self._cpus()
        told = last_level_cache_bytes(self._sys, cpus)
        cache = told or assumed_cache_bytes(len(cpus))
        rest = REST_SECONDS if quota_cpus(self._proc, self._sys) is None else QUOTA_REST_SECONDS
        runner = KernelRunner(self._engine, self._proc, self._sys, self._clock, rest)
        swept = thread_sets(self._sys, cpus, self._threads)
        sets = swept if len(swept[-1]) == 1 else (*swept, swept[-1][:1])
        compute: ComputePeak | Reason | None = None
        try:
            plan = plan_sizes(cache, memory_budget_bytes(self._proc, self._sys, self._max_memory))
            known = self._calibration
            if isinstance(plan, Reason):
                found = _nothing(runner.refuse(plan))
            elif full or known is None or known.cpus != cpus:
                found = _measure_all(runner, plan, sets, tell)
            else:
                found = _measure_again(runner, plan, sets, known, tell)
            self._remember(cpus, found)
            if full and not runner.cancelled():
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
        )

    def _remember(self, cpus: tuple[int, ...], found: _Found) -> None:
        """Keeps what was found fastest; a run without a `read` ceiling changes nothing."""
        best = _measured(found.best)
        if found.array_bytes is not None and Kernel.READ in best:
            older = self._calibration.best if self._calibration and self._calibration.cpus == cpus else {}
            self._calibration = _Calibration(cpus, found.array_bytes, MappingProxyType({**older, **best}))


def _measure_all(
    runner: KernelRunner, plan: SizePlan, sets: tuple[tuple[int, ...], ...], tell: Callable[[str], None]
) -> _Found:
    """Every kernel on every set of CPUs (the last is a single CPU), with arrays proven to lie in memory."""
    tell("array size")
    size = runner.proven_bytes(plan, sets)
    if isinstance(size, Reason):
        return _nothing(size)
    stores = {kernel: _READ_STORES if kernel is Kernel.READ else tuple(Store) for kernel in _BY_IMPORTANCE}
    results = [_measure_set(runner, cpus, size, stores, tell) for cpus in sets]
    return _Found(
        size,
        {kernel: fastest([result[kernel] for result in results]) for kernel in _BY_IMPORTANCE},
        tuple(_measured(results[-1]).values()),
    )


def _measure_again(
    runner: KernelRunner,
    plan: SizePlan,
    sets: tuple[tuple[int, ...], ...],
    known: _Calibration,
    tell: Callable[[str], None],
) -> _Found:
    """The kernels that ceilings come from, as they were fastest. A smaller budget than before needs a new proof."""
    size = known.array_bytes if known.array_bytes <= plan.largest else runner.proven_bytes(plan, sets)
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
    return _Found(size, {kernel: fastest([result]) for kernel, result in best.items()})


def _measure_set(
    runner: KernelRunner,
    cpus: tuple[int, ...],
    array_bytes: int,
    stores: Mapping[Kernel, tuple[Store, ...]],
    tell: Callable[[str], None],
    *,
    passes: int = FULL_PASSES,
) -> dict[Kernel, Bandwidth | Reason]:
    """Some kernels on one set of CPUs. One that fails does not keep the others from being measured."""
    if runner.cancelled():
        return dict.fromkeys(stores, Reason.CANCELLED)
    arrays = runner.open(cpus, array_bytes)
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
