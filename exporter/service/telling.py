"""What the log says of a server: its state when that changes, with the remedy, and each sample."""

import structlog

from exporter.present.words import REASONS
from exporter.roofline.decode import DecodePoint
from exporter.roofline.snapshot import Server


def tell_state(log: structlog.typing.FilteringBoundLogger, now: Server, was: Server) -> None:
    """One line when the state or its reason has changed, with what went wrong in its own words, and the remedy."""
    if (now.state, now.state_reason) == (was.state, was.state_reason):
        return
    why = now.state_reason
    told = {} if why is None else {"reason": why.value, "detail": now.state_detail, "means": REASONS[why]}
    tell = log.info if now.state.up else log.warning
    tell("state", state=now.state.value, was=was.state.value, **{key: text for key, text in told.items() if text})


def tell_sample(log: structlog.typing.FilteringBoundLogger, point: DecodePoint, seconds: float) -> None:
    """A sample that took `seconds`, and a warning where it cannot be true."""
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
    if point.implausible:
        log.warning(
            "decode is faster than this machine's memory: is this server on a GPU? set device: gpu",
            batch=sample.batch,
            step_gb_per_second=round((point.step_bytes_per_second or 0.0) / 1e9, 1),
        )
