"""Time of `GET /metrics`, the exporter against node_exporter: interleaved requests as Prometheus makes them.

    python benchmarks/scrape.py --json scrape.json

Three scenes, beside a real llama.cpp server of which every batch was measured:

- idle: nothing happens.
- loaded: a process of its own runs the bandwidth kernels on every core without a pause, while the server decodes one
  user's stream without a pause. (The exporter's own kernels wait while users are served.)
- own kernels: the exporter runs its kernels again and again (`bandwidth.interval: 1s`), the server is idle.

Requests go to both in random order, over one open connection each, gzip accepted; the time runs from the request to
the last byte. Bar: the exporter's p99 is at most node_exporter's, in each scene; of several rounds the median counts.
CPU per scrape is the process's CPU time over the scene / its requests, not told where kernels are in it.

Needs the `demo` extra and node_exporter (Debian: prometheus-node-exporter).
"""

import argparse
import gzip
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from pairs import Figure, quantile, show_figures, shuffled

from exporter.measure.membench import Membench, MembenchArrays, Way
from exporter.roofline.ceiling import Kernel
from exporter.roofline.passes import Store
from exporter.service.demo import cache_directory
from exporter.service.demo_model import assemble_model

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from processes import Exporter, exporter, free_port, get, llama, running, wait_for
from soak import cpu_seconds, value

CEILING_SECONDS = 100
ONE_THREAD = ("--threads", "1")
"""How fast the server is does not matter here; with one thread, other work on the machine cannot stall it."""
OURS, THEIRS = "exporter", "node_exporter"
OWN_KERNELS = "own kernels"
RUNS = "roofline_memory_bandwidth_runs_total"
HEADERS = {
    # What Prometheus 2.42 sends.
    "Accept": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
    "User-Agent": "Prometheus/2.42.0",
}


class Target:
    """One exporter, asked over one open connection."""

    def __init__(self, port: int, pid: int) -> None:
        self.pid = pid
        self.series = 0
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def scrape(self) -> float:
        """Seconds from the request to the last byte."""
        began = time.perf_counter()
        self._connection.request("GET", "/metrics", headers=HEADERS)
        answer = self._connection.getresponse()
        body = answer.read()
        seconds = time.perf_counter() - began
        assert answer.status == 200, answer.status
        text = gzip.decompress(body) if answer.headers.get("Content-Encoding") == "gzip" else body
        self.series = sum(not line.startswith(b"#") for line in text.splitlines())
        return seconds


def contest(scene: str, targets: dict[str, Target], rounds: int, requests: int, pause: float) -> list[Figure]:
    """Asks both, in turn and in random order; the p99 of each round, and their median."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in targets}
    for target in targets.values():
        target.scrape()  # opens the connection
    before = {name: cpu_seconds(target.pid) for name, target in targets.items()}
    for _ in range(rounds):
        for of_round in seconds.values():
            of_round.append([])
        for request in range(requests):
            for name in shuffled(list(targets), request):
                seconds[name][-1].append(1e3 * targets[name].scrape())
                time.sleep(pause)
    cpu = {name: 1e3 * (cpu_seconds(target.pid) - before[name]) / requests / rounds for name, target in targets.items()}
    p99 = {name: [quantile(times, 0.99) for times in seconds[name]] for name in targets}
    rows = []
    for name in (OURS, THEIRS):
        every = [x for of_round in seconds[name] for x in of_round]
        note = f"{rounds} x {requests}, p99 {min(p99[name]):.1f} to {max(p99[name]):.1f}, median {median(every):.1f}"
        note += f"; {targets[name].series} series"
        if scene != OWN_KERNELS:
            note += f"; CPU {cpu[name]:.1f} ms each"
        bar = median(p99[THEIRS]) if name == OURS else None
        rows.append(Figure(f"{scene}: p99 of {name}", median(p99[name]), "ms", bar, note))
    print(*rows, sep="\n", flush=True)
    return rows


def burn(port: int) -> None:
    """Runs the kernels on every core and decodes one stream, until killed."""

    def decode() -> None:
        body = {"prompt": [[1000, 2000, 3000]], "n_predict": 1000, "ignore_eos": True, "cache_prompt": False}
        url, headers = f"http://127.0.0.1:{port}/completion", {"Content-Type": "application/json"}
        while True:
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=300) as answer:
                answer.read()

    threading.Thread(target=decode, daemon=True).start()
    engine = Membench()
    arrays = engine.open(sorted(os.sched_getaffinity(0)), 64 << 20)
    assert isinstance(arrays, MembenchArrays), arrays
    while True:
        arrays.run(Kernel.TRIAD, Way(engine.isas[0], Store.PLAIN), passes=1000, rest_seconds=0, budget_seconds=2)


def ready(program: Exporter) -> Target:
    """The exporter once every batch was measured, and, where the machine is quiet enough for it, a ceiling."""

    def text() -> str:
        return program.get("/metrics")

    never = "roofline_probe_last_success_timestamp_seconds{.*} 0.0$"
    wait_for("every batch", 400, lambda: not re.search(never, text(), re.MULTILINE))
    deadline = time.monotonic() + CEILING_SECONDS
    while "roofline_decode_floor_ratio{" not in text() and time.monotonic() < deadline:
        time.sleep(1)
    return Target(int(program.url.rpartition(":")[2]), program.process.pid)


def scenes(names: Sequence[str], rounds: int, requests: int, pause: float, node_exporter: str) -> list[Figure]:
    """Plays the scenes."""
    figures = []
    model, port, node_port = assemble_model(cache_directory()), free_port(), free_port()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(llama(model, port, *ONE_THREAD))
        command = (node_exporter, f"--web.listen-address=127.0.0.1:{node_port}")
        node = stack.enter_context(running(command, stderr=subprocess.DEVNULL))
        wait_for("node_exporter", 10, lambda: get(f"http://127.0.0.1:{node_port}/metrics"))
        config = (
            "bandwidth: {interval: INTERVAL, max_memory: 128MiB}\n"
            "probe: {interval: 30s, seconds: 100ms, max_duty_cycle: 0.2}\n"
            f"servers: [{{name: local, url: 'http://127.0.0.1:{port}'}}]\n"
        )
        program = stack.enter_context(exporter(config.replace("INTERVAL", "1h"), scratch))
        targets = {OURS: ready(program), THEIRS: Target(node_port, node.pid)}
        if "idle" in names:
            figures += contest("idle", targets, rounds, requests, pause)
        if "loaded" in names:
            with running((sys.executable, __file__, "--burn", str(port))) as burning:
                time.sleep(3)
                figures += contest("loaded", targets, rounds, requests, pause)
                assert burning.poll() is None, "the load ended"
        if "own" in names:
            runs = value(program.get("/metrics"), RUNS)
            (scratch / "config.yaml").write_text(config.replace("INTERVAL", "1s"))
            program.process.send_signal(signal.SIGHUP)
            wait_for("kernels", 120, lambda: value(program.get("/metrics"), RUNS) > runs)
            figures += contest(OWN_KERNELS, targets, rounds, requests, pause)
        program.end(signal.SIGTERM)
    return figures


def main() -> None:
    """Plays the scenes and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--scenes", default="idle,loaded,own")
    parser.add_argument("--requests", type=int, default=300, help="to each, in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two requests")
    parser.add_argument("--node-exporter", default="prometheus-node-exporter")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--burn", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that it ends what it started
    if options.burn:
        burn(options.burn)
    figures = scenes(options.scenes.split(","), options.rounds, options.requests, options.pause, options.node_exporter)
    show_figures("GET /metrics, against node_exporter", figures, options.json)


if __name__ == "__main__":
    main()
