"""What the log says of a server: its state when that changes, each probe, and what to do where one failed."""

import structlog

from exporter.present.words import REASONS, implausible_cause, state_words, three_digits
from exporter.roofline.ceiling import Roof
from exporter.roofline.decode import DecodePoint
from exporter.roofline.reason import Outcome, Reason
from exporter.roofline.snapshot import Server, ServerState


def tell_state(log: structlog.typing.FilteringBoundLogger, now: Server, was: Server) -> None:
    """One line when the state or its reason has changed, with what went wrong in its own words, and the remedy."""
    if (now.state, now.state_reason) == (was.state, was.state_reason):
        return
    why = now.state_reason
    # A record begins as unreachable for no reason: that was no state of the server.
    seen = was.state is not ServerState.UNREACHABLE or was.state_reason is not None
    changed = {"was": was.state.value} if seen and was.state is not now.state else {}
    told = {} if why is None else {**_told(why, now.state_detail), "means": state_words(now.state, why)}
    tell = log.info if now.state.up else log.warning
    tell("state", state=now.state.value, **changed, **told)


def tell_no_probe(log: structlog.typing.FilteringBoundLogger, reason: Reason, detail: str) -> None:
    """A round could not begin; that a server sleeps is no cause for alarm."""
    tell = log.info if reason.outcome is Outcome.SKIPPED else log.warning
    tell("no probe", **_told(reason, detail))


def tell_reason(
    log: structlog.typing.FilteringBoundLogger, batch: int, reason: Reason, detail: str, seconds: float, *, new: bool
) -> None:
    """A batch gave no sample, after `seconds`; a warning with the remedy where it failed for a `new` reason."""
    if new and reason.outcome is Outcome.FAILED:
        log.warning("probe", batch=batch, seconds=round(seconds, 3), **_told(reason, detail))
    else:
        why = {"detail": detail} if detail else {}
        log.info("probe", batch=batch, reason=reason.value, seconds=round(seconds, 3), **why)


def _told(reason: Reason, detail: str) -> dict[str, str]:
    """The reason, how it came where that is known, and what to do."""
    return {"reason": reason.value, **({"detail": detail} if detail else {}), "means": REASONS[reason]}


def tell_sample(log: structlog.typing.FilteringBoundLogger, point: DecodePoint, roof: Roof, seconds: float) -> None:
    """A sample under its roof that took `seconds`, and a warning with the likely cause where it cannot be true."""
    sample = point.sample
    log.info(
        "probe",
        batch=sample.batch,
        tokens_per_second=round(sample.tokens_per_second, 1),
        step_ms=round(sample.step_seconds * 1e3, 2),
        floor_ratio=None if point.floor_ratio is None else round(point.floor_ratio, 3),
        contended=sample.contended,
        seconds=round(seconds, 3),
    )
    if (found := implausible_cause(point, roof)) is not None:
        ratio, cause = found
        told = f"implausible, {three_digits(ratio)} x the ceiling: {cause}"
        log.warning(
            told,
            batch=sample.batch,
            step_gb_per_second=round((point.step_bytes_per_second or 0.0) / 1e9, 1),
        )
