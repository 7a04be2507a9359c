"""Reading the configuration again while the daemon runs: all of it is valid, or nothing changes."""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import structlog

from exporter.config import ConfigError, Settings
from exporter.measure.asking import trusting
from exporter.roofline.snapshot import Snapshot
from exporter.service.peaks import PeakError, with_peaks
from exporter.service.warn import told

log = structlog.get_logger()


class Reloader:
    """Keeps the configuration in force and takes a new one when it is told to.

    Args:
        settings: What the daemon started with.
        load: Reads and validates the file again; None when there is no file, as in the demo.
        unix: Unix seconds.

    Attributes:
        trusted: What was read of each `ca_file` with the settings, for none may be there any more when sessions are
            opened; empty before the first reload.
    """

    def __init__(self, settings: Settings, load: Callable[[], Settings] | None, unix: Callable[[], float]) -> None:
        self.settings = settings
        self.trusted: Mapping[Path, ssl.SSLContext] = {}
        self.ok = True
        self.loaded_at = unix()
        self._changed: Callable[[], None] = lambda: None
        self._pending = False
        self._load = load
        self._unix = unix
        self._turn = asyncio.Lock()
        self._asked: set[asyncio.Task[tuple[str, ...]]] = set()

    def in_force(self, settings: Settings, changed: Callable[[], None]) -> None:
        """These settings are in force; `changed` is called when others are read, or were meanwhile."""
        self._changed = changed
        if self.settings is not settings:
            changed()
        elif self._pending:
            self._pending = False
            log.info("configuration in force")

    async def reload(self) -> tuple[str, ...]:
        """Reads the file; a valid one is in force from the next cycle on, and who put the old one in force is told.

        Names that are slow to resolve and disks keep nobody waiting but who asks for a reload, one after the other.

        Returns:
            Why not: every error of the file, each also logged; the old configuration stays. Empty on success.
        """
        if self._load is None:
            log.warning("there is no configuration file to read again")
            return ("there is no configuration file to read again",)
        async with self._turn:
            try:
                settings, trusted = await asyncio.to_thread(_read, self._load)
            except ConfigError as error:
                return self._refuse(error.errors)
            except (PeakError, OSError) as error:
                return self._refuse((str(error),))
            except RuntimeError as error:
                # Python's word for a machine that gives no more threads.
                return self._refuse((f"no thread to read it in: {error}",))
            return self._take(settings, trusted)

    def reload_soon(self) -> None:
        """For a signal: `reload`, whose outcome is only logged."""
        task = asyncio.ensure_future(self.reload())
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    def _take(self, settings: Settings, trusted: Mapping[Path, ssl.SSLContext]) -> tuple[str, ...]:
        if self.settings.servers and not settings.servers:
            # An editor caught in the middle of writing leaves an empty file; so do few operators on purpose.
            return self._refuse(("the new configuration has no servers; to watch none, restart with it",))
        self.ok, self.loaded_at = True, self._unix()
        # A certificate authority may have changed under the same name.
        if settings == self.settings and not trusted:
            log.info("configuration read again: nothing has changed", changed=False)
            return ()
        log.info("configuration read again: in force when the measurement at hand ends", changed=True)
        told(settings)
        self.settings, self.trusted, self._pending = settings, trusted, True
        self._changed()
        return ()

    def stamped(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the outcome of the last reload."""
        return replace(snapshot, config_reload_ok=self.ok, config_reload_timestamp=self.loaded_at)

    def _refuse(self, errors: tuple[str, ...]) -> tuple[str, ...]:
        self.ok = False
        for error in errors:
            log.error("the new configuration cannot be used; the old one stays in force", error=error)
        return errors


def _read(load: Callable[[], Settings]) -> tuple[Settings, Mapping[Path, ssl.SSLContext]]:
    """The file's settings, peaks looked up, and what its certificate authorities say; blocks."""
    settings = with_peaks(load())
    files = {server.ca_file for server in settings.servers if server.ca_file is not None}
    return settings, {file: trusting(file) for file in files}
