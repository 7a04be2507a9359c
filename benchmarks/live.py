"""Users' traffic as the exporter sees it, against the client's own count, and what the polling costs the decode.

    python benchmarks/live.py --pairs 10 --seconds 6 --json live.json

Accuracy: a client streams a known load; the exporter's polls follow it, and the tokens/s of each published sample is
compared with the tokens that reached the client within the sample's own time. Cost: the same load with and without
polling beside it, in random order within each pair; the step rate is the server's own. Polling is at the quick pace
throughout, 3.3 times as often as beside a steady load, so its cost is an upper bound.

Needs the `demo` extra.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from statistics import fmean, median

from pairs import Comparison, show, shuffled, upper_bound

from exporter.measure.live import LiveReader
from exporter.measure.llama import LlamaClient, open_session
from exporter.roofline.live import LiveTrack, SlotPoll
from exporter.service.demo import cache_directory
from exporter.service.demo_model import assemble_model
from exporter.service.live import QUICK_SECONDS

PORT = 18082
URL = f"http://127.0.0.1:{PORT}"
POLLER = f"""
import asyncio, time
from exporter.measure.live import LiveReader
from exporter.measure.llama import LlamaClient, open_session
async def main():
    async with open_session({URL!r}, None) as session:
        reader = LiveReader(LlamaClient(session, {URL!r}, None), time.monotonic)
        while True:
            await reader.slots()
            await asyncio.sleep({QUICK_SECONDS})
asyncio.run(main())
"""


def load(streams: int, seconds: float, tokens: int = 150) -> tuple[list[float], float]:
    """Generates for about that time; when each token came, and the steps/s by the server's own timings."""
    arrivals: list[float] = []
    steps = busy = 0.0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        body = {
            "prompt": [[1000 + 100 * n, 2000, 3000] for n in range(streams)],
            "n_predict": tokens,
            "ignore_eos": True,
            "cache_prompt": False,
            "top_k": 1,
            "stream": True,
        }
        request = urllib.request.Request(
            f"{URL}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                if b'"stop":false' in line:
                    arrivals.append(time.monotonic())
                else:
                    timings = json.loads(line[6:])["timings"]
                    steps += timings["predicted_n"] - 1
                    busy += timings["predicted_ms"] / 1e3
    return arrivals, steps / busy


async def followed(streams: int, seconds: float) -> list[tuple[float, float]]:
    """Tokens/s as published and as counted by the client, for each sample that became known during the load."""
    async with open_session(URL, None) as session:
        reader, track = LiveReader(LlamaClient(session, URL, None), time.monotonic), LiveTrack()
        running = asyncio.create_task(asyncio.to_thread(load, streams, seconds))
        spans = []
        while not running.done():
            poll = await reader.slots()
            if isinstance(poll, SlotPoll):
                track = track.add(poll)
            # One uninterrupted run at a time, so that the client can count over the same time.
            if (sample := LiveTrack(runs=track.runs[-1:]).sample()) is not None and sample.tokens_per_second:
                spans.append((track.runs[-1].began, track.runs[-1].ended, sample.tokens_per_second))
            await asyncio.sleep(1.0 if track.clean else QUICK_SECONDS)
        arrivals, _ = await running
    return [
        (rate, sum(began < arrival <= ended for arrival in arrivals) / (ended - began)) for began, ended, rate in spans
    ]


def cost(pairs: int, seconds: float) -> list[float]:
    """The part of the step rate that polling takes, pair by pair."""
    losses = []
    for pair in range(pairs):
        rates = {}
        for name in shuffled(["with", "without"], pair):
            poller = subprocess.Popen((sys.executable, "-c", POLLER)) if name == "with" else None
            time.sleep(1.0)
            rates[name] = load(1, seconds)[1]
            if poller is not None:
                poller.terminate()
                poller.wait(10)
        losses.append(1 - rates["with"] / rates["without"])
        print(f"pair {pair}: {rates} loss {losses[-1]:+.2%}", flush=True)
    return losses


def main() -> None:
    """Runs both parts and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    module = "exporter.service.llama_child"
    model = assemble_model(cache_directory())
    server = subprocess.Popen((sys.executable, "-m", module, "--model", str(model), "--port", str(PORT)))
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"{URL}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.3)
        load(1, 2, 20)
        comparisons = []
        for streams in (1, 2, 4):
            seen = asyncio.run(followed(streams, 2 * options.seconds))
            if seen:
                ours, theirs = zip(*seen, strict=True)
                comparisons.append(Comparison(f"live, {streams} streams / client's count", ours, theirs, "tokens/s"))
        losses = cost(options.pairs, options.seconds)
    finally:
        server.terminate()
        server.wait(20)
    show("users' traffic", comparisons, options.json, losses=losses)
    off = [abs(ratio - 1) for c in comparisons for ratio in c.ratios]
    print(f"largest deviation {max(off, default=0):.2%} of {len(off)} samples (bar 3 %)")
    print(f"loss by polling every {QUICK_SECONDS} s: median {median(losses):+.2%}, mean {fmean(losses):+.2%}", end="")
    print(f", upper 95 % bound {upper_bound(losses):+.2%}" if len(losses) > 1 else "")


if __name__ == "__main__":
    main()
