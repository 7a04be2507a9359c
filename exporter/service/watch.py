"""One watched server: its record, kept up to date by health checks and probe cycles."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import structlog

from exporter.config import ProbeSettings, ServerSettings
from exporter.measure.model import ModelReader
from exporter.measure.probe import DecodeProbe, Identity, identify, state_of
from exporter.roofline.ceiling import CeilingSource, Device, Roof, RoofPolicy
from exporter.roofline.decode import DecodePoint, DecodeSample, place
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import BatchRecord, Model, Server, ServerState

log = structlog.get_logger()

_LEAVE_ALONE: Final = frozenset({Reason.BUSY, Reason.SLEEPING})
"""Reasons that hold for every batch of a cycle."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks that the service reads: monotonic seconds for durations, Unix seconds for timestamps."""

    monotonic: Callable[[], float]
    unix: Callable[[], float]


def policy_of(server: ServerSettings) -> RoofPolicy:
    """What the configuration says about the server's ceilings."""
    return RoofPolicy(
        device=Device(server.device),
        reference=None if server.reference == "auto" else CeilingSource(server.reference),
        peak_bytes_per_second=server.peak_bandwidth,
        sustained_fraction=server.sustained_fraction,
        compute_flops_per_second=server.compute_peak,
    )


class ServerWatch:
    """Checks and probes one server; `record` is what is known of it, replaced whole at every change.

    Args:
        settings: The server's configuration.
        probing: How probes are made.
        duty_cycle: The part of the time that this server may be probed.
        probe: Makes the probes.
        models: Reads the model's file, where it can be seen.
        roof: The server's roof as it is known now, to compare samples with their thresholds.
        clocks: The clocks.
    """

    def __init__(
        self,
        *,
        settings: ServerSettings,
        probing: ProbeSettings,
        duty_cycle: float,
        probe: DecodeProbe,
        models: ModelReader,
        roof: Callable[[RoofPolicy], Roof],
        clocks: Clocks,
    ) -> None:
        self._probing = probing
        self._duty_cycle = duty_cycle
        self._probe = probe
        self._models = models
        self._roof = roof
        self._clocks = clocks
        self._identity: Identity | None = None
        self._busy_since: float | None = None
        self._log = log.bind(server=settings.name)
        self.due = clocks.monotonic()
        self.record = Server(
            name=settings.name,
            policy=policy_of(settings),
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
        """Probes every batch once and decides when the next cycle is due."""
        answer = await self._identify(None)
        if isinstance(answer, Reason):
            self._count(answer, {b: self._without_sample(r, answer) for b, r in self.record.batches.items()})
            self._log.warning("no answer to probe", reason=answer.value)
            self.due = self._clocks.monotonic() + self._probing.interval
            return
        spent, confirm = 0.0, False
        for batch in self.record.batches:
            on_batch(batch)
            started = self._clocks.monotonic()
            result = await self._probe.ready(answer, batch) or await self._probe.measure(answer, batch)
            seconds = self._clocks.monotonic() - started
            if isinstance(result, Reason):
                self._take_reason(batch, result, seconds)
                if result in _LEAVE_ALONE:
                    break
            else:
                confirm |= self._take_sample(result, seconds)
            spent += seconds
        self._plan(spent, confirm=confirm)

    def _plan(self, spent: float, *, confirm: bool) -> None:
        """When to probe next: the duty cycle wins over the interval; a busy server is asked again soon."""
        now = self._clocks.monotonic()
        if self._busy_since is not None:
            self.due = now + self._probing.health_interval
            return
        rest = spent / self._duty_cycle
        interval = max(self._probing.interval, rest)
        self.record = replace(self.record, interval_seconds=interval)
        # A first sample below its threshold is worth confirming as soon as the duty cycle allows.
        self.due = now + (max(rest, self._probing.health_interval) if confirm else interval)

    async def _identify(self, known: Identity | None) -> Identity | Reason:
        answer = await identify(self._probe.client, known)
        if isinstance(answer, Reason):
            self._take_answer(answer, None)
        else:
            self._take_answer(answer, await self._models.describe(answer.props, answer.size))
        return answer

    def _take_answer(self, answer: Identity | Reason, model: Model | None) -> None:
        state, was = state_of(answer), self.record.state
        self.record = replace(self.record, checked_at=self._clocks.monotonic())
        if isinstance(answer, Reason):
            self.record = replace(self.record, state=state, state_reason=answer)
        else:
            if state is ServerState.READY and was is ServerState.BUSY:
                # Health does not tell whether users are served; only the next cycle does.
                state = was
            if self.record.model is not None and self.record.model != model:
                self._forget_samples()
            if not was.up and any(r.success is False for r in self.record.batches.values()):
                self.due = self._clocks.monotonic()
            self.record = replace(self.record, state=state, state_reason=None, slots=answer.props.slots, model=model)
            self._identity = answer
        if state is not was:
            self._log.info("state", state=state.value, was=was.value, reason=_value(self.record.state_reason))

    def _forget_samples(self) -> None:
        """Another model: what was measured of the old one is no longer true of this server."""
        self._log.info("model changed")
        self._probe.forget()
        fresh = {b: BatchRecord(threshold=r.threshold) for b, r in self.record.batches.items()}
        self.record = replace(self.record, batches=fresh)
        self.due = self._clocks.monotonic()

    def _take_reason(self, batch: int, reason: Reason, seconds: float) -> None:
        now = self._clocks.monotonic()
        if reason is Reason.BUSY:
            self._busy_since = now if self._busy_since is None else self._busy_since
            self.record = replace(self.record, state=ServerState.BUSY, busy_seconds=now - self._busy_since)
        self._count(reason, {batch: self._without_sample(self.record.batches[batch], reason, seconds)})
        self._log.info("probe", batch=batch, reason=reason.value, seconds=round(seconds, 3))

    def _take_sample(self, sample: DecodeSample, seconds: float) -> bool:
        """Publishes a sample; True when it is the first below its threshold."""
        self._busy_since = None
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
            busy_seconds=0.0,
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

    def _without_sample(self, old: BatchRecord, reason: Reason, seconds: float | None = None) -> BatchRecord:
        """The record after a probe that gave no sample; the last sample stays until it is stale."""
        return replace(old, success=False, reason=reason, duration_seconds=seconds)

    def _count(self, reason: Reason, batches: Mapping[int, BatchRecord]) -> None:
        counts = {**self.record.counts, reason: self.record.counts.get(reason, 0) + 1}
        self.record = replace(self.record, counts=counts, batches={**self.record.batches, **batches})


def _value(reason: Reason | None) -> str | None:
    return None if reason is None else reason.value
