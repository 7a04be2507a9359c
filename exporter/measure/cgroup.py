"""The control groups that this process lives in, v1 and v2: what they leave of memory and what they take of CPU time.

Every visible group counts: the process's own one and each ancestor up to the mount, because a limit anywhere on the
way binds. Inside a container the path in `/proc/self/cgroup` may not exist below the mount; the mount itself is then
the group.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_GROUP_FILES: Final = ("cgroup.procs", "memory.max", "memory.limit_in_bytes")
"""One of these is in every group that rules memory."""
_OWN_FIELDS: Final = 3
"""Of a line of /proc/self/cgroup: `id:controllers:path`."""
_MOUNT_FIELDS, _MOUNT_TAIL = 5, 3
"""Of a line of mountinfo: the least before the dash that tell root and mount point, and those behind it."""
_NO_LIMIT_BYTES: Final = 1 << 62
"""Version 1 writes 2^63 - one page for "no limit"; nothing real comes near half of that."""
_USUAL_V2: Final = ("fs/cgroup", "fs/cgroup/unified")
_USUAL_V1: Final = {"memory": ("fs/cgroup/memory",), "cpu": ("fs/cgroup/cpu", "fs/cgroup/cpu,cpuacct")}


@dataclass(frozen=True, slots=True)
class Group:
    """One visible control group.

    Attributes:
        version: 1 or 2.
        path: Its directory.
    """

    version: int
    path: Path


@dataclass(frozen=True, slots=True)
class _Mount:
    version: int
    controllers: frozenset[str]
    root: str
    directory: Path


def read_text(path: Path) -> str | None:
    """The file's text, or None when it is missing or the kernel refuses to answer."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _exists(path: Path) -> bool:
    """Whether it is there; what may not be looked at is not."""
    try:
        return path.exists()
    except OSError:
        return False


def matching(directory: Path, pattern: str) -> list[Path]:
    """The directory's entries of that pattern; none where there is no directory, or it may not be looked at."""
    try:
        return list(directory.glob(pattern))
    except OSError:
        return []


def read_int(path: Path) -> int | None:
    """The file's only number, or None: missing, `max`, or anything else."""
    text = (read_text(path) or "").strip()
    return int(text) if text.isascii() and text.isdigit() else None


def groups(proc: Path, sys: Path, controller: str) -> tuple[Group, ...]:
    """The visible groups that rule one controller, the process's own one first in each hierarchy, then its ancestors.

    Args:
        proc: The root of procfs.
        sys: The root of sysfs; mount points under `/sys` are looked for here.
        controller: `memory` or `cpu`.
    """
    found: dict[Group, None] = {}
    for mount in _mounts(proc, sys, controller):
        own = _own_directory(mount, _own_path(proc, mount.version, controller))
        for path in (own, *own.parents):
            found[Group(mount.version, path)] = None
            if path == mount.directory:
                break
    return tuple(found)


def memory_left_bytes(proc: Path, sys: Path) -> int | None:
    """The least limit - usage over the visible groups, at least 0; None without any limit.

    Page cache counts as used, reclaimable or not: it may be the server's mapped model, and evicting that would hurt.
    """
    left = [limit - used for limit, used in _memory(proc, sys)]
    return max(0, min(left)) if left else None


def memory_limit_bytes(proc: Path, sys: Path) -> int | None:
    """The least memory limit over the visible groups; None without any limit."""
    return min((limit for limit, _ in _memory(proc, sys)), default=None)


def memory_limit_hidden(proc: Path, sys: Path) -> bool:
    """Whether this process is in a memory group whose limit cannot be seen: a container without /sys, for instance."""
    own = (line.split(":", 2) for line in (read_text(proc / "self/cgroup") or "").splitlines())
    ruled = any(len(f) == _OWN_FIELDS and ("memory" in f[1].split(",") or (f[0] == "0" and not f[1])) for f in own)
    seen = (g.path / name for g in groups(proc, sys, "memory") for name in _GROUP_FILES)
    return ruled and not any(_exists(file) for file in seen)


