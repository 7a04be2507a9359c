"""The one measuring loop: bandwidth runs and probe cycles in turn, never together; health checks beside it."""

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

import structlog

from exporter.config import Settings
from exporter.measure.prompts import PROMPT_FAMILIES
from exporter.roofline.ceiling import BandwidthRun, BandwidthTrack, Roof, RoofPolicy
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import CHECK_SECONDS, Host, HostInfo, Snapshot, host_roof
from exporter.service.duty import DutyAccount
from exporter.service.watch import Clocks, ServerWatch

log = structlog.get_logger()

FULL_RUN_SECONDS: Final = 3600.0
"""Every kernel is measured at the start and then this often; in between only those that ceilings come from."""
RETRY_SECONDS: Final = 30.0
FIRST_ATTEMPTS: Final = 3
DISTURBED: Final = frozenset({Reason.PREEMPTED, Reason.PAGE_FAULTS, Reason.IMBALANCED, Reason.UNSTABLE})
"""Reasons that the next run may not meet."""
HEALTHY_INTERVALS: Final = 3
_TICK: Final = 0.5
_BANDWIDTH_SECONDS: Final = 60.0
"""A bandwidth run takes seconds; longer than this, it hangs."""


Progress = Callable[[str], None]
"""Told, in a few words, what is being measured now."""


LiveFollower = Callable[[ServerWatch, Callable[[], None]], Coroutine[None, None, None]]
"""Follows a server's users; calls back after each change of the watch's record."""


def _silent(_: str) -> None:
    """Nobody watches."""


class Meter(Protocol):
    """Measures bandwidth; `BandwidthMeter` is one. `measure` blocks, `cancel` comes from another thread."""

    def measure(self, *, full: bool, progress: Progress) -> BandwidthRun:
        """Runs the kernels."""

    def cancel(self) -> None:
        """Ends the running measurement within milliseconds."""


