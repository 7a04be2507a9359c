"""Measures this machine's memory-bandwidth ceilings and compute peak.

A full run proves that memory and not a cache is measured, sweeps the thread counts and the ways of writing, and
remembers the winners; a short run measures `read` and `triad` again with those. Both block, and run in one thread of
their own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from exporter.measure.calibration import Calibration, Found, Plan, measure_again, measure_all, remembered
from exporter.measure.cgroup import quota_cpus
from exporter.measure.host import huge_pages_given, memory_budget_bytes, steal_seconds, was_robbed
from exporter.measure.kernels import KernelRunner
from exporter.measure.membench import MOST_REFILL_BYTES, MOST_THREADS, Engine, Membench
from exporter.measure.topology import (
    assumed_cache_bytes,
    last_level_cache_bytes,
    private_cache_bytes,
    thread_sets,
)
from exporter.measure.whose import CpuSet, measured_cpus
from exporter.roofline.ceiling import BandwidthRun, ComputePeak, Kernel
from exporter.roofline.passes import (
    ENOUGH_THREADS,
    EVICT_MEMORY_SHARE,
    SizePlan,
    plan_evict,
    plan_sizes,
)
from exporter.roofline.reason import Reason

REST_SECONDS: Final = 0.01
"""Sleep between two passes, so that a server's work interleaves."""
QUOTA_REST_SECONDS: Final = 0.12
"""The same under a CPU quota: longer than the usual period (100 ms), so that a pass begins with a fresh quota."""


@dataclass(frozen=True, slots=True)
class _Setup:
    """Where a run measures, and how memory is told from cache there.

    Attributes:
        cpus: The CPUs that can be used.
        sets: Those to measure on, the widest first; the last is a single CPU.
        plan: How large the arrays may be, or why nothing can be measured.
        runner: Runs the kernels.
    """

    cpus: tuple[int, ...]
    sets: tuple[tuple[int, ...], ...]
    plan: Plan | Reason
    runner: KernelRunner


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
        self._calibration: Calibration | None = None

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
        setup = self._setup()
        cpus, runner = setup.cpus, setup.runner
        compute: ComputePeak | Reason | None = None
        began, stolen = self._clock(), steal_seconds(self._proc, cpus)
        try:
            found = self._find(setup, tell, full=full)
            if was_robbed(stolen, steal_seconds(self._proc, cpus), self._clock() - began, len(cpus)):
                # Guests do not see the hypervisor's theft in their threads' CPU time, so no pass tells.
                found = Found.nothing(runner.refuse(Reason.PREEMPTED))
            self._calibration = remembered(self._calibration, cpus, found)
            if full and self._measure_compute and not runner.cancelled():
                tell("compute peak")
                compute = runner.compute_peak(setup.sets[0])
        finally:
            self._engine.resume()
        read = found.best[Kernel.READ]
        return BandwidthRun(
            measurements=found.measurements,
            compute=None if isinstance(compute, Reason) else compute,
            rejected=MappingProxyType(dict(runner.rejected)),
            problem=read if isinstance(read, Reason) else None,
            array_bytes=found.array_bytes,
            cpus=cpus,
            compute_problem=compute if isinstance(compute, Reason) else None,
        )

    def _setup(self) -> _Setup:
        """Asks whose CPUs to measure, and the machine for its caches, its memory and its quota."""
        chosen = self._cpus()
        told = last_level_cache_bytes(self._sys, chosen.cpus)
        quota = quota_cpus(self._proc, self._sys) is not None
        swept = thread_sets(self._sys, chosen.cpus, min(self._threads or MOST_THREADS, MOST_THREADS))
        plan, skipped = self._plan_sets(told or assumed_cache_bytes(len(chosen.cpus)), swept)
        swept = swept[skipped:]
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
        sets = swept if len(swept[-1]) == 1 else (*swept, swept[-1][:1])
        return _Setup(chosen.cpus, sets, plan, runner)

    def _find(self, setup: _Setup, tell: Callable[[str], None], *, full: bool) -> Found:
        """Everything, or what an earlier run found fastest, where that holds still."""
        plan, known = setup.plan, self._calibration
        if isinstance(plan, Reason):
            return Found.nothing(setup.runner.refuse(plan))
        if full or known is None or not known.holds(setup.cpus, plan, setup.sets):
            return measure_all(setup.runner, plan, setup.sets, tell)
        return measure_again(setup.runner, plan, setup.sets, known, tell)

    def _plan_sets(self, cache_bytes: int, swept: tuple[tuple[int, ...], ...]) -> tuple[Plan | Reason, int]:
        """The plan for the widest set of CPUs that memory suffices for, and how many wider ones it leaves out."""
        widest = self._plan(cache_bytes, swept[0])
        for skipped, cpus in enumerate(swept if isinstance(widest, Reason) else ()):
            # Many threads ask for much memory, and fewer still load every memory channel.
            if len(cpus) >= ENOUGH_THREADS and not isinstance(plan := self._plan(cache_bytes, cpus), Reason):
                return plan, skipped
        return widest, 0

    def _plan(self, cache_bytes: int, cpus: tuple[int, ...]) -> Plan | Reason:
        """Large arrays where STREAM's rule fits into the budget; else small ones, flushed; else as large as may be."""
        by_size = plan_sizes(cache_bytes, memory_budget_bytes(self._proc, self._sys, self._max_memory))
        if not self._engine.evict_supported or (isinstance(by_size, SizePlan) and by_size.rule_met):
            return by_size
        budget = memory_budget_bytes(self._proc, self._sys, self._max_memory, EVICT_MEMORY_SHARE)
        private = min(private_cache_bytes(self._sys, cpus), MOST_REFILL_BYTES)
        return plan_evict(len(cpus), budget, private, huge_pages=huge_pages_given(self._sys)) or by_size
