"""How surely a probe notices somebody else's request, and how often it takes nothing for one, on a real server.

    python benchmarks/foreign.py --trials 20 --json foreign.json

Each trial is one probe, at batch 1, 2 or 3 in turn on a server with 4 slots. In half of the trials, in random order, a
request of 8 to 30 tokens comes and goes while the probe generates. The whole is done twice: on a server that shows its
slots, and on one started with --no-slots, where the step times alone must tell. Bars: a foreign request voids at least
19 of 20 probes, and fewer than 1 of 20 undisturbed ones is voided. Other work on the machine makes steps uneven, so the
number of contended probes is told too; on a machine that others use, give the server fewer threads than CPUs.

Needs the `demo` extra.
"""

import argparse
import asyncio
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
from probing import probed_server
from rich.console import Console
from rich.table import Table

from exporter.measure.llama import LlamaClient
from exporter.measure.probe import DecodeProbe, Identity, identify
from exporter.roofline.decode import DecodeSample
from exporter.roofline.proof import Stream
from exporter.roofline.reason import Reason

BATCHES = (1, 2, 3)
VOIDED_BAR, FALSE_BAR = 19 / 20, 1 / 20


@dataclass(frozen=True)
class Trial:
    """One probe: whether somebody interfered, with how many tokens and when, and what came of it.

    Attributes:
        within: The user's request was over before the probe.
        overlapped: It ran during the completion that the result comes from: a probe may try again, undisturbed.
    """

    slots: bool
    batch: int
    tokens: int
    delay: float
    within: bool
    overlapped: bool
    result: str
    contended: bool | None


class Watched(LlamaClient):
    """A client that remembers when its last completion of more than one token ran."""

    last = (0.0, 0.0)

    async def complete(
        self, prompts: Sequence[Sequence[int]], tokens: int, timeout: float, slot: int | None = None
    ) -> tuple[Stream, ...] | Reason:
        """As it does."""
        began = time.monotonic()
        try:
            return await super().complete(prompts, tokens, timeout, slot)
        finally:
            if tokens > 1:
                self.last = (began, time.monotonic())


async def interfere(url: str, rng: random.Random, delay: float, tokens: int) -> tuple[float, float]:
    """A user's request after `delay` seconds; when it began and ended."""
    await asyncio.sleep(delay)
    began = time.monotonic()
    prompt = [rng.randrange(1000, 200_000) for _ in range(rng.choice([4, 20, 60]))]
    body = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "cache_prompt": False}
    async with aiohttp.ClientSession() as session, session.post(url + "/completion", json=body) as answer:
        await answer.read()
    return began, time.monotonic()


async def trial(
    probe: DecodeProbe, url: str, rng: random.Random, batch: int, *, slots: bool, foreign: bool, seconds: float
) -> Trial:
    """One probe on an idle server, disturbed or not, that takes about `seconds`."""
    identity = await identify(probe.client)
    assert isinstance(identity, Identity), identity
    while (objection := await probe.ready(identity, batch)) is not None:
        assert objection in {Reason.BUSY, Reason.SLOTS_IN_USE}, objection
        await asyncio.sleep(0.2)
    tokens, delay = rng.choice([8, 8, 15, 30]), rng.uniform(0.05, 0.7) * seconds
    user = asyncio.ensure_future(interfere(url, rng, delay, tokens)) if foreign else None
    result = await probe.measure(identity, batch)
    ended = time.monotonic()
    began, over = await user if user is not None else (math.inf, math.inf)
    first, last = probe.client.last if isinstance(probe.client, Watched) else (0.0, 0.0)
    return Trial(
        slots=slots,
        batch=batch,
        tokens=tokens if foreign else 0,
        delay=delay,
        within=over < ended,
        overlapped=began < last and over > first,
        result="published" if isinstance(result, DecodeSample) else result.value,
        contended=result.contended if isinstance(result, DecodeSample) else None,
    )


async def trials(count: int, rng: random.Random, *, slots: bool, threads: int | None) -> list[Trial]:
    """As many disturbed and undisturbed probes of a server that shows its slots or does not."""
    async with probed_server(parallel=4, ctx_size=8192, threads=threads, slots=slots, client_type=Watched) as (
        url,
        probe,
    ):
        took = {}
        for batch in BATCHES:
            # The first probe of a batch finds the model's speed; the second one tells how long a probe takes.
            for _ in range(2):
                began = time.monotonic()
                await trial(probe, url, rng, batch, slots=slots, foreign=False, seconds=1.0)
                took[batch] = time.monotonic() - began
        found = []
        plan = [(BATCHES[i // 2 % len(BATCHES)], i % 2 == 0) for i in range(2 * count)]
        rng.shuffle(plan)
        for batch, foreign in plan:
            one = await trial(probe, url, rng, batch, slots=slots, foreign=foreign, seconds=min(2.0, took[batch]))
            print(one, flush=True)
            found.append(one)
        return found


def show(found: list[Trial], json_file: Path | None) -> None:
    """Prints the counts against the bars, and writes every trial to a file as JSON."""
    table = Table(title="A foreign request during a probe")
    for head in ("/slots", "probes", "number", "voided", "bar", "reasons", "contended"):
        table.add_column(head)
    for slots in sorted({t.slots for t in found}, reverse=True):
        for foreign in (True, False):
            # A number from a completion that nobody disturbed is right, whatever happened before or after it.
            kind = [t for t in found if t.slots is slots and bool(t.tokens) is foreign]
            kind = [t for t in kind if not foreign or t.overlapped or t.result != "published"]
            voided = [t for t in kind if t.result != "published"]
            share = len(voided) / len(kind)
            met = share >= VOIDED_BAR if foreign else share < FALSE_BAR
            bar = f"{'>= 19' if foreign else '< 1'} of 20 {'met' if met else 'MISSED'}"
            reasons = ", ".join(f"{reason} {n}" for reason, n in Counter(t.result for t in voided).items())
            contended = str(sum(bool(t.contended) for t in kind))
            what = "disturbed" if foreign else "undisturbed"
            table.add_row("on" if slots else "off", what, str(len(kind)), str(len(voided)), bar, reasons, contended)
    Console(width=140).print(table)
    if json_file is not None:
        machine = {"cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()}
        json_file.write_text(json.dumps({"machine": machine, "trials": [asdict(t) for t in found]}, indent=2))


async def main() -> None:
    """Runs the trials and prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--slots", choices=("on", "off", "both"), default="both", help="of the server")
    parser.add_argument("--trials", type=int, default=20, help="disturbed probes, and as many undisturbed, each way")
    parser.add_argument("--threads", type=int, help="of the server; by default its own choice")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    found = []
    for slots in {"on": (True,), "off": (False,), "both": (True, False)}[options.slots]:
        found += await trials(options.trials, rng, slots=slots, threads=options.threads)
    show(found, options.json)


if __name__ == "__main__":
    asyncio.run(main())
