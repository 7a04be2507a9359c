"""Which process listens on a port or a Unix socket of this network namespace.

The kernel's tables are read line by line: a busy host has tens of thousands of connections, and one object for each
would cost a small container its memory. Links of open files are plain strings for the same reason: a `Path` enters its
parts into the interpreter's table of names, which grows, and in early releases of Python 3.12 forgets none.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import psutil

_LISTENS: Final = "0A"
_TCP_INODE: Final = 9
_UNIX_INODE: Final = 6
_UNIX_PATH: Final = 7


def tcp_sockets(proc: Path, port: int) -> frozenset[str]:
    """The inodes of the sockets that listen on the port, IPv4 and IPv6."""

    def listens(fields: list[str]) -> bool:
        return len(fields) > _TCP_INODE and fields[3] == _LISTENS and fields[1].endswith(f":{port:04X}")

    lines = (fields for name in ("tcp", "tcp6") for fields in _lines(proc / "net" / name))
    return frozenset(fields[_TCP_INODE] for fields in lines if listens(fields))


def unix_sockets(proc: Path, path: str) -> frozenset[str]:
    """The inodes of the sockets that are bound to the path."""
    lines = _lines(proc / "net/unix")
    return frozenset(f[_UNIX_INODE] for f in lines if len(f) > _UNIX_PATH and " ".join(f[_UNIX_PATH:]) == path)


def owner(proc: Path, inodes: Iterable[str], pids: Callable[[], Iterable[int]] = psutil.pids) -> int | None:
    """A process that holds one of the sockets; None where none is seen: other users' open files are not shown."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return next((pid for pid in pids() if wanted and any(link in wanted for link in _links(f"{proc}/{pid}/fd"))), None)


def _links(directory: str) -> Iterator[str]:
    """What the open files of a process are; none of another user's."""
    try:
        files = os.listdir(directory)  # noqa: PTH208 - no `Path` for each, see above
    except OSError:
        return
    for file in files:
        # One that was closed meanwhile is no reason to miss the others.
        with contextlib.suppress(OSError):
            yield os.readlink(f"{directory}/{file}")  # noqa: PTH115 - the same


def _lines(file: Path) -> Iterator[list[str]]:
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                yield line.split()
    except OSError:
        return
