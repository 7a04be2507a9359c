"""Whether a server may be probed now: what was seen of its users, their caches and its sleep.

Nothing here asks the server; the probe tells what it saw. A slot whose last request was a probe's holds nothing of a
user's. Times are those of the clock that is passed in, and of what was seen: what happened between two looks counts
as having happened just now, what was there at the first look as well.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from exporter.roofline.reason import Reason
from exporter.roofline.slots import Slot

CACHED_TOKENS: Final = 512
"""More tokens than this in an idle slot are a conversation, worth keeping for its user."""
CACHE_SECONDS: Final = 1800.0
"""For how long a conversation that rests is expected to go on."""
AWAKE_MARGIN: Final = 2
"""Health intervals beyond the server's idle time: it falls asleep a little late, and is seen to sleep later still."""


@dataclass(slots=True)
class _Seen:
    """What a slot showed last, and when its user last worked in it; None where only probes did."""

    task: int | None
    tokens: int | None
    used_at: float | None


@dataclass(slots=True)
class Manners:
    """The rules for one server.

    Attributes:
        clock: Monotonic seconds.
        interval: Seconds that all slots must be idle before a probe takes all of them.
        health_interval: Seconds between two looks at the server's health.
        sleep_idle: Seconds of rest after which the server sleeps, where the operator says so.
    """

    clock: Callable[[], float]
    interval: float = 300.0
    health_interval: float = 15.0
    sleep_idle: float | None = None
    _slots: dict[int, _Seen] = field(default_factory=dict)
    _users_at: float | None = None
    _seen_asleep: bool = False
    _touched_at: float | None = None

    def see_slots(self, slots: Sequence[Slot], own: Collection[int] = ()) -> None:
        """What GET /slots showed just now; `own` are the slots that a probe of ours has just left."""
        now = self.clock()
        seen: dict[int, _Seen] = {}
        for slot in slots:
            old = self._slots.get(slot.number)
            used_at = old.used_at if old is not None else None
            moved = old is None or (slot.task, slot.tokens) != (old.task, old.tokens)
            if slot.probe or (slot.number in own and not slot.processing):
                used_at = None
            elif slot.processing or (moved and slot.task is not None):
                used_at = self._users_at = now
            seen[slot.number] = _Seen(slot.task, slot.tokens, used_at)
        # A server that was started anew with fewer slots keeps nothing in those that are gone.
        self._slots = seen

    def objection(self, batch: int, slots: int) -> Reason | None:
        """What speaks against a probe of `batch` streams on the server's `slots`, all idle now.

        One stream takes the slot that was used longest ago, or the one that it had before: it may always be asked for.
        """
        now = self.clock()
        if batch <= 1:
            return None
        if any(self._conversation(seen, now) for seen in self._slots.values()):
            return Reason.CACHE_IN_USE
        if batch >= slots and self._users_at is not None and now - self._users_at < self.interval:
            return Reason.SLOTS_IN_USE
        return None

    @staticmethod
    def _conversation(seen: _Seen, now: float) -> bool:
        recent = seen.used_at is not None and now - seen.used_at < CACHE_SECONDS
        return recent and seen.tokens is not None and seen.tokens > CACHED_TOKENS

    def see_sleep(self, *, sleeping: bool) -> None:
        """Whether the server slept just now."""
        if sleeping:
            # When it wakes, somebody else woke it.
            self._seen_asleep, self._touched_at = True, None

    def touched(self) -> None:
        """The server was asked just now for something that keeps it awake, while no user did."""
        self._touched_at = self.clock()

    @property
    def sleeps(self) -> bool:
        """Whether the server is known to fall asleep when it is left alone."""
        return self.sleep_idle is not None or self._seen_asleep

    def rest(self) -> float | None:
        """Seconds for which the server must be left alone, so that it can fall asleep; 0 where it may be asked now.

        None: until it has slept and somebody woke it, because nobody knows how long it takes to fall asleep.
        """
        if self._touched_at is None:
            return 0.0
        if self.sleep_idle is not None:
            left = self._touched_at + self.sleep_idle + AWAKE_MARGIN * self.health_interval - self.clock()
            return max(0.0, left)
        return None if self._seen_asleep else 0.0
