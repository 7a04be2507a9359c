"""What the tests of the GGUF reader ask of it: the header, or the problem, and the memory that it takes."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

from exporter.measure.gguf import read_gguf
from exporter.measure.gguf_types import GgufHeader, GgufProblem

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20
MAX_MEMORY = 32 * MIB
NOBODY = 65534


def header(path: Path) -> GgufHeader:
    """The header, which has to be right."""
    found = read_gguf(path)
    assert isinstance(found, GgufHeader), found
    return found


def problem(path: Path) -> GgufProblem:
    """The problem, after a look at its message: one printable sentence with the file's name and a remedy."""
    found = read_gguf(path)
    assert isinstance(found, GgufProblem), found
    assert found.message.isprintable()
    assert len(found.message) < 1000
    assert path.name[:8] in found.message
    assert ": " in found.message
    assert "\n" not in found.message
    return found


def peak_bytes(read: Callable[[], object]) -> int:
    """The most memory that a call holds beyond what was there before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        read()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
