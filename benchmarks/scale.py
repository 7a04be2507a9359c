"""How many sidecars one Prometheus takes: N targets with a real exporter's live exposition, and the shipped rules.

    python benchmarks/scale.py --targets 50,500,1000 --json scale.json

A real exporter measures a real llama.cpp server, until every batch and, where the machine is quiet enough, a ceiling is
known; its series are counted, and again with a second server. Then a process of its own serves what the exporter says,
asked anew at most once a second, at N addresses of this machine (127.x.y.z), so that each is an instance of its own. A
fresh Prometheus scrapes them with deploy/prometheus/rules.yaml; a baseline scrapes only itself.

Intervals are shortened (`--interval`, 5 s) so that every figure is of tens of scrapes. Memory is Prometheus's own
`process_resident_memory_bytes` over the second half of the time. After so short a time its head block holds minutes,
not the hours that it holds in steady state, and nobody queries it. The figures per series and per sidecar are
differences to the baseline. Every rule is also asked as a query, for the rules' own groups have intervals of minutes;
looking back over a week costs more than this shows, for there are minutes to look at.

Needs the `demo` extra and `prometheus` (Debian's).
"""

import argparse
import asyncio
import gzip
import json
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from urllib.parse import urlencode

import aiohttp
import yaml
from aiohttp import web
from pairs import Figure, quantile, show_figures
from rich.console import Console
from rich.table import Table

from exporter.service.demo import cache_directory
from exporter.service.demo_model import assemble_model

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from processes import Exporter, Prometheus, exporter, free_port, get, llama, prometheus_running, running, wait_for

RULES = Path(__file__).parents[1] / "deploy" / "prometheus" / "rules.yaml"
MIB = 1 << 20
BATCHES = 3
CEILING_SECONDS = 150
ONE_THREAD = ("--threads", "1")
"""How fast the server is does not matter here; with one thread, other work on the machine cannot stall it."""
FRESH_SECONDS = 1.0
MEMORIES_GIB = (1, 2, 4, 8)
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


# The targets


def address(number: int) -> str:
    """The address of a target: all of 127.0.0.0/8 is this machine."""
    return f"127.1.{number // 250}.{1 + number % 250}"


