"""The prompts of probes: token ids that every model takes, alike where slots should be chosen alike, else different."""

from typing import Final

from exporter.roofline.prefill import PREFILL_TOKENS

PROMPT_TOKENS: Final = 16
COMMON_TOKENS: Final = 9
"""How many tokens the prompts of a family share at their beginning: more than the half that older builds ask for."""
PROMPT_FAMILIES: Final = 3


def probe_prompts(batch: int, vocabulary: int | None, family: int = 0) -> list[list[int]]:
    """`batch` different prompts of valid token ids; those of one family begin alike.

    A server gives a prompt to the idle slot whose content begins like it, lowest first, else to the least recently
    used one. Beginning alike, the prompts of successive probes return to the same slots, side by side; ending
    differently, the streams share neither their cache nor, in a mixture of experts, their route.

    Args:
        batch: Number of prompts.
        vocabulary: Number of token ids; None takes ids that every known vocabulary has.
        family: Which beginning, 0 to PROMPT_FAMILIES - 1.
    """
    ids = _token_ids(vocabulary, PROMPT_TOKENS * (batch + PROMPT_FAMILIES))
    common = ids[family * PROMPT_TOKENS :][:COMMON_TOKENS]
    ends = (ids[(PROMPT_FAMILIES + s) * PROMPT_TOKENS :][: PROMPT_TOKENS - COMMON_TOKENS] for s in range(batch))
    return [common + end for end in ends]


def prefill_prompt(vocabulary: int | None) -> list[int]:
    """A long prompt that begins like no decode probe's; its ids differ as far as the vocabulary has enough."""
    return _token_ids(vocabulary, PREFILL_TOKENS)[::-1]


def _token_ids(vocabulary: int | None, count: int) -> list[int]:
    """Valid ids; a prime stride spreads them over the vocabulary, away from the special tokens at its start."""
    size = vocabulary or 256
    return [(size // 3 + 7919 * i) % size for i in range(count)]
