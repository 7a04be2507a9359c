"""One watched server: its record, kept up to date by health checks and probe cycles."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import structlog

from exporter.config import ProbeSettings, ServerSettings
from exporter.measure.model import ModelReader
from exporter.measure.probe import DecodeProbe, Identity, identify
from exporter.roofline.ceiling import Roof, RoofPolicy
from exporter.roofline.decode import DecodePoint, DecodeSample, place
from exporter.roofline.live import LiveSample
from exporter.roofline.reason import Outcome, Reason
from exporter.roofline.snapshot import BatchRecord, Model, Server, ServerState
from exporter.service.duty import DutyAccount
from exporter.service.policy import policy_of
from exporter.service.states import checked_state, live_state

log = structlog.get_logger()

FAILED_CHARGE: Final = 4
"""A probe that failed is charged at most this many times the time that a probe aims at."""
_LEAVE_ALONE: Final = frozenset({Reason.BUSY, Reason.SLEEPING})
"""Reasons that hold for every batch of a cycle."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks that the service reads: monotonic seconds for durations, Unix seconds for timestamps."""

    monotonic: Callable[[], float]
    unix: Callable[[], float]


class ServerWatch:
    """Checks and probes one server; `record` is what is known of it, replaced whole at every change.

    Args:
        settings: The server's configuration.
        probing: How probes are made.
        duty: What probes took so far; shared by all servers.
        probe: Makes the probes.
        models: Reads the model's file, where it can be seen.
        roof: The server's roof as it is known now, to compare samples with their thresholds.
        clocks: The clocks.
        machine_compute_peak: The configured one, FLOP/s; None to take the measured one.
    """

    def __init__(
        self,
        *,
        settings: ServerSettings,
        probing: ProbeSettings,
        duty: DutyAccount,
        probe: DecodeProbe,
        models: ModelReader,
        roof: Callable[[RoofPolicy], Roof],
        clocks: Clocks,
        machine_compute_peak: float | None = None,
    ) -> None:
        self._probing = probing
        self._duty = duty
        self._probe = probe
        self._models = models
        self._roof = roof
        self._clocks = clocks
        self._identity: Identity | None = None
        self._busy_at: float | None = None
        self._owed = list(probing.batches)
        self._round_cost = 0.0
        self._checked = False
        self._stalled = False
        self._generating = False
        self._generated_at = -math.inf
        self._log = log.bind(server=settings.name)
        self.due = clocks.monotonic()
        self.record = Server(
            name=settings.name,
            policy=policy_of(settings, machine_compute_peak),
            interval_seconds=probing.interval,
            check_interval_seconds=probing.health_interval,
            checked_at=clocks.monotonic(),
            batches={b: BatchRecord(threshold=settings.floor_fraction.get(b)) for b in probing.batches},
        )

    async def check(self) -> None:
        """Asks how the server is, without touching its model."""
        await self._identify(self._identity)

    async def has_users(self) -> bool:
        """Whether a user's request is known to be running; a sleeping or unknown server has none."""
        identity = self._identity
        return identity is not None and await self._probe.ready(identity, 1) is Reason.BUSY

    async def cycle(self, on_batch: Callable[[int], None] = lambda _: None) -> None:
        """Probes every batch that this round still owes, and decides when to go on."""
        if not self._checked:
            await self.check()
        if self.record.state.up:
            # A model may have gone to sleep since the last check, and must not be woken.
            await self._identify(None)
        identity = self._identity
        if not self.record.state.up or identity is None:
            self._take_failure(self.record.state_reason or Reason.UNREACHABLE)
            return
        confirm, reason, model = False, None, self.record.model
        while self._owed and reason not in _LEAVE_ALONE:
            batch = self._owed[0]
            on_batch(batch)
            began = self._clocks.monotonic()
            result: DecodeSample | Reason | None = await self._probe.ready(identity, batch)
            if result is None:
                self._generating = True
                try:
                    result = await self._probe.measure(identity, batch)
                finally:
                    self._generating, self._generated_at = False, self._clocks.monotonic()
                seconds = self._clocks.monotonic() - began
                if isinstance(result, Reason):
                    # A server that hung was waited for, not worked: its neighbours must not pay for the whole wait.
                    seconds = min(seconds, FAILED_CHARGE * self._probing.seconds)
                self._duty.charge(seconds)
                self._round_cost += seconds
            if self.record.model != model:
                # Another model since this batch began: what was measured is of neither, and a new round is due.
                return
            reason = result if isinstance(result, Reason) else None
            if isinstance(result, Reason):
                self._take_reason(batch, result, self._clocks.monotonic() - began)
            else:
                confirm |= self._take_sample(result, self._clocks.monotonic() - began)
            if reason not in _LEAVE_ALONE:
                self._owed.pop(0)
        self._plan(confirm=confirm, busy=reason is Reason.BUSY)

    def probed_since(self, moment: float) -> bool:
        """Whether the server worked for a probe of ours at or after `moment` (monotonic seconds)."""
        return self._generating or self._generated_at >= moment

    def take_live(self, sample: LiveSample | None, *, users: bool, stalled: bool) -> None:
        """What was seen of users: new figures (None keeps the old, which grow stale), whether requests run, or hang."""
        was, self._stalled = self.record.state, stalled
        state = live_state(was, users=users, stalled=stalled)
        self.record = replace(self.record, live=sample or self.record.live)
        if state is not was:
            reason = Reason.TIMEOUT if stalled else None
            self.record = replace(self.record, state=state, state_reason=reason)
            self._welcome(was)
            self._log.info("state", state=state.value, was=was.value, reason=_value(reason))

    async def prefill(self) -> None:
        """Sends one long prompt, for the report; the daemon never does, for it would stall a user's first tokens."""
        await self._identify(None)
        identity = self._identity
        if identity is None:
            self.record = replace(self.record, prefill=self.record.state_reason or Reason.UNREACHABLE)
            return
        found = await self._probe.ready(identity, 1) or await self._probe.prefill(identity)
        self.record = replace(self.record, prefill=found)

    def _plan(self, *, confirm: bool, busy: bool) -> None:
        """When to probe next; the duty cycle may put it off further."""
        now, soon = self._clocks.monotonic(), self._probing.health_interval
        if busy:
            # The round goes on where users interrupted it.
            self.due = now + soon
            return
        if self._round_cost:
            self._duty.settle(self.record.name, self._round_cost)
        self._owed, self._round_cost = list(self.record.batches), 0.0
        interval = max(self._probing.interval, self._duty.least_interval(), self._duty.pause())
        self.record = replace(self.record, interval_seconds=interval)
        # A first sample below its threshold is worth confirming as soon as the duty cycle allows.
        self.due = now + (soon if confirm else interval)

    def _take_failure(self, reason: Reason) -> None:
        """A round that could not begin: one failed probe, and no batch with a new sample."""
        self._busy_at = None
        failed = {b: replace(r, success=False, reason=reason) for b, r in self.record.batches.items()}
        self._count(reason, failed)
        self._log.warning("no probe", reason=reason.value)
        self.due = self._clocks.monotonic() + self._probing.interval

    async def _identify(self, known: Identity | None) -> Identity | Reason:
        answer = await identify(self._probe.client, known)
        if isinstance(answer, Reason):
            self._take_answer(answer, None)
        else:
            self._take_answer(answer, await self._models.describe(answer.props, answer.size))
        return answer

    def _take_answer(self, answer: Identity | Reason, model: Model | None) -> None:
        was, self._checked = self.record.state, True
        state = checked_state(answer, was, stalled=self._stalled)
        self.record = replace(self.record, checked_at=self._clocks.monotonic())
        if isinstance(answer, Reason):
            self.record = replace(self.record, state=state, state_reason=answer)
            # Another model may come back.
            self._identity = None
        else:
            if self.record.model is not None and self.record.model != model:
                self._forget_samples()
            why = Reason.TIMEOUT if state is ServerState.STALLED else None
            self.record = replace(self.record, state=state, state_reason=why, slots=answer.props.slots, model=model)
            self._identity = answer
            self._welcome(was)
        if state is not was:
            self._log.info("state", state=state.value, was=was.value, reason=_value(self.record.state_reason))

    def _welcome(self, was: ServerState) -> None:
        """A server that is back is probed at once, where the last probe failed."""
        if self.record.state.up and not was.up and any(r.success is False for r in self.record.batches.values()):
            self.due = self._clocks.monotonic()

    def _forget_samples(self) -> None:
        """Another model: what was measured of the old one is no longer true of this server."""
        self._log.info("model changed")
        self._probe.forget()
        fresh = {
            b: BatchRecord(threshold=r.threshold, last_success_timestamp=r.last_success_timestamp)
            for b, r in self.record.batches.items()
        }
        self.record = replace(self.record, batches=fresh, live=None)
        self._owed = list(fresh)
        self.due = self._clocks.monotonic()

    def _take_reason(self, batch: int, reason: Reason, seconds: float) -> None:
        now = self._clocks.monotonic()
        if reason is Reason.BUSY:
            lost = 0.0 if self._busy_at is None else now - self._busy_at
            spared = {b: replace(r, busy_seconds=r.busy_seconds + lost) for b, r in self.record.batches.items()}
            self.record = replace(self.record, state=ServerState.BUSY, batches=spared)
        self._busy_at = now if reason is Reason.BUSY else None
        old = self.record.batches[batch]
        if reason.outcome is Outcome.SKIPPED:
            # Nothing was probed: the last probe's result stands.
            new = replace(old, reason=reason)
        else:
            new = replace(old, success=False, reason=reason, duration_seconds=seconds)
        self._count(reason, {batch: new})
        self._log.info("probe", batch=batch, reason=reason.value, seconds=round(seconds, 3))

    def _take_sample(self, sample: DecodeSample, seconds: float) -> bool:
        """Publishes a sample; True when it is the first below its threshold."""
        self._busy_at = None
        old = self.record.batches[sample.batch]
        footprint = self.record.model.footprint if self.record.model else None
        point = place(sample, footprint, self._roof(self.record.policy))
        below = old.below_threshold_samples
        if old.threshold is not None and point.floor_ratio is not None:
            below = below + 1 if point.floor_ratio < old.threshold else 0
        new = BatchRecord(
            sample=sample,
            success=True,
            duration_seconds=seconds,
            last_success_timestamp=self._clocks.unix(),
            threshold=old.threshold,
            below_threshold_samples=below,
        )
        self.record = replace(
            self.record,
            state=ServerState.READY,
            succeeded=self.record.succeeded + 1,
            batches={**self.record.batches, sample.batch: new},
        )
        self._log_sample(point, seconds)
        return below == 1

    def _log_sample(self, point: DecodePoint, seconds: float) -> None:
        sample = point.sample
        self._log.info(
            "probe",
            batch=sample.batch,
            tokens_per_second=round(sample.tokens_per_second, 1),
            step_ms=round(sample.step_seconds * 1e3, 2),
            floor_ratio=None if point.floor_ratio is None else round(point.floor_ratio, 3),
            contended=sample.contended,
            seconds=round(seconds, 3),
        )
        if point.implausible:
            self._log.warning(
                "decode is faster than this machine's memory: is this server on a GPU? set device: gpu",
                batch=sample.batch,
                step_gb_per_second=round((point.step_bytes_per_second or 0.0) / 1e9, 1),
            )

    def _count(self, reason: Reason, batches: Mapping[int, BatchRecord]) -> None:
        counts = {**self.record.counts, reason: self.record.counts.get(reason, 0) + 1}
        self.record = replace(self.record, counts=counts, batches={**self.record.batches, **batches})


def _value(reason: Reason | None) -> str | None:
    return None if reason is None else reason.value
