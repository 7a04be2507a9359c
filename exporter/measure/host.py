"""This machine as far as the exporter's own process may use it: its CPUs, its memory, and who else is using them.

Everything is read again at each call, because a cpuset or a limit can change under a running process, and every file
may be missing. The roots of procfs and sysfs are passed in.
"""

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from exporter.measure.cgroup import (
    memory_left_bytes,
    memory_limit_bytes,
    memory_limit_hidden,
    read_int,
    read_text,
    throttled_seconds,
)
from exporter.measure.topology import last_level_cache_bytes
from exporter.roofline.passes import MEMORY_SHARE
from exporter.roofline.snapshot import HostInfo

STEAL_LIMIT: Final = 0.05
"""Share of the CPUs' time that the hypervisor may give to others; a busy cloud machine loses up to 3 % all the time."""
STALL_LIMIT: Final = 0.2
"""Share of the time in which some task may wait for a CPU. Measured on two CPUs: 0.05 for two busy threads and a light
client, 0.5 with one more busy thread."""
RECLAIM_LIMIT: Final = 0.01
"""Share of the time in which some task may wait for memory while bandwidth is measured."""

_STEAL_FIELD: Final = 8

HIDDEN_LIMIT_BYTES: Final = 48 << 20
"""Enough to measure with flushed caches, and little enough for a container of 128 MiB."""


def allowed_cpus() -> tuple[int, ...]:
    """The numbers of the CPUs that this process may run on, in order. Not `range(n)`: a cpuset has gaps."""
    return tuple(sorted(os.sched_getaffinity(0)))


def cpu_model(proc: Path, sys: Path) -> str:
    """The processor's name as the kernel tells it, or `unknown`."""
    for name in ("model name", "Model", "Hardware", "cpu model"):
        match = re.search(rf"^{name}\s*:\s*(\S.*)$", read_text(proc / "cpuinfo") or "", re.MULTILINE)
        if match:
            return " ".join(match[1].split())
    board = (read_text(sys / "firmware/devicetree/base/model") or "").strip("\0 \n")
    return board or "unknown"


def meminfo_bytes(proc: Path, name: str) -> int | None:
    """One line of `/proc/meminfo`, such as `MemFree`, in bytes."""
    match = re.search(rf"^{name}:\s*(\d+) kB$", read_text(proc / "meminfo") or "", re.MULTILINE)
    return int(match[1]) << 10 if match else None


