"""When this machine's ceilings are measured, and what of earlier runs stays in force."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from benches import GB, bench
from fake_llama import FakeLlama
from structlog.testing import capture_logs

from exporter.present.words import REASONS
from exporter.roofline.ceiling import CEILING_LIFETIME_SECONDS, BandwidthRun, Kernel
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import view


class NoThreads(ThreadPoolExecutor):
    """Queues the work and then finds no thread for it, as Python's own does; the next one that is idle takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[Callable[[], object]] = []

    def submit(self, fn: Callable[..., Any], /, *args: object, **named: object) -> NoReturn:
        self.queued.append(partial(fn, *args, **named))
        raise RuntimeError("can't start new thread")


async def test_a_machine_without_threads_is_a_reason(fake_llama: FakeLlama, tmp_path: Path) -> None:
    async with bench(fake_llama, tmp_path) as b:
        asyncio.get_running_loop().set_default_executor(threads := NoThreads())
        await b.machine.measure()
        assert b.machine.host.problem is Reason.NO_THREADS
        assert b.machine.host.rejected_passes == {Reason.NO_THREADS: 1}
        for late in threads.queued:
            late()
        assert b.meter.runs == [], "what was given up does not run beside a probe"


async def test_a_disturbed_first_run_is_made_again_at_once(fake_llama: FakeLlama, tmp_path: Path) -> None:
    async with bench(fake_llama, tmp_path) as b:
        b.meter.problem = Reason.PREEMPTED
        await b.scheduler.run_once(probe=False)
        assert b.meter.runs == [True] * 3
        b.meter.runs.clear()
        b.meter.problem = Reason.NO_MEMORY
        await b.scheduler.run_once(probe=False)
        assert b.meter.runs == [True]


async def test_a_rejected_run_leaves_the_ceiling_in_force(fake_llama: FakeLlama, tmp_path: Path) -> None:
    async with bench(fake_llama, tmp_path) as b:
        await b.scheduler.run_once(probe=False)
        b.meter.problem = Reason.NO_MEMORY
        b.time.now += 300
        snapshot = await b.scheduler.run_once(probe=False)
        assert view(snapshot, b.time.now).in_force
        assert snapshot.host.rejected_passes == {Reason.NO_MEMORY: 3}
        assert snapshot.host.problem is Reason.NO_MEMORY
        assert snapshot.host.runs == 2
        assert snapshot.host.last_success_timestamp == pytest.approx(1.7e9 + 1000)


async def test_other_cpus_have_their_own_ceiling(fake_llama: FakeLlama, tmp_path: Path) -> None:
    """A server that is seen only now, or was moved: the higher ceiling of more CPUs is not its ceiling."""
    async with bench(fake_llama, tmp_path) as b:
        await b.scheduler.run_once(probe=False)
        b.meter.cpus, b.meter.read = (1,), 15 * GB
        b.time.now += 300
        snapshot = await b.scheduler.run_once(probe=False)
        (read,) = (c for c in view(snapshot, b.time.now).in_force if c.kernel is Kernel.READ)
        assert read.best_bytes_per_second == 15 * GB
        assert snapshot.host.compute is None, "that of two CPUs"
        b.time.now += 300
        assert (await b.scheduler.run_once(probe=False)).host.compute
        assert b.meter.runs == [True, False, True]


async def test_the_cpus_of_a_server_that_appears_are_measured_soon(fake_llama: FakeLlama, tmp_path: Path) -> None:
    """A sidecar starts before its server, and cannot see its CPUs yet; one that flaps does not make kernels run."""
    fake_llama.behaviour.loading = True
    async with bench(fake_llama, tmp_path) as b:
        await b.scheduler._check(b.watch)
        await b.machine.measure()
        assert b.machine.due == b.time.now + 300
        b.time.now += 100
        await b.scheduler._check(b.watch)
        assert b.machine.due == b.time.now + 200, "it is still away"
        fake_llama.behaviour.loading = False
        await b.scheduler._check(b.watch)
        assert b.machine.due == b.time.now
        await b.machine.measure()
        for loading in (True, False):
            fake_llama.behaviour.loading = loading
            b.time.now += 1
            await b.scheduler._check(b.watch)
        assert b.machine.due == b.time.now - 2 + 30


