"""Builds `exporter.measure._membench`, the cffi binding of the C library beside this file.

setuptools reads `ffibuilder`; running the file builds the extension in place, for work in the source tree.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SOURCES = ("membench.c", "contents.c", "evict.c", "flops.c", "kernels.c", "names.c", "team.c")
HEADERS = ("membench.h", "contents.h", "evict.h", "kernels.h", "team.h")
COMPILE_ARGS = ("-O3", "-std=c11", "-g0")  # debug data would hold the build's path: no two builds would be the same


def declarations() -> str:
    """Returns what the public header declares between its two cdef markers."""
    header = (HERE / "membench.h").read_text(encoding="utf-8")
    return header.split("/* cdef begin */")[1].split("/* cdef end */")[0]


def builder(root: str) -> FFI:
    """Describes the extension.

    Args:
        root: Prefix of the C sources' paths; empty for setuptools, which wants them relative to the project.
    """
    ffi = FFI()
    ffi.cdef(declarations())
    ffi.set_source(
        "exporter.measure._membench",
        '#include "membench.h"',
        sources=[f"{root}csrc/{name}" for name in SOURCES],
        include_dirs=[f"{root}csrc"],
        depends=[f"{root}csrc/{name}" for name in HEADERS],
        extra_compile_args=[*COMPILE_ARGS],
        libraries=["pthread"],
        py_limited_api=True,
    )
    return ffi


ffibuilder = builder("")

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(builder(f"{ROOT}/").compile(tmpdir=scratch))
        target = ROOT / "exporter" / "measure" / built.name
        # A process that has the old file mapped keeps it: renamed over, never written over.
        shutil.copy(built, target.with_suffix(".new"))
        target.with_suffix(".new").replace(target)
