"""The part of the time that probes may take, shared by all servers: they load the same memory."""

from collections import deque
from collections.abc import Callable
from typing import Final

_HOUR: Final = 3600.0
_MOMENT: Final = 0.001


class DutyAccount:
    """Keeps what probes took, and says when the next one may begin.

    Only time in which a server generated for us is charged; asking and waiting cost it nothing. In no hour do probes
    take more than `limit` of it, but for the one probe that reached it.

    Args:
        limit: The part of the time, 0..1.
        clock: Monotonic seconds.
    """

    def __init__(self, limit: float, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._free_at = clock()
        self._spent: deque[tuple[float, float]] = deque()
        self._cycle_costs: dict[str, float] = {}

    def charge(self, seconds: float) -> None:
        """Seconds of generating that just ended. What is taken is paid off at `limit` seconds a second."""
        now = self._clock()
        self._free_at = max(self._free_at, now - seconds) + seconds / self._limit
        self._spent.append((now, seconds))

    def free(self) -> bool:
        """Whether everything that was taken is paid off."""
        return self.pause() <= 0

    def pause(self) -> float:
        """Seconds until everything that was taken is paid off, and the last hour has room for more."""
        return max(0.0, self._free_at - self._clock(), self.hour_pause())

    def hour_pause(self) -> float:
        """Seconds until the last hour has room for more; within a round of probes, only this counts."""
        over = self._in_last_hour() - self._limit * _HOUR
        for at, seconds in self._spent:
            if over < 0:
                break
            over -= seconds
            # A little later than the hour, so that it has passed whatever the clock's last digit says.
            if over < 0:
                return max(0.0, at + _HOUR - self._clock()) + _MOMENT
        return 0.0

    def settle(self, server: str, seconds: float) -> None:
        """What a whole cycle of a server took."""
        self._cycle_costs[server] = seconds

    def least_interval(self) -> float:
        """The shortest interval at which every server can be probed within the limit, seconds."""
        return sum(self._cycle_costs.values()) / self._limit

    def ratio(self) -> float:
        """Time charged in the last hour / that hour."""
        return self._in_last_hour() / _HOUR

    def _in_last_hour(self) -> float:
        now = self._clock()
        while self._spent and self._spent[0][0] < now - _HOUR:
            self._spent.popleft()
        return sum(seconds for _, seconds in self._spent)
