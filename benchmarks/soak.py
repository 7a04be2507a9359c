"""What the exporter itself takes: memory over a thousand cycles, CPU while nothing happens, time to the first scrape.

    python benchmarks/soak.py --json soak.json

Three parts, any of them by `--parts`:

- start: time from the start of the process until `GET /metrics` answers, with a server that answers nothing.
- idle: CPU seconds / seconds at default settings beside an idle llama.cpp server, scraped every 15 s. Samples are taken
  every second from the process's CPU clock. Those in which kernels or a probe ran (the exporter's log tells) are
  reported apart: the bar is for the rest.
- soak: intervals at their least against the fake server of the tests, until `--cycles` probe cycles (every batch once)
  were made; scraped every second. Resident memory, threads and open files at the start and after so many cycles.
  Between two measurements the arrays of the kernels are returned: `between` is the least of some seconds; `most` is
  the most so far, with arrays.

Needs the `demo` extra for idle.
"""

import argparse
import asyncio
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

from pairs import Figure, show_figures
from rich.console import Console
from rich.table import Table

from exporter.service.demo import cache_directory
from exporter.service.demo_model import assemble_model

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from fake_llama import FakeLlama
from processes import COMMAND, Exporter, exporter, free_port, get, llama, running, wait_for

MIB = 1 << 20
MEMORY_BAR, IDLE_BAR, START_BAR = 64.0, 0.2, 1.0
BATCHES = 3
CHECKPOINTS = (10, 50, 100, 250, 500, 750, 1000)
WATCH_SECONDS = 10.0
SCRAPE_SECONDS = 15.0
AROUND_SECONDS = 1.0
"""What is done right before and after a measurement belongs to it."""


