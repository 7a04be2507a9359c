"""Memory-bandwidth ceilings: from raw pass times to the number that is in force.

Kernel definitions and byte counts are STREAM's (J. D. McCalpin, "Memory Bandwidth and Machine Balance in Current High
Performance Computers", 1995): only the bytes of explicit references are credited, never write-allocate traffic.
All rates are bytes/s, SI (GB = 1e9 bytes).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from types import MappingProxyType
from typing import Final

from exporter.roofline.reason import Reason

CEILING_LIFETIME_SECONDS: Final = 24 * 3600.0
"""A measured ceiling counts for this long; the best one of the window is in force."""


class Kernel(StrEnum):
    """The kernels that a ceiling can be measured with."""

    TRIAD = "triad"
    COPY = "copy"
    SCALE = "scale"
    ADD = "add"
    READ = "read"


class ThreadScope(StrEnum):
    """How many threads a kernel ran with: one, or the best of the swept counts."""

    SINGLE = "single"
    ALL = "all"


class CeilingSource(StrEnum):
    """Where a server's ceiling comes from."""

    TRIAD = "triad"
    READ = "read"
    PEAK = "peak"
    SUSTAINED = "sustained"


class Device(StrEnum):
    """The processor that decodes."""

    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """One measurement of one kernel at one thread scope.

    Attributes:
        best_bytes_per_second: Credited bytes over the shortest clean pass.
        median_bytes_per_second: Credited bytes over the median clean pass.
        spread_ratio: (median pass - best pass) / best pass; 0 when all passes agree.
        array_bytes: Size of one of the three arrays, bytes.
        measured_at: Monotonic seconds.
        flags: What to know about the number: `unpinned`, `cache_assumed`, `quota`, `contended` (tasks waited for CPUs
            meanwhile), `few_threads` (memory for more was lacking).
    """

    kernel: Kernel
    threads: ThreadScope
    thread_count: int
    best_bytes_per_second: float
    median_bytes_per_second: float
    spread_ratio: float
    passes: int
    array_bytes: int
    store: str
    isa: str
    pages: str
    method: str
    scope: str
    measured_at: float
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ComputePeak:
    """A measured register-only fused-multiply-add rate, FLOP/s (2 FLOP for each lane of each FMA)."""

    precision: str
    flops_per_second: float
    spread_ratio: float
    thread_count: int
    isa: str
    measured_at: float


@dataclass(frozen=True, slots=True)
class BandwidthRun:
    """What one call of `measuring` gave.

    Attributes:
        measurements: At most one for each kernel and thread scope.
        compute: Full runs only.
        rejected: Passes, and whole kernels or sizes, that were not good enough, by reason.
        problem: Why there is no `read` ceiling for all threads, which every CPU server's floor needs; None when there
            is one.
        array_bytes: The size of each of the three arrays; None when none was settled on.
        cpus: The CPUs that could be used.
        compute_problem: Why a full run gave no compute peak; None when it gave one, or was not to.
    """

    measurements: tuple[Bandwidth, ...]
    compute: ComputePeak | None
    rejected: Mapping[Reason, int]
    problem: Reason | None
    array_bytes: int | None
    cpus: tuple[int, ...]
    compute_problem: Reason | None = None

    @classmethod
    def failed(cls, reason: Reason) -> "BandwidthRun":
        """A run that could not even begin."""
        return cls((), None, MappingProxyType({reason: 1}), reason, None, ())


@dataclass(frozen=True, slots=True)
class PassSummary:
    """Statistics of the clean passes of one run, in seconds."""

    best_seconds: float
    median_seconds: float
    spread_ratio: float


def summarize_passes(seconds: Sequence[float]) -> PassSummary:
    """Best, median and spread of pass times.

    Args:
        seconds: Times of the clean passes, the warm-up pass already dropped (STREAM drops the first).

    Raises:
        ValueError: There is no pass, or a time is not positive.
    """
    if not seconds or min(seconds) <= 0:
        raise ValueError(f"pass times must be positive and at least one: {list(seconds)}")
    best = min(seconds)
    middle = median(seconds)
    return PassSummary(best, middle, middle / best - 1)


