"""Which passes of a kernel count, and whether they prove memory rather than a cache: pure rules and their types."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar, Final

from exporter.roofline.ceiling import Bandwidth, PassSummary, ThreadScope, summarize_passes
from exporter.roofline.reason import Reason

ARRAYS: Final = 3
"""STREAM's a, b and c; the reader walks all three, as triad does."""
CACHE_LINE_BYTES: Final = 64
CACHE_MULTIPLE: Final = 4
"""Each array is this many times the last-level cache (STREAM's run rule), where the memory budget allows."""
SMALLEST_ARRAY_BYTES: Final = 1 << 20
"""Below this a pass is too short to time."""
PREFERRED_ARRAY_BYTES: Final = 32 << 20
"""At least this much for each array, budget permitting: some caches are not told, and a pass should take a while."""
WARM_UP_PASSES: Final = 1
"""STREAM drops the first pass of a run."""
LEAST_CLEAN_PASSES: Final = 3
"""Fewer clean passes are no measurement."""

CPU_RATIO_LIMIT: Final = 0.95
"""A thread that ran less than this share of a pass was pushed aside, whatever the switch counter says."""
SWITCHED_CPU_RATIO_LIMIT: Final = 0.97
"""The same, when the kernel also counted an involuntary switch."""
STAGGER_LIMIT: Final = 1.05
"""Pass / longest thread time: beyond it a thread started late, and had the memory to itself."""
IMBALANCE_LIMIT: Final = 1.15
"""Longest / shortest thread time in a pass: beyond it, one thread was disturbed or its CPU is slower."""
SPREAD_LIMIT: Final = 0.1
"""(median - best) / best of the clean passes: beyond it, something else used the memory. Undisturbed: below 0.05."""
PLATEAU_TOLERANCE: Final = 1.03
"""Reading an array that is smaller may be at most this much faster, or a cache took part."""


EVICT_SLICE_BYTES: Final = 16 << 20
"""Of each array and thread when caches are flushed instead of outgrown: the least size whose error is that of noise."""
EVICT_SMALL_PAGES_SLICE_BYTES: Final = 32 << 20
"""The same without huge pages, where every page's translation is missed too."""
EVICT_LEAST_SLICE_BYTES: Final = 1 << 19
"""The least size that was compared with large arrays: within 2 % in the median, 4 % for the best pass."""
ENOUGH_THREADS: Final = 16
"""Where memory does not suffice for a thread on each CPU, at least so many must do."""
MEMORY_SHARE: Final = 4
"""Arrays that outgrow the cache take at most this part (one in so many) of what the memory limit leaves."""
EVICT_MEMORY_SHARE: Final = 2
"""Small arrays may take this part: in a small container a quarter is too little to time anything."""


PASS_FLAWS: Final = frozenset(
    {Reason.PREEMPTED, Reason.THROTTLED, Reason.MEMORY_PRESSURE, Reason.PAGE_FAULTS, Reason.IMBALANCED}
)
"""Reasons that reject single passes, each counted with its pass; the others refuse a run as a whole."""
DISTURBED: Final = PASS_FLAWS | {Reason.UNSTABLE}
"""Reasons that the next run may not meet."""


class Method(StrEnum):
    """How memory and not a cache is measured: arrays that outgrow it, or small ones flushed before every pass."""

    STREAM = "stream"
    EVICT = "evict"


class Store(StrEnum):
    """How a kernel writes: through the caches, or past them (non-temporal)."""

    PLAIN = "plain"
    NT = "nt"


@dataclass(frozen=True, slots=True)
class Pass:
    """One timed pass of a kernel over its arrays.

    Attributes:
        seconds: From the first thread's start to the last one's end.
        cpu_ratio: The least thread's CPU time / wall time.
        imbalance: Longest thread time / shortest.
        involuntary_switches: Summed over the threads.
        page_faults: Summed over the threads.
        stagger: `seconds` / longest thread time; above 1, the threads did not run at the same time.
    """

    seconds: float
    cpu_ratio: float
    imbalance: float
    involuntary_switches: int
    page_faults: int
    stagger: float = 1.0


@dataclass(frozen=True, slots=True)
class Sifted:
    """The times of the clean passes of a run, seconds, and the others counted by reason. The warm-up is in neither."""

    seconds: tuple[float, ...]
    rejected: Mapping[Reason, int]


def flaw(timed: Pass) -> Reason | None:
    """Why this pass may not count, or None."""
    limit = SWITCHED_CPU_RATIO_LIMIT if timed.involuntary_switches else CPU_RATIO_LIMIT
    if timed.cpu_ratio < limit or timed.stagger > STAGGER_LIMIT:
        return Reason.PREEMPTED
    if timed.page_faults:
        return Reason.PAGE_FAULTS
    if timed.imbalance > IMBALANCE_LIMIT:
        return Reason.IMBALANCED
    return None


def sift(passes: Sequence[Pass], *, throttled: bool = False) -> Sifted:
    """Drops the warm-up and separates the clean passes from the others.

    Args:
        passes: Of one call of the library.
        throttled: A CPU quota ran out during the call, so that a thread without its CPU lost it to that.
    """
    judged = [(timed, flaw(timed)) for timed in passes[WARM_UP_PASSES:]]
    rejected = Counter(reason for _, reason in judged if reason is not None)
    if throttled and (lost := rejected.pop(Reason.PREEMPTED, 0)):
        rejected[Reason.THROTTLED] = lost
    clean = tuple(timed.seconds for timed, reason in judged if reason is None)
    return Sifted(clean, MappingProxyType(dict(rejected)))


