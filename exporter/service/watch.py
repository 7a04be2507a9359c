"""One watched server: its record, kept up to date by health checks and probe cycles."""

import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

import structlog

from exporter.config import ProbeSettings, ServerSettings
from exporter.measure.model import ModelReader
from exporter.measure.probe import DecodeProbe, Identity
from exporter.measure.sleep import SleepReader
from exporter.roofline.ceiling import Roof, RoofPolicy
from exporter.roofline.decode import DecodeSample
from exporter.roofline.live import LiveSample
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import BatchRecord, Model, Server, ServerState
from exporter.service.checkup import Checkup, started_anew
from exporter.service.clocks import Clocks
from exporter.service.duty import DutyAccount
from exporter.service.policy import policy_of
from exporter.service.record import (
    placed,
    with_failure,
    with_reason,
    with_sample,
    with_state,
    with_users,
    without_samples,
    without_samples_above,
)
from exporter.service.rounds import USERS, Rounds
from exporter.service.states import checked_state, live_state
from exporter.service.telling import tell_no_probe, tell_reason, tell_sample, tell_state

log = structlog.get_logger()

_CANNOT: Final = frozenset({Reason.NOT_SUPPORTED, Reason.NOT_LLAMA})
"""Answers to a completion that say: this server, well as it is, cannot be measured."""


