"""This machine's record, kept up to date by bandwidth runs: when the next one is due, and what the last ones found."""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, Protocol

import structlog

from exporter.present.words import REASONS
from exporter.roofline.ceiling import BandwidthRun, BandwidthTrack, Kernel, ThreadScope
from exporter.roofline.passes import DISTURBED
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import Host, HostInfo
from exporter.service.clocks import Clocks

log = structlog.get_logger()

FULL_RUN_SECONDS: Final = 3600.0
"""Every kernel is measured at the start and then this often; in between only those that ceilings come from."""
FORCED_RUN_SECONDS: Final = 23 * 3600.0
"""Kernels that users keep waiting run all the same when the ceiling is about to expire."""
RETRY_SECONDS: Final = 30.0
FIRST_ATTEMPTS: Final = 3
REST_RATIO: Final = 100
"""After a run that lacks a ceiling the next one waits at least this many times as long as it took: 1 % of the time.

A run takes seconds, on every core, where others disturb it; only the first attempts of all may follow sooner.
"""

Progress = Callable[[str], None]
"""Told, in a few words, what is being measured now."""


class Meter(Protocol):
    """Measures bandwidth; `BandwidthMeter` is one. `measure` blocks, `cancel` comes from another thread."""

    def measure(self, *, full: bool, progress: Progress) -> BandwidthRun:
        """Runs the kernels."""

    def cancel(self) -> None:
        """Ends the running measurement within milliseconds."""


