"""When a server puts its model to sleep, as far as its command line tells: nothing in its API does.

A router tells the command line of each of its models; a plain server's is seen where its process is (same PID
namespace).
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil
import structlog

from exporter.measure.answers import Props
from exporter.measure.listing import told_sleep
from exporter.measure.whose import listener_of

log = structlog.get_logger()


def seen_sleep(url: str, proc: Path = Path("/proc")) -> float | None:
    """What the process that listens at the URL was told, if it is seen; looks at every process of this namespace."""
    try:
        pid = listener_of(url, proc)
        return None if pid is None else told_sleep(psutil.Process(pid).cmdline())
    except (psutil.Error, OSError):
        return None


class SleepReader:
    """Finds out when one server sleeps; its process is looked at once for each start of the server.

    Args:
        url: The server.
        seen: Looks at its process.
    """

    def __init__(self, url: str, seen: Callable[[str], float | None] = seen_sleep) -> None:
        self._url = url
        self._seen = seen
        self._known: tuple[str, float | None] | None = None
        self._warned = False

    async def read(self, props: Props) -> float | None:
        """Seconds of rest after which the server that says this of itself sleeps; None where nobody tells."""
        if props.sleep_idle is not None:
            return props.sleep_idle
        if self._known is None or self._known[0] != props.marker:
            try:
                self._known = (props.marker, await asyncio.to_thread(self._seen, self._url))
                self._warned = False
            except RuntimeError as error:
                # Python's word for a machine that gives no more threads; the next check looks again.
                if not self._warned:
                    log.warning("no thread to look at the server's process in", error=str(error))
                self._warned = True
                return None
        return self._known[1]

    def forget(self) -> None:
        """The server was away: it may have been started anew, with other arguments."""
        self._known = None
