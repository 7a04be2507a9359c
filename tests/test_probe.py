"""Probing over real HTTP: what a healthy server gives, and what each fault becomes."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import permutations
from pathlib import Path

import pytest
from fake_llama import Behaviour, FakeLlama, Fault
from processes import needs_ipv6

from exporter.measure.host import ContentionMeter
from exporter.measure.llama import LlamaClient, open_session
from exporter.measure.model import ModelHints, describe
from exporter.measure.probe import ASK_TIMEOUT, MAX_STEPS, DecodeProbe, Identity, identify, state_of
from exporter.measure.prompts import COMMON_TOKENS, PROMPT_FAMILIES, PROMPT_TOKENS, probe_prompts
from exporter.roofline.decode import DecodeSample
from exporter.roofline.proof import MIN_STEPS
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import ServerState


@asynccontextmanager
async def client_of(fake: FakeLlama, api_key_file: Path | None = None) -> AsyncIterator[LlamaClient]:
    async with open_session(fake.url, None) as session:
        yield LlamaClient(session, fake.url, api_key_file)


def probe_of(client: LlamaClient, tmp_path: Path, *, seconds: float = 2.0, timeout: float = 10.0) -> DecodeProbe:
    """A probe on a machine without /proc and /sys: nothing is known of contention."""
    contention = ContentionMeter(tmp_path, tmp_path, time.monotonic)
    return DecodeProbe(client, contention, time.monotonic, seconds=seconds, timeout=timeout)


async def measured(
    behaviour: Behaviour, tmp_path: Path, batch: int = 2, *, timeout: float = 10.0
) -> DecodeSample | Reason:
    """What a probe makes of a server with that behaviour."""
    async with FakeLlama(behaviour) as fake, client_of(fake) as client:
        identity = await identify(client)
        assert isinstance(identity, Identity)
        probe = probe_of(client, tmp_path, timeout=timeout)
        return await probe.ready(identity, batch) or await probe.measure(identity, batch)


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
async def test_step_time_is_the_servers_own(batch: int, tmp_path: Path) -> None:
    """At every batch the sample says what the server's clock said."""
    result = await measured(Behaviour(step_seconds=lambda b: 0.010 + 0.002 * b), tmp_path, batch)
    assert isinstance(result, DecodeSample)
    assert result.step_seconds == pytest.approx(0.010 + 0.002 * batch, rel=0.02)
    assert result.tokens_per_second == pytest.approx(batch / (0.010 + 0.002 * batch), rel=0.02)
    assert result.contended is False


async def test_the_old_rate_that_counts_the_first_token_is_not_used(tmp_path: Path) -> None:
    result = await measured(Behaviour(step_seconds=lambda _: 0.01, old_rate=True), tmp_path, 1)
    assert isinstance(result, DecodeSample)
    assert result.step_seconds == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize("meta", ["old", "full"])
