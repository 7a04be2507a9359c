"""Every server that operators run: builds of two years, prefixes, keys, TLS, sockets, small slots."""

from __future__ import annotations

import importlib.util
import shutil
import ssl
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from fake_llama import Behaviour, FakeLlama, Intruder
from fake_llama_builds import BUILDS, behaviour_of
from odd_llama import odd_llama
from processes import free_port, needs_ipv6
from real import missing, require
from stations import measured, station, watching
from structlog.testing import capture_logs

from exporter.measure.llama import LlamaClient, open_session
from exporter.measure.probe import Identity, identify, state_of
from exporter.present.words import REASONS
from exporter.roofline.reason import Reason
from exporter.roofline.slots import busy
from exporter.roofline.snapshot import ServerState

if TYPE_CHECKING:
    from pathlib import Path


STEP = 0.01


@pytest.mark.parametrize(("model", "reason"), [("tiny", None), ("huge", Reason.UNKNOWN_MODEL)])
async def test_a_model_named_for_a_plain_server_has_to_be_its_own(
    model: str, reason: Reason | None, tmp_path: Path
) -> None:
    async with FakeLlama() as fake, watching(fake, tmp_path, {"model": model}) as running:
        await running.watches[0].cycle()
        assert running.server.counts == ({} if reason is None else {reason: 1})
        assert set(measured(running)) == ({1, 2} if reason is None else set())


# what cannot be measured


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"generates": False}, Reason.NOT_SUPPORTED),
        ({"faults": {"/completion": "404"}}, Reason.NOT_LLAMA),
    ],
)
async def test_a_server_that_does_not_generate_is_unsupported_until_it_does(
    change: dict[str, Any], reason: Reason, tmp_path: Path
) -> None:
    async with FakeLlama(Behaviour(**change)) as fake, watching(fake, tmp_path) as running:
        await running.scheduler.run_once()
        for _ in range(2):
            assert (running.server.state, running.server.state_reason) == (ServerState.UNSUPPORTED, reason)
            assert not measured(running)
            await running.watches[0].check()
        fake.behaviour = Behaviour()
        await running.watches[0].cycle()
        assert (running.server.state, running.server.state_reason) == (ServerState.READY, None)
        assert set(measured(running)) == {1, 2}


@pytest.mark.parametrize("path", ["/health", "/props", "/v1/models"])
async def test_a_server_without_an_endpoint_that_is_needed_is_unsupported(path: str, tmp_path: Path) -> None:
    async with FakeLlama(Behaviour(faults={path: "404"})) as fake, watching(fake, tmp_path) as running:
        await running.scheduler.run_once()
        assert (running.server.state, running.server.state_reason) == (ServerState.UNSUPPORTED, Reason.NOT_LLAMA)


async def test_a_server_that_was_one_and_is_none_any_more_is_gone(tmp_path: Path) -> None:
    """A proxy answers with a page of its own when the server behind it has ended: users get nothing."""
    async with FakeLlama(Behaviour()) as fake, watching(fake, tmp_path) as running:
        await running.scheduler.run_once()
        for page in ("404", "html_ok"):
            fake.behaviour.faults = {"*": page}
            for _ in range(2):
                await running.watches[0].check()
                assert (running.server.state, running.server.state_reason) == (
                    ServerState.UNREACHABLE,
                    Reason.NOT_LLAMA,
                )
        fake.behaviour.faults = {}
        await running.watches[0].check()
        assert running.server.state is ServerState.READY


async def test_one_slot_and_small_contexts(tmp_path: Path) -> None:
    async with FakeLlama(Behaviour(n_slots=1)) as fake, watching(fake, tmp_path) as running:
        await running.scheduler.run_once()
        assert set(measured(running)) == {1}
        assert running.server.counts == {Reason.TOO_FEW_SLOTS: 1}
    async with FakeLlama(Behaviour(n_ctx=24)) as fake, watching(fake, tmp_path) as running:
        await running.scheduler.run_once()
        assert running.server.counts == {Reason.CONTEXT_TOO_SMALL: 2}
        assert fake.asked("/completion") == 0


