"""Servers that share this machine's CPUs: a probe of one keeps away from the users of all."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Literal

import pytest
from fake_llama import Behaviour, FakeLlama
from stations import Station, measured, station
from structlog.testing import capture_logs

from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import ServerState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

USERS: Final[frozenset[Literal["before", "during", "after"]]] = frozenset({"before"})


@asynccontextmanager
async def two(tmp_path: Path, device: str) -> AsyncIterator[tuple[Station, FakeLlama, FakeLlama]]:
    keys: dict[str, object] = {"device": device, "peak_bandwidth": "1TB/s"} if device == "gpu" else {}
    async with (
        FakeLlama() as one,
        FakeLlama(Behaviour(foreign=USERS)) as other,
        station([{"url": one.url}, {"url": other.url, **keys}], tmp_path) as s,
    ):
        yield s, one, other


async def test_a_server_is_not_probed_while_another_on_the_same_cpus_serves_users(tmp_path: Path) -> None:
    async with two(tmp_path, "cpu") as (s, one, other):
        with capture_logs() as logs:
            await s.scheduler.run_once()
        assert (one.asked("/completion"), other.asked("/completion")) == (0, 0)
        assert s.server.counts == {Reason.BUSY: 1}
        assert s.server.state is ServerState.READY, "the users are not its own"
        (line,) = [line for line in logs if line["event"] == "probe" and line["server"] == "s0"]
        assert (line["reason"], line["detail"]) == ("busy", "users of s1 on the same CPUs")
        health = s.server.check_interval_seconds
        assert s.watches[0].due - s.watches[0].record.checked_at < 2 * health, "it is asked again soon"
        other.behaviour.foreign = frozenset()
        await s.scheduler.run_once()
        assert set(measured(s, 0)) == set(measured(s, 1)) == {1, 2}


async def test_users_of_a_gpu_slow_no_probe_on_the_cpus(tmp_path: Path) -> None:
    async with two(tmp_path, "gpu") as (s, _, other):
        await s.scheduler.run_once()
        assert set(measured(s, 0)) == {1, 2}
        assert other.asked("/completion") == 0


async def test_users_who_come_to_another_server_end_the_round(tmp_path: Path) -> None:
    async with two(tmp_path, "cpu") as (s, one, other):
        other.behaviour.foreign = frozenset()
        measure = s.watches[0].probe.measure

        async def then_users(*arguments: object) -> object:
            found = await measure(*arguments)  # type: ignore[arg-type]
            other.behaviour.foreign = USERS
            return found

        s.watches[0].probe.measure = then_users  # type: ignore[assignment,method-assign]
        await s.scheduler._cycle(s.watches[0])
        await s.watches[1].check()
        assert set(measured(s, 0)) == {1, 2}, "nobody knew the other server yet"
        await s.scheduler._cycle(s.watches[0])
        assert s.server.counts == {Reason.BUSY: 1}
        other.behaviour.foreign = frozenset()
        asked = one.asked("/completion")
        await s.scheduler._cycle(s.watches[0])
        assert s.server.counts == {Reason.BUSY: 2}, "the batch that was owed waits for the users who came meanwhile"
        assert one.asked("/completion") > asked


@pytest.mark.parametrize("batches", [(1,), (1, 2, 4)])
async def test_the_loop_is_expected_back_after_one_request_and_not_after_a_round(
    tmp_path: Path, batches: tuple[int, ...]
) -> None:
    """At most probe.timeout, 15 s of questions and 3 health intervals: 120 + 15 + 45 s."""
    async with FakeLlama() as fake, station([{"url": fake.url}], tmp_path, batches=batches) as s:
        left: list[float] = []
        client = s.watches[0].probe.client
        complete, now = client.complete, s.scheduler._clocks.monotonic

        async def noted(*arguments: object) -> object:
            s.scheduler._alive_until = 0.0
            found = await complete(*arguments)  # type: ignore[arg-type]
            left.append(s.scheduler._alive_until - now())
            assert s.scheduler.healthy()
            return found

        client.complete = noted  # type: ignore[assignment,method-assign]
        await s.scheduler.run_once()
        assert set(measured(s)) == set(batches)
        assert len(left) > len(batches)
        assert all(170 < seconds <= 180 for seconds in left)
