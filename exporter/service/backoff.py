"""How long to wait after a failure: longer each time, and never in step with others that fail for the same reason."""

from collections.abc import Callable
from typing import Final

JITTER: Final = 0.1
"""A pause is up to this part shorter or longer."""


class Backoff:
    """A pause that doubles with each failure, up to a limit.

    Args:
        first: The first pause, seconds.
        most: The longest pause, seconds.
        chance: A random number in [0, 1).
    """

    def __init__(self, first: float, most: float, chance: Callable[[], float]) -> None:
        self._first = first
        self._most = most
        self._chance = chance
        self._next = first

    def fail(self) -> float:
        """One more failure: the pause after it, seconds."""
        pause = self._next
        self._next = min(2 * pause, self._most)
        return pause * (1 - JITTER + 2 * JITTER * self._chance())

    def succeed(self) -> None:
        """The next failure is a first one again."""
        self._next = self._first
