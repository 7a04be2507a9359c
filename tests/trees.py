"""Builders of small procfs and sysfs trees: a test says what the machine shows, and the rest is missing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

V1_NO_LIMIT = (1 << 63) - 4096
"""What version 1 writes where there is no memory limit."""


@dataclass
class Machine:
    """A tree under `root`; every method adds to it and returns the machine."""

    root: Path
    mounts: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)

    @property
    def proc(self) -> Path:
        return self.root / "proc"

    @property
    def sys(self) -> Path:
        return self.root / "sys"

    def write(self, path: str, text: str) -> "Machine":
        """A file, by its path on the pretended machine."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self

    def memory(self, *, total: int = 64 << 30, free: int = 32 << 30) -> "Machine":
        """`/proc/meminfo`; bytes."""
        lines = {"MemTotal": total, "MemFree": free, "MemAvailable": total, "Cached": total - free}
        return self.write("proc/meminfo", "".join(f"{name}:{size >> 10:>16} kB\n" for name, size in lines.items()))

    def cache(self, cpus: str, level: int, size: str | None, kind: str = "Unified") -> "Machine":
        """One cache of the CPUs of a list such as `0-3`, as each of them shows it."""
        for cpu in expand(cpus):
            index = f"sys/devices/system/cpu/cpu{cpu}/cache/index{level}{'' if kind != 'Instruction' else 9}"
            self.write(f"{index}/level", f"{level}\n").write(f"{index}/type", f"{kind}\n")
            self.write(f"{index}/shared_cpu_list", f"{cpus}\n")
            if size is not None:
                self.write(f"{index}/size", f"{size}\n")
        return self

    def core(self, cpus: str) -> "Machine":
        """The hardware threads of one core."""
        for cpu in expand(cpus):
            self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpus}\n")
        return self

    def mount_v1(self, controllers: str, at: str, *, path: str = "/", root: str = "/") -> "Machine":
        """A version 1 hierarchy, and this process's path in it as `/proc/self/cgroup` tells it."""
        number = len(self.own) + 2
        return self._mounted(
            f"{30 + number} 31 0:{number} {root} {at} rw,relatime shared:5 - cgroup cgroup rw,{controllers}",
            f"{number}:{controllers}:{path}",
            at,
        )

    def mount_v2(self, at: str = "/sys/fs/cgroup", *, path: str = "/", root: str = "/") -> "Machine":
        """The version 2 hierarchy, and this process's path in it."""
        return self._mounted(f"30 31 0:26 {root} {at} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate", f"0::{path}", at)

    def group(self, directory: str, files: Mapping[str, int | str]) -> "Machine":
        """A group's files."""
        for name, content in files.items():
            self.write(f"{directory}/{name}", f"{content}\n")
        return self

    def _mounted(self, mount: str, own: str, at: str) -> "Machine":
        self.mounts.append(mount)
        self.own.append(own)
        (self.root / at.lstrip("/")).mkdir(parents=True, exist_ok=True)
        other = ["22 28 0:20 / /proc rw - proc proc rw", "28 1 254:1 / / rw - ext4 /dev/vda1 rw"]
        self.write("proc/self/mountinfo", "\n".join([*other, *self.mounts, ""]))
        return self.write("proc/self/cgroup", "\n".join([*self.own, ""]))


def expand(cpus: str) -> Iterable[int]:
    """The numbers of a list such as `0-3,8`."""
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
