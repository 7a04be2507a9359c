"""The C library: its own test program, under every checker that is installed, and what the compiler made of it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cffi import FFI
from real import require

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.timeout(1200)  # emulators and checkers, on a busy machine

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
TESTS = sorted(str(path) for path in (ROOT / "tests" / "csrc").glob("*.c"))
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Werror"]
SOURCES = sorted(str(path) for path in CSRC.glob("*.c") if not path.name.startswith("_"))
HASWELL = "Haswell-noTSX,-pcid,-x2apic,-tsc-deadline,-invpcid"  # less what the emulator lacks and warns of
INSTRUMENTED = os.environ | {"MEMBENCH_INSTRUMENTED": "1"}


def compiler(name: str = "cc") -> str:
    path = shutil.which(name)
    require(path, f"{name} is not installed")
    return str(path)


def compile_test(out: Path, *flags: str, cc: str = "cc") -> Path:
    command = [compiler(cc), *WARNINGS, *flags, f"-I{CSRC}", *SOURCES, *TESTS, "-o", str(out), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def run(command: list[str], *, instrumented: bool = False, expect_isa: str | None = None) -> None:
    env = INSTRUMENTED if instrumented else dict(os.environ)
    if expect_isa is not None:
        env = env | {"MEMBENCH_EXPECT_ISA": expect_isa}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1100, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == ""


def build_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_membench", CSRC / "build_membench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("level", ["-O2", "-O3"])
def test_library_keeps_its_promises(tmp_path: Path, level: str) -> None:
    run([str(compile_test(tmp_path / "plain", level))])


def test_kernel_that_leaves_out_one_line_is_always_caught(tmp_path: Path) -> None:
    fault = ROOT / "tests" / "csrc" / "fault.h"
    run([str(compile_test(tmp_path / "fault", "-O2", "-include", str(fault)))])


@pytest.mark.real
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(tmp_path: Path, sanitizer: str) -> None:
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    linked = subprocess.run(
        [compiler(), f"-fsanitize={sanitizer}", str(probe), "-o", str(tmp_path / "probe")],
        capture_output=True,
        check=False,
    )
    require(linked.returncode == 0, f"the compiler has no -fsanitize={sanitizer}")
    # Sanitizers of some compilers do not start where the kernel spreads addresses widely.
    plainly = ["setarch", os.uname().machine, "-R"]
    can = subprocess.run([*plainly, "true"], capture_output=True, check=False).returncode == 0
    start = plainly if can else []
    began = subprocess.run([*start, str(tmp_path / "probe")], capture_output=True, check=False)
    require(began.returncode == 0, f"no program with -fsanitize={sanitizer} starts on this kernel")
    flags = ["-O2", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    run([*start, str(compile_test(tmp_path / "sanitized", *flags))], instrumented=True)


@pytest.mark.real
def test_valgrind_finds_no_error_and_no_leak(tmp_path: Path) -> None:
    valgrind = compiler("valgrind")
    program = compile_test(tmp_path / "plain", "-O2", "-g")
    checks = ["-q", "--error-exitcode=9", "--leak-check=full", "--fair-sched=yes"]
    run([valgrind, *checks, str(program)], instrumented=True)


@pytest.mark.real
@pytest.mark.parametrize("machine", ["aarch64", "riscv64"])  # NEON, and an architecture with the portable loops only
def test_other_architectures(tmp_path: Path, machine: str) -> None:
    emulator = shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")
    require(emulator, f"qemu-{machine} is not installed")
    program = compile_test(tmp_path / machine, "-O2", "-static", cc=f"{machine}-linux-gnu-gcc")
    run([str(emulator), str(program)], instrumented=True)


@pytest.mark.real
@pytest.mark.parametrize(("cpu", "isa"), [("Nehalem", "sse2"), (HASWELL, "avx2")], ids=["Nehalem", "Haswell"])
def test_older_processors_get_what_they_have(tmp_path: Path, cpu: str, isa: str) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("x86-64 code")
    emulator = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
    require(emulator, "qemu-x86_64 is not installed")
    program = compile_test(tmp_path / "static", "-O2", "-static")
    run([str(emulator), "-cpu", cpu, str(program)], instrumented=True, expect_isa=isa)


@pytest.mark.parametrize(("function", "accumulators"), [("flops_avx2", 12), ("flops_avx512", 16)])
def test_multiply_adds_touch_registers_only(tmp_path: Path, function: str, accumulators: int) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("x86-64 code")
    flags = build_script().COMPILE_ARGS
    out = tmp_path / "kernels.o"
    subprocess.run([compiler(), *flags, "-fPIC", "-c", str(CSRC / "kernels.c"), "-o", str(out)], check=True)
    listing = subprocess.run(
        [compiler("objdump"), "-d", "--no-show-raw-insn", f"--disassemble={function}", str(out)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    operands = [line.split("vfmadd231ps", 1)[1] for line in listing.splitlines() if "vfmadd231ps" in line]
    assert len(operands) == accumulators
    assert not any("(" in operand for operand in operands)
    assert len({operand.rsplit(",", 1)[1] for operand in operands}) == accumulators


@pytest.mark.real
def test_where_it_is_built_makes_no_difference(tmp_path: Path) -> None:
    """Two builds of one source are the same, byte for byte."""
    compiler()
    built = []
    for place in (tmp_path / "here", tmp_path / "a" / "longer" / "place"):
        shutil.copytree(CSRC, place / "csrc")
        (place / "exporter" / "measure").mkdir(parents=True)
        subprocess.run([sys.executable, str(place / "csrc" / "build_membench.py")], check=True, capture_output=True)
        built += [library.read_bytes() for library in (place / "exporter" / "measure").glob("_membench*.so")]
    assert len(built) == 2
    assert built[0] == built[1]
    assert str(tmp_path).encode() not in built[0]


def test_library_has_no_mutable_globals_and_never_prints_or_aborts(tmp_path: Path) -> None:
    out = tmp_path / "library.o"
    flags = ["-std=c11", "-O2", "-fno-pie", "-fno-stack-protector", "-r", "-nostdlib"]
    subprocess.run([compiler(), *flags, *SOURCES, "-o", str(out)], check=True)
    symbols = subprocess.run([compiler("nm"), str(out)], capture_output=True, text=True, check=True).stdout
    names = [line.split()[-2:] for line in symbols.splitlines()]
    assert [name for kind, name in names if kind in "bBdDC"] == []
    undefined = {name for kind, name in names if kind == "U"}
    assert not undefined & {"printf", "fprintf", "puts", "write", "abort", "exit", "perror", "fork"}


def test_binding_is_derived_from_the_public_header_and_lists_every_file() -> None:
    script = build_script()
    assert sorted(script.SOURCES) == [Path(source).name for source in SOURCES]
    assert sorted(script.HEADERS) == sorted(path.name for path in CSRC.glob("*.h"))
    ffi = FFI()
    ffi.cdef(script.declarations())
    assert ffi.typeof("membench_pass").fields is not None
    header = (CSRC / "membench.h").read_text(encoding="utf-8")
    declared = set(re.findall(r"\b(membench_\w+)\(", script.declarations()))
    assert {"membench_open", "membench_run", "membench_fma", "membench_close"} <= declared
    assert declared == set(re.findall(r"^(?!static)[\w ]+[ *](membench_\w+)\(", header, flags=re.MULTILINE))