def memory_budget_bytes(proc: Path, sys: Path, max_memory: int, group_share: int = MEMORY_SHARE) -> int:
    """What the kernels' arrays may take together, bytes; at least 0.

    The least of `max_memory`, one part in `group_share` of what each visible control group leaves, and a quarter of
    the memory that is free now. Free, not available: a mapped model is "available" page cache, and evicting it would
    slow the server down. Where a limit must be expected but cannot be seen, HIDDEN_LIMIT_BYTES at most.
    """
    if memory_limit_hidden(proc, sys):
        max_memory = min(max_memory, HIDDEN_LIMIT_BYTES)
    left = ((memory_left_bytes(proc, sys), group_share), (meminfo_bytes(proc, "MemFree"), MEMORY_SHARE))
    return max(0, min([max_memory, *(value // share for value, share in left if value is not None)]))


def anonymous_huge_bytes(proc: Path) -> int | None:
    """This process's anonymous memory that lies on huge pages, bytes; None when the kernel does not tell."""
    match = re.search(r"^AnonHugePages:\s*(\d+) kB$", read_text(proc / "self/smaps_rollup") or "", re.MULTILINE)
    return int(match[1]) << 10 if match else None


def huge_pages_given(sys: Path) -> bool:
    """Whether the kernel gives transparent huge pages to who asks for them."""
    enabled = read_text(sys / "kernel/mm/transparent_hugepage/enabled") or ""
    return "[always]" in enabled or "[madvise]" in enabled


def huge_page_bytes(sys: Path) -> int:
    """The size of a transparent huge page: 2 MiB unless the kernel tells another."""
    return read_int(sys / "kernel/mm/transparent_hugepage/hpage_pmd_size") or 2 << 20


def host_info(proc: Path, sys: Path) -> HostInfo:
    """The machine as published; `memory_bytes` is the physical memory or a control group's lower limit."""
    cpus = allowed_cpus()
    memory = (meminfo_bytes(proc, "MemTotal"), memory_limit_bytes(proc, sys))
    uname = os.uname()
    return HostInfo(
        cpu_model=cpu_model(proc, sys),
        cpus=len(cpus),
        last_level_cache_bytes=last_level_cache_bytes(sys, cpus),
        memory_bytes=min((m for m in memory if m is not None), default=None),
        kernel=uname.release,
        machine=uname.machine,
    )


def pressure_seconds(proc: Path, resource: str = "cpu") -> float | None:
    """Seconds in which at least one task waited for the resource (PSI, `some`); None without pressure information.

    Args:
        proc: The root of procfs.
        resource: `cpu` or `memory`.
    """
    match = re.search(r"^some .*\btotal=(\d+)$", read_text(proc / "pressure" / resource) or "", re.MULTILINE)
    return int(match[1]) / 1e6 if match else None


def steal_seconds(proc: Path, cpus: Collection[int]) -> float | None:
    """CPU seconds of these CPUs that the hypervisor gave to others, in clock ticks of 10 ms; None when not told."""
    lines = [line.split() for line in (read_text(proc / "stat") or "").splitlines()]
    wanted = {f"cpu{cpu}" for cpu in cpus}
    ticks = [int(f[_STEAL_FIELD]) for f in lines if len(f) > _STEAL_FIELD and f[0] in wanted]
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


@dataclass(frozen=True, slots=True)
class ContentionReading:
    """Counters at one moment, in seconds; None where the kernel does not tell. Only differences mean something."""

    taken_at: float
    stalled_seconds: float | None
    stolen_seconds: float | None
    throttled_seconds: float | None
    reclaiming_seconds: float | None = None


class ContentionMeter:
    """Tells whether somebody else took CPU time while a decode was timed. Such a decode is slow but true.

    A server with a thread on each CPU, and its client, make some pressure themselves; STALL_LIMIT lies above that.

    Args:
        proc: The root of procfs.
        sys: The root of sysfs.
        clock: Monotonic seconds.
        cpus: Tells the CPUs that this process may use.
    """

    def __init__(
        self,
        proc: Path,
        sys: Path,
        clock: Callable[[], float],
        cpus: Callable[[], Collection[int]] = allowed_cpus,
    ) -> None:
        self._proc = proc
        self._sys = sys
        self._clock = clock
        self._cpus = cpus

    def read(self) -> ContentionReading:
        """The counters now."""
        return ContentionReading(
            self._clock(),
            pressure_seconds(self._proc),
            steal_seconds(self._proc, self._cpus()),
            throttled_seconds(self._proc, self._sys),
            pressure_seconds(self._proc, "memory"),
        )

    def contended_since(self, before: ContentionReading) -> bool:
        """Whether somebody else took CPU time since that reading; what the kernel does not tell is taken for no."""
        return contended(before, self.read(), cpus=len(self._cpus()))


def waited_for_cpu(before: ContentionReading, after: ContentionReading) -> bool:
    """Whether tasks waited for a CPU longer than a server and its client alone make them wait."""
    return _grown(before.stalled_seconds, after.stalled_seconds) > STALL_LIMIT * (after.taken_at - before.taken_at)


def was_throttled(before: ContentionReading, after: ContentionReading) -> bool:
    """Whether a CPU quota ran out in between."""
    return _grown(before.throttled_seconds, after.throttled_seconds) > 0


def waited_for_memory(before: ContentionReading, after: ContentionReading) -> bool:
    """Whether the kernel was short of memory in between, so that tasks waited for it."""
    waited = _grown(before.reclaiming_seconds, after.reclaiming_seconds)
    return waited > RECLAIM_LIMIT * (after.taken_at - before.taken_at)


def was_robbed(before: float | None, after: float | None, wall_seconds: float, cpus: int) -> bool:
    """Whether the hypervisor gave more than STEAL_LIMIT of these CPUs' time to others, given their stolen seconds."""
    return _grown(before, after) > STEAL_LIMIT * cpus * wall_seconds


def contended(before: ContentionReading, after: ContentionReading, *, cpus: int) -> bool:
    """Whether somebody else took time of that many CPUs between two readings."""
    wall = after.taken_at - before.taken_at
    return (
        was_throttled(before, after)
        or was_robbed(before.stolen_seconds, after.stolen_seconds, wall, cpus)
        or waited_for_cpu(before, after)
    )


def _grown(before: float | None, after: float | None) -> float:
    return 0.0 if before is None or after is None else after - before