async def test_after_a_run_without_a_ceiling_the_next_comes_sooner(fake_llama: FakeLlama, tmp_path: Path) -> None:
    """30 s, 60 s, 120 s and so on up to the interval; a success goes back to it."""
    async with bench(fake_llama, tmp_path) as b:
        b.meter.problem = Reason.NO_MEMORY
        pauses = []
        for _ in range(6):
            await b.scheduler.run_once(probe=False)
            pauses.append(b.scheduler.machine.due - b.time.now)
        assert pauses == [30, 60, 120, 240, 300, 300]
        assert b.meter.runs == [True] * 6, "the full run is still owed"
        b.meter.problem = None
        await b.scheduler.run_once(probe=False)
        assert b.scheduler.machine.due - b.time.now == 300
        await b.scheduler.run_once(probe=False)
        assert b.meter.runs[-1] is False


async def test_runs_that_take_long_and_find_nothing_get_one_percent_of_the_time(
    fake_llama: FakeLlama, tmp_path: Path
) -> None:
    """Every core for seconds, beside a server that works: only the first attempts come soon after each other."""
    async with bench(fake_llama, tmp_path) as b:
        b.meter.problem = Reason.PREEMPTED

        def slow() -> None:
            b.time.now += 8

        b.meter.during = slow
        await b.scheduler.run_once(probe=False)
        assert len(b.meter.runs) == 3
        assert b.machine.due - b.time.now == 120 - 8
        for _ in range(3):
            b.time.now = b.machine.due
            await b.machine.measure()
            assert b.machine.due - b.time.now == 800
        b.machine.server_appeared()
        b.machine.configure(interval=60, meter=b.meter)
        assert b.machine.due - b.time.now == 800
        b.meter.problem = None
        await b.machine.measure()
        assert b.machine.due - b.time.now == 60 - 8
        b.meter.problem = Reason.PREEMPTED
        await b.machine.measure()
        assert b.machine.due - b.time.now == 800, "with a ceiling in force there is no hurry"


async def test_the_lack_of_a_read_ceiling_is_a_warning_once(fake_llama: FakeLlama, tmp_path: Path) -> None:
    async with bench(fake_llama, tmp_path) as b:
        with capture_logs() as logs:
            for problem in (Reason.NO_MEMORY, Reason.NO_MEMORY, Reason.PREEMPTED, None, Reason.PREEMPTED):
                b.meter.problem = problem
                await b.machine.measure()
            b.time.now += CEILING_LIFETIME_SECONDS + 1
            await b.machine.measure()
        told = [(line.get("problem"), line["log_level"]) for line in logs if line["event"] == "bandwidth"]
        assert told == [
            ("no_memory", "warning"),
            ("no_memory", "info"),
            ("preempted", "warning"),
            (None, "info"),
            ("preempted", "info"),
            ("preempted", "warning"),
        ]
        assert [line.get("means") for line in logs[:2]] == [REASONS[Reason.NO_MEMORY], None]
        others = [(line["event"], line["log_level"]) for line in logs if line["event"] != "bandwidth"]
        assert others == [("a read ceiling is known again", "info")]


@pytest.mark.parametrize("last", [None, Reason.PREEMPTED])
async def test_what_is_tried_again_at_once_is_no_warning_yet(
    fake_llama: FakeLlama, tmp_path: Path, last: Reason | None
) -> None:
    async with bench(fake_llama, tmp_path) as b:
        b.meter.problem = Reason.PREEMPTED

        def third() -> None:
            b.meter.problem = last if len(b.meter.runs) == 3 else Reason.PREEMPTED

        b.meter.during = third
        with capture_logs() as logs:
            await b.scheduler.run_once(probe=False)
        assert [(line["event"], line["log_level"], line.get("so")) for line in logs] == [
            ("bandwidth", "info", "trying again"),
            ("bandwidth", "info", "trying again"),
            ("bandwidth", "info", None)
            if last is None
            else ("bandwidth", "warning", "no read ceiling: no floor and no ratio"),
        ]


async def test_a_first_run_that_nothing_disturbed_leaves_no_attempts_over(
    fake_llama: FakeLlama, tmp_path: Path
) -> None:
    """The next one, disturbed, is not made again at once, and so it is warned of."""
    async with bench(fake_llama, tmp_path) as b:
        with capture_logs() as logs:
            for problem in (Reason.NO_MEMORY, Reason.PREEMPTED):
                b.meter.problem = problem
                await b.scheduler.run_once(probe=False)
        assert [line["log_level"] for line in logs] == ["warning", "warning"]


async def test_a_bug_of_the_meter_is_no_lack_of_threads(fake_llama: FakeLlama, tmp_path: Path) -> None:
    async with bench(fake_llama, tmp_path) as b:

        def bug() -> None:
            raise RuntimeError("dictionary changed size during iteration")

        b.meter.during = bug
        with pytest.raises(RuntimeError, match="changed size"):
            await b.machine.measure()
        assert b.machine.host.problem is None


