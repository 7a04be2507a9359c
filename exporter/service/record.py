"""What becomes of a server's record when something is learnt: pure changes, each giving the whole new record."""

from collections.abc import Mapping
from dataclasses import replace

from exporter.roofline.ceiling import Roof
from exporter.roofline.decode import DecodePoint, DecodeSample, place
from exporter.roofline.reason import Outcome, Reason
from exporter.roofline.snapshot import BatchRecord, Server, ServerState


def with_state(server: Server, state: ServerState, reason: Reason | None = None, detail: str = "") -> Server:
    """The server is in this state, for this reason, which came like this."""
    return replace(server, state=state, state_reason=reason, state_detail=detail)


def with_reason(server: Server, batch: int, reason: Reason, seconds: float) -> Server:
    """A batch that gave no sample, after `seconds`; where nothing was probed, the last probe's result stands."""
    old = server.batches[batch]
    if reason.outcome is Outcome.SKIPPED:
        return _counted(server, reason, {batch: replace(old, reason=reason)})
    return _counted(server, reason, {batch: replace(old, success=False, reason=reason, duration_seconds=seconds)})


def with_failure(server: Server, reason: Reason) -> Server:
    """A round that could not begin: counted once, for all batches."""
    skipped = reason.outcome is Outcome.SKIPPED
    batches = {b: replace(r, success=r.success if skipped else False, reason=reason) for b, r in server.batches.items()}
    return _counted(server, reason, batches)


def with_users(server: Server, seconds: float, *, own: bool = True) -> Server:
    """Users, its `own` or of a server beside it, were there for `seconds` more: that time does not age the samples."""
    spared = {b: replace(r, busy_seconds=r.busy_seconds + seconds) for b, r in server.batches.items()}
    return replace(with_state(server, ServerState.BUSY) if own else server, batches=spared)


def with_sample(server: Server, sample: DecodeSample, roof: Roof, seconds: float, unix: float) -> Server:
    """A sample to publish, which took `seconds` and came at that Unix time."""
    old = server.batches[sample.batch]
    point = placed(server, sample, roof)
    below = old.below_threshold_samples
    if old.threshold is not None and point.floor_ratio is not None:
        below = below + 1 if point.floor_ratio < old.threshold else 0
    new = BatchRecord(
        sample=sample,
        success=True,
        duration_seconds=seconds,
        last_success_timestamp=unix,
        threshold=old.threshold,
        below_threshold_samples=below,
    )
    batches = {**server.batches, sample.batch: new}
    return replace(with_state(server, ServerState.READY), succeeded=server.succeeded + 1, batches=batches)


def placed(server: Server, sample: DecodeSample, roof: Roof) -> DecodePoint:
    """The sample under the server's roof."""
    return place(sample, server.model.footprint if server.model else None, roof)


def without_samples(server: Server) -> Server:
    """Another model: what was measured of the old one is no longer true of this server."""
    return replace(server, batches={b: _unmeasured(r) for b, r in server.batches.items()}, live=None)


def without_samples_above(server: Server, slots: int) -> Server:
    """What was measured at batches that do not fit into the server's slots is no longer true of it."""
    gone = {b: _unmeasured(r) for b, r in server.batches.items() if b > slots and r.sample is not None}
    return replace(server, batches={**server.batches, **gone})


def _unmeasured(batch: BatchRecord) -> BatchRecord:
    return BatchRecord(threshold=batch.threshold, last_success_timestamp=batch.last_success_timestamp)


def carried_over(new: Server, old: Server, *, same: bool) -> Server:
    """A server's fresh record with what an older configuration found of it.

    Counters go on, for they must not go backwards. What was measured stays true only of the same server.

    Args:
        new: The record under the new configuration.
        old: The record under the old one, of the same name.
        same: Whether the server is asked in the same way, so that samples and state are still true.
    """
    counted = replace(new, succeeded=old.succeeded, counts=old.counts)
    if not same:
        return counted
    batches = {
        batch: replace(
            old.batches[batch],
            threshold=record.threshold,
            # A count below another threshold says nothing about this one.
            below_threshold_samples=(
                old.batches[batch].below_threshold_samples if record.threshold == old.batches[batch].threshold else 0
            ),
        )
        if batch in old.batches
        else record
        for batch, record in new.batches.items()
    }
    return replace(
        counted,
        batches=batches,
        state=old.state,
        state_reason=old.state_reason,
        state_detail=old.state_detail,
        checked_at=old.checked_at,
        slots=old.slots,
        model=old.model,
        live=old.live,
    )


def _counted(server: Server, reason: Reason, batches: Mapping[int, BatchRecord]) -> Server:
    counts = {**server.counts, reason: server.counts.get(reason, 0) + 1}
    return replace(server, counts=counts, batches={**server.batches, **batches})
