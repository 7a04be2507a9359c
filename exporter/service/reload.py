"""Reading the configuration again while the daemon runs: all of it is valid, or nothing changes."""

from collections.abc import Callable
from dataclasses import replace

import structlog

from exporter.config import ConfigError, Settings
from exporter.roofline.snapshot import Snapshot
from exporter.service.peaks import PeakError, with_peaks

log = structlog.get_logger()


class Reloader:
    """Keeps the configuration in force and takes a new one when it is told to.

    Args:
        settings: What the daemon started with.
        load: Reads and validates the file again; None when there is no file, as in the demo.
        unix: Unix seconds.
    """

    def __init__(self, settings: Settings, load: Callable[[], Settings] | None, unix: Callable[[], float]) -> None:
        self.settings = settings
        self.ok = True
        self.loaded_at = unix()
        self._changed: Callable[[], None] = lambda: None
        self._pending = False
        self._load = load
        self._unix = unix

    def in_force(self, settings: Settings, changed: Callable[[], None]) -> None:
        """These settings are in force; `changed` is called when others are read, or were meanwhile."""
        self._changed = changed
        if self.settings is not settings:
            changed()
        elif self._pending:
            self._pending = False
            log.info("configuration in force")

    def reload(self) -> tuple[str, ...]:
        """Reads the file; a valid one is in force from the next cycle on, and who put the old one in force is told.

        Returns:
            Why not: every error of the file, each also logged; the old configuration stays. Empty on success.
        """
        if self._load is None:
            log.warning("there is no configuration file to read again")
            return ("there is no configuration file to read again",)
        try:
            settings = with_peaks(self._load())
            if self.settings.servers and not settings.servers:
                # An editor caught in the middle of writing leaves an empty file; so do few operators on purpose.
                return self._refuse(("the new configuration has no servers; to watch none, restart with it",))
        except ConfigError as error:
            return self._refuse(error.errors)
        except PeakError as error:
            return self._refuse((str(error),))
        self.ok, self.loaded_at = True, self._unix()
        # A certificate authority may have changed under the same name, and is read when sessions are opened.
        different = settings != self.settings or any(server.ca_file for server in settings.servers)
        if not different:
            log.info("configuration read again: nothing has changed", changed=False)
            return ()
        log.info("configuration read again: in force when the measurement at hand ends", changed=True)
        self.settings, self._pending = settings, True
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
