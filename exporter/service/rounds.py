"""When to probe a server next: rounds over all batches, put off by users, by the duty cycle and by failures."""

from collections.abc import Callable, Iterable
from typing import Final

from exporter.config import ProbeSettings
from exporter.roofline.decode import DecodeSample
from exporter.roofline.reason import Outcome, Reason
from exporter.service.backoff import Backoff
from exporter.service.duty import DutyAccount

FAILED_CHARGE: Final = 4
"""A probe that failed is charged at most this many times the time that a probe aims at."""
RETRY_INTERVALS: Final = 2
"""Health intervals after a first failure until the next try."""
BACKOFF_INTERVALS: Final = 4
"""Probe intervals between two tries at most, however often they fail."""
USERS: Final = frozenset({Reason.BUSY, Reason.GAVE_WAY})
"""Reasons that say that users are there."""
LEAVE_ALONE: Final = USERS | {Reason.SLEEPING, Reason.KEEPS_AWAKE, Reason.MODEL_UNLOADED}
"""Reasons that hold for every batch: the round ends there, and a batch that met one is still owed."""
ENDS_ROUND: Final = LEAVE_ALONE | {
    Reason.TIMEOUT,
    Reason.UNREACHABLE,
    Reason.CERTIFICATE_REFUSED,
    Reason.TLS_FAILED,
    Reason.LOADING,
    Reason.UNAUTHORIZED,
}
"""Reasons after which the other batches are not tried: they would wait as long, and learn the same."""


class Rounds:
    """What the current round of one server still owes, and when it goes on or the next one begins.

    Args:
        name: The server.
        batches: The batches of a round.
        probing: How probes are made.
        duty: What probes took so far; shared by all servers.
        clock: Monotonic seconds.
        chance: A random number in [0, 1), so that retries of several exporters do not fall together.
    """

    def __init__(
        self,
        *,
        name: str,
        batches: Iterable[int],
        probing: ProbeSettings,
        duty: DutyAccount,
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self._name = name
        self._batches = tuple(batches)
        self._probing = probing
        self._duty = duty
        self._clock = clock
        first = min(RETRY_INTERVALS * probing.health_interval, probing.interval)
        self._backoff = Backoff(first, BACKOFF_INTERVALS * probing.interval, chance)
        self._cost = 0.0
        self._succeeded = self._failed = self._confirm = False
        self._last: Reason | None = None
        self.owed = list(self._batches)
        self.interval = probing.interval
        self.due = clock()

    def hurry(self) -> None:
        """There is reason to probe at once."""
        self.due = min(self.due, self._clock())

    def restart(self) -> None:
        """A new round is due: what was measured in this one is of no use."""
        self.owed, self.due = list(self._batches), self._clock()

    def begin(self) -> None:
        """A cycle begins, of the same round or of the next."""
        self._succeeded = self._failed = False
        self._last = None

    def goes_on(self, *, whole: bool) -> bool:
        """Whether the cycle tries one batch more; a `whole` round does not wait for the duty cycle."""
        return bool(self.owed) and self._last not in ENDS_ROUND and (whole or not self._duty.hour_pause())

    def spent(self, seconds: float, *, failed: bool) -> None:
        """The server worked for a probe, or was waited for: then its neighbours must not pay for the whole wait."""
        if failed:
            seconds = min(seconds, FAILED_CHARGE * self._probing.seconds)
        self._duty.charge(seconds)
        self._cost += seconds

    def took(self, result: DecodeSample | Reason, *, confirm: bool = False) -> None:
        """One batch's result; `confirm` where it is worth probing again soon. A skipped batch is no failure."""
        self._last = result if isinstance(result, Reason) else None
        self._confirm |= confirm
        if self._last is None:
            self._succeeded = True
        elif self._last.outcome is not Outcome.SKIPPED:
            self._failed = True
        if self._last not in LEAVE_ALONE:
            self.owed.pop(0)

    def end(self, rest: float | None) -> None:
        """Plans what comes after this cycle; `rest` are the seconds that the server must be left alone, if told."""
        now = self._clock()
        if self._succeeded:
            self._backoff.succeed()
        if self._last is Reason.BUSY:
            self.due = now + self._probing.health_interval
        elif self._last is Reason.KEEPS_AWAKE:
            self.due = now + (rest or self._probing.interval)
        elif self._last is Reason.GAVE_WAY:
            self.due = now + self._backoff.fail()
        elif self.owed and self._last not in ENDS_ROUND:
            # The hour's share is used up: the round goes on when there is room again.
            self.due = now + self._duty.pause()
        else:
            self._next_round(now)

    def _next_round(self, now: float) -> None:
        if self._cost:
            self._duty.settle(self._name, self._cost)
        self.owed, self._cost = list(self._batches), 0.0
        self.interval = max(self._probing.interval, self._duty.least_interval(), self._duty.pause())
        if self._failed and not self._succeeded:
            self.due = now + self._backoff.fail()
        else:
            # A first sample below its threshold is worth confirming as soon as the duty cycle allows.
            self.due = now + (self._probing.health_interval if self._confirm else self.interval)
        self._confirm = False

    def failed(self) -> None:
        """A round could not begin. Each time in a row, the next try comes later."""
        self.due = self._clock() + self._backoff.fail()
