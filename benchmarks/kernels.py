"""Our kernels against plain STREAM loops (-O3 -march=native, OpenMP) and against likwid-bench, interleaved.

    python benchmarks/kernels.py --pairs 9 --json kernels.json

Needs a C compiler; `likwid-bench` (Debian: likwid) if its rows are wanted. Same threads, same bytes, same CPUs.
likwid reports a mean over a second or more and is compared with our median; STREAM reports its best and is compared
with our best.
"""

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from statistics import median

from pairs import Comparison, show, shuffled

from exporter.measure.membench import Membench, MembenchArrays, Way
from exporter.roofline.ceiling import Kernel
from exporter.roofline.passes import Store

HERE = Path(__file__).parent
PASSES = 12
CLEAN = 0.97
ATTEMPTS = 5
SUFFIX = {"avx512": "avx512", "avx2": "avx_fma", "sse2": "sse", "neon": "neon"}
LOAD = {"avx512": "load_avx512", "avx2": "load_avx", "sse2": "load_sse", "neon": "load_neon"}
FLOPS = {"avx512": "peakflops_sp_avx512_fma", "avx2": "peakflops_sp_avx_fma", "sse2": "peakflops_sp_sse", "neon": ""}


class Contest:
    """Everything that can be run once, by name, giving figures by name."""

    def __init__(self, array_bytes: int, threads: int) -> None:
        self.cpus = sorted(os.sched_getaffinity(0))[:threads]
        self.array_bytes = array_bytes
        self.engine = Membench()
        self.scratch = tempfile.TemporaryDirectory()
        self.stream = Path(self.scratch.name) / "stream_loop"
        source = HERE / "stream_loop.c"
        flags = ("-O3", "-march=native", "-fopenmp", "-Wall", "-Wextra", "-Werror")
        subprocess.run(("cc", *flags, "-o", self.stream, source), check=True)
        self.likwid = shutil.which("likwid-bench")

    def ours(self) -> dict[str, float]:
        """Best and median GB/s of our kernels, and GFLOP/s; a disturbed run is made again."""
        found = {}
        arrays = self.engine.open(self.cpus, self.array_bytes)
        assert isinstance(arrays, MembenchArrays), arrays
        try:
            for kernel, store in ((Kernel.READ, Store.PLAIN), (Kernel.TRIAD, Store.NT), (Kernel.TRIAD, Store.PLAIN)):
                for _ in range(ATTEMPTS):
                    run = arrays.run(
                        kernel, Way(self.engine.isas[0], store), passes=PASSES, rest_seconds=0, budget_seconds=2
                    )
                    assert run.error is None, run.error
                    clean = [p.seconds for p in run.passes[1:] if p.cpu_ratio >= CLEAN]
                    if len(clean) >= PASSES // 2:
                        break
                else:
                    raise SystemExit("this machine is too busy: most passes were disturbed")
                found[f"{kernel} {store} best"] = run.amount / min(clean) / 1e9
                found[f"{kernel} {store} median"] = run.amount / median(clean) / 1e9
        finally:
            arrays.close()
        fma = self.engine.fma(self.cpus, self.engine.isas[0], passes=PASSES, pass_seconds=0.05)
        found["fma"] = fma.amount / median(p.seconds for p in fma.passes[1:]) / 1e9
        return found

    def plain_stream(self) -> dict[str, float]:
        """Best GB/s of the plain loops, the first pass dropped."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(len(self.cpus)),
            "OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in self.cpus),
            "OMP_PROC_BIND": "close",
        }
        command = (self.stream, str(self.array_bytes // 8), str(PASSES))
        lines = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()
        rows = {name: (int(size), [float(t) for t in times]) for name, size, *times in map(str.split, lines)}
        return {name: size / min(times[1:]) / 1e9 for name, (size, times) in rows.items()}

    def likwid_bench(self) -> dict[str, float]:
        """Likwid's own figures, GB/s and GFLOP/s."""
        isa, megabytes = self.engine.isas[0], self.array_bytes * 3 // 1_000_000
        return {
            "load": self._likwid(LOAD[isa], f"{megabytes}MB", "MByte/s"),
            "stream_mem": self._likwid(f"stream_mem_{SUFFIX[isa]}", f"{megabytes}MB", "MByte/s"),
            "peakflops": self._likwid(FLOPS[isa], "100kB", "MFlops/s"),
        }

    def _likwid(self, test: str, size: str, figure: str) -> float:
        # -W: each thread touches its own part first, as our kernels do.
        command = (str(self.likwid), "-t", test, "-W", f"M0:{size}:{len(self.cpus)}")
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        match = re.search(rf"^{figure}:\s+([\d.]+)", text, re.MULTILINE)
        assert match, text
        return float(match[1]) / 1e3


def main() -> None:
    """Runs the pairs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--array-mib", type=int, default=341, help="size of each of the three arrays")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    contest = Contest(options.array_mib << 20, options.threads)
    contestants = {"ours": contest.ours, "stream": contest.plain_stream}
    if contest.likwid:
        contestants["likwid"] = contest.likwid_bench
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for pair in range(options.pairs):
        for name in shuffled(list(contestants), pair):
            figures[name].append(contestants[name]())

    def column(name: str, figure: str) -> list[float]:
        return [row[figure] for row in figures[name]]

    rows = [
        Comparison("triad best / STREAM loop", _best_triad(figures["ours"]), column("stream", "triad"), "GB/s", 1.0),
        Comparison("triad plain / STREAM loop", column("ours", "triad plain best"), column("stream", "triad"), "GB/s"),
    ]
    if contest.likwid:
        rows += [
            Comparison(
                f"triad nt / likwid stream_mem_{SUFFIX[contest.engine.isas[0]]}",
                column("ours", "triad nt median"),
                column("likwid", "stream_mem"),
                "GB/s",
                0.97,
            ),
            Comparison(
                f"read / likwid {LOAD[contest.engine.isas[0]]}",
                column("ours", "read plain median"),
                column("likwid", "load"),
                "GB/s",
                0.97,
            ),
            Comparison(
                f"fma / likwid {FLOPS[contest.engine.isas[0]]}",
                column("ours", "fma"),
                column("likwid", "peakflops"),
                "GFLOP/s",
                0.95,
            ),
        ]
    title = f"{contest.engine.isas[0]}, {options.threads} threads, 3 x {options.array_mib} MiB"
    show(title, rows, options.json, figures=figures)


def _best_triad(rows: list[dict[str, float]]) -> list[float]:
    return [max(row["triad nt best"], row["triad plain best"]) for row in rows]


if __name__ == "__main__":
    main()
