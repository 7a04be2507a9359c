"""Runs kernels until enough of their passes are clean, and counts by reason what was rejected on the way."""

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from exporter.measure.host import (
    ContentionMeter,
    anonymous_huge_bytes,
    huge_page_bytes,
    waited_for_cpu,
    waited_for_memory,
    was_throttled,
)
from exporter.measure.membench import Bench, Engine, KernelRun, Way
from exporter.roofline.ceiling import Bandwidth, ComputePeak, Kernel, PassSummary, ThreadScope
from exporter.roofline.passes import (
    ARRAYS,
    LEAST_CLEAN_PASSES,
    PASS_FLAWS,
    WARM_UP_PASSES,
    Method,
    Store,
    flaw,
    judge,
    sift,
)
from exporter.roofline.reason import Reason

FULL_PASSES: Final = WARM_UP_PASSES + 4
LEAST_PASSES: Final = WARM_UP_PASSES + LEAST_CLEAN_PASSES
PASS_BUDGET_SECONDS: Final = 0.6
"""Timed work of one call; on a slow machine fewer passes are made rather than longer calls."""
PATIENT_BUDGET_SECONDS: Final = 5.0
"""The same for a second attempt, so that a very slow machine gets its passes too."""
PATIENCE_SECONDS: Final = 15.0
"""After this much of a measurement, a run whose passes were disturbed is not made once more."""
COMPUTE_PASS_SECONDS: Final = 0.01
TRIAL_PASSES: Final = WARM_UP_PASSES + 2
DECISIVE_RATIO: Final = 1.15
"""One way of writing that beats the other by this much on a kernel is taken for the other kernels on the same CPUs."""
HUGE_SHARE: Final = 0.9
"""The share of the arrays that must lie on huge pages to say so."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """Mapped arrays, the CPUs whose threads walk them, and this process's huge pages before they were touched."""

    bench: Bench
    cpus: tuple[int, ...]
    method: Method
    huge_before: int | None


@dataclass(frozen=True, slots=True)
class _Sample:
    """The clean passes of a kernel, and the bytes or FLOP of each."""

    summary: PassSummary
    passes: int
    amount: float
    contended: bool


