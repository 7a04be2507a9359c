"""What a server's slots say of the users' work: pure types and rules, for the probe and for live traffic alike."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of GET /slots; None is what this build does not tell.

    Attributes:
        number: The server's own number, from 0.
        processing: It works on a request: waits, reads the prompt, or generates.
        task: The request that it works on, or worked on last; None where it never had one.
        decoded: Tokens generated for that request so far; builds from b10406 on set it to 0 when the request ends.
        tokens: Tokens that the slot's cache holds, prompt and generated.
        speculative: It drafts tokens, so that a step may give several.
        prompt_done: Prompt tokens read for that request so far; None before b9276.
    """

    number: int
    processing: bool
    task: int | None = None
    decoded: int = 0
    tokens: int | None = None
    speculative: bool = False
    prompt_done: int | None = None


def busy(slots: Sequence[Slot]) -> int:
    """How many slots work on a request."""
    return sum(slot.processing for slot in slots)
