"""Structured logs on stderr: for people on a terminal, JSON lines otherwise."""

import logging
import sys
from typing import Final, Literal

# structlog loads rich where it finds it, 3 MiB, for tracebacks that no log of ours shows; None hides it meanwhile.
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]  # Python's own sign for a module that is not there
import structlog  # noqa: E402 - after what it must not find

if sys.modules.get("rich") is None:
    del sys.modules["rich"]

LEVELS: Final = ("debug", "info", "warning", "error")


def configure_logs(level: str, form: Literal["console", "json"] | None = None) -> None:
    """Sends structlog's events to stderr.

    Args:
        level: The least level that is written, one of `LEVELS`.
        form: `console` or `json`; None picks by whether stderr is a terminal.
    """
    form = form or ("console" if sys.stderr.isatty() else "json")
    renderer: structlog.typing.Processor
    if form == "console":
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    else:
        renderer = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