def judge(seconds: Sequence[float]) -> PassSummary | Reason | None:
    """The statistics of the clean passes, or why they are no measurement; None when there are too few of them.

    Args:
        seconds: Times of the clean passes.
    """
    if len(seconds) < LEAST_CLEAN_PASSES:
        return None
    summary = summarize_passes(seconds)
    return Reason.UNSTABLE if summary.spread_ratio > SPREAD_LIMIT else summary


def is_plateau(smaller_bytes_per_second: float, larger_bytes_per_second: float) -> bool:
    """Whether two sizes of the arrays read equally fast, so that neither can have been served by a cache."""
    return smaller_bytes_per_second <= PLATEAU_TOLERANCE * larger_bytes_per_second


@dataclass(frozen=True, slots=True)
class SizePlan:
    """How large each array may be, bytes.

    Attributes:
        wanted: What STREAM's rule asks for, or all that the budget allows.
        largest: All that the budget allows.
        rule_met: The budget allows what STREAM's rule asks for.
    """

    wanted: int
    largest: int

    rule_met: bool = True
    method: ClassVar = Method.STREAM

    @property
    def comparisons(self) -> tuple[tuple[int, int], ...]:
        """(a smaller size, the size to measure with when that one reads no faster than the largest), best first."""
        by_half = (self.largest // 2, self.largest)
        return ((self.wanted, self.wanted), by_half) if self.wanted < self.largest else (by_half,)


@dataclass(frozen=True, slots=True)
class EvictPlan:
    """Small arrays whose lines are flushed before every pass.

    Attributes:
        slice_bytes: Of each array, for each thread.
        refill_bytes: What each thread then reads, so that its private cache is as full as in a long stream.
    """

    slice_bytes: int
    refill_bytes: int
    method: ClassVar = Method.EVICT


@dataclass(frozen=True, slots=True)
class Size:
    """How large the arrays are, as a whole or for each thread, and what a thread reads after it has flushed."""

    method: Method
    whole: int = 0
    part: int = 0
    refill: int = 0

    def of(self, cpus: tuple[int, ...]) -> int:
        """Bytes of each array for threads on these CPUs."""
        return self.whole or self.part * len(cpus)

    def largest(self, sets: Sequence[tuple[int, ...]]) -> int:
        """Bytes of each array for the widest set."""
        return max(self.of(cpus) for cpus in sets)


def plan_sizes(cache_bytes: int, budget_bytes: int) -> SizePlan | Reason:
    """The sizes to measure with, each array's bytes.

    The kernel's word on the cache is not trusted (virtual machines tell a tenth or ten times of it): where the budget
    allows more than STREAM's rule asks for, the rule's size must read as slowly as the largest one.

    Args:
        cache_bytes: Sum of the last-level caches within reach, told or assumed.
        budget_bytes: For all three arrays together.

    Returns:
        NO_MEMORY when the budget is too small to time anything; CACHE_SUSPECT when all arrays together are smaller
        than the cache, where no comparison of sizes can prove anything.
    """
    largest = budget_bytes // ARRAYS // CACHE_LINE_BYTES * CACHE_LINE_BYTES
    if largest < SMALLEST_ARRAY_BYTES:
        return Reason.NO_MEMORY
    if largest * ARRAYS < cache_bytes:
        return Reason.CACHE_SUSPECT
    wanted = max(PREFERRED_ARRAY_BYTES, CACHE_MULTIPLE * cache_bytes)
    return SizePlan(min(largest, wanted), largest, rule_met=CACHE_MULTIPLE * cache_bytes <= largest)


def plan_evict(threads: int, budget_bytes: int, private_cache_bytes: int, *, huge_pages: bool) -> EvictPlan | None:
    """The sizes when the caches are flushed before every pass; None when they do not fit.

    Args:
        threads: Of the widest set.
        budget_bytes: For all threads' slices of the three arrays, and what they read after flushing.
        private_cache_bytes: Of each thread's core.
        huge_pages: Whether the kernel gives them.
    """
    wanted = EVICT_SLICE_BYTES if huge_pages else EVICT_SMALL_PAGES_SLICE_BYTES
    fits = (budget_bytes // threads - private_cache_bytes) // ARRAYS // CACHE_LINE_BYTES * CACHE_LINE_BYTES
    return EvictPlan(min(wanted, fits), private_cache_bytes) if fits >= EVICT_LEAST_SLICE_BYTES else None


def fastest(results: Sequence[Bandwidth | Reason]) -> Bandwidth | Reason:
    """The best of the swept thread counts, under the scope `all`.

    Args:
        results: Of one kernel, the widest set of CPUs first.

    Returns:
        The widest set's reason when it was disturbed: the others would understate the ceiling. A widest set that is
        unevenly fast (hybrid processors) only drops out.
    """
    widest = results[0]
    measured = [result for result in results if isinstance(result, Bandwidth)]
    if isinstance(widest, Reason) and (widest is not Reason.IMBALANCED or not measured):
        return widest
    return replace(max(measured, key=lambda b: b.best_bytes_per_second), threads=ThreadScope.ALL)