async def test_unified_and_split_caches(tmp_path: Path) -> None:
    """A pool that the streams outgrow together fails them all; a batch that fits is measured."""
    small = Behaviour(kv_cells=60, step_seconds=lambda _: STEP)
    async with FakeLlama(small) as fake, watching(fake, tmp_path) as running:
        await running.scheduler.run_once()
        assert set(measured(running)) == {1}
        assert running.server.counts == {Reason.SERVER_ERROR: 1}
    for split in (False, True):
        behaviour = Behaviour(split_kv=split, step_seconds=lambda _: STEP)
        async with FakeLlama(behaviour) as fake, watching(fake, tmp_path, batches=(1, 2, 4)) as running:
            await running.scheduler.run_once()
            assert measured(running) == pytest.approx({1: STEP, 2: STEP, 4: STEP})


async def test_a_speculative_server_gives_no_number_that_takes_tokens_for_steps(tmp_path: Path) -> None:
    behaviour = Behaviour(accepted=(2, 0, 3), step_seconds=lambda _: STEP)
    async with FakeLlama(behaviour) as fake, watching(fake, tmp_path) as running:
        await running.scheduler.run_once()
        found = measured(running)
        assert found or running.server.counts == {Reason.SPECULATIVE: 2}
        for step in found.values():
            assert step == pytest.approx(STEP, rel=0.03)


# what the log says


async def test_the_first_sight_of_a_server_is_no_recovery(tmp_path: Path) -> None:
    async with FakeLlama() as fake:
        gone = f"http://127.0.0.1:{free_port()}"
        async with watching(fake, tmp_path, {}, {"url": gone}) as running:
            with capture_logs() as logs:
                for watch in running.watches:
                    await watch.check()
                fake.behaviour = Behaviour(loading=True)
                await running.watches[0].check()
                await running.watches[1].cycle()
    states = [(line["state"], line.get("was")) for line in logs if line["event"] == "state"]
    assert states == [("ready", None), ("unreachable", None), ("loading", "ready")]
    (unprobed,) = [line for line in logs if line["event"] == "no probe"]
    assert (unprobed["log_level"], unprobed["means"]) == ("warning", REASONS[Reason.UNREACHABLE])


@pytest.mark.parametrize("sent", [False, True])
async def test_a_key_that_is_refused_is_not_told_as_none(sent: bool, tmp_path: Path) -> None:  # noqa: FBT001
    key = tmp_path / "key"
    key.write_text("yesterday's")
    words = "the key in api_key_file is refused" if sent else "no key was sent"
    async with (
        FakeLlama(Behaviour(api_key="secret", api_prefix="/x")) as fake,
        watching(fake, tmp_path, {"api_key_file": key} if sent else {}) as running,
    ):
        await running.watches[0].check()
        assert running.server.state_reason is Reason.UNAUTHORIZED
        assert running.server.state_detail == f"GET /health: status 401, {words}"


# builds


@pytest.mark.parametrize("build", BUILDS)
async def test_every_build_is_measured_alike(build: str, tmp_path: Path) -> None:
    behaviour = behaviour_of(build, step_seconds=lambda b: STEP * (1 + b))
    async with FakeLlama(behaviour) as fake, watching(fake, tmp_path) as running:
        await running.scheduler.run_once()
        assert measured(running) == pytest.approx({1: 2 * STEP, 2: 3 * STEP}, rel=0.01)
        assert running.server.counts == {}
        samples, _ = await running.scrape()
        floors = [v for (name, _), v in samples.items() if name == "roofline_decode_floor_ratio"]
        assert len(floors) == 2


@pytest.mark.parametrize("build", [b for b in BUILDS if behaviour_of(b).slots_enabled])
async def test_every_build_with_slots_shows_its_users(build: str, tmp_path: Path) -> None:
    """A user is left alone whatever the build calls it, and the tokens are counted where it tells them."""
    behaviour = behaviour_of(build, foreign=frozenset({"before"}))
    async with FakeLlama(behaviour) as fake:
        async with watching(fake, tmp_path) as running:
            await running.scheduler.run_once()
            assert running.server.counts == {Reason.BUSY: 1}
            assert running.server.state is ServerState.BUSY
        assert fake.asked("/completion") == 0
        async with open_session(fake.url, None) as session:
            slots = await LlamaClient(session, fake.url, None).slots(1)
        assert not isinstance(slots, Reason)
        assert busy(slots) == 1
        assert slots[0].decoded > 0


