"""What a server's slots say of the users' work: pure types and rules, for the probe and for live traffic alike."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

PROBE_SEED: Final = 1_919_905_638
"""The seed that every probe asks for. It changes nothing in greedy decoding, but GET /slots tells it, so that a slot
whose last request was a probe's, of this exporter or another, is not taken for a user's."""


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
        probe: The request was a probe's; None where the server does not tell what was asked for.
        prompt_done: Prompt tokens read for that request so far; None before b9276.
    """

    number: int
    processing: bool
    task: int | None = None
    decoded: int = 0
    tokens: int | None = None
    speculative: bool = False
    probe: bool | None = None
    prompt_done: int | None = None


def busy(slots: Sequence[Slot]) -> int:
    """How many slots work on a request."""
    return sum(slot.processing for slot in slots)


def others(slots: Sequence[Slot], own: int) -> bool:
    """Whether somebody else's request is in a slot, while `own` streams of a probe generate."""
    return busy(slots) > own or any(slot.processing and slot.probe is False for slot in slots)


def touched(before: Sequence[Slot], after: Sequence[Slot], own: Collection[int]) -> bool:
    """Whether a slot that is not in `own` worked for somebody between two looks, even if it is idle again.

    A slot tells its last request. (The number of a request says nothing more: the server counts its own steps with
    the same counter, so it does not tell how many requests there were.)
    """
    known = {slot.number: slot.task for slot in before}
    return any(slot.number not in own and slot.task != known.get(slot.number, slot.task) for slot in after)