def serve_fleet(source: str, port: int) -> None:
    """Answers on every address with what `source` said at most a second ago."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    text, packed, asked = b"", b"", 0.0
    lock = asyncio.Lock()

    async def metrics(request: web.Request) -> web.Response:
        nonlocal text, packed, asked
        async with lock:
            if time.monotonic() - asked >= FRESH_SECONDS:
                async with (
                    aiohttp.ClientSession() as session,
                    session.get(source, headers={"Accept": OPENMETRICS}) as answer,
                ):
                    text = await answer.read()
                packed, asked = gzip.compress(text), time.monotonic()
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=packed, headers={"Content-Type": OPENMETRICS, "Content-Encoding": "gzip"})
        return web.Response(body=text, headers={"Content-Type": OPENMETRICS})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    web.run_app(app, host="0.0.0.0", port=port, access_log=None, print=lambda _: None)


# The exporter


def series(text: str) -> int:
    """The samples of an exposition."""
    return sum(bool(line) and not line.startswith("#") for line in text.splitlines())


def measured(program: Exporter, servers: int) -> str:
    """The exposition once every batch of every server was measured, with a ceiling if the machine allows."""
    never = "roofline_probe_last_success_timestamp_seconds{.*} 0.0$"
    wait_for("every batch", 400, lambda: not re.search(never, program.get("/metrics"), re.MULTILINE))
    deadline = time.monotonic() + CEILING_SECONDS
    while time.monotonic() < deadline:
        ratios = re.findall(r"^roofline_decode_floor_ratio\{", program.get("/metrics"), re.MULTILINE)
        if len(ratios) >= BATCHES * servers:
            break
        time.sleep(1)
    return program.get("/metrics")


# Prometheus


@contextmanager
def prometheus(targets: int, port: int, real: str, interval: float, directory: Path) -> Iterator[Prometheus]:
    """A fresh Prometheus; without targets it scrapes itself and has no rules."""
    own = free_port()
    jobs = [{"job_name": "prometheus", "static_configs": [{"targets": [f"127.0.0.1:{own}"]}]}]
    if targets:
        fleet = [f"{address(number)}:{port}" for number in range(targets)]
        jobs += [
            {"job_name": "roofline", "static_configs": [{"targets": fleet}]},
            # The exporter itself, for its own scrape time.
            {"job_name": "real", "static_configs": [{"targets": [real]}]},
        ]
    spaced = f"{int(interval * 1000)}ms"
    config = {
        "global": {"scrape_interval": spaced, "scrape_timeout": spaced, "evaluation_interval": spaced},
        "scrape_configs": jobs,
        "rule_files": [str(RULES)] if targets else [],
    }
    below = directory / str(targets)
    below.mkdir()
    with prometheus_running("prometheus", config, below, port=own) as server:
        yield server


@dataclass(frozen=True, slots=True)
class Load:
    """What one Prometheus had to do, and what it took."""

    targets: int
    up: int
    head_series: float
    samples_per_scrape: float
    resident_mib: float
    most_resident_mib: float
    heap_mib: float
    cpu_ratio: float
    scrape_median_seconds: float
    scrape_p99_seconds: float
    scrape_median_real_seconds: float
    rules_seconds: float
    slowest_rule: str
    slowest_rule_seconds: float
    groups_seconds: dict[str, float]
    missed_evaluations: float


def queries(server: Prometheus) -> dict[str, float]:
    """Seconds that each shipped rule takes as an instant query, the faster of two."""
    found = {}
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            url = f"{server.url}/api/v1/query?{urlencode({'query': rule['expr'], 'stats': 'all'})}"
            answers = [json.loads(get(url)) for _ in range(2)]
            seconds = [a["data"]["stats"]["timings"]["execTotalTime"] for a in answers]
            found[rule.get("alert", rule.get("record"))] = min(seconds)
    return found


def one(server: Prometheus, expression: str) -> float:
    """The value of an expression that gives one series; NaN when it gives none."""
    return next((number for _, number in server.query(expression)), float("nan"))


def load(server: Prometheus, targets: int, seconds: float) -> Load:
    """Lets it work, and then asks it about itself."""
    time.sleep(seconds)
    window, me = f"{int(seconds / 2)}s", '{job="prometheus"}'
    durations = [
        v for _, v in server.query(f'quantile_over_time(0.5, scrape_duration_seconds{{job="roofline"}}[{window}])')
    ]
    text = json.loads(get(f"{server.url}/api/v1/query?{urlencode({'query': f'scrape_duration_seconds[{window}]'})}"))
    every = [
        float(sample)
        for found in text["data"]["result"]
        for _, sample in found["values"]
        if found["metric"]["job"] == "roofline"
    ]
    groups = server.query("prometheus_rule_group_last_duration_seconds and prometheus_rule_group_iterations_total > 0")
    rules = queries(server) if targets else {}
    slowest = max(rules, key=lambda name: rules[name], default="")
    nothing = float("nan")
    return Load(
        targets=targets,
        up=int(one(server, 'sum(up{job="roofline"})')) if targets else 0,
        head_series=one(server, "prometheus_tsdb_head_series"),
        samples_per_scrape=one(server, 'avg(scrape_samples_scraped{job="roofline"})'),
        resident_mib=one(server, f"quantile_over_time(0.5, process_resident_memory_bytes{me}[{window}])") / MIB,
        most_resident_mib=one(server, f"max_over_time(process_resident_memory_bytes{me}[{window}])") / MIB,
        heap_mib=one(server, f"min_over_time(go_memstats_heap_inuse_bytes{me}[{window}])") / MIB,
        cpu_ratio=one(server, f"rate(process_cpu_seconds_total{me}[{window}])"),
        scrape_median_seconds=median(durations) if durations else nothing,
        scrape_p99_seconds=quantile(every, 0.99) if every else nothing,
        scrape_median_real_seconds=one(
            server, f'quantile_over_time(0.5, scrape_duration_seconds{{job="real"}}[{window}])'
        ),
        rules_seconds=sum(rules.values()),
        slowest_rule=slowest,
        slowest_rule_seconds=rules.get(slowest, 0.0),
        groups_seconds={labels["rule_group"].rpartition(";")[2]: duration for labels, duration in groups},
        missed_evaluations=sum(v for _, v in server.query("prometheus_rule_group_iterations_missed_total")),
    )


# The report


def show_loads(loads: list[Load]) -> None:
    """One column for each Prometheus."""
    table = Table(title="one Prometheus")
    table.add_column("")
    for found in loads:
        table.add_column(f"{found.targets} targets" if found.targets else "itself only", justify="right")
    for name in Load.__slots__:
        cells = [getattr(found, name) for found in loads]
        if not isinstance(cells[0], dict):
            table.add_row(name, *(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells))
    for group in sorted({group for found in loads for group in found.groups_seconds}):
        table.add_row(f"group {group}, s", *(f"{f.groups_seconds.get(group, float('nan')):.4g}" for f in loads))
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def summary(loads: list[Load], one_server: int, two_servers: int, interval: float) -> list[Figure]:
    """Bytes per series and per sidecar, and what follows from them."""
    baseline, largest = loads[0], loads[-1]
    extra = (largest.most_resident_mib - baseline.most_resident_mib) * MIB
    per_sidecar = extra / largest.targets
    per_series = extra / (largest.head_series - baseline.head_series)
    cpu = (largest.cpu_ratio - baseline.cpu_ratio) / largest.targets * interval
    rows = [
        Figure("series of an exporter with one server", one_server, ""),
        Figure("series of one more server", two_servers - one_server, ""),
        Figure("memory per series", per_series, "bytes", None, f"{largest.targets} targets, most resident"),
        Figure("memory per sidecar", per_sidecar / MIB, "MiB", None, f"{largest.targets} targets, most resident"),
        Figure("CPU per scrape, rules included", 1e3 * cpu, "ms", None, f"{largest.targets} targets"),
    ]
    for gib in MEMORIES_GIB:
        # Half is left for queries, compaction and the write-ahead log's replay.
        count = (gib * 1024 / 2 - baseline.most_resident_mib) * MIB / per_sidecar
        note = "computed: half of the memory, less the baseline, by memory per sidecar"
        rows.append(Figure(f"sidecars for a Prometheus of {gib} GiB", round(max(0.0, count), -1), "", None, note))
    return rows


def main() -> None:
    """Runs one Prometheus after the other and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--targets", default="50,500,1000")
    parser.add_argument("--seconds", type=float, default=120, help="that each Prometheus works")
    parser.add_argument("--interval", type=float, default=5, help="between scrapes and evaluations, seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fleet", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that it ends what it started
    if options.fleet:
        serve_fleet(options.fleet[0], int(options.fleet[1]))
        return
    model, port, fleet_port = assemble_model(cache_directory()), free_port(), free_port()
    # One thread in the kernels: other work on the machine disturbs it least, and there are ceilings to show.
    head = (
        "bandwidth: {interval: 10s, max_memory: 128MiB, threads: 1}\n"
        "probe: {interval: 30s, seconds: 100ms, max_duty_cycle: 0.5}\n"
    )
    thresholds = "floor_fraction: {1: 0.1, 2: 0.1, 4: 0.1}"
    first = f"{{name: one, url: 'http://127.0.0.1:{port}', {thresholds}}}"
    second = f"{{name: two, url: 'http://localhost:{port}', {thresholds}}}"
    loads = []
    with tempfile.TemporaryDirectory() as scratch, llama(model, port, *ONE_THREAD):
        with exporter(f"{head}servers: [{first}, {second}]", Path(scratch)) as program:
            two_servers = series(measured(program, 2))
        with exporter(f"{head}servers: [{first}]", Path(scratch)) as program:
            one_server = series(measured(program, 1))
            print(f"series: {one_server} with one server, {two_servers} with two", flush=True)
            real = program.url.removeprefix("http://")
            fleet = (sys.executable, __file__, "--fleet", f"{program.url}/metrics", str(fleet_port))
            with running(fleet, stderr=subprocess.DEVNULL):
                wait_for("the targets", 10, lambda: get(f"http://{address(0)}:{fleet_port}/metrics"))
                for targets in (0, *map(int, options.targets.split(","))):
                    with prometheus(targets, fleet_port, real, options.interval, Path(scratch)) as server:
                        loads.append(load(server, targets, options.seconds))
                    print(loads[-1], flush=True)
    show_loads(loads)
    figures = summary(loads, one_server, two_servers, options.interval)
    show_figures("one Prometheus and its sidecars", figures, options.json, loads=[asdict(found) for found in loads])


if __name__ == "__main__":
    main()