async def test_builds_with_older_metadata_are_probed_alike(meta: str, tmp_path: Path) -> None:
    behaviour = Behaviour(meta="old" if meta == "old" else "full", next_token_as_object=True, null_event=False)
    assert isinstance(await measured(behaviour, tmp_path), DecodeSample)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"same_id_slot": True}, Reason.NOT_TOGETHER),
        ({"one_at_a_time": True}, Reason.NOT_TOGETHER),
        ({"stop_after": 5}, Reason.WRONG_LENGTH),
        ({"stop_type": "eos"}, Reason.WRONG_LENGTH),
        ({"truncated": True}, Reason.WRONG_LENGTH),
        ({"cache_n": 4}, Reason.CACHED_PROMPT),
        ({"drop_timings": True}, Reason.BAD_TIMINGS),
        ({"timing_values": {"predicted_ms": None}}, Reason.BAD_TIMINGS),
        ({"timing_values": {"predicted_ms": float("nan")}}, Reason.BAD_TIMINGS),
        ({"timing_values": {"predicted_ms": float("inf")}}, Reason.BAD_TIMINGS),
        ({"timing_values": {"predicted_ms": 0.0}}, Reason.BAD_TIMINGS),
        ({"timing_values": {"predicted_ms": -1.0}}, Reason.BAD_TIMINGS),
        ({"timing_values": {"predicted_ms": "12.5"}}, Reason.BAD_TIMINGS),
        ({"timing_values": {"predicted_n": True}}, Reason.BAD_TIMINGS),
        ({"timing_values": {"predicted_n": 2**63}}, Reason.BAD_TIMINGS),
        ({"timing_values": {"draft_n": 7}}, Reason.SPECULATIVE),
        ({"cut_after": 9}, Reason.STREAM_CUT),
        ({"error_after": 9}, Reason.SERVER_ERROR),
        ({"garbage_after": 9}, Reason.BAD_ANSWER),
        ({"foreign": frozenset({"before"})}, Reason.BUSY),
        ({"foreign": frozenset({"after"})}, Reason.FOREIGN_REQUEST),
        ({"n_ctx": PROMPT_TOKENS + MIN_STEPS}, Reason.CONTEXT_TOO_SMALL),
        ({"n_slots": 1}, Reason.TOO_FEW_SLOTS),
        ({"sleeping": True}, Reason.SLEEPING),
    ],
)
async def test_faults_of_the_answer(change: dict[str, object], reason: Reason, tmp_path: Path) -> None:
    """Each fault has its own reason, and none gives a number."""
    behaviour = Behaviour()
    for name, value in change.items():
        assert hasattr(behaviour, name)
        setattr(behaviour, name, value)
    assert await measured(behaviour, tmp_path) is reason


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("html", Reason.HTTP_ERROR),
        ("redirect", Reason.HTTP_ERROR),
        ("500", Reason.SERVER_ERROR),
        ("hang", Reason.TIMEOUT),
        ("slow", Reason.TIMEOUT),
        ("drop", Reason.UNREACHABLE),
    ],
)
async def test_faults_of_the_transport(fault: Fault, reason: Reason, tmp_path: Path) -> None:
    timeout = 0.3 if reason is Reason.TIMEOUT else 10.0
    assert await measured(Behaviour(faults={"/completion": fault}), tmp_path, timeout=timeout) is reason


async def test_a_stream_that_stops_coming_times_out(tmp_path: Path) -> None:
    assert await measured(Behaviour(hang_after=9), tmp_path, timeout=0.3) is Reason.TIMEOUT


async def test_a_batch_that_fits_after_a_fault_is_measured(tmp_path: Path) -> None:
    """A fault leaves nothing behind: the next probe over a fresh connection succeeds."""
    behaviour = Behaviour(cut_after=5)
    async with FakeLlama(behaviour) as fake, client_of(fake) as client:
        identity = await identify(client)
        assert isinstance(identity, Identity)
        probe = probe_of(client, tmp_path)
        assert await probe.measure(identity, 2) is Reason.STREAM_CUT
        behaviour.cut_after = None
        assert isinstance(await probe.measure(identity, 2), DecodeSample)


async def test_scattered_slots_are_tried_again_with_other_prompts(tmp_path: Path) -> None:
    """Users' requests leave slots in an order that scatters the streams; a sample still comes from adjacent ones."""
    behaviour = Behaviour(split_kv=True, step_seconds=lambda _: 0.01)
    async with FakeLlama(behaviour) as fake, client_of(fake) as client:
        identity = await identify(client)
        assert isinstance(identity, Identity)
        users = [[1000 * user + i for i in range(PROMPT_TOKENS)] for user in range(4)]
        # Slots 3, 2, 1, 0 in turn, then 2 and 1 again: the least recently used are now 3 and 0.
        for user in (0, 1, 2, 3, 1, 2):
            await client.complete([users[user]], 4, 5)
        before = fake.asked("/completion")
        result = await probe_of(client, tmp_path).measure(identity, 2)
        assert isinstance(result, DecodeSample)
        assert result.step_seconds == pytest.approx(0.01, rel=0.02)
        # Scattered, two prompts seated side by side, adjacent, and the real run on the same slots.
        assert fake.asked("/completion") - before == 5


