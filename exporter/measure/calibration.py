"""How a bandwidth run measures: everything anew with arrays proven to lie in memory, or again what was fastest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from exporter.measure.kernels import FULL_PASSES, LEAST_PASSES, KernelRunner
from exporter.measure.plateau import proven_bytes
from exporter.roofline.ceiling import Bandwidth, Kernel, ThreadScope
from exporter.roofline.passes import EvictPlan, Method, Size, SizePlan, Store, fastest
from exporter.roofline.reason import Reason

Plan = SizePlan | EvictPlan
Sets = Sequence[tuple[int, ...]]
"""The sets of CPUs to measure on, the widest first; the last is a single CPU."""
Tell = Callable[[str], None]

_TRACKED: Final = (Kernel.READ, Kernel.TRIAD)
_BY_IMPORTANCE: Final = (*_TRACKED, Kernel.COPY, Kernel.SCALE, Kernel.ADD)
_SCOPES: Final = (ThreadScope.ALL, ThreadScope.SINGLE)
_KERNELS: Final = tuple(Kernel)


@dataclass(frozen=True, slots=True)
class Found:
    """What a run measured, and what each kernel got for all threads: its measurement, or why there is none."""

    array_bytes: int | None
    best: Mapping[Kernel, Bandwidth | Reason]
    single: tuple[Bandwidth, ...] = ()

    @classmethod
    def nothing(cls, reason: Reason) -> "Found":
        """A run without any figure."""
        return cls(None, dict.fromkeys(Kernel, reason))

    @property
    def measurements(self) -> tuple[Bandwidth, ...]:
        """In one order, in whichever they were measured: all threads first, then by kernel."""
        every = (*_measured(self.best).values(), *self.single)
        return tuple(sorted(every, key=lambda b: (_SCOPES.index(b.threads), _KERNELS.index(b.kernel))))


@dataclass(frozen=True, slots=True)
class Calibration:
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
        """How it was measured; what was found with flushed arrays holds for those only, and the other way round."""
        return Method(self.best[Kernel.READ].method)

    def holds(self, cpus: tuple[int, ...], plan: Plan, sets: Sets) -> bool:
        """Whether a short run on these CPUs can go by it: with this plan, and with as many threads as were fastest."""
        counts = {self.best[kernel].thread_count for kernel in _TRACKED if kernel in self.best}
        return (self.cpus, self.method) == (cpus, plan.method) and counts <= {len(one) for one in sets}


def remembered(known: Calibration | None, cpus: tuple[int, ...], found: Found) -> Calibration | None:
    """What is known after a run: what was fastest in the same way; a run without a `read` ceiling changes nothing."""
    best = _measured(found.best)
    if found.array_bytes is None or Kernel.READ not in best:
        return known
    same = known is not None and (known.cpus, known.method) == (cpus, best[Kernel.READ].method)
    older = known.best if known and same else {}
    return Calibration(cpus, found.array_bytes, MappingProxyType({**older, **best}))


def measure_all(runner: KernelRunner, plan: Plan, sets: Sets, tell: Tell) -> Found:
    """Every kernel on every set of CPUs, with arrays proven to lie in memory."""
    size = _proven(runner, plan, sets, tell)
    if isinstance(size, Reason):
        return Found.nothing(size)
    stores = {kernel: _stores(kernel, plan) for kernel in _BY_IMPORTANCE}
    results = [_measure_set(runner, cpus, size, stores, tell) for cpus in sets]
    return Found(
        size.largest(sets),
        {kernel: fastest([result[kernel] for result in results]) for kernel in _BY_IMPORTANCE},
        tuple(_measured(results[-1]).values()),
    )


def measure_again(runner: KernelRunner, plan: Plan, sets: Sets, known: Calibration, tell: Tell) -> Found:
    """The kernels that ceilings come from, as they were fastest. A smaller budget than before needs a new proof.

    Args:
        runner: Runs the kernels.
        plan: How large the arrays may be.
        sets: The sets of CPUs.
        known: Holds for these sets and this plan.
        tell: Told what is being measured.
    """
    if isinstance(plan, SizePlan) and known.array_bytes <= plan.largest:
        size: Size | Reason = Size(Method.STREAM, whole=known.array_bytes)
    else:
        size = _proven(runner, plan, sets, tell)
    if isinstance(size, Reason):
        return Found.nothing(size)
    best: dict[Kernel, Bandwidth | Reason] = {}
    ways = {kernel: known.best.get(kernel, known.best[Kernel.READ]).thread_count for kernel in _TRACKED}
    for cpus in sets:
        stores = {
            kernel: (Store(known.best[kernel].store),) if kernel in known.best else _stores(kernel, plan)
            for kernel in _TRACKED
            if ways[kernel] == len(cpus)
        }
        if stores:
            best |= _measure_set(runner, cpus, size, stores, tell, passes=LEAST_PASSES)
    return Found(size.largest(sets), {kernel: fastest([result]) for kernel, result in best.items()})


def _stores(kernel: Kernel, plan: Plan) -> tuple[Store, ...]:
    """The ways of writing to try."""
    if kernel is Kernel.READ:
        return (Store.PLAIN,)
    # A line that a plain store left in a cache is written back after the pass, so flushing first proves nothing.
    return (Store.NT,) if isinstance(plan, EvictPlan) else tuple(Store)


def _proven(runner: KernelRunner, plan: Plan, sets: Sets, tell: Tell) -> Size | Reason:
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
    tell: Tell,
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


def _measured(results: Mapping[Kernel, Bandwidth | Reason]) -> dict[Kernel, Bandwidth]:
    return {kernel: result for kernel, result in results.items() if isinstance(result, Bandwidth)}