async def test_a_triad_alone_is_no_floor_and_so_a_warning(fake_llama: FakeLlama, tmp_path: Path) -> None:
    async with bench(fake_llama, tmp_path) as b:
        whole = b.meter.measure

        def no_read(*, full: bool, progress: Callable[[str], None]) -> BandwidthRun:
            run = whole(full=full, progress=progress)
            triad = tuple(m for m in run.measurements if m.kernel is Kernel.TRIAD)
            return replace(run, measurements=triad, problem=Reason.NO_MEMORY)

        b.meter.measure = no_read  # type: ignore[method-assign]
        with capture_logs() as logs:
            await b.machine.measure()
        assert [line["log_level"] for line in logs] == ["warning"]


@pytest.mark.parametrize("lost", ["triad", "compute"])
async def test_a_run_that_lost_one_of_its_figures_is_made_again_in_full(
    fake_llama: FakeLlama, tmp_path: Path, lost: str
) -> None:
    async with bench(fake_llama, tmp_path) as b:
        whole = b.meter.measure

        def lossy(*, full: bool, progress: Callable[[str], None]) -> BandwidthRun:
            run = whole(full=full, progress=progress)
            if lost == "compute":
                return replace(run, compute=None, compute_problem=Reason.PREEMPTED)
            return replace(run, measurements=tuple(m for m in run.measurements if m.kernel is not Kernel.TRIAD))

        b.meter.measure = lossy  # type: ignore[method-assign]
        await b.scheduler.run_once(probe=False)
        assert b.meter.runs == [True] * 3, "the first one is tried again at once"
        assert b.scheduler.machine.due - b.time.now < 300
        b.meter.measure = whole  # type: ignore[method-assign]
        await b.scheduler.run_once(probe=False)
        assert b.meter.runs[-1] is True
        assert b.scheduler.machine.due - b.time.now == 300
        await b.scheduler.run_once(probe=False)
        assert b.meter.runs[-1] is False


async def test_kernels_wait_for_users_but_not_for_ever(fake_llama: FakeLlama, tmp_path: Path) -> None:
    async with bench(fake_llama, tmp_path) as b:
        await b.watch.check()
        fake_llama.behaviour.foreign = frozenset({"before"})
        assert not await b.scheduler._may_measure_bandwidth()
        b.time.now += 301
        assert await b.scheduler._may_measure_bandwidth(), "without any ceiling there is nothing to say"


async def test_kernels_of_a_known_ceiling_wait_until_it_is_about_to_expire(
    fake_llama: FakeLlama, tmp_path: Path
) -> None:
    async with bench(fake_llama, tmp_path) as b:
        await b.scheduler.run_once(probe=False)
        await b.watch.check()
        fake_llama.behaviour.foreign = frozenset({"before"})
        b.time.now += 301
        assert not await b.scheduler._may_measure_bandwidth()
        b.time.now += 22 * 3600
        assert not await b.scheduler._may_measure_bandwidth()
        b.time.now += 3600
        assert await b.scheduler._may_measure_bandwidth()


async def test_a_user_at_the_start_is_seen_before_the_first_kernel(fake_llama: FakeLlama, tmp_path: Path) -> None:
    fake_llama.behaviour.foreign = frozenset({"before"})
    loop, began = asyncio.get_running_loop(), asyncio.Event()
    async with bench(fake_llama, tmp_path) as b:
        start, seen = b.time.now, []

        def during() -> None:
            seen.append(b.time.now - start)
            loop.call_soon_threadsafe(began.set)

        b.meter.during = during
        running = asyncio.create_task(b.scheduler.run())
        await asyncio.wait_for(began.wait(), 60)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert 300 < seen[0] < 320, "one interval, for without a ceiling there is nothing to say"


async def test_where_no_triad_can_be_flushed_read_is_all_there_is(fake_llama: FakeLlama, tmp_path: Path) -> None:
    """On arm64 with little memory: not every run is a full one."""
    async with bench(fake_llama, tmp_path) as b:
        measure = b.meter.measure

        def without_triad(*, full: bool, progress: Callable[[str], None]) -> BandwidthRun:
            run = measure(full=full, progress=progress)
            read = tuple(m for m in run.measurements if m.kernel is Kernel.READ)
            return replace(run, measurements=read, rejected={Reason.UNSUPPORTED: 1})

        b.meter.measure = without_triad  # type: ignore[method-assign]
        await b.machine.measure()
        b.time.now = b.machine.due
        await b.machine.measure()
        assert b.meter.runs == [True, False]