class KernelRunner:
    """Runs kernels for one measurement.

    Args:
        engine: The compiled kernels.
        proc: The root of procfs.
        sys: The root of sysfs.
        clock: Monotonic seconds.
        rest_seconds: Sleep between two passes, so that others' work interleaves.
        scope: Whose CPUs are measured.
        flags: What to know about every number of this measurement.
    """

    def __init__(
        self,
        engine: Engine,
        proc: Path,
        sys: Path,
        clock: Callable[[], float],
        *,
        rest_seconds: float,
        scope: str,
        flags: tuple[str, ...],
    ) -> None:
        self._engine = engine
        self._proc = proc
        self._sys = sys
        self._clock = clock
        self._rest = rest_seconds
        self._scope = scope
        self._flags = flags
        self._contention = ContentionMeter(proc, sys, clock)
        self._patient_until = clock() + PATIENCE_SECONDS
        self._decided: dict[tuple[int, ...], Store] = {}
        self._isas: dict[tuple[int, ...], str] = {}
        self.rejected: Counter[Reason] = Counter()

    def cancelled(self) -> bool:
        """Whether the measurement is to end."""
        return self._engine.cancelled()

    def refuse(self, reason: Reason) -> Reason:
        """Counts a refusal."""
        self.rejected[reason] += 1
        return reason

    def open(
        self, cpus: tuple[int, ...], array_bytes: int, method: Method = Method.STREAM, refill_bytes: int = 0
    ) -> Arrays | Reason:
        """Maps the arrays; the caller closes the bench."""
        huge = anonymous_huge_bytes(self._proc)
        bench = self._engine.open(cpus, array_bytes, refill_bytes)
        return self.refuse(bench) if isinstance(bench, Reason) else Arrays(bench, cpus, method, huge)

    def bandwidth(
        self, arrays: Arrays, kernel: Kernel, stores: Sequence[Store], passes: int = FULL_PASSES
    ) -> Bandwidth | Reason:
        """One kernel's measurement, or why there is none; the scope is `single` for one thread, else `all`.

        Args:
            arrays: Where to run.
            kernel: What to run.
            stores: The ways of writing to try; the faster one counts.
            passes: Passes of a run, the warm-up included.
        """
        measured: dict[Store, _Sample] = {}
        decided = self._decided.get(arrays.cpus)
        if decided is not None and decided in stores:
            stores = (decided,)
        isa = self._fastest_isa(arrays)
        for store in stores:
            sample = self._sample(arrays, kernel, Way(isa, store, arrays.method), passes)
            if isinstance(sample, _Sample):
                measured[store] = sample
            elif sample is not Reason.UNSUPPORTED or not measured:
                return sample if sample in PASS_FLAWS else self.refuse(sample)
        store = min(measured, key=lambda s: measured[s].summary.best_seconds)
        best = measured[store]
        if max(s.summary.best_seconds for s in measured.values()) > DECISIVE_RATIO * best.summary.best_seconds:
            self._decided[arrays.cpus] = store
        return Bandwidth(
            kernel=kernel,
            threads=ThreadScope.SINGLE if len(arrays.cpus) == 1 else ThreadScope.ALL,
            thread_count=len(arrays.cpus),
            best_bytes_per_second=best.amount / best.summary.best_seconds,
            median_bytes_per_second=best.amount / best.summary.median_seconds,
            spread_ratio=best.summary.spread_ratio,
            passes=best.passes,
            array_bytes=arrays.bench.array_bytes,
            store=store.value,
            isa=isa,
            pages=self._pages(arrays),
            method=arrays.method.value,
            scope=self._scope,
            measured_at=self._clock(),
            flags=(
                *self._flags,
                *(["unpinned"] if arrays.bench.unpinned else []),
                *(["contended"] if best.contended else []),
            ),
        )

    def compute_peak(self, cpus: tuple[int, ...]) -> ComputePeak | Reason:
        """The fp32 multiply-add peak of these CPUs, or why it is not known."""
        peaks = []
        for isa in self._engine.isas:

            def call(_: float, isa: str = isa) -> KernelRun:
                return self._engine.fma(cpus, isa, passes=FULL_PASSES, pass_seconds=COMPUTE_PASS_SECONDS)

            found = self._settle(call)
            if isinstance(found, Reason):
                return found if found in PASS_FLAWS else self.refuse(found)
            peaks.append((found.amount / found.summary.best_seconds, isa, found))
        flops, isa, sample = max(peaks, key=lambda peak: peak[0])
        return ComputePeak(
            precision="fp32",
            flops_per_second=flops,
            spread_ratio=sample.summary.spread_ratio,
            thread_count=len(cpus),
            isa=isa,
            measured_at=self._clock(),
        )

    def _fastest_isa(self, arrays: Arrays) -> str:
        """The instruction set that reads fastest on these CPUs, tried once for a measurement."""
        if arrays.cpus not in self._isas:
            tried = self._engine.isas
            times = dict.fromkeys(tried, math.inf)
            for isa in tried if len(tried) > 1 else ():
                run = arrays.bench.run(
                    Kernel.READ,
                    Way(isa, method=arrays.method),
                    passes=TRIAL_PASSES,
                    rest_seconds=self._rest,
                    budget_seconds=PASS_BUDGET_SECONDS,
                )
                times[isa] = min((t.seconds for t in run.passes[1:] if flaw(t) is None), default=math.inf)
            # Of equals the first, the widest, is taken; so it is where a disturbed trial cannot tell.
            undecided = math.inf in times.values()
            self._isas[arrays.cpus] = tried[0] if undecided else min(tried, key=lambda isa: times[isa])
        return self._isas[arrays.cpus]

    def _sample(self, arrays: Arrays, kernel: Kernel, way: Way, passes: int) -> "_Sample | Reason":
        def call(budget_seconds: float) -> KernelRun:
            return arrays.bench.run(kernel, way, passes=passes, rest_seconds=self._rest, budget_seconds=budget_seconds)

        return self._settle(call)

    def _settle(self, call: Callable[[float], KernelRun]) -> "_Sample | Reason":
        """Calls the library once, or twice where the passes of the first call do not suffice.

        Args:
            call: Runs a kernel for at most that many seconds of timed work.
        """
        seen = Counter(self.rejected)
        clean: tuple[float, ...] = ()
        unstable = contended = False
        for budget in (PASS_BUDGET_SECONDS, PATIENT_BUDGET_SECONDS):
            before = self._contention.read()
            run = call(budget)
            after = self._contention.read()
            if run.error is not None:
                return run.error
            sifted = sift(run.passes, throttled=was_throttled(before, after))
            self.rejected.update(sifted.rejected)
            # Every pass of this call had its CPUs, or it was rejected; others that waited for one are only told of.
            contended |= waited_for_cpu(before, after)
            if waited_for_memory(before, after):
                self.rejected[Reason.MEMORY_PRESSURE] += len(sifted.seconds)
            else:
                clean = (*clean, *sifted.seconds)
            verdict = judge(clean)
            if isinstance(verdict, PassSummary):
                return _Sample(verdict, len(clean), run.amount, contended)
            unstable = verdict is Reason.UNSTABLE
            if unstable:
                # Too few clean passes may be completed; unstable ones may not be diluted.
                clean = ()
            if self._clock() >= self._patient_until:
                break
        return Reason.UNSTABLE if unstable else _commonest(self.rejected - seen)

    def _pages(self, arrays: Arrays) -> str:
        """The kind of page that the arrays lie on, now that they have been touched."""
        huge = anonymous_huge_bytes(self._proc)
        if huge is None or arrays.huge_before is None:
            return "unknown"
        if huge - arrays.huge_before >= HUGE_SHARE * ARRAYS * arrays.bench.array_bytes:
            return f"{huge_page_bytes(self._sys) >> 20}MiB"
        return f"{os.sysconf('SC_PAGE_SIZE') >> 10}KiB"


def _commonest(rejected: Counter[Reason]) -> Reason:
    """What stood most in the way; too few passes without any rejected one are unstable timing."""
    return max(rejected, key=lambda reason: rejected[reason], default=Reason.UNSTABLE)
