"""The compiled kernels (`csrc/membench.h`) in Python's types: error codes become reasons, passes become values."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from exporter.measure._membench import ffi, lib
from exporter.roofline.ceiling import Kernel
from exporter.roofline.passes import Method, Pass, Store
from exporter.roofline.reason import Reason

ELEMENT_BYTES: Final = 8
"""The arrays are of doubles."""
MOST_THREADS: Final = int(lib.MEMBENCH_MAX_THREADS)
MOST_REFILL_BYTES: Final = int(lib.MEMBENCH_MAX_REFILL_BYTES)
"""For each thread."""


@dataclass(frozen=True, slots=True)
class KernelRun:
    """What one call of the library gave.

    Attributes:
        passes: In order, the warm-up first; empty when they may not be used.
        amount: Bytes credited to each pass, or FLOP for the compute kernel.
        error: Why the call failed, or None.
    """

    passes: tuple[Pass, ...] = ()
    amount: float = 0.0
    error: Reason | None = None


@dataclass(frozen=True, slots=True)
class Way:
    """How a kernel runs: its instruction set, how it writes, and how the caches are kept out."""

    isa: str
    store: Store = Store.PLAIN
    method: Method = Method.STREAM


class Bench(Protocol):
    """Three mapped arrays and the CPUs whose threads walk them."""

    @property
    def array_bytes(self) -> int:
        """The size of each array."""

    @property
    def unpinned(self) -> int:
        """Threads of the last run that the system did not let us pin."""

    def run(
        self,
        kernel: Kernel,
        way: "Way",
        *,
        passes: int,
        rest_seconds: float,
        budget_seconds: float,
    ) -> KernelRun:
        """Runs one kernel: so many passes, rests between them, none begun after `budget_seconds` of timed work."""

    def close(self) -> None:
        """Gives the memory back."""


class Engine(Protocol):
    """What the bandwidth meter needs of the compiled library."""

    @property
    def isas(self) -> tuple[str, ...]:
        """The instruction sets worth trying on this CPU, the widest first."""

    @property
    def evict_supported(self) -> bool:
        """Whether `read` can be measured by flushing."""

    def open(self, cpus: Sequence[int], array_bytes: int, refill_bytes: int = 0) -> Bench | Reason:
        """Maps three arrays for one thread on each of these CPUs, and what each reads after flushing."""

    def fma(self, cpus: Sequence[int], isa: str, *, passes: int, pass_seconds: float) -> KernelRun:
        """Runs fused multiply-adds on registers, one thread on each of these CPUs."""

    def cancel(self) -> None:
        """Ends the running call within milliseconds, and every later one, until `resume`; callable from any thread."""

    def resume(self) -> None:
        """Allows calls again after a cancel."""

    def cancelled(self) -> bool:
        """Whether `cancel` was called since the last `resume`."""


class Membench:
    """The library on this machine."""

    def __init__(self) -> None:
        self._cancel = ffi.new("int32_t *", 0)

    @property
    def isas(self) -> tuple[str, ...]:
        """The instruction sets worth trying on this CPU, the widest first: AVX-512 does not always win over AVX2."""
        best: int = lib.membench_isa_best()
        tried = (best, lib.MEMBENCH_ISA_AVX2) if best == lib.MEMBENCH_ISA_AVX512 else (best,)
        return tuple(_text(lib.membench_isa_name(isa)) for isa in tried)

    @property
    def evict_supported(self) -> bool:
        """Whether `read` can be measured by flushing; a writing kernel answers UNSUPPORTED where it cannot."""
        return bool(lib.membench_evict_supported())

    def cancelled(self) -> bool:
        """Whether `cancel` was called since the last `resume`."""
        return bool(self._cancel[0])

    def cancel(self) -> None:
        """Ends the running call within milliseconds, and every later one, until `resume`; callable from any thread."""
        lib.membench_cancel(self._cancel)

    def resume(self) -> None:
        """Allows calls again after a cancel."""
        self._cancel[0] = 0

    def open(self, cpus: Sequence[int], array_bytes: int, refill_bytes: int = 0) -> "MembenchArrays | Reason":
        """Maps three arrays for one thread on each of these CPUs, and what each reads after flushing."""
        handle = ffi.new("membench **")
        numbers = ffi.new("int32_t[]", list(cpus))
        error = _reason(lib.membench_open(handle, array_bytes // ELEMENT_BYTES, refill_bytes, numbers, len(cpus)))
        return error or MembenchArrays(handle[0], array_bytes, self._cancel)

    def fma(self, cpus: Sequence[int], isa: str, *, passes: int, pass_seconds: float) -> KernelRun:
        """Runs fused multiply-adds on registers, one thread on each of these CPUs."""
        flops = ffi.new("double *")
        number = getattr(lib, f"MEMBENCH_ISA_{isa.upper()}")

        def call(times: object, completed: object) -> int:
            numbers = ffi.new("int32_t[]", list(cpus))
            code: int = lib.membench_fma(
                numbers, len(cpus), number, passes, pass_seconds, self._cancel, times, completed, flops
            )
            return code

        timed, error = _timed(passes, call)
        return KernelRun(timed, float(flops[0]), error)


class MembenchArrays:
    """Mapped arrays; `close` gives them back."""

    def __init__(self, handle: object, array_bytes: int, cancel: object) -> None:
        self._handle = handle
        self._cancel = cancel
        self.array_bytes = array_bytes

    @property
    def unpinned(self) -> int:
        """Threads of the last run that the system did not let us pin."""
        return int(lib.membench_unpinned(self._handle))

    def run(
        self,
        kernel: Kernel,
        way: "Way",
        *,
        passes: int,
        rest_seconds: float,
        budget_seconds: float,
    ) -> KernelRun:
        """Runs one kernel: so many passes, rests between them, none begun after `budget_seconds` of timed work."""
        number = getattr(lib, f"MEMBENCH_{kernel.name}")
        isa = getattr(lib, f"MEMBENCH_ISA_{way.isa.upper()}")
        how = getattr(lib, f"MEMBENCH_STORE_{way.store.name}")
        by = getattr(lib, f"MEMBENCH_METHOD_{way.method.name}")

        def call(times: object, completed: object) -> int:
            code: int = lib.membench_run(
                self._handle,
                number,
                isa,
                how,
                by,
                passes,
                rest_seconds,
                budget_seconds,
                self._cancel,
                times,
                completed,
            )
            return code

        timed, error = _timed(passes, call)
        return KernelRun(timed, float(lib.membench_pass_bytes(self._handle, number)), error)

    def close(self) -> None:
        """Gives the memory back."""
        lib.membench_close(self._handle)
        self._handle = ffi.NULL


def _timed(passes: int, call: Callable[[object, object], int]) -> tuple[tuple[Pass, ...], Reason | None]:
    """The passes that a call of the library timed, none when it failed, and why it failed."""
    times = ffi.new("membench_pass[]", passes)
    completed = ffi.new("int32_t *")
    error = _reason(call(times, completed))
    if error is not None:
        return (), error
    timed = tuple(
        Pass(p.seconds, p.cpu_ratio, p.imbalance, p.involuntary_switches, p.page_faults, p.stagger)
        for p in times[0 : completed[0]]
    )
    if not all(math.isfinite(p.seconds) and p.seconds > 0 for p in timed):
        return (), Reason.INVALID_RESULT
    return timed, None


def _reason(code: int) -> Reason | None:
    """The reason behind an error code of the library; a wrong argument is a bug here, not a reason."""
    if code == lib.MEMBENCH_OK:
        return None
    reasons: dict[int, Reason] = {
        lib.MEMBENCH_E_MAP: Reason.NO_MEMORY,
        lib.MEMBENCH_E_THREAD: Reason.NO_THREADS,
        lib.MEMBENCH_E_CANCELLED: Reason.CANCELLED,
        lib.MEMBENCH_E_INVALID: Reason.INVALID_RESULT,
        lib.MEMBENCH_E_UNSUPPORTED: Reason.UNSUPPORTED,
    }
    if code not in reasons:
        raise ValueError(f"membench: {_text(lib.membench_strerror(code))}")
    return reasons[code]


def _text(pointer: object) -> str:
    raw: bytes = ffi.string(pointer)
    return raw.decode("ascii")
