"""Models behind a router: asked only when they are loaded, never loaded, never woken."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from fake_llama import Behaviour, FakeLlama, RouterModel
from fake_llama_answers import Model
from stations import measured, watching

from exporter.config import ServerSettings, Settings
from exporter.measure.live import LiveReader
from exporter.measure.llama import LlamaClient, open_session
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import ServerState
from exporter.service.live import LiveWatch

if TYPE_CHECKING:
    from pathlib import Path

    from aiohttp.web import Request, Response

STEP = 0.01


def router(*models: RouterModel, **changes: Any) -> Behaviour:
    return Behaviour(router=list(models), step_seconds=lambda _: STEP, **changes)


def named(alias: str, status: str = "loaded", **more: Any) -> RouterModel:
    return RouterModel(Model(alias=alias, size=100_000_000 + len(alias), n_params=1000), status, **more)


# routers


async def test_a_loaded_model_of_a_router_is_measured(tmp_path: Path) -> None:
    async with FakeLlama(router(named("other", "unloaded"), named("mine"))) as fake:
        async with watching(fake, tmp_path, {"model": "mine"}) as running:
            await running.scheduler.run_once()
            assert measured(running) == pytest.approx({1: STEP, 2: STEP})
            assert running.server.model is not None
            assert (running.server.model.name, running.server.model.weight_bytes) == ("mine", 100_000_004)
        assert (fake.loaded, fake.woken) == (0, 0)
        assert [body["model"] for body in fake.bodies] == ["mine"] * len(fake.bodies)
        of_model = [r for r in fake.requests if r.path in ("/props", "/slots", "/completion")]
        assert {tuple(r.query.items()) for r in of_model} == {(("model", "mine"), ("autoload", "false"))}


@pytest.mark.parametrize(
    ("model", "reason", "state"),
    [
        (named("mine", "unloaded"), Reason.MODEL_UNLOADED, ServerState.SLEEPING),
        (named("mine", "downloaded"), Reason.MODEL_UNLOADED, ServerState.SLEEPING),
        (named("mine", "sleeping"), Reason.SLEEPING, ServerState.SLEEPING),
        (named("mine", "loading"), Reason.LOADING, ServerState.LOADING),
        (named("mine", "downloading"), Reason.LOADING, ServerState.LOADING),
        (named("mine", "unloaded", failed=True), Reason.MODEL_FAILED, ServerState.UNREACHABLE),
        (named("mine", "a status of next year"), Reason.BAD_ANSWER, ServerState.UNSUPPORTED),
        (named("not mine"), Reason.UNKNOWN_MODEL, ServerState.UNSUPPORTED),
    ],
)
async def test_a_model_that_is_not_loaded_is_asked_nothing(
    model: RouterModel, reason: Reason, state: ServerState, tmp_path: Path
) -> None:
    async with FakeLlama(router(model, named("another"))) as fake:
        async with watching(fake, tmp_path, {"model": "mine"}) as running:
            await running.scheduler.run_once()
            samples, _ = await running.scrape()
            assert (running.server.state, running.server.state_reason) == (state, reason)
            assert running.server.counts == {reason: 1}
            up = samples["roofline_server_up", frozenset({("server", "s0")})]
            assert up == (state is ServerState.SLEEPING)
        assert (fake.loaded, fake.woken) == (0, 0)
        assert {r.path for r in fake.requests} == {"/health", "/models"}


async def test_counters_of_a_routers_model_are_its_own_and_load_nothing() -> None:
    one, other = named("one"), named("other")
    async with FakeLlama(router(one, other)) as fake, open_session(fake.url, None) as session:
        mine, theirs = (LlamaClient(session, fake.url, None, name) for name in ("one", "other"))
        assert not isinstance(await mine.complete([[1, 2]], 20, 5), Reason)
        found = [await client.counters(5, 0.0) for client in (mine, theirs)]
        assert [None if isinstance(c, Reason) else c.tokens for c in found] == [20, 0]
        one.status, other.status = "unloaded", "sleeping"
        assert [await client.counters(5, 0.0) for client in (mine, theirs)] == [
            Reason.MODEL_UNLOADED,
            Reason.SLEEPING,
        ]
        assert (fake.loaded, fake.woken) == (0, 0)


async def test_a_routers_model_seen_asleep_is_not_kept_awake(tmp_path: Path) -> None:
    mine = named("mine", "sleeping")
    async with FakeLlama(router(mine)) as fake, watching(fake, tmp_path, {"model": "mine"}) as running:
        await running.watches[0].check()
        assert running.watches[0].probe.manners.sleeps


async def test_users_of_a_model_that_is_loaded_later_are_watched_then(tmp_path: Path) -> None:
    """Unlike one that sleeps, an unloaded model cannot be kept awake by asking."""
    mine = named("mine", "unloaded")
    async with FakeLlama(router(mine)) as fake, watching(fake, tmp_path, {"model": "mine"}) as running:
        watch = running.watches[0]
        settings = ServerSettings.model_validate({"name": "s0", "url": fake.url, "model": "mine"})
        live = LiveWatch(settings, watch, LiveReader(watch.probe.client, time.monotonic), clock=time.monotonic)
        await watch.check()
        assert await live.tick() > 0
        assert (fake.asked("/slots"), fake.loaded) == (0, 0)
        mine.status = "loaded"
        await watch.check()
        await live.tick()
        assert (fake.asked("/slots"), fake.loaded) == (1, 0)
        mine.status = "sleeping"
        await watch.check()
        for _ in range(2):
            await live.tick()
        assert (fake.asked("/slots"), fake.woken) == (1, 0)


class Fickle(FakeLlama):
    """A router that takes its model away when it has had so many requests."""

    def __init__(self, behaviour: Behaviour, after: int, status: str) -> None:
        super().__init__(behaviour)
        self.after = after
        self.status = status

    def _turn(self) -> None:
        if self.behaviour.router and len(self.requests) > self.after:
            self.behaviour.router[0].status = self.status

    async def _models(self, request: Request) -> Response:
        self._turn()
        return await super()._models(request)

    def _asked_model(self, name: str, request: Request, *, wakes: bool) -> RouterModel | Response:
        # What falls asleep between the status and the question is woken by it: no server offers a way around that.
        if self.status == "unloaded":
            self._turn()
        return super()._asked_model(name, request, wakes=wakes)


@pytest.mark.parametrize("status", ["unloaded", "sleeping"])
async def test_a_model_taken_away_at_any_moment_is_not_loaded_again(status: str, tmp_path: Path) -> None:
    reason = Reason.MODEL_UNLOADED if status == "unloaded" else Reason.SLEEPING
    voided = 0
    for after in range(22):
        async with Fickle(router(named("mine")), after, status) as fake:
            async with watching(fake, tmp_path, {"model": "mine"}) as running:
                await running.watches[0].cycle()
                assert set(running.server.counts) <= {reason}, after
                voided += bool(running.server.counts)
            assert (fake.loaded, fake.woken) == (0, 0), after
    assert voided > 10


async def test_a_router_without_a_model_named_says_what_to_do(tmp_path: Path) -> None:
    async with FakeLlama(router(named("mine"))) as fake:
        async with watching(fake, tmp_path) as running:
            await running.scheduler.run_once()
            assert running.server.state is ServerState.UNSUPPORTED
            assert running.server.counts == {Reason.MODEL_NOT_NAMED: 1}
        assert fake.asked("/completion") == fake.asked("/slots") == 0


async def test_two_models_of_one_router_are_two_servers(tmp_path: Path) -> None:
    url = "http://127.0.0.1:1"
    assert len(Settings.model_validate({"servers": [named_server("a", url), named_server("b", url)]}).servers) == 2
    one, other = named("one"), named("org/other:Q4_K_M", aliases=("second",))
    async with FakeLlama(router(one, other)) as fake:
        async with watching(fake, tmp_path, {"model": "one"}, {"model": "second"}) as running:
            await running.scheduler.run_once()
            assert measured(running, 0) == measured(running, 1) == pytest.approx({1: STEP, 2: STEP})
            assert [w.record.model.name if w.record.model else "" for w in running.watches] == ["one", "other:Q4_K_M"]
            samples, _ = await running.scrape()
            weights = {labels: v for (name, labels), v in samples.items() if name == "roofline_model_weight_bytes"}
            assert sorted(weights.values()) == [100_000_003, 100_000_016]
        assert {body["model"] for body in fake.bodies} == {"one", "org/other:Q4_K_M"}
        assert (fake.loaded, fake.woken) == (0, 0)


def named_server(model: str, url: str) -> dict[str, object]:
    return {"name": model, "url": url, "model": model, "live": "off"}


async def test_a_router_that_does_not_tell_the_size_yet_is_measured_without_a_floor(tmp_path: Path) -> None:
    """The child's figures are merged in when they come; then the floor is there."""
    mine = named("mine", tells_meta=False)
    async with FakeLlama(router(mine)) as fake, watching(fake, tmp_path, {"model": "mine"}) as running:
        await running.scheduler.run_once()
        assert set(measured(running)) == {1, 2}
        assert running.server.model is not None
        assert running.server.model.footprint is None
        mine.tells_meta = True
        await running.watches[0].check()
        assert running.server.model is not None
        assert running.server.model.footprint is not None


async def test_a_model_loaded_by_its_user_is_measured_then(tmp_path: Path) -> None:
    mine = named("mine", "unloaded")
    async with FakeLlama(router(mine)) as fake, watching(fake, tmp_path, {"model": "mine"}) as running:
        await running.watches[0].cycle()
        assert running.server.batches[1].success is None, "nothing was probed, so nothing failed"
        mine.status = "loaded"
        await running.watches[0].cycle()
        assert set(measured(running)) == {1, 2}
        assert fake.loaded == 0
        before = running.server.batches
        mine.status = "unloaded"
        await running.watches[0].cycle()
        assert running.server.batches[1].sample == before[1].sample
        assert running.server.batches[1].success is True
