"""Work in progress without progress: when a server that says it is well is found not to generate."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from exporter.roofline.slots import Slot, busy

PATIENCE_SECONDS: Final = 15.0
PATIENCE_INTERVALS: Final = 3
PATIENCE_STEPS: Final = 20
"""A generating server has stalled after the longest of: this time, health intervals, and its own steps."""
PROMPT_PATIENCE_SECONDS: Final = 120.0
PROMPT_BATCH_TOKENS: Final = 2048
"""A prompt advances by llama.cpp's default n_batch at a time, and reading a token takes no longer than a step."""


def patience(check_interval_seconds: float, step_seconds: float, *, prompt: bool) -> float:
    """How long a server may show no progress, seconds.

    Args:
        check_interval_seconds: The health interval.
        step_seconds: Time of one step as far as it is known, else 0.
        prompt: Some request is at its prompt, or may be.
    """
    least = max(PATIENCE_SECONDS, PATIENCE_INTERVALS * check_interval_seconds, PATIENCE_STEPS * step_seconds)
    return max(least, PROMPT_PATIENCE_SECONDS, PROMPT_BATCH_TOKENS * step_seconds) if prompt else least


@dataclass(frozen=True, slots=True)
class Progress:
    """What the slots showed last, and since when they show the same.

    Attributes:
        since: When anything moved last, monotonic seconds.
        prompt: A request is at its prompt, or may be, for the server did not answer.
    """

    since: float
    slots: tuple[Slot, ...] = ()
    prompt: bool = False

    def seen(self, slots: Sequence[Slot], now: float) -> "Progress":
        """After an answer; idle slots wait for nothing."""
        now_shown = tuple(slots)
        at_prompt = any(slot.processing and slot.decoded == 0 for slot in now_shown)
        moved = now_shown != self.slots or not busy(now_shown)
        return Progress(now if moved else self.since, now_shown, at_prompt)

    def unanswered(self) -> "Progress":
        """After no answer: before b10429 GET /slots waits for the running decode, which may be a long prompt's."""
        return replace(self, prompt=True)

    def stalled(self, now: float, check_interval_seconds: float, step_seconds: float) -> bool:
        """Whether requests are in work and nothing has moved for too long."""
        limit = patience(check_interval_seconds, step_seconds, prompt=self.prompt)
        return busy(self.slots) > 0 and now - self.since > limit
