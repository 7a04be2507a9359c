"""Watching one server's own users: gentle polls, never during a probe of ours, never of a model that may sleep."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Final, Literal

import structlog

from exporter.config import ServerSettings
from exporter.measure.live import LiveReader
from exporter.roofline.counters import CounterTrack
from exporter.roofline.live import LiveTrack
from exporter.roofline.progress import Progress
from exporter.roofline.reason import Reason
from exporter.roofline.slots import busy
from exporter.roofline.snapshot import ServerState
from exporter.service.watch import ServerWatch

log = structlog.get_logger()

PACE_SECONDS: Final = 1.0
"""Between two polls while requests run."""
QUICK_SECONDS: Final = 0.3
"""The same after an interval that did not count: requests come and go, and a shorter one may fit between them."""
LEAST_PART: Final = 20
"""A poll takes at most this part of the time, also on a server that answers slowly."""
AFTER_PROBE_SECONDS: Final = 2.0
"""Time for a cancelled request of ours to leave its slot."""
LONGEST_PAUSE_SECONDS: Final = 600.0
_REFUSED: Final = frozenset({Reason.NOT_SUPPORTED, Reason.NOT_LLAMA, Reason.UNAUTHORIZED})
"""The endpoint is switched off, or is not for us; that changes only when the server is started anew."""

_GONE: Final = frozenset({Reason.UNREACHABLE, Reason.LOADING})
"""The server went away, or came anew."""

Mode = Literal["slots", "metrics", "off"]


class LiveWatch:
    """Follows the users of one server and tells its watch.

    Args:
        settings: The server's configuration.
        watch: The server's record.
        reader: Asks the server.
        clock: Monotonic seconds.
        sleep: Sleeps some seconds.
        changed: Called after the watch was told something.
    """

    def __init__(
        self,
        settings: ServerSettings,
        watch: ServerWatch,
        reader: LiveReader,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._watch = watch
        self._reader = reader
        self._clock = clock
        self._sleep = sleep
        self._changed = changed
        self._interval = watch.record.check_interval_seconds
        self._mode: Mode = "off" if settings.sleep_idle is not None else settings.live
        self._fallback = settings.live == "metrics"
        self._track = LiveTrack()
        self._counters = CounterTrack()
        self._progress = Progress(clock())
        self._users = False
        self._model = watch.record.model
        self._gone_at = -math.inf
        self._failures = 0
        self._told: Reason | None = None
        self._log = log.bind(server=settings.name)
        if settings.sleep_idle is not None and settings.live != "off":
            self._log.info("live traffic is not watched: asking would keep the model awake")
        if self._mode == "metrics":
            # The slots' exact counts are better, where the server tells them.
            self._mode = "slots"

    async def run(self) -> None:
        """Polls until cancelled, or until it is clear that this server must not be polled."""
        while self._mode != "off":
            await self._sleep(await self.tick())

    async def tick(self) -> float:
        """At most one poll; the seconds until the next."""
        state = self._watch.record.state
        sleeping = state is ServerState.SLEEPING and self._watch.record.state_reason is not Reason.MODEL_UNLOADED
        if sleeping or self._watch.probe.manners.sleeps:
            return self._switch_off()
        if self._watch.probed_since(self._clock() - AFTER_PROBE_SECONDS):
            self._cut()
            return AFTER_PROBE_SECONDS
        if self._watch.record.model != self._model:
            # What was seen of another model is not this one's.
            self._model, self._track = self._watch.record.model, LiveTrack()
            self._cut()
        awaits_check = self._watch.record.checked_at <= self._gone_at
        if awaits_check or state not in {ServerState.READY, ServerState.BUSY, ServerState.STALLED}:
            self._cut()
            return min(PACE_SECONDS, self._interval)
        if not self._users:
            # Idle, a model may have gone to sleep since the last look, and must not be woken.
            asleep = await self._reader.asleep()
            if asleep is True:
                return self._switch_off()
            if isinstance(asleep, Reason):
                self._lost(asleep)
                return self._interval
        asked = self._clock()
        fault = await (self._poll_slots() if self._mode == "slots" else self._poll_counters())
        self._changed()
        if fault is not None:
            return self._failed(fault)
        self._failures, self._told = 0, None
        if not self._users:
            return self._interval
        pace = PACE_SECONDS if self._mode == "metrics" or self._track.clean else QUICK_SECONDS
        return min(self._interval, max(pace, LEAST_PART * (self._clock() - asked)))

    async def _poll_slots(self) -> Reason | None:
        asked = self._clock()
        poll = await self._reader.slots()
        if self._watch.probed_since(asked):
            self._cut()
            return None
        now = self._clock()
        if isinstance(poll, Reason):
            if poll is not Reason.TIMEOUT:
                return poll
            # A server that hangs in its work answers this no more; its slots are as they were last seen.
            self._track, self._progress = self._track.cut(), self._progress.unanswered()
            if self._has_stalled(now):
                self._watch.take_live(None, users=self._users, stalled=True)
            return poll
        if any(slot.processing and slot.probe for slot in poll.slots):
            # Another exporter's probe is nobody's traffic.
            self._cut()
            return None
        self._track = self._track.add(poll)
        self._progress = self._progress.seen(poll.slots, now)
        self._users = busy(poll.slots) > 0
        self._watch.probe.manners.see_slots(poll.slots)
        self._watch.take_live(self._track.sample(), users=self._users, stalled=self._has_stalled(now))
        return None

    def _has_stalled(self, now: float) -> bool:
        steps = [r.sample.step_seconds for r in self._watch.record.batches.values() if r.sample is not None]
        return self._progress.stalled(now, self._interval, max(steps, default=0.0))

    async def _poll_counters(self) -> Reason | None:
        asked = self._clock()
        reading = await self._reader.counters()
        if self._watch.probed_since(asked):
            self._cut()
            return None
        if isinstance(reading, Reason):
            return reading
        self._counters = self._counters.add(reading)
        self._users = reading.processing > 0
        self._watch.take_live(self._counters.sample(), users=self._users, stalled=False)
        return None

    def _cut(self) -> None:
        """From here to the next poll, what happens is not the users' alone, or not known."""
        self._track, self._counters = self._track.cut(), self._counters.cut()
        self._progress = Progress(self._clock())
        self._users = False

    def _lost(self, fault: Reason) -> None:
        """After a failure nothing joins; where another server or model may come back, a health check tells which."""
        self._cut()
        if fault in _GONE:
            self._gone_at = self._clock()

    def _failed(self, fault: Reason) -> float:
        """Each failure in a row doubles the pause; one that will stay is told once and asked about rarely."""
        self._failures += 1
        if fault is not self._told:
            self._told = fault
            self._log.info("users' traffic cannot be read", endpoint=self._mode, reason=fault.value)
        if fault in _REFUSED:
            if self._mode == "slots" and self._fallback:
                self._mode, self._failures, self._told = "metrics", 0, None
                return PACE_SECONDS
            self._cut()
            return LONGEST_PAUSE_SECONDS
        if fault is not Reason.TIMEOUT:
            self._lost(fault)
        most = max(self._interval, 8 * PACE_SECONDS)
        return float(min(most, PACE_SECONDS * 2 ** min(self._failures, 10)))

    def _switch_off(self) -> float:
        self._mode = "off"
        self._log.info("users' traffic is not watched any more: asking would wake the model, or keep it awake")
        return 0.0
