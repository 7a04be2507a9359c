"""A real llama.cpp server with the exporter's probe beside it, for the benchmarks of the probe."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from exporter.measure.host import ContentionMeter
from exporter.measure.llama import LlamaClient, open_session
from exporter.measure.probe import DecodeProbe
from exporter.service.demo import cache_directory
from exporter.service.demo_model import assemble_model
from exporter.service.llama_child import LlamaChild


@asynccontextmanager
async def probed_server(
    *,
    parallel: int,
    ctx_size: int,
    threads: int | None,
    slots: bool = True,
    client_type: type[LlamaClient] = LlamaClient,
) -> AsyncIterator[tuple[str, DecodeProbe]]:
    """The server's URL, and a probe of it as the daemon makes one.

    Args:
        parallel: Slots.
        ctx_size: Tokens of all slots together.
        threads: Of the server; None leaves it the choice.
        slots: Whether it shows its slots.
        client_type: What the probe asks with.
    """
    child = await LlamaChild.start(
        model=assemble_model(cache_directory()), parallel=parallel, ctx_size=ctx_size, slots=slots, threads=threads
    )
    try:
        await child.wait_ready(120)
        async with open_session(child.url, None) as session:
            contention = ContentionMeter(Path("/proc"), Path("/sys"), time.monotonic)
            client = client_type(session, child.url, None)
            yield child.url, DecodeProbe(client, contention, time.monotonic, seconds=2.0, timeout=120)
    finally:
        await child.stop()