class Scheduler:
    """Owns the snapshot and everything that changes it; runs on one event loop, so no lock is needed.

    Args:
        settings: The configuration.
        watches: Makes the servers' watches, in the order of the configuration.
        duty: What probes took; the watches charge it.
        meter: Measures bandwidth; blocks, and so runs in `executor`.
        executor: A single dedicated thread.
        info: The machine.
        clocks: The clocks.
        progress: Told what is being measured.
        sleep: Sleeps some seconds.
        live: Follows a server's users for ever, and tells when its record has changed.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        watches: Callable[[Callable[[RoofPolicy], Roof]], Sequence[ServerWatch]],
        duty: DutyAccount,
        meter: Meter,
        executor: Executor,
        info: HostInfo,
        clocks: Clocks,
        progress: Progress = _silent,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        live: LiveFollower | None = None,
    ) -> None:
        self._settings = settings
        self._duty = duty
        self._meter = meter
        self._executor = executor
        self._clocks = clocks
        self._progress = progress
        self._sleep = sleep
        self._live = live
        self._host = Host(info)
        self._watches = tuple(watches(lambda policy: host_roof(self._host, policy, clocks.monotonic())))
        self._started = clocks.unix()
        self._bandwidth_due = self._full_due = clocks.monotonic()
        self._failed_runs = 0
        self._warned = False
        self._asked_users_at = -math.inf
        self._alive_until = clocks.monotonic() + HEALTHY_INTERVALS * settings.probe.health_interval
        self.first_cycle_done = asyncio.Event()
        self.snapshot = self._freeze()

    def healthy(self) -> bool:
        """Whether the measuring loop has ticked when it should have."""
        return self._clocks.monotonic() <= self._alive_until

    async def run(self) -> None:
        """Checks and measures until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._check_forever())
                group.create_task(self._measure_forever())
                if (live := self._live) is not None:
                    for watch in self._watches:
                        group.create_task(live(watch, self._refresh))
        finally:
            self._meter.cancel()

    async def run_once(self, *, probe: bool = True, prefill: bool = False) -> Snapshot:
        """One full bandwidth run and one cycle of each server, then a long prompt if asked, for the command line."""
        try:
            await asyncio.gather(*(watch.check() for watch in self._watches if probe))
            await self._measure_first_bandwidth()
            for watch in self._watches if probe else ():
                await self._cycle(watch, whole=True)
            for watch in self._watches if prefill else ():
                self._progress(f"{watch.record.name}: prefill")
                await watch.prefill()
            self.snapshot = self._freeze()
        finally:
            self._meter.cancel()
        return self.snapshot

    async def _check_forever(self) -> None:
        interval = self._settings.probe.health_interval
        while True:
            await asyncio.gather(*(self._check(watch) for watch in self._watches))
            await self._sleep(interval)

    async def _check(self, watch: ServerWatch) -> None:
        """One server that hangs does not keep the others' state from being seen."""
        await watch.check()
        self.snapshot = self._freeze()

    async def _measure_forever(self) -> None:
        await self._measure_first_bandwidth()
        while True:
            self._expect_tick(0.0)
            if self._clocks.monotonic() >= self._bandwidth_due and await self._may_measure_bandwidth():
                await self._measure_bandwidth()
            for watch in sorted(self._watches, key=lambda w: w.due):
                # The duty cycle may put a server off, but not the word that one cannot be probed.
                if self._clocks.monotonic() >= watch.due and (self._duty.free() or not watch.record.state.up):
                    await self._cycle(watch)
            self.first_cycle_done.set()
            self.snapshot = self._freeze()
            await self._sleep(_TICK)

    async def _may_measure_bandwidth(self) -> bool:
        """Kernels wait for users' requests to end, but not for ever: a pass that was disturbed is rejected anyway."""
        now = self._clocks.monotonic()
        if now - self._bandwidth_due > self._settings.bandwidth.interval:
            return True
        if now - self._asked_users_at < self._settings.probe.health_interval:
            return False
        self._asked_users_at = now
        return not any([await watch.has_users() for watch in self._watches])

    async def _measure_first_bandwidth(self) -> None:
        """At the start a few disturbed runs are made again at once: without a ceiling there is nothing to say."""
        for _ in range(FIRST_ATTEMPTS):
            await self._measure_bandwidth()
            if self._host.problem not in DISTURBED:
                break

    async def _measure_bandwidth(self) -> None:
        started = self._clocks.monotonic()
        full = started >= self._full_due
        loop = asyncio.get_running_loop()
        # The meter speaks from its own thread; progress is drawn on this one.

        def tell(step: str) -> None:
            loop.call_soon_threadsafe(self._progress, step)

        self._expect_tick(_BANDWIDTH_SECONDS)
        try:
            run = await loop.run_in_executor(self._executor, partial(self._meter.measure, full=full, progress=tell))
        except RuntimeError as error:
            # Python's word for a machine that gives no more threads.
            log.warning("no thread to measure bandwidth in", error=str(error))
            run = BandwidthRun.failed(Reason.NO_THREADS)
        self._plan_bandwidth(started, full=full, failed=run.problem is not None)
        self._host = _with_run(self._host, run, self._clocks)
        self._warn_of_own_cpus(run)
        self.snapshot = self._freeze()
        log.info(
            "bandwidth",
            full=full,
            seconds=round(self._clocks.monotonic() - started, 2),
            problem=run.problem.value if run.problem else None,
            rejected={reason.value: count for reason, count in run.rejected.items()},
            **{
                f"{b.kernel}_{b.threads}_gb_per_second": round(b.best_bytes_per_second / 1e9, 1)
                for b in run.measurements
            },
        )

    def _warn_of_own_cpus(self, run: BandwidthRun) -> None:
        """Once: the ceiling is that of fewer CPUs than the machine has, and nobody saw the server's."""
        own = [b for b in run.measurements if b.scope == "exporter"]
        narrower = len(run.cpus) < (os.cpu_count() or 1) or any("quota" in b.flags for b in own)
        if own and narrower and not self._warned:
            self._warned = True
            log.warning(
                "the ceiling is measured on the exporter's own CPUs, which are fewer than the machine's: share the PID"
                " namespace with the server, or give the exporter the server's CPUs and no CPU limit",
                cpus=len(run.cpus),
            )

    def _plan_bandwidth(self, started: float, *, full: bool, failed: bool) -> None:
        """After a run without a ceiling the next comes sooner, each time after twice the pause."""
        interval = self._settings.bandwidth.interval
        self._failed_runs = self._failed_runs + 1 if failed else 0
        pause = min(interval, RETRY_SECONDS * 2 ** min(self._failed_runs - 1, 10)) if failed else interval
        self._bandwidth_due = started + pause
        if full and not failed:
            self._full_due = started + FULL_RUN_SECONDS

    async def _cycle(self, watch: ServerWatch, *, whole: bool = False) -> None:
        # Bounded by its timeouts: for each batch a short run and a long one, each with every family of prompts.
        requests = 2 * PROMPT_FAMILIES * len(watch.record.batches)
        self._expect_tick(requests * (self._settings.probe.timeout + CHECK_SECONDS))

        def on_batch(batch: int) -> None:
            self.snapshot = self._freeze()
            self._progress(f"{watch.record.name}: decode, batch {batch}")

        await watch.cycle(on_batch, whole=whole)
        self.snapshot = self._freeze()
        self._expect_tick(0.0)

    def _expect_tick(self, work: float) -> None:
        """The measuring loop is alive now, and will be again after at most `work` seconds."""
        grace = HEALTHY_INTERVALS * self._settings.probe.health_interval
        self._alive_until = self._clocks.monotonic() + work + grace

    def _refresh(self) -> None:
        self.snapshot = self._freeze()

    def _freeze(self) -> Snapshot:
        return Snapshot(
            host=self._host,
            servers=tuple(watch.record for watch in self._watches),
            duty_cycle_ratio=self._duty.ratio(),
            config_reload_timestamp=self._started,
        )


def _with_run(host: Host, run: BandwidthRun, clocks: Clocks) -> Host:
    """The host's record after one more bandwidth run."""
    tracks = dict(host.tracks)
    for bandwidth in run.measurements:
        key = (bandwidth.kernel, bandwidth.threads)
        tracks[key] = tracks.get(key, BandwidthTrack()).add(bandwidth)
    return replace(
        host,
        tracks=tracks,
        compute=run.compute or host.compute,
        runs=host.runs + 1,
        last_success_timestamp=clocks.unix() if run.measurements else host.last_success_timestamp,
        rejected_passes=_added(host.rejected_passes, run.rejected),
        problem=run.problem,
    )


def _added(one: Mapping[Reason, int], other: Mapping[Reason, int]) -> dict[Reason, int]:
    return {reason: one.get(reason, 0) + other.get(reason, 0) for reason in {*one, *other}}
