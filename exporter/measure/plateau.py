"""The plateau test: an array size is proven to lie in memory when another size reads no faster."""

from collections.abc import Sequence
from typing import Final

from exporter.measure.kernels import LEAST_PASSES, KernelRunner
from exporter.roofline.ceiling import Kernel
from exporter.roofline.passes import SizePlan, Store, is_plateau
from exporter.roofline.reason import Reason

ATTEMPTS: Final = 3
"""The best of each size counts: a disturbance only slows down, so that more attempts tell two sizes apart better."""


def proven_bytes(runner: KernelRunner, plan: SizePlan, sets: Sequence[tuple[int, ...]]) -> int | Reason:
    """The array size to measure with, bytes; CACHE_SUSPECT, counted, when no size of the plan passes.

    Args:
        runner: Runs the reader.
        plan: The sizes to compare.
        sets: The sets of CPUs, the widest first.
    """
    for cpus in sets:
        best: dict[int, float] = {}
        for _ in range(ATTEMPTS):
            proven = _plateau_bytes(runner, plan, cpus, best)
            if proven is not None:
                break
        # Unevenly fast CPUs cannot tell; a set of equals can.
        if proven is not Reason.IMBALANCED:
            break
    return runner.refuse(Reason.CACHE_SUSPECT) if proven is None else proven


def _plateau_bytes(
    runner: KernelRunner, plan: SizePlan, cpus: tuple[int, ...], best: dict[int, float]
) -> int | Reason | None:
    """The first size of the plan that passes, None when none does, or why it could not be tried.

    Args:
        runner: Runs the reader.
        plan: The sizes.
        cpus: Where the threads run.
        best: The best rate of each size so far, bytes/s; updated.
    """
    for array_bytes in (plan.largest, *(smaller for smaller, _ in plan.comparisons)):
        rate = _read_rate(runner, cpus, array_bytes)
        if isinstance(rate, Reason):
            return rate
        best[array_bytes] = max(rate, best.get(array_bytes, 0.0))
        for smaller, size in plan.comparisons:
            if smaller in best and is_plateau(best[smaller], best[plan.largest]):
                return size
    return None


def _read_rate(runner: KernelRunner, cpus: tuple[int, ...], array_bytes: int) -> float | Reason:
    """How fast arrays of this size are read, bytes/s: the best of a few clean passes."""
    arrays = runner.open(cpus, array_bytes)
    if isinstance(arrays, Reason):
        return arrays
    try:
        measured = runner.bandwidth(arrays, Kernel.READ, (Store.PLAIN,), LEAST_PASSES)
    finally:
        arrays.bench.close()
    return measured if isinstance(measured, Reason) else measured.best_bytes_per_second
