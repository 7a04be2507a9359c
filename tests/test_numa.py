"""Per-node locality: in a virtual machine with two memory nodes, every thread's pages lie on the node of its CPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from real import missing, require
from test_csrc import CSRC, SOURCES, WARNINGS, compiler

INIT = Path(__file__).parent / "csrc" / "numa" / "init.c"
PACKAGE = "linux-image-cloud-amd64"
QEMU = "qemu-system-x86_64"
NODES = [
    *("-m", "512", "-smp", "4"),
    *(part for n in range(2) for part in ("-object", f"memory-backend-ram,id=m{n},size=256M")),
    *(part for n in range(2) for part in ("-numa", f"node,nodeid={n},cpus={2 * n}-{2 * n + 1},memdev=m{n}")),
]


pytestmark = pytest.mark.timeout(1200)  # an emulated machine, on a busy one


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Linux kernel for the machine: this system's own, or Debian's, fetched and unpacked without installing it."""
    if os.uname().machine != "x86_64":
        pytest.skip("an x86-64 machine is emulated, with what is compiled here")
    if own := sorted(Path("/boot").glob("vmlinuz-*")):
        return own[-1]
    require(shutil.which("apt-get") and shutil.which("dpkg"), "no kernel in /boot, and no apt-get to fetch one with")
    directory = tmp_path_factory.mktemp("kernel")
    depends = subprocess.run(["apt-cache", "depends", PACKAGE], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    if found is None:
        missing(f"no kernel in /boot, and apt does not know {PACKAGE}; run apt-get update")
    fetched = subprocess.run(
        ["apt-get", "-o", "Acquire::Retries=3", "download", found[1]], cwd=directory, capture_output=True, check=False
    )
    if fetched.returncode != 0:
        missing(f"no kernel in /boot, and {found[1]} cannot be fetched")
    subprocess.run(["dpkg", "-x", next(directory.glob("*.deb")), directory], check=True)
    return next((directory / "boot").glob("vmlinuz-*"))


@pytest.fixture(scope="module")
def console(kernel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the machine prints; our program is the only one in it."""
    require(shutil.which(QEMU), f"{QEMU} is not installed")
    require(shutil.which("cpio"), "cpio is not installed")
    directory = tmp_path_factory.mktemp("numa")
    root = directory / "root"
    for name in ("proc", "sys", "dev"):
        (root / name).mkdir(parents=True)
    command = [compiler(), *WARNINGS, "-O2", "-static", f"-I{CSRC}", *SOURCES, str(INIT), "-o", str(root / "init")]
    subprocess.run([*command, "-lpthread"], check=True)
    with (directory / "initrd").open("wb") as initrd:
        names = "\n".join(str(path.relative_to(root)) for path in root.rglob("*"))
        packing = ["cpio", "--quiet", "-o", "-H", "newc"]
        subprocess.run(packing, cwd=root, input=names.encode(), stdout=initrd, check=True)
    boot = ["-kernel", str(kernel), "-initrd", str(directory / "initrd")]
    boot += ["-append", "console=ttyS0 quiet panic=-1", "-nographic", "-no-reboot"]
    machine = [QEMU, "-accel", "tcg", "-cpu", "max", *NODES, *boot]
    done = subprocess.run(machine, capture_output=True, check=False, timeout=1100, stdin=subprocess.DEVNULL)
    return done.stdout.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("cpus", "share_of_first_node"), [("all", 0.5), ("first", 1.0), ("second", 0.0)], ids=["both", "first", "second"]
)
def test_pages_lie_where_their_thread_runs(console: str, cpus: str, share_of_first_node: float) -> None:
    """The arrays are 72 MiB: 18,432 pages. A huge page on the border of two slices may go either way."""
    found = re.search(rf"RESULT {cpus} error=0 passes=3 unpinned=0 N0=(\d+) N1=(\d+)", console)
    assert found, console
    first, second = int(found[1]), int(found[2])
    assert first + second >= 18_432
    assert abs(first / (first + second) - share_of_first_node) < 0.1
