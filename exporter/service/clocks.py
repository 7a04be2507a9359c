"""The clocks that the service reads."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clocks:
    """Monotonic seconds for durations, Unix seconds for timestamps."""

    monotonic: Callable[[], float]
    unix: Callable[[], float]