async def test_streams_come_together_in_whatever_order_users_left_the_slots(tmp_path: Path) -> None:
    """All orders of use of 4 slots: no batch stays scattered, and the slot with a conversation keeps it."""
    for order in permutations(range(4)):
        behaviour = Behaviour(split_kv=True, step_seconds=lambda _: 0.01)
        async with FakeLlama(behaviour) as fake, client_of(fake) as client:
            identity = await identify(client)
            assert isinstance(identity, Identity)
            for slot in order:
                await client.complete([[1000 * slot + i for i in range(PROMPT_TOKENS)]], 4, 5, slot)
            for batch in (2, 3):
                probe = probe_of(client, tmp_path)
                assert await probe.ready(identity, batch) is None
                assert isinstance(await probe.measure(identity, batch), DecodeSample), (order, batch)


async def test_a_sleeping_model_is_asked_nothing_that_wakes_it(tmp_path: Path) -> None:
    async with FakeLlama(Behaviour(sleeping=True)) as fake, client_of(fake) as client:
        identity = await identify(client)
        assert isinstance(identity, Identity)
        assert state_of(identity) is ServerState.SLEEPING
        assert await probe_of(client, tmp_path).ready(identity, 1) is Reason.SLEEPING
        assert fake.woken == 0
        assert fake.asked("/slots") == 0
        assert fake.asked("/completion") == 0


async def test_a_server_without_slots_endpoint_is_probed(tmp_path: Path) -> None:
    assert isinstance(await measured(Behaviour(slots_enabled=False), tmp_path), DecodeSample)


async def test_probe_length_follows_the_models_speed(tmp_path: Path) -> None:
    """A slow model gets 16 steps, a fast one 256, and one in between what fits into the time."""
    for step, expected in ((1.0, MIN_STEPS), (0.0201, 99), (0.0005, MAX_STEPS)):
        result = await measured(Behaviour(step_seconds=lambda _, s=step: s), tmp_path, 1)  # type: ignore[misc]
        assert isinstance(result, DecodeSample)
        assert result.steps == expected


async def test_steps_stay_within_the_context(tmp_path: Path) -> None:
    result = await measured(Behaviour(n_ctx=64, step_seconds=lambda _: 0.001), tmp_path, 1)
    assert isinstance(result, DecodeSample)
    assert result.steps == 64 - PROMPT_TOKENS - 1


async def test_what_the_probe_asks_for(tmp_path: Path) -> None:
    """Greedy, never ended early, nothing cached: the request that the proof relies on."""
    async with FakeLlama() as fake, client_of(fake) as client:
        identity = await identify(client)
        assert isinstance(identity, Identity)
        await probe_of(client, tmp_path).measure(identity, 2)
        body = fake.bodies[-1]
        assert isinstance(body, dict)
        assert body["ignore_eos"] is True
        assert body["cache_prompt"] is False
        assert body["temperature"] == 0
        assert body["stream"] is True
        assert MIN_STEPS < body["n_predict"] <= MAX_STEPS + 1
        assert len(body["prompt"]) == 2
        assert body["prompt"][0] != body["prompt"][1]


@pytest.mark.parametrize(
    ("behaviour", "reason", "state"),
    [
        (Behaviour(loading=True), Reason.LOADING, ServerState.LOADING),
        (Behaviour(api_key="secret"), Reason.UNAUTHORIZED, ServerState.UNAUTHORIZED),
        (Behaviour(faults={"/health": "html_ok"}), Reason.NOT_LLAMA, ServerState.UNSUPPORTED),
        (Behaviour(faults={"/health": "garbage"}), Reason.NOT_LLAMA, ServerState.UNSUPPORTED),
        (Behaviour(faults={"/props": "wrong_type"}), Reason.NOT_LLAMA, ServerState.UNSUPPORTED),
        (Behaviour(faults={"/health": "html"}), Reason.HTTP_ERROR, ServerState.UNREACHABLE),
        (Behaviour(faults={"/health": "redirect"}), Reason.HTTP_ERROR, ServerState.UNREACHABLE),
        (Behaviour(faults={"/health": "drop"}), Reason.UNREACHABLE, ServerState.UNREACHABLE),
    ],
)
async def test_states(behaviour: Behaviour, reason: Reason, state: ServerState) -> None:
    async with FakeLlama(behaviour) as fake, client_of(fake) as client:
        answer = await identify(client)
        assert answer is reason
        assert state_of(answer) is state