def quota_cpus(proc: Path, sys: Path) -> float | None:
    """CPU seconds per second that the tightest visible group grants; None without a quota."""
    quotas: list[float] = []
    for group in groups(proc, sys, "cpu"):
        if group.version == 1:
            quota, period = (read_int(group.path / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        else:
            quota, period = _quota_v2(read_text(group.path / "cpu.max") or "")
        if quota is not None and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def throttled_seconds(proc: Path, sys: Path) -> float | None:
    """Seconds that the visible groups were denied their CPU, summed: only differences tell. None when not told."""
    totals: list[float] = []
    for group in groups(proc, sys, "cpu"):
        name, unit = ("throttled_time", 1e-9) if group.version == 1 else ("throttled_usec", 1e-6)
        match = re.search(rf"^{name} (\d+)$", read_text(group.path / "cpu.stat") or "", re.MULTILINE)
        if match:
            totals.append(int(match[1]) * unit)
    return sum(totals) if totals else None


def _quota_v2(text: str) -> tuple[int | None, int | None]:
    match = re.fullmatch(r"(\d+) (\d+)\s*", text)
    return (int(match[1]), int(match[2])) if match else (None, None)


def _memory(proc: Path, sys: Path) -> Iterator[tuple[int, int]]:
    """(limit, usage) in bytes of each visible group that has a limit."""
    for group in groups(proc, sys, "memory"):
        limits, usage = (
            (("memory.limit_in_bytes",), "memory.usage_in_bytes")
            if group.version == 1
            else (("memory.max", "memory.high"), "memory.current")
        )
        for name in limits:
            limit = read_int(group.path / name)
            if limit is not None and limit < _NO_LIMIT_BYTES:
                yield limit, read_int(group.path / usage) or 0


def _mounts(proc: Path, sys: Path, controller: str) -> tuple[_Mount, ...]:
    """The hierarchies that can rule the controller: from mountinfo, else the usual places."""
    text = read_text(proc / "self/mountinfo")
    if text is None:
        v2 = (_Mount(2, frozenset(), "/", sys / p) for p in _USUAL_V2 if _exists(sys / p / "cgroup.controllers"))
        v1 = (_Mount(1, frozenset({controller}), "/", sys / p) for p in _USUAL_V1[controller] if _exists(sys / p))
        return (*v2, *v1)
    mounts = [mount for line in text.splitlines() if (mount := _parse_mount(line, sys)) is not None]
    return tuple(m for m in mounts if m.version != 1 or controller in m.controllers)


def _parse_mount(line: str, sys: Path) -> _Mount | None:
    """One line of mountinfo: `id parent dev root mount options ... - type source super-options`."""
    left, _, right = line.partition(" - ")
    fields, tail = left.split(), right.split()
    if len(fields) < _MOUNT_FIELDS or len(tail) < _MOUNT_TAIL or tail[0] not in {"cgroup", "cgroup2"}:
        return None
    root, mount = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), f) for f in fields[3:5])
    inside = PurePosixPath(mount)
    directory = sys / inside.relative_to("/sys") if inside.is_relative_to("/sys") else Path(mount)
    return _Mount(2 if tail[0] == "cgroup2" else 1, frozenset(tail[2].split(",")), root, directory)


def _own_path(proc: Path, version: int, controller: str) -> str:
    """The process's path in a hierarchy: `id:controllers:path`, where version 2 has id 0 and no controllers."""
    for line in (read_text(proc / "self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if (version == 1 and controller in names.split(",")) or (version != 1 and number == "0" and not names):
            return path
    return "/"


def _own_directory(mount: _Mount, path: str) -> Path:
    """Where the process's group is visible below the mount; the mount itself when it is not."""
    own = PurePosixPath(path)
    if ".." in own.parts or not own.is_relative_to(mount.root):
        # A path that a foreign namespace wrote, or a container's mount that shows only a part of the hierarchy.
        own = PurePosixPath(mount.root)
    directory = mount.directory / own.relative_to(mount.root)
    return directory if _exists(directory) else mount.directory
