"""Tells in the log what of a valid configuration is probably a mistake."""

import structlog

from exporter.config import Settings, warnings
from exporter.measure.gguf import read_gguf
from exporter.measure.gguf_types import GgufProblem

log = structlog.get_logger()


def told(settings: Settings, *, files: bool = False) -> Settings:
    """The settings, after one line in the log for each warning.

    Args:
        settings: Valid ones.
        files: Also for each model file that cannot be used now; blocks on the disk. Whoever measures reads the files
            anyway, and tells.
    """
    for server, text in warnings(settings):
        log.warning(text, **({"server": server} if server else {}))
    for watched in settings.servers if files else ():
        found = None if watched.gguf is None else read_gguf(watched.gguf)
        if isinstance(found, GgufProblem):
            log.warning("gguf cannot be used now", server=watched.name, problem=found.message)
    return settings