@dataclass(frozen=True, slots=True)
class BandwidthTrack:
    """The recent measurements of one kernel and scope: enough to know the last one and the window's best.

    A contended measurement may therefore raise the ceiling but never lower it.
    """

    samples: tuple[Bandwidth, ...] = ()

    def add(self, sample: Bandwidth) -> "BandwidthTrack":
        """The track with one more measurement; what the new one makes irrelevant or too old is dropped."""
        kept = tuple(
            old
            for old in self.samples
            if old.best_bytes_per_second > sample.best_bytes_per_second
            and sample.measured_at - old.measured_at <= CEILING_LIFETIME_SECONDS
        )
        return BandwidthTrack((*kept, sample))

    def in_force(self, now: float) -> Bandwidth | None:
        """The best measurement of the last 24 h, or None."""
        alive = [s for s in self.samples if now - s.measured_at <= CEILING_LIFETIME_SECONDS]
        return max(alive, key=lambda s: s.best_bytes_per_second, default=None)

    def last(self, now: float) -> Bandwidth | None:
        """The newest measurement, unless it is older than 24 h."""
        if self.samples and now - self.samples[-1].measured_at <= CEILING_LIFETIME_SECONDS:
            return self.samples[-1]
        return None


@dataclass(frozen=True, slots=True)
class Roof:
    """The ceilings that one server decodes under.

    Attributes:
        ceilings: Bytes/s by source.
        reference: The source that the floor uses.
        compute_flops_per_second: The processor's compute peak, or None when unknown.
        compute_source: `measured` or `configured`.
    """

    ceilings: Mapping[CeilingSource, float]
    reference: CeilingSource
    compute_flops_per_second: float | None = None
    compute_source: str | None = None

    @property
    def reference_bytes_per_second(self) -> float | None:
        """The ceiling that the floor uses, or None while it is not known."""
        return self.ceilings.get(self.reference)

    @property
    def ridge_flops_per_byte(self) -> float | None:
        """Compute peak / reference ceiling (Williams, Waterman, Patterson, "Roofline", CACM 2009)."""
        reference = self.reference_bytes_per_second
        if reference is None or self.compute_flops_per_second is None:
            return None
        return self.compute_flops_per_second / reference

    @property
    def hard_bytes_per_second(self) -> float | None:
        """What no reader can pass: `read` on a CPU, `peak` on a GPU; None while neither is known."""
        return self.ceilings.get(CeilingSource.READ, self.ceilings.get(CeilingSource.PEAK))


@dataclass(frozen=True, slots=True)
class RoofPolicy:
    """What the configuration says about one server's ceilings.

    Attributes:
        reference: None means: `read` for a CPU, `sustained` for a GPU.
        peak_bytes_per_second: A GPU's spec-sheet bandwidth.
        sustained_fraction: The part of the peak that streaming reads are expected to reach.
        compute_flops_per_second: Overrides the measured compute peak.
    """

    device: Device = Device.CPU
    reference: CeilingSource | None = None
    peak_bytes_per_second: float | None = None
    sustained_fraction: float = 0.8
    compute_flops_per_second: float | None = None

    def roof(self, host: Mapping[Kernel, float], host_flops_per_second: float | None) -> Roof:
        """The server's roof, given this machine's ceilings (bytes/s, all threads) and compute peak (FLOP/s)."""
        if self.device is Device.CPU:
            ceilings = {CeilingSource(k.value): host[k] for k in (Kernel.TRIAD, Kernel.READ) if k in host}
            flops = self.compute_flops_per_second or host_flops_per_second
            source = "configured" if self.compute_flops_per_second else "measured"
        else:
            peak = self.peak_bytes_per_second
            ceilings = {}
            if peak is not None:
                ceilings = {CeilingSource.PEAK: peak, CeilingSource.SUSTAINED: peak * self.sustained_fraction}
            flops, source = self.compute_flops_per_second, "configured"
        default = CeilingSource.READ if self.device is Device.CPU else CeilingSource.SUSTAINED
        return Roof(MappingProxyType(ceilings), self.reference or default, flops, source if flops else None)
