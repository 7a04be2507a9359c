"""Reading the configuration again while the daemon runs: all of it is valid, or nothing changes."""

from collections.abc import Callable
from dataclasses import replace

import structlog

from exporter.config import ConfigError, Settings
from exporter.roofline.snapshot import Server, Snapshot
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
        self.changed: Callable[[], None] = lambda: None
        self._load = load
        self._unix = unix

    def reload(self) -> tuple[str, ...]:
        """Reads the file; a valid one is in force from the next cycle on, and `changed` is called if it differs.

        Returns:
            Why not: every error of the file, each also logged; the old configuration stays. Empty on success.
        """
        if self._load is None:
            log.warning("there is no configuration file to read again")
            return ("there is no configuration file to read again",)
        try:
            settings = with_peaks(self._load())
        except ConfigError as error:
            return self._refuse(error.errors)
        except PeakError as error:
            return self._refuse((str(error),))
        self.ok, self.loaded_at = True, self._unix()
        different = settings != self.settings
        log.info("configuration read again", changed=different)
        if different:
            self.settings = settings
            self.changed()
        return ()

    def stamped(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the outcome of the last reload."""
        return replace(snapshot, config_reload_ok=self.ok, config_reload_timestamp=self.loaded_at)

    def _refuse(self, errors: tuple[str, ...]) -> tuple[str, ...]:
        self.ok = False
        for error in errors:
            log.error("the new configuration cannot be used; the old one stays in force", error=error)
        return errors


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
        checked_at=old.checked_at,
        slots=old.slots,
        model=old.model,
    )
