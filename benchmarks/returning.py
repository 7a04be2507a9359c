"""What a round of probes costs a user who comes back to a long conversation: the time to the first token.

    python benchmarks/returning.py --pairs 10 --tokens 4000 --json returning.json

A conversation of about 4,000 tokens is in one of 4 slots. In each pair the user's next turn comes twice, in random
order: after a round of probes at batch 1, 2 and 4, as the exporter makes it, and after as much rest. The turn is the
same conversation with a few other words at its end, so its first token is fast exactly if the cache is still there.
Bar: at most 1.1 x. On a machine that others use too, give the server fewer threads than CPUs.

Needs the `demo` extra.
"""

import argparse
import asyncio
import http.client
import json
import random
import time
from collections import Counter
from pathlib import Path
from statistics import median

from pairs import Comparison, show
from probing import probed_server

from exporter.measure.probe import DecodeProbe, Identity, identify
from exporter.roofline.decode import DecodeSample

BAR = 1.1
NEW_TOKENS = 12


def first_token_seconds(port: int, conversation: list[int], rng: random.Random) -> float:
    """A user's turn: the conversation and some new tokens; seconds until the first token arrives."""
    prompt = [*conversation, *(rng.randrange(5000, 200_000) for _ in range(NEW_TOKENS))]
    body = {"prompt": prompt, "n_predict": 4, "cache_prompt": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        began = time.perf_counter()
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        answer, first = connection.getresponse(), None
        while line := answer.readline():
            if line.startswith(b"data: {") and first is None:
                first = time.perf_counter() - began
        assert first is not None
        return first
    finally:
        connection.close()


async def probe_round(probe: DecodeProbe) -> Counter[str]:
    """A round as the exporter makes it, with what came of each batch."""
    results: Counter[str] = Counter()
    for batch in (1, 2, 4):
        identity = await identify(probe.client)
        assert isinstance(identity, Identity), identity
        result = await probe.ready(identity, batch) or await probe.measure(identity, batch)
        results["published" if isinstance(result, DecodeSample) else result.value] += 1
    return results


async def main() -> None:
    """Runs the pairs and prints the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--threads", type=int, help="of the server; by default its own choice")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng = random.Random(1)
    conversation = [rng.randrange(5000, 200_000) for _ in range(options.tokens)]
    size = 4 * (options.tokens + 512)
    results: Counter[str] = Counter()
    after: dict[str, list[float]] = {"probes": [], "rest": []}
    async with probed_server(parallel=4, ctx_size=size, threads=options.threads) as (url, probe):
        port = int(url.rsplit(":", 1)[1])
        cold = await asyncio.to_thread(first_token_seconds, port, conversation, rng)
        print(f"the whole conversation read: {cold:.2f} s", flush=True)
        took = 2.0
        for pair in range(options.pairs):
            for what in rng.sample(("probes", "rest"), 2):
                if what == "probes":
                    began = time.monotonic()
                    results += await probe_round(probe)
                    took = time.monotonic() - began
                else:
                    await asyncio.sleep(took)
                after[what].append(await asyncio.to_thread(first_token_seconds, port, conversation, rng))
            print(f"pair {pair}: {after['probes'][-1]:.4f} s, {after['rest'][-1]:.4f} s", flush=True)
    comparison = Comparison("first token after probes / after rest", after["probes"], after["rest"], "s")
    show("A returning conversation", [comparison], options.json, cold_seconds=cold, probes=dict(results))
    ratio = median(comparison.ratios)
    print(f"probes: {dict(results)}; {ratio:.3f} x (bar {BAR:g}: {'met' if ratio <= BAR else 'MISSED'})")


if __name__ == "__main__":
    asyncio.run(main())
