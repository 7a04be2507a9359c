"""The fake llama-server against what the real one was seen to do, and, where it is installed, against the real one."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from fake_llama import Behaviour, FakeLlama, Fault, Intruder, RouterModel
from fake_llama_answers import METRICS, Model
from fake_llama_builds import BUILDS, behaviour_of

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
    timeout = aiohttp.ClientTimeout(total=60)
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


ROUTER_PROPS = {
    "role",
    "max_instances",
    "models_autoload",
    "model_alias",
    "model_path",
    "default_generation_settings",
    "ui_settings",
    "build_info",
    "cors_proxy_enabled",
}
ROUTER_MODEL = {
    "id",
    "aliases",
    "tags",
    "object",
    "owned_by",
    "created",
    "status",
    "architecture",
    "source",
    "can_remove",
}


async def test_a_router_speaks_as_recorded_and_loads_what_it_is_not_told_to_leave(
    session: aiohttp.ClientSession,
) -> None:
    one, two = RouterModel(Model("one")), RouterModel(Model("two"), "sleeping")
    async with FakeLlama(Behaviour(router=[one, two])) as fake:
        assert set(await get(session, fake.url + "/props")) == ROUTER_PROPS
        listed = (await get(session, fake.url + "/models"))["data"]
        assert [set(entry) for entry in listed] == [ROUTER_MODEL, ROUTER_MODEL | {"meta"}]
        assert set(listed[1]["meta"]) == META
        assert set(listed[0]["status"]) == {"value", "args", "preset"}
        for path, words in (
            ("/slots", "model name is missing from the request"),
            ("/metrics?model=one&autoload=false", "model is not loaded"),
            ("/slots?model=none", "model not found"),
        ):
            assert (await get(session, fake.url + path))["error"]["message"] == words
        assert set(await get(session, fake.url + "/props?model=two&autoload=false")) == PROPS
        assert (fake.loaded, fake.woken, one.status, two.status) == (0, 0, "unloaded", "sleeping")
        assert len(await get(session, fake.url + "/slots?model=two&autoload=false")) == 4
        await get(session, fake.url + "/slots?model=one")
        assert (fake.loaded, fake.woken, one.status, two.status) == (1, 1, "loaded", "loaded")
        events = finals(await stream(session, fake.url, 2, model="one"))
        assert {event["model"] for event in events} == {"one"}
        used = {name: await get(session, f"{fake.url}/slots?model={name}") for name in ("one", "two")}
        assert [sum("id_task" in slot for slot in used[name]) for name in ("one", "two")] == [2, 0]


async def test_speculative_steps_give_several_tokens(session: aiohttp.ClientSession) -> None:
    async with FakeLlama(Behaviour(accepted=(2, 0, 3), step_seconds=lambda _: 0.01)) as fake:
        events = [event for event in await stream(session, fake.url, 1, n=20) if event]
        assert sum(not event["stop"] for event in events) == 20
        told = events[-1]["timings"]
        steps = (told["predicted_n"] - 1) - told["draft_n_accepted"]
        assert told["predicted_ms"] == pytest.approx(10 * steps)
        assert told["draft_n"] >= told["draft_n_accepted"] > 0
        assert all(slot["speculative"] for slot in await get(session, fake.url + "/slots"))
        async with session.get(fake.url + "/metrics") as response:
            text = await response.text()
        assert f"spec_decode_num_drafts_total {steps}\n" in text
        assert f"spec_decode_num_accepted_tokens_total {told['draft_n_accepted']}\n" in text


async def test_a_unified_cache_that_is_full_fails_every_stream(session: aiohttp.ClientSession) -> None:
    async with FakeLlama(Behaviour(kv_cells=20)) as fake:
        assert len(finals(await stream(session, fake.url, 1, n=10))) == 1
        events = await stream(session, fake.url, 2, n=10)
        assert [event["error"]["message"] for event in events[-2:] if event] == ["Context size has been exceeded."] * 2
        assert not any(slot["is_processing"] for slot in await get(session, fake.url + "/slots"))


async def test_a_slot_out_of_range_wraps_or_waits_for_ever(session: aiohttp.ClientSession) -> None:
    async with FakeLlama(behaviour_of("b11434")) as fake:
        assert [event["id_slot"] for event in finals(await stream(session, fake.url, 1, id_slot=6))] == [2]
        fake.behaviour = behaviour_of("b7889")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await stream(session, fake.url, 1, id_slot=6)


async def test_tasks_are_numbered_across_requests_and_questions(session: aiohttp.ClientSession) -> None:
    """GET /slots takes a number, and so does a user's request that nobody saw running."""

    async def tasks() -> set[int]:
        return {slot["id_task"] for slot in await get(session, fake.url + "/slots") if "id_task" in slot}

    async with FakeLlama() as fake:
        await stream(session, fake.url, 2)
        assert await tasks() == {0, 1}
        fake.behaviour.intruders = (Intruder(at_token=3, tokens=2),)
        await stream(session, fake.url, 1)
        assert await tasks() == {1, 3, 4}  # ours went to the slot that held its like


@pytest.mark.parametrize("build", BUILDS)
async def test_builds_differ_as_told(session: aiohttp.ClientSession, build: str) -> None:
    number = int(build[1:].split(maxsplit=1)[0])
    async with FakeLlama(behaviour_of(build)) as fake:
        props = await get(session, fake.url + "/props")
        assert ("is_sleeping" in props) == (number >= 7492)
        assert ("model_ftype" in props) == (number >= 9860)
        assert ("endpoint_slots" in props) == (number >= 6337)
        events = [event for event in await stream(session, fake.url, 1) if event]
        assert ("timings" in events[0]) == (number >= 4240)
        assert ("cache_n" in events[-1]["timings"]) == (number >= 6399)
        told = events[-1]["timings"]
        counted = told["predicted_n"] - (number >= 10406)
        assert told["predicted_per_second"] == pytest.approx(1e3 * counted / told["predicted_ms"])
        async with session.get(fake.url + "/metrics") as response:
            assert (await response.text()).startswith('"') == (7090 <= number <= 7190)
        slots = await get(session, fake.url + "/slots")
        if number < 6337 and "--slots" not in build:
            assert slots["error"]["code"] == 501
            return
        assert ("state" in slots[3]) == (number == 4080)
        assert isinstance(slots[3]["next_token"], dict) == (number < 6723)
        assert ("n_prompt_tokens" in slots[3]) == (number >= 9276)
        assert ("prompt" in slots[3]) == (number < 6337)
        fake.behaviour.loading = True
        async with session.get(fake.url + "/models") as response:
            assert response.status == (200 if 5380 <= number <= 7507 else 503)


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
