"""The probe's rates against a long independent run of the same server, pair by pair, at batch 1, 2 and 4.

    python benchmarks/rates.py --pairs 7 --seconds 8 --json rates.json

The independent run shares no code with the probe: it streams completions over http.client for some seconds and counts
the tokens that arrive, (n - 1) / wall for each request, on its own clock and on no timings of the server's. Its
requests are as long as the probe's, so that the cache is as deep. Probe and run follow each other directly, in random
order. Bar: the medians are within 3 %. On a machine that others use too, give the server fewer threads than CPUs.

Needs the `demo` extra.
"""

import argparse
import asyncio
import http.client
import json
import random
import time
from pathlib import Path
from statistics import median

from pairs import Comparison, show
from probing import probed_server

from exporter.measure.probe import DecodeProbe, Identity, identify
from exporter.roofline.decode import DecodeSample

BATCHES = (1, 2, 4)
BAR = 0.03
SLOTS = 8


def arrivals(port: int, batch: int, tokens: int, rng: random.Random) -> tuple[list[float], list[int]]:
    """When each token of `batch` streams arrived, seconds on this process's clock, and the slots of the streams."""
    prompts = [[rng.randrange(5000, 200_000) for _ in range(16)] for _ in range(batch)]
    body = {"prompt": prompts, "n_predict": tokens, "ignore_eos": True, "cache_prompt": False, "top_k": 1}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request(
            "POST", "/completion", json.dumps({**body, "stream": True}), {"Content-Type": "application/json"}
        )
        answer, times, slots = connection.getresponse(), [], []
        while line := answer.readline():
            if line.startswith(b"data: {") and b'"stop":false' in line:
                times.append(time.perf_counter())
            elif line.startswith(b"data: {"):
                slots.append(int(json.loads(line[6:])["id_slot"]))
        return times, sorted(slots)
    finally:
        connection.close()


def independent_rate(port: int, batch: int, tokens: int, seconds: float, rng: random.Random) -> float:
    """Tokens/s of all streams over about that long, the first token of each stream left out with its prompt."""
    counted, wall, began = 0, 0.0, time.monotonic()
    while time.monotonic() < began + seconds or counted == 0:
        times, slots = arrivals(port, batch, tokens, rng)
        if slots[-1] - slots[0] >= batch:
            # Slots apart cost a second pass over the weights (llama.cpp issue 25840): another thing than the probe's.
            if time.monotonic() > began + 20 * seconds:
                raise SystemExit(f"batch {batch}: no adjacent slots for {20 * seconds:.0f} s; start again")
            # It takes the slots that were used longest ago, in turn: only another number of streams changes which.
            arrivals(port, rng.randint(1, SLOTS), 2, rng)
            continue
        assert len(times) == batch * tokens, f"{len(times)} tokens of {batch} x {tokens}"
        # The first tokens of all streams come from the prompts' batch; the clock starts when the last of them is there.
        counted += len(times) - batch
        wall += times[-1] - times[batch - 1]
    return counted / wall


async def probed(probe: DecodeProbe, batch: int) -> DecodeSample:
    """One sample that the probe publishes; a rejected probe is made again, as the exporter does."""
    for _ in range(5):
        identity = await identify(probe.client)
        assert isinstance(identity, Identity), identity
        objection = await probe.ready(identity, batch)
        result = objection or await probe.measure(identity, batch)
        if isinstance(result, DecodeSample):
            return result
        print(f"batch {batch}: {result}", flush=True)
        await asyncio.sleep(1)
    raise SystemExit(f"batch {batch} could not be probed")


async def main() -> None:
    """Runs the pairs and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--threads", type=int, help="of the server; by default its own choice")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng = random.Random(1)
    async with probed_server(parallel=SLOTS, ctx_size=8192, threads=options.threads) as (url, probe):
        port = int(url.rsplit(":", 1)[1])
        steps = {batch: (await probed(probe, batch)).steps for batch in BATCHES}
        found: dict[int, list[tuple[float, float, bool]]] = {batch: [] for batch in BATCHES}
        for pair in range(options.pairs):
            for batch in BATCHES:
                sample, rate = None, 0.0
                for what in rng.sample(("probe", "run"), 2):
                    if what == "probe":
                        sample = await probed(probe, batch)
                    else:
                        arguments = (port, batch, steps[batch] + 1, options.seconds, rng)
                        rate = await asyncio.to_thread(independent_rate, *arguments)
                assert sample is not None
                found[batch].append((sample.tokens_per_second, rate, sample.contended))
                print(f"pair {pair} batch {batch}: {found[batch][-1]}", flush=True)
    comparisons = [
        Comparison(f"batch {batch}", [f[0] for f in of], [f[1] for f in of], "tokens/s") for batch, of in found.items()
    ]
    contended = {batch: sum(f[2] for f in of) for batch, of in found.items()}
    show("The probe's rate / an independent run's", comparisons, options.json, contended_probes=contended)
    for c in comparisons:
        off = abs(median(c.ratios) - 1)
        print(f"{c.what}: {off:.1%} off (bar {BAR:.0%}: {'met' if off <= BAR else 'MISSED'})")
    print(f"contended probes: {contended}")


if __name__ == "__main__":
    asyncio.run(main())