class HostWatch:
    """Measures this machine; `host` is what is known of it, replaced whole at every change.

    Args:
        interval: Seconds between two runs.
        meter: Measures bandwidth; blocks, and so runs in a thread.
        info: The machine.
        clocks: The clocks.
        progress: Told what is being measured.
    """

    def __init__(self, *, interval: float, meter: Meter, info: HostInfo, clocks: Clocks, progress: Progress) -> None:
        self._interval = interval
        self._meter = meter
        self._clocks = clocks
        self._progress = progress
        self._failed_runs = 0
        self._warned = False
        self._told: Reason | None = None
        self._at_once = True
        self._measured_at: float | None = None
        self._rested_at = clocks.monotonic()
        self._cpus: tuple[int, ...] = ()
        self._full_due = self.due = clocks.monotonic()
        self.host = Host(info)

    def configure(self, *, interval: float, meter: Meter) -> None:
        """Goes on under another configuration; what was found of the machine stays true."""
        self._interval, self._meter = interval, meter
        self.due = min(self.due, max(self._clocks.monotonic() + interval, self._rested_at))

    def cancel(self) -> None:
        """Ends a running measurement within milliseconds."""
        self._meter.cancel()

    def forced(self) -> bool:
        """Whether users who keep the kernels waiting have done so long enough: no ceiling, or one about to expire."""
        now = self._clocks.monotonic()
        if self._measured_at is None:
            return now - self.due > self._interval
        return now - self._measured_at > FORCED_RUN_SECONDS

    def server_appeared(self) -> None:
        """Has the CPUs of a server measured soon that may be seen only now; not at every turn of one that flaps."""
        self.due = min(self.due, max(self._clocks.monotonic(), self._rested_at))

    async def measure(self) -> bool:
        """One run, full when that is due; whether it was disturbed, so that another one may find what it lacks."""
        started = self._clocks.monotonic()
        full = started >= self._full_due
        loop = asyncio.get_running_loop()
        # The meter speaks from its own thread; progress is drawn on this one.

        def tell(step: str) -> None:
            loop.call_soon_threadsafe(self._progress, step)

        wanted = True

        def work() -> BandwidthRun:
            return self._meter.measure(full=full, progress=tell) if wanted else BandwidthRun.failed(Reason.CANCELLED)

        try:
            working = loop.run_in_executor(None, work)
        except RuntimeError as error:
            # Python's word for a machine that gives no more threads; the work stays queued for one that comes free.
            wanted = False
            log.warning("no thread to measure bandwidth in", error=str(error))
            run = BandwidthRun.failed(Reason.NO_THREADS)
        else:
            run = await working
        self._plan(started, run, full=full)
        self._move(started, run)
        self.host = _with_run(self.host, run, self._clocks)
        self._warn_of_own_cpus(run)
        disturbed = not _is_complete(run) and (run.problem is None or run.problem in DISTURBED)
        # Only the very first runs, as long as nothing else than a disturbance stands in their way.
        self._at_once = self._at_once and disturbed and self.host.runs < FIRST_ATTEMPTS
        self._tell(started, run, full=full)
        return disturbed

    def _tell(self, started: float, run: BandwidthRun, *, full: bool) -> None:
        """What the run found; a warning when there is no read ceiling in force, new or for another reason.

        No warning yet while the first runs are made again at once; one more line when there is a ceiling after one.
        """
        now = self._clocks.monotonic()
        read = self.host.tracks.get((Kernel.READ, ThreadScope.ALL), BandwidthTrack()).in_force(now)
        problem = run.problem if read is None else None
        tell, why = log.info, {}
        if problem is not None and self._at_once:
            why = {"so": "trying again"}
        elif problem not in {None, self._told}:
            tell, why = log.warning, {"means": REASONS[problem], "so": "no read ceiling: no floor and no ratio"}
        known_again = self._told is not None and read is not None
        self._told = None if self._at_once else problem
        tell(
            "bandwidth",
            full=full,
            seconds=round(now - started, 2),
            problem=run.problem.value if run.problem else None,
            rejected={reason.value: count for reason, count in run.rejected.items()},
            **why,
            **{
                f"{b.kernel}_{b.threads}_gb_per_second": round(b.best_bytes_per_second / 1e9, 1)
                for b in run.measurements
            },
        )
        if known_again:
            log.info("a read ceiling is known again")

    def _plan(self, started: float, run: BandwidthRun, *, full: bool) -> None:
        """After a run that lacks a ceiling a full one comes soon, each time after twice the pause, and a rest."""
        lacking = not _is_complete(run)
        self._failed_runs = self._failed_runs + 1 if lacking else 0
        self.due, self._rested_at = started + self._interval, started + RETRY_SECONDS
        if lacking:
            self._full_due = min(self._full_due, started)
            ended = self._clocks.monotonic()
            if self._measured_at is not None or self._failed_runs > FIRST_ATTEMPTS:
                self._rested_at = max(self._rested_at, ended + REST_RATIO * (ended - started))
            retry = min(self._interval, RETRY_SECONDS * 2 ** min(self._failed_runs - 1, 10))
            self.due = max(started + retry, self._rested_at)
        elif full:
            self._full_due = started + FULL_RUN_SECONDS
        if run.problem is None:
            self._measured_at = started

    def _move(self, started: float, run: BandwidthRun) -> None:
        """On other CPUs than before, as when the server is seen at last, what those sustained is no ceiling."""
        if run.cpus and run.cpus != self._cpus:
            if self._cpus and run.compute is None:
                self._full_due = min(self._full_due, started)
            self._cpus, self.host = run.cpus, replace(self.host, tracks={}, compute=None)

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


def _is_complete(run: BandwidthRun) -> bool:
    """Whether the run gave every ceiling that a server may refer to, and no disturbance cost it the compute peak."""
    measured = {b.kernel for b in run.measurements if b.threads is ThreadScope.ALL}
    # Where nothing can be written past the caches, no flushed triad can be measured.
    needed = {Kernel.READ} if Reason.UNSUPPORTED in run.rejected else {Kernel.READ, Kernel.TRIAD}
    ceilings = run.problem is None and measured >= needed
    return ceilings and run.compute_problem not in DISTURBED


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
        last_success_timestamp=clocks.unix() if run.problem is None else host.last_success_timestamp,
        rejected_passes=_added(host.rejected_passes, run.rejected),
        problem=run.problem,
    )


def _added(one: Mapping[Reason, int], other: Mapping[Reason, int]) -> dict[Reason, int]:
    return {reason: one.get(reason, 0) + other.get(reason, 0) for reason in {*one, *other}}
