"""The fake llama-server against what the real one was seen to do, and, where it is installed, against the real one."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from fake_llama import Behaviour, FakeLlama, Fault
from fake_llama_answers import METRICS, Model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from exporter.service.llama_child import LlamaChild

PROPS = {
    "default_generation_settings",
    "total_slots",
    "model_alias",
    "model_ftype",
    "model_path",
    "modalities",
    "media_marker",
    "endpoint_slots",
    "endpoint_props",
    "endpoint_metrics",
    "ui",
    "ui_settings",
    "chat_template",
    "chat_template_caps",
    "bos_token",
    "eos_token",
    "build_info",
    "is_sleeping",
    "cors_proxy_enabled",
}
META = {"vocab_type", "n_vocab", "n_ctx", "n_ctx_train", "n_embd", "n_params", "size", "ftype"}
IDLE_SLOT = {"id", "n_ctx", "speculative", "is_processing"}
USED_SLOT = IDLE_SLOT | {
    "id_task",
    "n_prompt_tokens",
    "n_prompt_tokens_processed",
    "n_prompt_tokens_cache",
    "params",
    "next_token",
}
PARTIAL = {"index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated", "timings"}
FINAL = PARTIAL | {
    "model",
    "generation_settings",
    "prompt",
    "has_new_line",
    "truncated",
    "stop_type",
    "stopping_word",
    "tokens_cached",
}
TIMINGS = {
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
}

Event = dict[str, Any]


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


async def get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as response:
        return await response.json()


async def stream(
    session: aiohttp.ClientSession, url: str, batch: int, n: int = 6, **more: object
) -> list[Event | None]:
    body: Event = {"prompt": [[10 + i, 20, 30] for i in range(batch)], "n_predict": n, "stream": True}
    body |= {"ignore_eos": True, "timings_per_token": True, "cache_prompt": False, "temperature": 0, **more}
    async with session.post(url + "/completion", json=body) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        text = await response.text()
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def finals(events: list[Event | None]) -> list[Event]:
    return [event for event in events if event and event.get("stop")]


def keys_of(value: Any) -> Any:
    """The nested key sets of a JSON value; a list stands for its first element."""
    if isinstance(value, dict):
        return {key: keys_of(inner) for key, inner in value.items()}
    return [keys_of(value[0])] if isinstance(value, list) and value and isinstance(value[0], dict) else None


async def test_shapes_are_the_recorded_ones(fake_llama: FakeLlama, session: aiohttp.ClientSession) -> None:
    url = fake_llama.url
    assert await get(session, url + "/health") == await get(session, url + "/v1/health") == {"status": "ok"}
    assert set(await get(session, url + "/props")) == PROPS
    models = await get(session, url + "/v1/models")
    assert set(models["data"][0]["meta"]) == META
    assert models == await get(session, url + "/models")
    assert [set(slot) for slot in await get(session, url + "/slots")] == [IDLE_SLOT] * 4
    await stream(session, url, 1)
    assert [set(slot) for slot in await get(session, url + "/slots")] == [IDLE_SLOT] * 3 + [USED_SLOT]


async def test_a_batch_streams_in_lockstep(fake_llama: FakeLlama, session: aiohttp.ClientSession) -> None:
    fake_llama.behaviour.step_seconds = lambda batch: 0.01 * batch
    events = await stream(session, fake_llama.url, 2)
    assert events[0] is None
    told = [event for event in events if event]
    assert [set(event) for event in told if not event["stop"]] == [PARTIAL] * 12
    last = finals(events)
    assert [set(event) for event in last] == [FINAL] * 2
    assert set(last[0]["timings"]) == TIMINGS
    assert sorted(event["id_slot"] for event in last) == [2, 3]
    for event in last:
        assert event["timings"]["predicted_n"] == 6
        assert event["timings"]["predicted_ms"] == pytest.approx(5 * 20)
        assert event["timings"]["predicted_per_second"] == pytest.approx(50)
    slots = await get(session, fake_llama.url + "/slots")
    assert slots[3]["n_prompt_tokens"] == 8
    assert slots[3]["next_token"] == [{"has_next_token": False, "has_new_line": False, "n_remain": -1, "n_decoded": 0}]


async def test_more_prompts_than_slots_wait_for_a_slot(fake_llama: FakeLlama, session: aiohttp.ClientSession) -> None:
    last = finals(await stream(session, fake_llama.url, 6))
    assert len(last) == 6
    assert [event["id_slot"] for event in last] == [0, 1, 2, 3, 0, 1]
    assert [event["index"] for event in last] == [3, 2, 1, 0, 5, 4]  # as the real server does, last deferred first


async def test_separate_slots_step_one_after_another(session: aiohttp.ClientSession) -> None:
    async with FakeLlama(Behaviour(split_kv=True, step_seconds=lambda batch: 0.01 + 0.001 * batch)) as fake:
        for prompts, slots, step in (
            ([10, 11, 12, 13], [0, 1, 2, 3], 14),
            ([10, 12], [1, 3], 22),
            ([12, 13], [0, 1], 12),
        ):
            body = {"prompt": [[token] for token in prompts], "n_predict": 2}
            async with session.post(fake.url + "/completion", json=body) as response:
                last = await response.json()
            assert sorted(event["id_slot"] for event in last) == slots
            assert last[0]["timings"]["predicted_ms"] == pytest.approx(step)


async def test_two_requests_share_the_steps(fake_llama: FakeLlama, session: aiohttp.ClientSession) -> None:
    fake_llama.behaviour.real_time = True
    fake_llama.behaviour.step_seconds = lambda batch: 0.002 * batch
    alone = finals(await stream(session, fake_llama.url, 1, 50))[0]["timings"]["predicted_ms"]
    both = await asyncio.gather(*(stream(session, fake_llama.url, 1, 50) for _ in range(2)))
    assert min(finals(events)[0]["timings"]["predicted_ms"] for events in both) > 1.4 * alone


async def test_answers_without_a_stream(fake_llama: FakeLlama, session: aiohttp.ClientSession) -> None:
    for prompt, kind in (([1, 2], dict), ("one two", dict), ([[1, 2]], dict), ([[1], [2]], list)):
        async with session.post(fake_llama.url + "/completion", json={"prompt": prompt, "n_predict": 3}) as response:
            assert isinstance(await response.json(), kind)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"n_predict": 3}, "invalid_request_error"),
        ({"prompt": [1], "n_predict": "many"}, "invalid_request_error"),
        ({"prompt": [-5]}, "invalid_request_error"),
        ({"prompt": []}, "invalid_request_error"),
        ({"prompt": [7] * 2000}, "exceed_context_size_error"),
    ],
)
async def test_bad_requests(fake_llama: FakeLlama, session: aiohttp.ClientSession, body: Event, kind: str) -> None:
    async with session.post(fake_llama.url + "/completion", json=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == kind


async def test_refusals(fake_llama: FakeLlama, session: aiohttp.ClientSession) -> None:
    async def status(path: str, **headers: str) -> int:
        async with session.get(fake_llama.url + path, headers=headers) as response:
            assert response.status == 200 or set((await response.json())["error"]) == {"code", "message", "type"}
            return response.status

    assert await status("/nowhere") == 404
    fake_llama.behaviour.slots_enabled = fake_llama.behaviour.metrics_enabled = False
    assert [await status("/slots"), await status("/metrics")] == [501, 501]
    fake_llama.behaviour.api_key = "secret"
    assert [await status("/props"), await status("/health")] == [401, 200]
    assert await status("/props", Authorization="Bearer secret") == 200
    fake_llama.behaviour.loading = True
    assert [await status("/health"), await status("/props")] == [503, 503]


async def test_sleep(fake_llama: FakeLlama, session: aiohttp.ClientSession) -> None:
    fake_llama.behaviour.sleeping = True
    assert (await get(session, fake_llama.url + "/props"))["is_sleeping"] is True
    assert fake_llama.woken == 0
    await get(session, fake_llama.url + "/slots")
    assert (fake_llama.woken, fake_llama.behaviour.sleeping, fake_llama.asked("/slots")) == (1, False, 1)


async def test_metrics_count(fake_llama: FakeLlama, session: aiohttp.ClientSession) -> None:
    await stream(session, fake_llama.url, 2)
    async with session.get(fake_llama.url + "/metrics") as response:
        text = await response.text()
    values = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}
    assert set(values) == {f"llamacpp:{name}" for name, _, _ in METRICS}
    assert values["llamacpp:tokens_predicted_total"] == 12
    assert values["llamacpp:n_decode_total"] == 6
    assert values["llamacpp:n_busy_slots_per_decode"] == 2


async def test_foreign_requests_by_phase(session: aiohttp.ClientSession) -> None:
    async with FakeLlama(Behaviour(foreign=frozenset({"before", "during"}))) as fake:
        assert [slot["is_processing"] for slot in await get(session, fake.url + "/slots")] == [True, *[False] * 3]
        slowed = finals(await stream(session, fake.url, 1))[0]["timings"]["predicted_ms"]
        assert slowed == pytest.approx(5e3 * fake.behaviour.step_seconds(2))
        assert not any(slot["is_processing"] for slot in await get(session, fake.url + "/slots"))


async def test_distorted_completions(session: aiohttp.ClientSession) -> None:
    async with FakeLlama(Behaviour(stop_after=3, stop_type="eos", same_id_slot=True, one_at_a_time=True)) as fake:
        last = finals(await stream(session, fake.url, 2))
        assert [(e["tokens_predicted"], e["stop_type"], e["id_slot"]) for e in last] == [(3, "eos", 0)] * 2
        fake.behaviour = Behaviour(
            timing_values={"predicted_ms": math.nan, "draft_n": 4}, cache_n=2, model=Model("new")
        )
        event = finals(await stream(session, fake.url, 1))[0]
        assert math.isnan(event["timings"]["predicted_ms"])
        assert (event["timings"]["draft_n"], event["timings"]["cache_n"], event["model"]) == (4, 2, "new")
        fake.behaviour = Behaviour(error_after=4)
        assert "error" in ((await stream(session, fake.url, 1))[-1] or {})
        fake.behaviour = Behaviour(cut_after=4)
        with pytest.raises(aiohttp.ClientError):
            await stream(session, fake.url, 1)


@pytest.mark.parametrize("fault", ["html", "html_ok", "redirect", "wrong_type", "garbage", "500"])
async def test_faults_answer(fake_llama: FakeLlama, session: aiohttp.ClientSession, fault: Fault) -> None:
    fake_llama.behaviour.faults = {"*": fault}
    async with session.get(fake_llama.url + "/props", allow_redirects=False) as response:
        status = {"html": 502, "redirect": 302, "500": 500}.get(fault, 200)
        assert response.status == status


@pytest.mark.parametrize("fault", ["hang", "slow", "drop"])
async def test_faults_never_answer(fake_llama: FakeLlama, session: aiohttp.ClientSession, fault: Fault) -> None:
    fake_llama.behaviour.faults = {"/props": fault}
    with pytest.raises((TimeoutError, aiohttp.ClientError)):
        async with asyncio.timeout(0.3), session.get(fake_llama.url + "/props") as response:
            await response.read()


@pytest.mark.real
async def test_the_fake_speaks_like_the_real_server(
    fake_llama: FakeLlama, real_llama: LlamaChild, session: aiohttp.ClientSession
) -> None:
    """Every key of the fake is one of the real server's, nested ones too.

    The other direction would break with each new llama.cpp, which adds keys often and takes few away.
    """

    def only_in(one: Any, other: Any, path: str = "") -> set[str]:
        if isinstance(one, list):
            return only_in(one[0], other[0] if isinstance(other, list) else None, path + "[]")
        if not isinstance(one, dict):
            return set()
        deeper = [only_in(one[key], (other or {}).get(key), f"{path}.{key}") for key in one]
        return {f"{path}.{key}" for key in one if key not in (other or {})}.union(*deeper)

    mine, real = fake_llama.url, real_llama.url
    for server in (mine, real):
        await stream(session, server, 4)  # so that every slot has had a task
    for path in ("/health", "/props", "/v1/models", "/slots"):
        fake_keys, real_keys = keys_of(await get(session, mine + path)), keys_of(await get(session, real + path))
        assert only_in(fake_keys, real_keys) == set(), path
    for fields in (None, ["timings", "id_slot", "stop_type"]):
        fake_events = await stream(session, mine, 2, response_fields=fields)
        real_events = await stream(session, real, 2, response_fields=fields)
        for fake_event, real_event in zip(fake_events, real_events, strict=True):
            assert (fake_event is None) == (real_event is None)
            assert only_in(keys_of(fake_event), keys_of(real_event)) == set()