@pytest.mark.parametrize("build", BUILDS)
async def test_every_build_says_that_it_loads(build: str, tmp_path: Path) -> None:
    async with FakeLlama(behaviour_of(build, loading=True)) as fake:
        for keys in ({}, {"model": "tiny"}):
            async with watching(fake, tmp_path, keys) as running:
                await running.watches[0].check()
                assert running.server.state is ServerState.LOADING


async def test_a_slots_answer_that_does_not_say_who_works_is_no_proof_of_an_idle_server(tmp_path: Path) -> None:
    behaviour = Behaviour(slots_without=frozenset({"is_processing"}), foreign=frozenset({"before"}))
    async with FakeLlama(behaviour) as fake, watching(fake, tmp_path) as running:
        await running.scheduler.run_once()
        assert set(running.server.counts) == {Reason.BAD_ANSWER}
        assert fake.asked("/completion") == 0


# the way to the server


async def test_an_api_prefix_and_its_trap(tmp_path: Path) -> None:
    """With a prefix even /health wants the key."""
    key = tmp_path / "key"
    key.write_text("secret")
    async with FakeLlama(Behaviour(api_prefix="/llm/one", api_key="secret")) as fake:
        assert fake.url.endswith("/llm/one")
        async with watching(fake, tmp_path) as running:
            await running.watches[0].check()
            assert running.server.state is ServerState.UNAUTHORIZED
        async with watching(fake, tmp_path, {"api_key_file": key}) as running:
            await running.scheduler.run_once()
            assert set(measured(running)) == {1, 2}
        async with watching(fake, tmp_path, {"url": fake.url.removesuffix("/one"), "api_key_file": key}) as running:
            await running.watches[0].check()
            assert running.server.state_reason is Reason.NOT_LLAMA


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate of localhost, its key beside it."""
    program = shutil.which("openssl") or missing("openssl is not on the PATH")
    directory = tmp_path_factory.mktemp("tls")
    pem, key = directory / "cert.pem", directory / "key.pem"
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    subprocess.run((program, *new, "-keyout", key, "-out", pem, *subject), check=True, capture_output=True)
    return pem


async def test_tls_with_a_private_authority(certificate: Path, tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    fake = FakeLlama(Behaviour(step_seconds=lambda _: STEP))
    await fake.start(tls=context)
    try:
        async with watching(fake, tmp_path, {"ca_file": certificate}) as running:
            await running.scheduler.run_once()
            assert measured(running) == pytest.approx({1: STEP, 2: STEP})
        before = len(fake.requests)
        for keys in ({}, {"url": fake.url.replace("https:", "http:")}):
            async with watching(fake, tmp_path, keys) as running:
                await running.watches[0].check()
                assert running.server.state is ServerState.UNREACHABLE
        assert len(fake.requests) == before
    finally:
        await fake.stop()


@pytest.mark.parametrize("way", ["unix", "ipv6"])
async def test_a_probe_over_a_unix_socket_and_ipv6(way: str, tmp_path: Path) -> None:
    if way == "ipv6":
        needs_ipv6()
    fake = FakeLlama(Behaviour(step_seconds=lambda _: STEP))
    await (fake.start(unix=tmp_path / "llama.sock") if way == "unix" else fake.start(host="::1"))
    try:
        async with watching(fake, tmp_path) as running:
            await running.scheduler.run_once()
            assert measured(running) == pytest.approx({1: STEP, 2: STEP})
    finally:
        await fake.stop()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_key_never_leaves_for_another_host(status: int, tmp_path: Path) -> None:
    """Redirects are followed neither when asking nor when generating."""
    key = tmp_path / "key"
    key.write_text("secret")
    async with FakeLlama() as thief, FakeLlama(Behaviour(api_key="secret")) as fake:
        for path in ("/health", "/props", "/slots", "/completion"):
            fake.behaviour.faults = {path: f"redirect {status} {thief.url}{path}"}
            async with watching(fake, tmp_path, {"api_key_file": key}) as running:
                await running.scheduler.run_once()
                assert set(running.server.counts) == {Reason.HTTP_ERROR}, path
        assert thief.requests == []


async def test_every_request_has_a_connection_of_its_own(tmp_path: Path) -> None:
    """A kept one may be dropped by the server just as the next request is sent."""
    async with FakeLlama() as fake, watching(fake, tmp_path) as running:
        await running.scheduler.run_once()
        assert len({r.peer for r in fake.requests}) == len(fake.requests) > 5


async def test_a_short_user_within_our_completion_costs_steps() -> None:
    """The fake's users come and go unseen by GET /slots before and after; what they leave is a task in a slot."""
    async with FakeLlama(Behaviour(intruders=(Intruder(at_token=10, tokens=5),))) as fake:
        async with open_session(fake.url, None) as session:
            client = LlamaClient(session, fake.url, None)
            streams = await client.complete([[1, 2, 3]], 40, 5)
            assert not isinstance(streams, Reason)
            steps = [b - a for a, b in zip(streams[0].token_ms, streams[0].token_ms[1:], strict=False)]
            alone, with_user = 1e3 * fake.behaviour.step_seconds(1), 1e3 * fake.behaviour.step_seconds(2)
            assert steps[1] == pytest.approx(alone)  # the first is measured from the server's least, 1 us
            assert sum(step == pytest.approx(with_user) for step in steps) == 4
            assert max(steps) == pytest.approx(alone + 1e3 * fake.behaviour.prompt_seconds)
            slots = await client.slots(1)
        assert not isinstance(slots, Reason)
        tasks = sorted(slot.task for slot in slots if slot.task is not None)
        assert (busy(slots), len(tasks)) == (0, 2)
        assert tasks[1] == tasks[0] + 1