def cpu_seconds(pid: int) -> float:
    """User and system CPU time of all threads, ended ones too, of another process, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) makes it


def value(text: str, name: str) -> float:
    """The sum of a metric's series."""
    return sum(float(found) for found in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


# start


def start_seconds(directory: Path) -> tuple[float, float]:
    """From the start of the process until `/metrics` answered: seconds, and the CPU seconds that it took."""
    port = free_port()
    (directory / "config.yaml").write_text("servers: [{name: local, url: 'http://192.0.2.1:8080'}]")
    arguments = ("--config.file", directory / "config.yaml", "--web.listen-address", f"127.0.0.1:{port}")
    began = time.monotonic()
    with running((*COMMAND, *arguments), stderr=subprocess.DEVNULL) as process:
        while True:
            try:
                get(f"http://127.0.0.1:{port}/metrics")
            except OSError:
                assert time.monotonic() - began < 30, "the exporter does not answer"
                time.sleep(0.005)
            else:
                return time.monotonic() - began, cpu_seconds(process.pid)


def measure_start(starts: int) -> list[Figure]:
    """Several starts; the first one, which may have files to read, is left out."""
    with tempfile.TemporaryDirectory() as scratch:
        found = [start_seconds(Path(scratch)) for _ in range(starts + 1)][1:]
    seconds, cpu = ([one[part] for one in found] for part in (0, 1))
    note = f"median of {starts}, {min(seconds):.2f} to {max(seconds):.2f}"
    return [
        Figure("start until /metrics answers", median(seconds), "s", START_BAR, note),
        Figure("CPU of the start", median(cpu), "s", None, f"kernels may have begun; {min(cpu):.2f} to {max(cpu):.2f}"),
    ]


# idle


@dataclass(frozen=True, slots=True)
class Second:
    """One sample: when it began and ended (Unix seconds), and the CPU seconds in it."""

    began: float
    ended: float
    cpu: float

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.ended - self.began

    def touches(self, span: tuple[float, float]) -> bool:
        """Whether the span reaches into this sample."""
        return self.began < span[1] and self.ended > span[0]


def spans(program: Exporter, event: str) -> list[tuple[float, float]]:
    """When the kernels ran or probes were made, by the log; widened, for what is done around them."""
    found = []
    for line in program.logged(event):
        ended = datetime.fromisoformat(line["timestamp"]).timestamp()
        found.append((ended - line["seconds"] - AROUND_SECONDS, ended + AROUND_SECONDS))
    return found


def measure_idle(minutes: float) -> list[Figure]:
    """CPU at default settings, from the end of the first cycle on."""
    model, port = assemble_model(cache_directory()), free_port()
    config = f"servers: [{{name: local, url: 'http://127.0.0.1:{port}'}}]"
    samples: list[Second] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        llama(model, port),
        exporter(config, Path(scratch)) as program,
    ):
        wait_for("the first cycle", 300, lambda: len(program.logged("probe")) >= BATCHES)
        time.sleep(AROUND_SECONDS)
        pid, deadline, scraped = program.process.pid, time.monotonic() + 60 * minutes, 0.0
        while time.monotonic() < deadline:
            began, cpu = time.time(), cpu_seconds(pid)
            if time.monotonic() - scraped >= SCRAPE_SECONDS:
                scraped = time.monotonic()
                program.get("/metrics")
            time.sleep(1)
            samples.append(Second(began, time.time(), cpu_seconds(pid) - cpu))
        kernels, probes = spans(program, "bandwidth"), spans(program, "probe")
    rows: dict[str, list[Second]] = {"idle": [], "probes": [], "kernels": []}
    for sample in samples:
        name = "kernels" if any(map(sample.touches, kernels)) else "idle"
        rows["probes" if name == "idle" and any(map(sample.touches, probes)) else name].append(sample)

    def share(name: str) -> float:
        return 100 * sum(s.cpu for s in rows[name]) / max(1e-9, sum(s.seconds for s in rows[name]))

    def length(name: str) -> float:
        return sum(s.seconds for s in rows[name])

    whole = 100 * sum(s.cpu for s in samples) / sum(s.seconds for s in samples)
    quiet = sum(1 for span in kernels if any(s.touches(span) for s in samples))
    cycles = sum(1 for span in probes if any(s.touches(span) for s in samples)) / BATCHES
    return [
        Figure("idle CPU: no kernels, no probes", share("idle"), "% of a core", IDLE_BAR, f"{length('idle'):.0f} s"),
        Figure("CPU of probes", sum(s.cpu for s in rows["probes"]), "s", None, f"{cycles:.1f} cycles"),
        Figure("CPU of kernels", sum(s.cpu for s in rows["kernels"]), "s", None, f"{quiet} runs"),
        Figure("CPU in all", whole, "% of a core", None, f"{minutes:g} min at default settings"),
    ]


# soak


@contextmanager
def fake_server() -> Iterator[str]:
    """The fake llama-server in a thread of its own; its URL. It forgets what it was asked, or it would grow."""
    ready, stop, urls = threading.Event(), threading.Event(), []

    async def work() -> None:
        async with FakeLlama() as fake:
            urls.append(fake.url)
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.5)
                fake.requests.clear()

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    ready.wait(10)
    try:
        yield urls[0]
    finally:
        stop.set()
        thread.join(10)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the process held when so many cycles had been made."""

    cycles: int
    bandwidth_runs: int
    seconds: float
    between_mib: float
    most_mib: float
    own_mib: float
    threads: int
    open_files: int


def status(pid: int) -> dict[str, int]:
    """`VmRSS`, `RssAnon` (both in kB), `Threads` and the like."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return {name: int(number) for name, number in re.findall(r"^(\w+):\s+(\d+)(?: kB)?$", text, re.MULTILINE)}


