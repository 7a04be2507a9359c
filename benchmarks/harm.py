"""What the exporter costs a decoding server: paired windows with and without it, on a real llama.cpp server.

    python benchmarks/harm.py --pairs 20 --seconds 10 --json harm.json

A client decodes without a pause, as the busiest user would. In half of the windows, in random order within each pair,
the exporter runs beside it with its intervals shortened: bandwidth runs `--speed-up` times, health checks 15 times (to
their least interval, 1 s). The loss measured is divided by the smaller factor, so it is an upper bound for what the
default settings cost. (Probes give way to users, so a busy server gets none; bandwidth runs wait one interval for them
to end, then happen all the same.) Reported: the mean loss at default settings and the upper end of its 95 % confidence
interval.

Needs the `demo` extra.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import fmean

from pairs import shuffled, upper_bound

from exporter.service.demo import cache_directory
from exporter.service.demo_model import assemble_model

BAR = 0.01
DEFAULT_INTERVAL = 300.0
HEALTH_SPEED_UP = 15.0
PORT, METRICS_PORT = 18080, 18081


def decode_rate(seconds: float) -> float:
    """Tokens/s of one stream over about that time, from the server's own timings of back-to-back requests."""
    steps, busy, deadline = 0, 0.0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        body = {"prompt": [[1000, 2000, 3000]], "n_predict": 65, "ignore_eos": True, "cache_prompt": False, "top_k": 1}
        request = urllib.request.Request(
            f"http://127.0.0.1:{PORT}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            found = json.load(answer)
        timings = (found[0] if isinstance(found, list) else found)["timings"]
        steps += timings["predicted_n"] - 1
        busy += timings["predicted_ms"] / 1e3
    return steps / busy


def start_exporter(directory: Path, speed_up: float) -> subprocess.Popen[bytes]:
    """The exporter with shortened intervals, past its first (full) bandwidth run."""
    config = directory / "config.yaml"
    interval = DEFAULT_INTERVAL / speed_up
    config.write_text(
        f"bandwidth: {{interval: {interval}s}}\n"
        f"probe: {{interval: {max(1.0, interval)}s, health_interval: 1s}}\n"
        f"servers: [{{name: local, url: 'http://127.0.0.1:{PORT}'}}]\n"
    )
    arguments = ("--config.file", config, "--web.listen-address", f"127.0.0.1:{METRICS_PORT}", "--log.level", "error")
    process = subprocess.Popen((sys.executable, "-m", "exporter", *map(str, arguments)))
    metric = "roofline_memory_bandwidth_runs_total "
    while runs(metric) < 1:
        assert process.poll() is None, "the exporter ended"
        time.sleep(0.2)
    return process


def runs(metric: str) -> float:
    """A value of the running exporter; 0 while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return 0.0
    return next((float(line.removeprefix(metric)) for line in lines if line.startswith(metric)), 0.0)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process in order."""
    process.send_signal(signal.SIGTERM)
    process.wait(20)


def main() -> None:
    """Runs the pairs and prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=9)
    parser.add_argument("--speed-up", type=float, default=150)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = assemble_model(cache_directory())
    module = "exporter.service.llama_child"
    server = subprocess.Popen((sys.executable, "-m", module, "--model", str(model), "--port", str(PORT)))
    losses, bandwidth_runs = [], []
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for _ in range(100):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.3)
            decode_rate(3)
            for pair in range(options.pairs):
                rates = {}
                for name in shuffled(["with", "without"], pair):
                    if name == "with":
                        exporter = start_exporter(Path(scratch), options.speed_up)
                        before = runs("roofline_memory_bandwidth_runs_total ")
                        rates[name] = decode_rate(options.seconds)
                        bandwidth_runs.append(runs("roofline_memory_bandwidth_runs_total ") - before)
                        end(exporter)
                    else:
                        rates[name] = decode_rate(options.seconds)
                losses.append(1 - rates["with"] / rates["without"])
                print(
                    f"pair {pair}: {rates} loss {losses[-1]:+.3%}, bandwidth runs {bandwidth_runs[-1]:.0f}", flush=True
                )
    finally:
        end(server)
    scaled = [loss / min(HEALTH_SPEED_UP, options.speed_up) for loss in losses]
    bound = upper_bound(scaled)
    print(f"loss in the windows: mean {fmean(losses):+.2%}, upper 95 % bound {upper_bound(losses):+.2%}")
    print(f"bandwidth runs a window: {fmean(bandwidth_runs):.1f}")
    verdict = "met" if bound <= BAR else "MISSED"
    print(
        f"loss at default settings: mean {fmean(scaled):+.4%}, upper 95 % bound {bound:+.4%} (bar {BAR:.0%}: {verdict})"
    )
    if options.json:
        options.json.write_text(json.dumps({"losses": losses, "speed_up": options.speed_up, "bound": bound}, indent=2))


if __name__ == "__main__":
    main()