async def _nobody() -> None:
    """No server is beside this one."""


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
        chance: A random number in [0, 1), so that retries of several exporters do not fall together.
        sleep: Finds out when the server sleeps, where the configuration does not say.
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
        chance: Callable[[], float] = random.random,
        sleep: SleepReader | None = None,
    ) -> None:
        self.settings = settings
        self.probe = probe
        self._roof = roof
        self._clocks = clocks
        self._identity: Identity | None = None
        self._marker: str | None = None
        self._cannot: Reason | None = None
        self._busy_at: float | None = None
        self._generating, self._generated_at = False, -math.inf
        self._checked = False
        self._stalled = False
        self._warned: Reason | None = None
        self.rounds = Rounds(
            name=settings.name,
            batches=probing.batches,
            probing=probing,
            duty=duty,
            clock=clocks.monotonic,
            chance=chance,
        )
        self._log = log.bind(server=settings.name)
        self.checkup = Checkup(settings, probe, models, sleep or SleepReader(settings.url), self._log)
        self.record = Server(
            name=settings.name,
            policy=policy_of(settings, machine_compute_peak),
            interval_seconds=probing.interval,
            check_interval_seconds=probing.health_interval,
            checked_at=clocks.monotonic(),
            batches={b: BatchRecord(threshold=settings.floor_fraction.get(b)) for b in probing.batches},
        )

    @property
    def due(self) -> float:
        """When the next cycle is due, monotonic seconds."""
        return self.rounds.due

    async def check(self) -> None:
        """Asks how the server is, without touching its model."""
        await self._identify(self._identity)

    async def has_users(self) -> bool:
        """Whether a user's request is known to be running; a sleeping or unknown server has none.

        A server that falls asleep when it is left alone is not asked: asking keeps it awake.
        """
        identity = self._identity
        if identity is None or self.probe.manners.sleeps:
            return False
        return await self.probe.ready(identity, 1) is Reason.BUSY

    async def cycle(
        self,
        on_batch: Callable[[int], None] = lambda _: None,
        *,
        users_beside: Callable[[], Awaitable[str | None]] = _nobody,
        whole: bool = False,
    ) -> None:
        """Probes every batch that this round still owes, and decides when to go on.

        Args:
            on_batch: Told which batch is next.
            users_beside: Names another server whose users a probe of this one would slow, if there is one.
            whole: The operator asked for the round now: no batch waits for the duty cycle.
        """
        if not self._checked:
            await self.check()
        if self.record.state.up or self._cannot is not None:
            # A model may have gone to sleep since the last check, and must not be woken.
            await self._identify(None)
        identity = self._identity
        if identity is None or not (self.record.state.up or self._cannot is not None):
            self._take_failure(self.record.state_reason or Reason.UNREACHABLE)
            return
        rounds = self.rounds
        rounds.begin()
        if not identity.props.sleeping and self.probe.manners.rest() != 0:
            self._take_reason(rounds.owed[0], Reason.KEEPS_AWAKE, 0.0)
        while rounds.goes_on(whole=whole):
            on_batch(rounds.owed[0])
            beside = None if identity.props.sleeping else await users_beside()
            if beside is not None:
                self._take_reason(rounds.owed[0], Reason.BUSY, 0.0, beside)
            elif not await self._probe_batch(identity, rounds.owed[0]):
                # Another model or another start since the round began: what was measured is of neither.
                rounds.restart()
                return
        rounds.end(self.probe.manners.rest())
        self.record = replace(self.record, interval_seconds=rounds.interval)

    async def _probe_batch(self, identity: Identity, batch: int) -> bool:
        """One batch, taken into the record; False where the server changed meanwhile."""
        began, model = self._clocks.monotonic(), self.record.model
        result: DecodeSample | Reason | None = await self.probe.ready(identity, batch)
        if result is None:
            self._generating = True
            try:
                result = await self.probe.measure(identity, batch)
            finally:
                self._generating, self._generated_at = False, self._clocks.monotonic()
            self.rounds.spent(self._clocks.monotonic() - began, failed=isinstance(result, Reason))
            if not isinstance(result, Reason):
                # A server that was restarted meanwhile may have another model, or other settings.
                await self._identify(self._identity)
        gone = self._identity is None and not isinstance(result, Reason)
        if gone or self.record.model != model or self._restarted(identity):
            return False
        seconds = self._clocks.monotonic() - began
        if isinstance(result, Reason):
            self._take_reason(batch, result, seconds)
        else:
            self._take_sample(result, seconds)
        return True

    def _restarted(self, before: Identity) -> bool:
        now = self._identity
        return now is not None and now.props.marker != before.props.marker

    def probed_since(self, moment: float) -> bool:
        """Whether the server worked for a probe of ours at or after `moment` (monotonic seconds)."""
        return self._generating or self._generated_at >= moment

    def take_live(self, sample: LiveSample | None, *, users: bool, stalled: bool) -> None:
        """What was seen of users: new figures (None keeps the old, which grow stale), whether requests run, or hang."""
        was, self._stalled = self.record, stalled
        state = live_state(was.state, users=users, stalled=stalled)
        self.record = replace(self.record, live=sample or was.live)
        if state is not was.state:
            self.record = with_state(self.record, state, Reason.TIMEOUT if stalled else None)
            self._welcome(was.state)
            tell_state(self._log, self.record, was)

    async def prefill(self) -> None:
        """Sends one long prompt, for the report; the daemon never does, for it would stall a user's first tokens."""
        await self._identify(None)
        identity = self._identity
        if identity is None:
            self.record = replace(self.record, prefill=self.record.state_reason or Reason.UNREACHABLE)
            return
        found = await self.probe.ready(identity, 1) or await self.probe.prefill(identity)
        self.record = replace(self.record, prefill=found)

    def _take_failure(self, reason: Reason) -> None:
        """A round that could not begin: one failed probe, and no batch with a new sample."""
        self._busy_at = None
        self.record = with_failure(self.record, reason)
        if reason is not self._warned:
            tell_no_probe(self._log, reason, self.record.state_detail)
            self._warned = reason
        self.rounds.failed()

    async def _identify(self, known: Identity | None) -> None:
        self._take_answer(*await self.checkup.ask(known, self.record.model))

    def _take_answer(self, answer: Identity | Reason, model: Model | None) -> None:
        was, self._checked = self.record, True
        state = checked_state(answer, was.state, stalled=self._stalled, known=was.slots is not None)
        self.record = replace(self.record, checked_at=self._clocks.monotonic())
        if isinstance(answer, Reason):
            self.record = with_state(self.record, state, answer, self.probe.client.words(answer))
            if answer is Reason.SLEEPING:
                self.probe.manners.see_sleep(sleeping=True)
            # Another model may come back.
            self._identity = self._cannot = None
        else:
            if self.record.model is not None and self.record.model != model:
                self._cannot = None
                self._forget_samples()
            if self._cannot is not None:
                # It looks well, but the last probe found that it does not generate.
                state = ServerState.UNSUPPORTED
            why = Reason.TIMEOUT if state is ServerState.STALLED else self._cannot
            detail = self.record.state_detail if self._cannot is not None else ""
            props, anew = answer.props, started_anew(answer.props, self._marker, self.record)
            found = replace(without_samples_above(self.record, props.slots), slots=props.slots, model=model)
            self.record = with_state(found, state, why, detail)
            self._identity, self._marker = answer, props.marker
            if anew:
                self.rounds.hurry()
            self.probe.manners.see_sleep(sleeping=answer.props.sleeping)
            self._welcome(was.state)
            if was.state is ServerState.SLEEPING and state is not was.state:
                # Somebody woke it: this may be the only time to probe it before it sleeps again.
                self.rounds.hurry()
        tell_state(self._log, self.record, was)

    def _welcome(self, was: ServerState) -> None:
        """A server that is back is probed at once, where the last probe failed."""
        if self.record.state.up and not was.up and any(r.success is False for r in self.record.batches.values()):
            self.rounds.hurry()

    def _forget_samples(self) -> None:
        """Another model: a new round is due."""
        self._log.info("model changed")
        self.probe.forget()
        self.record = without_samples(self.record)
        self.rounds.restart()

    def _take_reason(self, batch: int, reason: Reason, seconds: float, beside: str | None = None) -> None:
        """Counts why there is no sample; the users who are why may be those of a server `beside`."""
        now = self._clocks.monotonic()
        users = reason in USERS
        if users:
            self.record = with_users(self.record, 0.0 if self._busy_at is None else now - self._busy_at, own=not beside)
        self._busy_at = now if users else None
        words = f"users of {beside} on the same CPUs" if beside else self.probe.client.words(reason)
        if reason in _CANNOT:
            self._cannot = reason
            self.record = with_state(self.record, ServerState.UNSUPPORTED, reason, words)
        new = reason is not self.record.batches[batch].reason
        self.record = with_reason(self.record, batch, reason, seconds)
        self.rounds.took(reason)
        tell_reason(self._log, batch, reason, words, seconds, new=new)

    def _take_sample(self, sample: DecodeSample, seconds: float) -> None:
        """Publishes a sample; a first one below its threshold is to be confirmed."""
        self._busy_at = self._cannot = None
        roof, was = self._roof(self.record.policy), self.record.batches[sample.batch].below_threshold_samples
        self.record = with_sample(self.record, sample, roof, seconds, self._clocks.unix())
        first_below = was == 0 and self.record.batches[sample.batch].below_threshold_samples == 1
        self.rounds.took(sample, confirm=first_below)
        self._warned = None
        tell_sample(self._log, placed(self.record, sample, roof), roof, seconds)
