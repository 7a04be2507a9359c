"""Probes of a real llama.cpp server: alone, disturbed, and stopped in the middle."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
from real import require

from exporter.measure.host import ContentionMeter
from exporter.measure.llama import LlamaClient, open_session
from exporter.measure.probe import DecodeProbe, Identity, identify
from exporter.roofline.decode import DecodeSample
from exporter.roofline.reason import Reason
from exporter.service.llama_child import LlamaChild

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from exporter.roofline.slots import Slot


@pytest.fixture(scope="module")
def model(real_model: Path) -> Path:
    require(importlib.util.find_spec("xllamacpp"), "xllamacpp is not installed")
    return real_model


async def started(model: Path) -> LlamaChild:
    """A server with one thread: neighbours on a busy machine slow it down in proportion, not by a hundred."""
    child = await LlamaChild.start(model=model, parallel=4, ctx_size=4096, threads=1)
    await child.wait_ready(120)
    return child


@pytest.fixture(name="server")
async def _server(model: Path) -> AsyncIterator[LlamaChild]:
    child = await started(model)
    try:
        yield child
    finally:
        await child.stop()


def probe_of(client: LlamaClient, *, timeout: float = 120.0) -> DecodeProbe:
    contention = ContentionMeter(Path("/proc"), Path("/sys"), time.monotonic)
    return DecodeProbe(client, contention, time.monotonic, seconds=1.0, timeout=timeout)


async def seen(client: LlamaClient) -> Identity:
    identity = await identify(client)
    assert isinstance(identity, Identity)
    return identity


async def idle(probe: DecodeProbe, identity: Identity, batch: int) -> None:
    """Waits until the server has let go of what ran before."""
    async with asyncio.timeout(60):
        while await probe.ready(identity, batch) is not None:  # noqa: ASYNC110 - a server tells no event
            await asyncio.sleep(0.2)


async def generating(client: LlamaClient) -> Slot:
    """The slot in which a probe of ours has got some tokens."""
    async with asyncio.timeout(60):
        while True:
            slots = await client.slots(5)
            assert isinstance(slots, tuple)
            for slot in slots:
                if slot.processing and slot.decoded >= 2:
                    return slot
            await asyncio.sleep(0.02)


async def test_alone_it_gives_a_sample_and_disturbed_none(server: LlamaChild) -> None:
    async with open_session(server.url, None) as session:
        client = LlamaClient(session, server.url, None)
        probe, identity = probe_of(client), await seen(client)
        for batch in (1, 2, 4):
            assert await probe.ready(identity, batch) is None, "a fresh server may be asked for every batch"
            sample = await probe.measure(identity, batch)
            assert isinstance(sample, DecodeSample), sample
            assert (sample.batch, sample.speculative) == (batch, False)
        for batch in (1, 2):
            await idle(probe, identity, batch)
            # As many steps as there may be, so that the user comes and goes within them.
            probe._step_seconds[batch] = 1e-6
            ours = asyncio.ensure_future(probe.measure(identity, batch))
            assert (await generating(client)).probe, "the server tells our mark"
            body = {"prompt": [1000, 2000, 3000], "n_predict": 8, "ignore_eos": True}
            async with aiohttp.ClientSession() as user, user.post(server.url + "/completion", json=body) as answer:
                assert (await answer.json())["tokens_predicted"] == 8
            assert await ours in {Reason.FOREIGN_REQUEST, Reason.GAVE_WAY}
        await idle(probe, identity, 1)
        assert await probe.ready(identity, 4) is Reason.SLOTS_IN_USE


async def test_a_server_that_is_stopped_in_the_middle_is_given_up_and_measured_when_it_goes_on(model: Path) -> None:
    child = await started(model)
    try:
        async with open_session(child.url, None) as session:
            client = LlamaClient(session, child.url, None)
            probe, identity = probe_of(client, timeout=4.0), await seen(client)
            await idle(probe, identity, 1)
            probe._step_seconds[1] = 1e-6
            began = time.monotonic()
            ours = asyncio.ensure_future(probe.measure(identity, 1))
            await generating(client)
            os.kill(child.pid, signal.SIGSTOP)
            try:
                assert await ours in {Reason.TIMEOUT, Reason.STREAM_CUT}
                assert time.monotonic() - began < 30, "4 s, and what a busy machine adds"
                assert await client.health(0.5) is Reason.TIMEOUT
            finally:
                os.kill(child.pid, signal.SIGCONT)
            patient = probe_of(client)
            await idle(patient, identity, 1)
            assert isinstance(await patient.measure(identity, 1), DecodeSample)
    finally:
        await child.stop()
