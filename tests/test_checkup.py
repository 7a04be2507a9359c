"""What hangs beside a server, its model's file or the look at its process, keeps neither the others nor the loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog
from benches import bench
from fake_llama import FakeLlama
from fake_llama_answers import Model
from stations import Station, measured, station
from structlog.testing import capture_logs

from exporter.config import parse
from exporter.service.checkup import Look
from exporter.service.daemon import serve
from exporter.service.wiring import measuring

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    import pytest

    from exporter.service.scheduler import Scheduler
    from exporter.service.watch import ServerWatch


class DeadDisk:
    """A model's file that hangs until the test ends, or it is released."""

    def __init__(self) -> None:
        self.asked = 0
        self._release = threading.Event()

    def hang(self, watch: ServerWatch) -> None:
        models, describe = watch.checkup.models, watch.checkup.models.describe

        async def slow(*arguments: object) -> object:
            self.asked += 1
            await asyncio.to_thread(self._release.wait, 60)
            return await describe(*arguments)  # type: ignore[arg-type]

        models.describe = slow  # type: ignore[assignment,method-assign]

    def release(self) -> None:
        self._release.set()


@asynccontextmanager
async def dead_disk() -> AsyncIterator[DeadDisk]:
    disk = DeadDisk()
    try:
        yield disk
    finally:
        disk.release()


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not done():  # noqa: ASYNC110 - records are replaced, and tell nobody
            await asyncio.sleep(0.05)


@asynccontextmanager
async def two_servers(tmp_path: Path) -> AsyncIterator[Station]:
    async with FakeLlama() as one, FakeLlama() as other, station([{"url": one.url}, {"url": other.url}], tmp_path) as s:
        yield s


async def test_a_file_that_hangs_stops_neither_the_other_servers_nor_the_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporter.service.checkup.LOOK_SECONDS", 2.0)
    async with two_servers(tmp_path) as s, dead_disk() as disk:
        one, other = s.watches
        disk.hang(one)
        task = asyncio.create_task(s.scheduler.run())
        await until(lambda: bool(measured(s, 0) and measured(s, 1)))
        assert s.scheduler.machine.host.runs
        assert other.record.model is not None
        for _ in range(3):
            await one.check()
        assert (one.record.model, one.record.state.up, disk.asked) == (None, True, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        disk.release()
        async with asyncio.timeout(60):
            while one.record.model is None:
                await asyncio.sleep(0.05)
                await one.check()
        assert one.record.model == other.record.model
        assert measured(s, 0), "what was measured is the same model's"


async def test_the_first_checks_are_waited_for_no_longer_than_one_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporter.service.checkup.LOOK_SECONDS", 60.0)
    monkeypatch.setattr("exporter.service.scheduler.CHECK_SECONDS", 0.1)
    async with two_servers(tmp_path) as s, dead_disk() as disk:
        disk.hang(s.watches[0])
        task = asyncio.create_task(s.scheduler.run())
        await until(lambda: s.scheduler.machine.host.runs > 0 and bool(measured(s, 1)))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_while_its_file_hangs_a_server_keeps_its_model_but_not_anothers(
    fake_llama: FakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporter.service.checkup.LOOK_SECONDS", 2.0)
    async with bench(fake_llama, tmp_path) as b, dead_disk() as disk:
        await b.watch.cycle()
        known = b.server.model
        assert known is not None
        disk.hang(b.watch)
        with capture_logs() as logs:
            for _ in range(3):
                await b.watch.check()
        assert (b.server.model, len(measured_batches(b.watch))) == (known, 3)
        assert [line["event"] for line in logs] == ["the model's file hangs: what was known before stays"]
        fake_llama.behaviour.model = Model(alias="other", size=123456789, n_params=1000)
        await b.watch.check()
        assert (b.server.model, measured_batches(b.watch)) == (None, [])


def measured_batches(watch: ServerWatch) -> list[int]:
    return [b for b, r in watch.record.batches.items() if r.sample is not None]


async def test_reloads_do_not_pile_up_threads_in_a_file_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporter.service.checkup.LOOK_SECONDS", 2.0)
    async with FakeLlama() as fake, dead_disk() as disk:
        text = f"servers: [{{name: a, url: '{fake.url}', gguf: {tmp_path / 'x.gguf'}}}]"
        before = None
        for number in range(3):
            async with measuring(parse(text, "test"), before=before) as before:
                (watch,) = before.watches
                if number == 0:
                    disk.hang(watch)
                await watch.check()
        assert disk.asked == 1
        moved = parse(text.replace("x.gguf", "y.gguf"), "test")
        async with measuring(moved, before=before) as after:
            await after.watches[0].check()
            assert after.watches[0].record.model is not None, "another file may be well"


async def test_without_a_thread_what_was_known_stays() -> None:
    async def refused() -> float:
        await asyncio.sleep(0)
        raise RuntimeError("can't start new thread")

    look: Look[float] = Look("the server's process", structlog.get_logger())
    with capture_logs() as logs:
        assert await look.take(refused, 7.0) == 7.0
    assert [line["event"] for line in logs] == ["no thread to look at the server's process in"]


async def test_disks_that_hang_leave_threads_for_names_and_kernels() -> None:
    """Asyncio's own pool has 4 and one for each CPU."""
    done: list[int] = []

    async def beside(_: Scheduler, __: Sequence[str]) -> None:
        release = threading.Event()
        hanging = [asyncio.create_task(asyncio.to_thread(release.wait, 60)) for _ in range(40)]
        await asyncio.sleep(0.05)
        try:
            async with asyncio.timeout(10):
                done.append(await asyncio.to_thread(int, "1"))
        finally:
            release.set()
            await asyncio.gather(*hanging)
            os.kill(os.getpid(), signal.SIGTERM)

    async with asyncio.timeout(60):
        await serve(parse("bandwidth: {compute_peak: 1TFLOP/s}", "test"), [("127.0.0.1", 0)], beside=beside)
    assert done == [1]
