"""Structured logs on stderr, what libraries log among them: for people on a terminal, JSON lines otherwise."""

import logging
import sys
from typing import Literal

# structlog loads rich where it finds it, 3 MiB, for tracebacks that no log of ours shows; None hides it meanwhile.
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]  # Python's own sign for a module that is not there
import structlog  # noqa: E402 - after what it must not find

if sys.modules.get("rich") is None:
    del sys.modules["rich"]


class _Library(logging.Handler):
    """What libraries, asyncio and Python's own warnings log, each in one event of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        """Logs the record; what a client or a task put into it is made one harmless line."""
        try:
            text = " ".join(record.getMessage().split())
        except (TypeError, ValueError, LookupError):
            # Who logs never fails for it, even with words that do not fit their arguments.
            text = f"{record.msg} {record.args}"
        error = record.exc_info[1] if record.exc_info else None
        structlog.get_logger().log(
            min(record.levelno // 10 * 10, logging.CRITICAL),
            text if text.isprintable() else ascii(text),
            logger=record.name,
            exc_info=error,
        )


def configure_logs(level: str, form: Literal["console", "json"] | None = None) -> None:
    """Sends structlog's events to stderr, and those of Python's `logging` and `warnings` with them.

    Args:
        level: The least level that is written, by Python's name for it in lower case.
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
    logging.basicConfig(handlers=[_Library()])
    logging.captureWarnings(capture=True)
