"""A request of a probe that is given up when a user comes: a long probe looks out, a short one is over soon anyway."""

import asyncio
from collections.abc import Sequence
from typing import Final

from exporter.measure.answers import Props
from exporter.measure.llama import LlamaClient
from exporter.roofline.proof import Stream
from exporter.roofline.reason import Reason
from exporter.roofline.slots import busy, others

POLITE_SECONDS: Final = 3.0
"""A probe longer than this looks out for users who wait for it."""
GLANCE_SECONDS: Final = 1.0
"""How often it looks, and for how long at most: older builds answer between two decodes only."""


async def complete_politely(
    client: LlamaClient, props: Props, prompts: Sequence[Sequence[int]], tokens: int, timeout: float
) -> tuple[Stream, ...] | Reason:
    """The streams of `LlamaClient.complete`, or GAVE_WAY: closing the connection makes the server stop."""
    request = asyncio.ensure_future(client.complete(prompts, tokens, timeout))
    pause = POLITE_SECONDS
    try:
        while not (await asyncio.wait({request}, timeout=pause))[0]:
            pause = GLANCE_SECONDS
            if await _somebody_waits(client, props, len(prompts)):
                return Reason.GAVE_WAY
        return request.result()
    finally:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


async def _somebody_waits(client: LlamaClient, props: Props, batch: int) -> bool:
    """Whether a user's request is there beside our streams; what the server does not tell in time is no."""
    slots = await client.slots(GLANCE_SECONDS) if props.has_slots_endpoint else None
    if isinstance(slots, tuple):
        if others(slots, batch):
            return True
        if busy(slots) < props.slots:
            return False
    # Every slot is ours, or not shown: who waits is counted in the metrics alone.
    if not props.has_metrics_endpoint:
        return False
    # The time of asking plays no part in the two counts.
    counters = await client.counters(GLANCE_SECONDS, 0.0)
    return not isinstance(counters, Reason) and counters.processing + counters.deferred > batch