async def test_identity_of_a_plain_server_needs_no_list() -> None:
    async with FakeLlama() as fake, open_session(fake.url, None) as session:
        found = await identify(LlamaClient(session, fake.url, None))
        assert isinstance(found, Identity)
        assert state_of(found) is ServerState.READY
        assert fake.asked("/models") == 0


# the real server


@pytest.fixture
def needs_xllamacpp() -> None:
    require(importlib.util.find_spec("xllamacpp"), "xllamacpp is not installed")


@pytest.mark.real
@pytest.mark.usefixtures("needs_xllamacpp")
async def test_a_real_server_with_prefix_key_and_embeddings(real_model: Path, tmp_path: Path) -> None:
    """Builds of 2026 generate with --embeddings too; the prefix' trap is there as the source said."""
    key, port = tmp_path / "key", free_port()
    key.write_text("secret")
    switches = {"hostnames": ["127.0.0.1"], "port": port, "api_prefix": "/x", "api_keys": ["secret"], "embedding": True}
    with odd_llama(real_model, **switches, n_ctx=1024, n_parallel=2) as address:
        assert address
        url = f"http://127.0.0.1:{port}"
        faults: list[tuple[dict[str, object], Reason]] = [
            ({"url": url, "api_key_file": key}, Reason.NOT_LLAMA),
            ({"url": url + "/x"}, Reason.UNAUTHORIZED),
            ({"url": url + "/x", "api_key_file": key, "model": "nothing of it"}, Reason.UNKNOWN_MODEL),
        ]
        for keys, reason in faults:
            async with station([keys], tmp_path) as running:
                await running.watches[0].check()
                assert running.server.state_reason is reason
        async with station([{"url": url + "/x", "api_key_file": key}], tmp_path, timeout=60, batches=(1,)) as running:
            await running.watches[0].cycle()
            assert running.server.counts == {}
            assert set(measured(running)) == {1}


@pytest.mark.real
@pytest.mark.usefixtures("needs_xllamacpp")
async def test_a_real_server_on_a_socket_with_one_small_slot_and_a_strange_name(
    real_model: Path, tmp_path: Path
) -> None:
    socket, alias = tmp_path / "llama.sock", 'a"b\\c{d="e"}\nf\U0001d11e'
    switches = {"hostnames": [str(socket)], "port": 0, "model_alias": [alias], "n_ctx": 256, "n_parallel": 1}
    with odd_llama(real_model, **switches) as address:
        assert address.startswith("unix:")
        # The name is the plain server's own, so a configuration may give it; YAML has no line breaks in names.
        async with station([{"url": f"unix:{socket}"}], tmp_path, timeout=60) as running:
            await running.watches[0].cycle()
            assert running.server.counts == {Reason.TOO_FEW_SLOTS: 1}
            assert set(measured(running)) == {1}
            samples, _ = await running.scrape()
            (labels,) = (dict(labels) for name, labels in samples if name == "roofline_model_info")
            assert labels["model"] == alias.replace("\n", "\N{REPLACEMENT CHARACTER}")
