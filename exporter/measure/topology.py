"""The processor as this process sees it: last-level caches and the sets of CPUs that are worth sweeping.

Every file may be missing: virtual machines, gVisor and old kernels leave out what they like.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from exporter.measure.cgroup import matching, read_int, read_text

ASSUMED_CACHE_BYTES: Final = 32 << 20
"""Assumed for each 8 CPUs when the last-level cache is not told."""
ASSUMED_CACHE_CPUS: Final = 8
SECOND_LEVEL: Final = 2
ASSUMED_PRIVATE_CACHE_BYTES: Final = 2 << 20
"""Assumed for each core when its second-level cache is not told: as large as they come."""

_SIZE_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cpu_list(text: str) -> tuple[int, ...]:
    """The CPUs of a kernel list such as `0-3,8`; empty when it is not one."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text.strip()):
        return ()
    spans = (part.partition("-") for part in text.strip().split(","))
    return tuple(cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1))


def last_level_cache_bytes(sys: Path, cpus: Sequence[int]) -> int | None:
    """The sum of the distinct last-level caches that these CPUs can hit, bytes; None when the kernel does not tell.

    Per CPU the highest level of a unified or data cache counts: an AMD processor has one for each core complex, and a
    hybrid one may have cores that reach no third level.
    """
    found: dict[tuple[int, str], int] = {}
    for cpu in cpus:
        caches = _caches(sys, cpu)
        if not caches:
            return None
        level, index = max(caches)
        size = _size(index)
        if size is None:
            return None
        shared = (read_text(index / "shared_cpu_list") or f"{cpu}").strip()
        found[level, shared] = size
    return sum(found.values()) if found else None


def private_cache_bytes(sys: Path, cpus: Sequence[int]) -> int:
    """The largest share that one of these CPUs has of its second-level cache, bytes; assumed where it is not told."""
    shares = []
    for cpu in cpus:
        for index in (index for level, index in _caches(sys, cpu) if level == SECOND_LEVEL):
            sharing = set(cpu_list(read_text(index / "shared_cpu_list") or f"{cpu}")) & set(cpus)
            shares.append((_size(index) or 0) // max(1, len(sharing)))
    return max(shares, default=0) or ASSUMED_PRIVATE_CACHE_BYTES


def _caches(sys: Path, cpu: int) -> list[tuple[int, Path]]:
    """(level, directory) of each cache of a CPU that holds data."""
    return [
        (level, index)
        for index in matching(sys / f"devices/system/cpu/cpu{cpu}/cache", "index[0-9]*")
        if (level := read_int(index / "level")) is not None
        and (read_text(index / "type") or "Unified").strip() in {"Unified", "Data"}
    ]


def _size(index: Path) -> int | None:
    """The size of a cache, bytes; None when the kernel does not tell."""
    size = re.fullmatch(r"(\d+)([KMG]?)\s*", read_text(index / "size") or "")
    return int(size[1]) * _SIZE_UNITS[size[2]] or None if size else None


def assumed_cache_bytes(cpus: int) -> int:
    """What to take for the last-level cache of that many CPUs when it is not told, bytes."""
    return ASSUMED_CACHE_BYTES * -(-cpus // ASSUMED_CACHE_CPUS)


def thread_sets(sys: Path, cpus: Sequence[int], limit: int | None = None) -> tuple[tuple[int, ...], ...]:
    """The sets of CPUs to sweep for the `all` scope, the widest first; each CPU carries one thread.

    All allowed CPUs; one CPU of each core (a second thread of a core adds no memory bandwidth and can cost some); the
    fast cores of a hybrid processor; half the cores, spread over the machine (some memory controllers saturate early
    and then lose).

    Args:
        sys: The root of sysfs.
        cpus: The allowed CPUs.
        limit: The most threads, from the configuration.
    """
    cores = tuple(dict.fromkeys(_first_sibling(sys, cpu, cpus) for cpu in cpus))
    widest = (*cores, *(cpu for cpu in cpus if cpu not in cores))
    fast = _fast_cpus(sys, cores)
    candidates = [widest, cores, fast, cores[::2]]
    if limit is not None:
        candidates = [_spread(c, limit) for c in candidates]
    unique = {len(c): tuple(sorted(c)) for c in reversed(candidates) if c}
    return tuple(unique[count] for count in sorted(unique, reverse=True))


def _first_sibling(sys: Path, cpu: int, allowed: Sequence[int]) -> int:
    """The first allowed CPU of this CPU's core."""
    text = read_text(sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or ""
    return min((c for c in cpu_list(text) if c in allowed), default=cpu)


def _fast_cpus(sys: Path, cpus: Sequence[int]) -> tuple[int, ...]:
    """A hybrid processor's fast cores (Intel: `cpu_core`; ARM: the highest `cpu_capacity`); all cores of another."""
    performance = cpu_list(read_text(sys / "devices/cpu_core/cpus") or "")
    if performance:
        return tuple(cpu for cpu in cpus if cpu in performance)
    capacity = {cpu: read_int(sys / f"devices/system/cpu/cpu{cpu}/cpu_capacity") or 0 for cpu in cpus}
    return tuple(cpu for cpu in cpus if capacity[cpu] == max(capacity.values()))


def _spread(cpus: Sequence[int], count: int) -> tuple[int, ...]:
    """At most that many of the CPUs, evenly spread."""
    kept = min(count, len(cpus))
    return tuple(cpus[i * len(cpus) // kept] for i in range(kept))