def checkpoint(program: Exporter, began: float, seconds: float) -> Checkpoint:
    """Watches the process for some seconds, a few cycles long."""
    pid, deadline, seen, files = program.process.pid, time.monotonic() + seconds, [], []
    while time.monotonic() < deadline:
        seen.append(status(pid))
        files.append(len(list(Path(f"/proc/{pid}/fd").iterdir())))
        time.sleep(0.02)
    text = program.get("/metrics")
    return Checkpoint(
        cycles=int(value(text, "roofline_probes_total")) // BATCHES,
        bandwidth_runs=int(value(text, "roofline_memory_bandwidth_runs_total")),
        seconds=time.monotonic() - began,
        between_mib=min(s["VmRSS"] for s in seen) / 1024,
        most_mib=seen[-1]["VmHWM"] / 1024,
        own_mib=min(s["RssAnon"] for s in seen) / 1024,
        threads=min(s["Threads"] for s in seen),
        open_files=min(files),
    )


def measure_soak(cycles: int, bandwidth_interval: float, max_memory: str) -> tuple[list[Figure], list[Checkpoint]]:
    """Memory, threads and files over the cycles."""
    config = (
        f"bandwidth: {{interval: {bandwidth_interval}s, max_memory: {max_memory}}}\n"
        "probe: {interval: 1s, health_interval: 1s, seconds: 100ms, max_duty_cycle: 0.5}\n"
        "servers: [{name: local, url: 'URL'}]\n"
    )
    found: list[Checkpoint] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        fake_server() as url,
        exporter(config.replace("URL", url), Path(scratch)) as program,
    ):
        began = time.monotonic()
        for at in (0, *(c for c in CHECKPOINTS if c < cycles), cycles):
            while value(program.get("/metrics"), "roofline_probes_total") < BATCHES * at:
                assert program.process.poll() is None, "the exporter ended"
                time.sleep(1)
            found.append(checkpoint(program, began, 1.0 if at == 0 else WATCH_SECONDS))
            print(found[-1], flush=True)
        text = program.get("/metrics")
        failures = value(text, "roofline_probe_failures_total") + value(text, "roofline_probes_rejected_total")
        probes = value(text, "roofline_probes_total")
    table = Table(title="memory, MiB, over the cycles")
    heads = ("cycles", "bandwidth runs", "s", "between", "most", "own (anonymous)", "threads", "open files")
    for head in heads:
        table.add_column(head, justify="right")
    for c in found:
        table.add_row(*(f"{v:.1f}" if isinstance(v, float) else str(v) for v in asdict(c).values()))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    last = found[-1]
    middle = min(found[1:], key=lambda c: abs(c.cycles - last.cycles / 2))
    grown = (last.own_mib - middle.own_mib) / max(1, last.cycles - middle.cycles) * 1000
    note = f"{last.cycles} cycles ({failures:.0f} of {probes:.0f} probes without a sample), {last.bandwidth_runs} runs"
    return [
        Figure("resident between measurements", last.between_mib, "MiB", MEMORY_BAR, note),
        Figure("growth of its own memory", grown, "MiB/1000 cycles", None, f"from cycle {middle.cycles} on"),
        Figure("threads, against the start", last.threads - found[1].threads, "", 0, f"{last.threads} at the end"),
        Figure("open files, against the start", last.open_files - found[1].open_files, "", 2, f"{last.open_files}"),
    ], found


def main() -> None:
    """Runs the parts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parts", default="start,idle,soak")
    parser.add_argument("--starts", type=int, default=9)
    parser.add_argument("--minutes", type=float, default=6, help="of idling; longer than the default interval, 5")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--bandwidth-interval", type=float, default=5, help="seconds; a run takes some itself")
    parser.add_argument("--max-memory", default="128MiB", help="of the kernels' arrays while soaking")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that it ends what it started
    parts = options.parts.split(",")
    figures: list[Figure] = []
    checkpoints: list[Checkpoint] = []
    if "start" in parts:
        figures += measure_start(options.starts)
    if "idle" in parts:
        figures += measure_idle(options.minutes)
    if "soak" in parts:
        more, checkpoints = measure_soak(options.cycles, options.bandwidth_interval, options.max_memory)
        figures += more
    show_figures("the exporter's own cost", figures, options.json, checkpoints=[asdict(c) for c in checkpoints])


if __name__ == "__main__":
    main()
