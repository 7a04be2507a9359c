"""A client for llama-server's native HTTP API.

Every call returns a value or a `Reason`; how a request is made and bounded is `asking`'s business.

Where the configuration names a model, GET /models is asked before anything that could load or wake it, and every
request carries `autoload=false`: a router then refuses rather than loads.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlencode

import aiohttp
import structlog

from exporter.measure.answers import (
    Props,
    StreamTokens,
    finished_stream,
    parse_health,
    parse_props,
    parse_slots,
    refusal,
    take_event,
)
from exporter.measure.asking import OK, Asker, body_of, is_packed, open_session
from exporter.measure.counters import RESTART_HEADER, parse_counters
from exporter.measure.failure import failure_of
from exporter.measure.json_values import Json, loads
from exporter.measure.listing import ListedModel, ModelSize, find_model, model_names, parse_first_size
from exporter.roofline.counters import Counters
from exporter.roofline.proof import Stream
from exporter.roofline.reason import Reason
from exporter.roofline.slots import PROBE_SEED, Slot

__all__ = ["LlamaClient", "open_session"]

log = structlog.get_logger()

MAX_EVENT_BYTES: Final = 1 << 20
LIST_TIMEOUT: Final = 5.0
"""Seconds to list models before a completion, which itself may take much longer."""
MAX_TOKEN_BYTES: Final = 4 << 10
"""An event with one token's timings is a tenth of this; an answer that goes on for ever is not taken."""
_T = TypeVar("_T")


class LlamaClient(Asker):
    """One llama-server.

    Args:
        session: Its connections, closed by the caller.
        url: Base URL, with the API prefix if the server has one.
        api_key_file: Read at each request, so that a rotated key needs no restart.
        model: Which model of a router, by name or alias; None for a plain server's only one.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, api_key_file: Path | None, model: str | None = None
    ) -> None:
        super().__init__(session, url, api_key_file)
        self._model = model
        self._told: tuple[str, ...] = ()
        self._sleep_idle: float | None = None

    async def health(self, timeout: float) -> Reason | None:
        """None when the server is up and its model loaded (GET /health; never wakes a sleeping model)."""
        return await self._get("/health", timeout, parse_health)

    async def props(self, timeout: float) -> Props | Reason:
        """GET /props; never wakes or loads a model."""
        props = await self._get_of_model("/props", timeout, parse_props)
        return props if isinstance(props, Reason) else replace(props, sleep_idle=self._sleep_idle)

    async def model_size(self, timeout: float) -> ModelSize | Reason:
        """GET /models, which tells no figure of a model that has none or whose build does not tell it."""
        listed = await self._loaded(timeout)
        if listed is None:
            return await self._get("/v1/models", timeout, parse_first_size)
        return listed if isinstance(listed, Reason) else listed.size

    async def slots(self, timeout: float) -> tuple[Slot, ...] | Reason:
        """GET /slots. It wakes a sleeping model: ask `props` first."""
        return await self._get_of_model("/slots", timeout, parse_slots)

    async def counters(self, timeout: float, at: float) -> Counters | Reason:
        """GET /metrics, asked at `at` (monotonic seconds). It resets two gauges; before b10519 it wakes a model."""

        async def read(response: aiohttp.ClientResponse) -> Counters | Reason:
            body = await body_of(response)
            if response.status != OK:
                return refusal(response.status, body)
            if body is None or is_packed(response):
                return Reason.BAD_ANSWER
            return parse_counters(body, response.headers.get(RESTART_HEADER), at)

        listed = await self._loaded(timeout)
        if isinstance(listed, Reason):
            return listed
        return await self._ask("GET", "/metrics" + _query(listed), timeout, read)

    async def complete(
        self, prompts: Sequence[Sequence[int]], tokens: int, timeout: float, slot: int | None = None
    ) -> tuple[Stream, ...] | Reason:
        """Generates `tokens` tokens for each prompt in one request (POST /completion), greedily, never ending early.

        Args:
            prompts: Token ids of each prompt.
            tokens: Tokens of each stream, the first included.
            timeout: Seconds for the whole request.
            slot: Which slot a single prompt goes to, an idle one; None leaves the choice to the server.
        """
        listed = await self._loaded(min(timeout, LIST_TIMEOUT))
        if isinstance(listed, Reason):
            return listed
        request: dict[str, Json] = {
            "prompt": [list(p) for p in prompts],
            "n_predict": tokens,
            "ignore_eos": True,
            "cache_prompt": False,
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "n_probs": 0,
            "seed": PROBE_SEED,
            "stream": True,
            "timings_per_token": True,
        }

        async def read(response: aiohttp.ClientResponse) -> tuple[Stream, ...] | Reason:
            if response.status != OK:
                return refusal(response.status, await body_of(response))
            if is_packed(response):
                return Reason.BAD_ANSWER
            return await self._streams(response, len(prompts), len(prompts) * tokens)

        if slot is not None:
            request["id_slot"] = slot
        if listed is not None:
            request["model"] = listed.name
        return await self._ask("POST", "/completion" + _query(listed), timeout, read, request)

    async def _streams(self, response: aiohttp.ClientResponse, count: int, tokens: int) -> tuple[Stream, ...] | Reason:
        """Reads server-sent events until every stream has ended, or the body has."""
        streams = [StreamTokens() for _ in range(count)]
        rest, place, allowance = b"", 0, count * MAX_EVENT_BYTES + tokens * MAX_TOKEN_BYTES
        async for chunk in response.content.iter_any():
            if (allowance := allowance - len(chunk)) < 0:
                return Reason.BAD_ANSWER
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_EVENT_BYTES:
                return Reason.BAD_ANSWER
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                if (fault := take_event(line[5:].strip(), streams, place)) is not None:
                    return fault
                place += 1
            if all(s.final is not None for s in streams):
                return tuple(finished_stream(s) for s in streams)
        return Reason.STREAM_CUT

    async def _loaded(self, timeout: float) -> ListedModel | Reason | None:
        """The configured model, if it is loaded now, or why it must not be asked anything; None where none is named."""
        model = self._model
        if model is None:
            return None

        def find(body: Json) -> ListedModel | Reason:
            found, names = find_model(body, model), model_names(body)
            if found is Reason.UNKNOWN_MODEL and names != self._told:
                log.warning("the server has no such model", model=model, models=names)
                self._told = names
            return found

        listed = await self._get("/models", timeout, find)
        if isinstance(listed, ListedModel):
            self._sleep_idle = listed.sleep_idle
        return listed

    async def _get_of_model(self, path: str, timeout: float, parse: Callable[[Json], _T | Reason]) -> _T | Reason:
        try:
            async with asyncio.timeout(timeout):
                listed = await self._loaded(timeout)
                return listed if isinstance(listed, Reason) else await self._get(path + _query(listed), timeout, parse)
        except TimeoutError as error:
            return self._failed("GET", path, *failure_of(error))

    async def _get(self, path: str, timeout: float, parse: Callable[[Json], _T | Reason]) -> _T | Reason:
        async def read(response: aiohttp.ClientResponse) -> _T | Reason:
            body = await body_of(response)
            if response.status != OK:
                return refusal(response.status, body)
            if body is None or is_packed(response):
                return Reason.BAD_ANSWER
            try:
                return parse(loads(body))
            except ValueError:
                return Reason.NOT_LLAMA

        return await self._ask("GET", path, timeout, read)


def _query(listed: ListedModel | None) -> str:
    """What a router needs to know; a plain server does not read it."""
    return "" if listed is None else "?" + urlencode({"model": listed.name, "autoload": "false"})
