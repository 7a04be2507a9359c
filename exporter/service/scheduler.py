"""The one measuring loop: bandwidth runs and probe cycles in turn, never together; health checks beside it."""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Final

from exporter.config import Settings
from exporter.roofline.snapshot import CHECK_SECONDS, Snapshot
from exporter.service.ceilings import FIRST_ATTEMPTS, HostWatch, Progress
from exporter.service.clocks import Clocks
from exporter.service.duty import DutyAccount
from exporter.service.watch import ServerWatch

HEALTHY_INTERVALS: Final = 3
_TICK: Final = 0.5
_BANDWIDTH_SECONDS: Final = 60.0
"""A bandwidth run takes seconds; longer than this, it hangs."""


LiveFollower = Callable[[ServerWatch, Callable[[], None]], Coroutine[None, None, None]]
"""Follows a server's users; calls back after each change of the watch's record."""


def _silent(_: str) -> None:
    """Nobody watches."""


class Scheduler:
    """Owns the snapshot and everything that changes it; runs on one event loop, so no lock is needed.

    Args:
        settings: The configuration.
        watches: The servers' watches, in the order of the configuration.
        duty: What probes took; the watches charge it.
        machine: This machine's watch.
        clocks: The clocks.
        progress: Told what is being measured.
        sleep: Sleeps some seconds.
        live: Follows a server's users for ever, and tells when its record has changed.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        watches: Sequence[ServerWatch],
        duty: DutyAccount,
        machine: HostWatch,
        clocks: Clocks,
        progress: Progress = _silent,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        live: LiveFollower | None = None,
    ) -> None:
        self._settings = settings
        self.duty = duty
        self.machine = machine
        self._clocks = clocks
        self._progress = progress
        self._sleep = sleep
        self.watches = tuple(watches)
        self._live = live
        self._started = clocks.unix()
        self._asked_users_at = -math.inf
        self._alive_until = clocks.monotonic() + HEALTHY_INTERVALS * settings.probe.health_interval
        self._finishing = False
        self._unchecked = {watch.record.name for watch in self.watches}
        self._first_checks_done = asyncio.Event()
        self.first_cycle_done = asyncio.Event()
        self.snapshot = self._freeze()

    def healthy(self) -> bool:
        """Whether the measuring loop has ticked when it should have."""
        return self._clocks.monotonic() <= self._alive_until

    def finish(self) -> None:
        """Ends `run` once the work at hand is done, within a tick when there is none."""
        self._finishing = True

    async def run(self) -> None:
        """Checks and measures until cancelled, or until `finish` was called and a cycle has ended."""
        try:
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(self._check_forever(watch)) for watch in self.watches]
                if (live := self._live) is not None:
                    beside += [group.create_task(live(watch, self._refresh)) for watch in self.watches]
                await self._measure_forever()
                for task in beside:
                    task.cancel()
        finally:
            self.machine.cancel()

    async def run_once(self, *, probe: bool = True, prefill: bool = False) -> Snapshot:
        """One full bandwidth run and one cycle of each server, then a long prompt if asked, for the command line."""
        try:
            await asyncio.gather(*(watch.check() for watch in self.watches if probe))
            await self._measure_bandwidth()
            for watch in self.watches if probe else ():
                await self._cycle(watch, whole=True)
            for watch in self.watches if prefill else ():
                self._progress(f"{watch.record.name}: prefill")
                await watch.prefill()
            self.snapshot = self._freeze()
        finally:
            self.machine.cancel()
        return self.snapshot

    async def _check_forever(self, watch: ServerWatch) -> None:
        """A loop for each server: one that hangs does not keep the others' state from being seen."""
        while True:
            await self._check(watch)
            self._unchecked.discard(watch.record.name)
            if not self._unchecked:
                self._first_checks_done.set()
            await self._sleep(self._settings.probe.health_interval)

    async def _check(self, watch: ServerWatch) -> None:
        was_up = watch.record.state.up
        await watch.check()
        if watch.record.state.up and not was_up:
            self.machine.server_appeared()
        self.snapshot = self._freeze()

    async def _measure_forever(self) -> None:
        # Whether users are served is known only once the servers were asked.
        self._expect_tick(CHECK_SECONDS)
        if self.watches:
            with contextlib.suppress(TimeoutError):
                # Not wait_for, which in Python 3.11 may swallow a cancellation.
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._first_checks_done.wait()
        while not self._finishing:
            self._expect_tick(0.0)
            if self._clocks.monotonic() >= self.machine.due and await self._may_measure_bandwidth():
                await self._measure_bandwidth()
            for watch in sorted(self.watches, key=lambda w: w.due):
                # The duty cycle may put a server off, but not the word that one cannot be probed.
                if self._clocks.monotonic() >= watch.due and (self.duty.free() or not watch.record.state.up):
                    await self._cycle(watch)
            self.first_cycle_done.set()
            self.snapshot = self._freeze()
            await self._sleep(_TICK)

    async def _may_measure_bandwidth(self) -> bool:
        """Kernels wait for users' requests to end; only a ceiling that nobody knows, or that expires, does not."""
        now = self._clocks.monotonic()
        if self.machine.forced():
            return True
        if now - self._asked_users_at < self._settings.probe.health_interval:
            return False
        self._asked_users_at = now
        self._expect_tick(CHECK_SECONDS)
        return not any(await asyncio.gather(*(watch.has_users() for watch in self.watches)))

    async def _measure_bandwidth(self) -> None:
        """One run; the first is made again at once when it was disturbed: without a ceiling there is nothing to say."""
        for _ in range(1 if self.machine.host.runs else FIRST_ATTEMPTS):
            self._expect_tick(_BANDWIDTH_SECONDS)
            disturbed = await self.machine.measure()
            self.snapshot = self._freeze()
            if not disturbed:
                break

    async def _cycle(self, watch: ServerWatch, *, whole: bool = False) -> None:
        def on_batch(batch: int) -> None:
            self._expect_request()
            self.snapshot = self._freeze()
            self._progress(f"{watch.record.name}: decode, batch {batch}")

        async def users_beside() -> str | None:
            return await self._users_beside(watch)

        # A probe sends several requests; each has its time, and none has that of all.
        watch.probe.client.before_post = self._expect_request
        self._expect_request()
        await watch.cycle(on_batch, users_beside=users_beside, whole=whole)
        self.snapshot = self._freeze()
        self._expect_tick(0.0)

    async def _users_beside(self, watch: ServerWatch) -> str | None:
        """Another server that serves users on the same CPUs, for a CPU server; a probe would slow it as its own."""
        if watch.settings.device != "cpu":
            return None
        others = [w for w in self.watches if w is not watch and w.settings.device == "cpu"]
        served = await asyncio.gather(*(other.has_users() for other in others))
        return next((other.record.name for other, users in zip(others, served, strict=True) if users), None)

    def _expect_request(self) -> None:
        """The loop goes on after one request's time, and that of the questions around it, at most."""
        self._expect_tick(self._settings.probe.timeout + CHECK_SECONDS)

    def _expect_tick(self, work: float) -> None:
        """The measuring loop is alive now, and will be again after at most `work` seconds."""
        grace = HEALTHY_INTERVALS * self._settings.probe.health_interval
        self._alive_until = self._clocks.monotonic() + work + grace

    def _refresh(self) -> None:
        self.snapshot = self._freeze()

    def _freeze(self) -> Snapshot:
        return Snapshot(
            host=self.machine.host,
            servers=tuple(watch.record for watch in self.watches),
            duty_cycle_ratio=self.duty.ratio(),
            config_reload_timestamp=self._started,
        )