async def test_a_hanging_server_is_unreachable_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.measure.probe.ASK_TIMEOUT", 0.2)
    async with FakeLlama(Behaviour(faults={"/health": "hang"})) as fake, client_of(fake) as client:
        started = time.monotonic()
        assert state_of(await identify(client)) is ServerState.UNREACHABLE
        assert time.monotonic() - started < ASK_TIMEOUT


async def test_a_server_that_is_not_there_is_unreachable() -> None:
    async with open_session("http://127.0.0.1:1", None) as session:
        assert await identify(LlamaClient(session, "http://127.0.0.1:1", None)) is Reason.UNREACHABLE


async def test_the_key_is_read_at_each_request(tmp_path: Path) -> None:
    """A rotated key needs no restart; a file that vanished is a reason, not a crash."""
    key = tmp_path / "key"
    key.write_text("old\n")
    async with FakeLlama(Behaviour(api_key="new")) as fake, client_of(fake, key) as client:
        assert await identify(client) is Reason.UNAUTHORIZED
        key.write_text("new\n")
        assert isinstance(await identify(client), Identity)
        key.unlink()
        assert await identify(client) is Reason.API_KEY_UNREADABLE


async def test_a_unix_socket_and_ipv6(tmp_path: Path) -> None:
    needs_ipv6()
    fake = FakeLlama()
    for arguments in ({"unix": tmp_path / "llama.sock"}, {"host": "::1"}):
        await fake.start(**arguments)
        try:
            async with client_of(fake) as client:
                assert isinstance(await identify(client), Identity)
        finally:
            await fake.stop()


@pytest.mark.parametrize(
    ("alias", "label"), [("/srv/models/secret.gguf", "secret.gguf"), ("org/model", "model"), ("plain", "plain")]
)
async def test_a_label_never_carries_a_path(alias: str, label: str) -> None:
    behaviour = Behaviour()
    behaviour.model = type(behaviour.model)(alias=alias)
    async with FakeLlama(behaviour) as fake, client_of(fake) as client:
        identity = await identify(client)
        assert isinstance(identity, Identity)
        assert identity.props.model == label


@pytest.mark.parametrize("meta", ["null", "missing"])
async def test_a_server_that_does_not_tell_its_size_has_no_footprint(meta: str, tmp_path: Path) -> None:
    """Its rates are measured all the same."""
    behaviour = Behaviour(meta="null" if meta == "null" else "missing")
    async with FakeLlama(behaviour) as fake, client_of(fake) as client:
        identity = await identify(client)
        assert isinstance(identity, Identity)
        assert describe(identity.props, identity.size, None, ModelHints()).footprint is None
        assert isinstance(await probe_of(client, tmp_path).measure(identity, 2), DecodeSample)


@pytest.mark.parametrize("vocabulary", [None, 64, 1000, 32000, 262144])
def test_prompts_are_valid_and_different(vocabulary: int | None) -> None:
    for family in range(PROMPT_FAMILIES):
        prompts = probe_prompts(4, vocabulary, family)
        assert all(len(p) == PROMPT_TOKENS and all(0 <= t < (vocabulary or 256) for t in p) for p in prompts)
        assert len({tuple(p) for p in prompts}) == 4
        assert len({tuple(p[:COMMON_TOKENS]) for p in prompts}) == 1
    beginnings: Callable[[int], tuple[int, ...]] = lambda f: tuple(probe_prompts(1, vocabulary, f)[0][:2])  # noqa: E731
    assert len({beginnings(f) for f in range(PROMPT_FAMILIES)}) == PROMPT_FAMILIES
