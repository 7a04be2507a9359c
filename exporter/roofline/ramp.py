"""Another request, seen in the step times alone: where a server does not show its slots, its steps still tell.

A request that joins a batch makes every step dearer from one step to the next, until it leaves, and its prompt makes
one step much dearer still. So there is an edge: steps at one level, perhaps a few odd ones, then steps at another. A
single slow step has the same level on both sides; a cache that grows raises the level slowly; neighbours on the machine
make steps uneven, and their level wander all the time. None of them makes an edge.
"""

from collections.abc import Sequence
from statistics import median
from typing import Final

from exporter.roofline.proof import WARM_UP_STEPS

LEVEL_STEPS: Final = 5
"""Steps that make a level: a request of 8 tokens shares 7 steps, of which its prompt's may be odd ones."""
ODD_STEPS: Final = 3
"""Steps between two levels that may be of neither: those with the prompt."""
LEAST_EDGE: Final = 0.05
"""A smaller change of level, relatively, is not told from a cache that grows by a block, or a clock that changes."""
MOST_EDGE: Final = 3.0
"""One more stream does not make a step dearer than this many times, even where it costs a second pass."""
WANDER_MARGIN: Final = 10.0
"""An edge is higher than this many times the usual change of level. On two busy CPUs the highest of an idle run was up
to 7 times the usual, and that of a request 18 times and more."""
PROMPT_MARGIN: Final = 4.0
"""The same where a step with a prompt stands between the levels: a spike alone has the same level on both sides."""
PROMPT_STEP: Final = 1.3
"""A step with a prompt takes longer than the dearer level by this factor."""
FLATNESS: Final = 4.0
"""The steps of a level, but for its two extremes, differ by less than the edge by this factor."""


def has_ramp(step_ms: Sequence[float]) -> bool:
    """Whether a request joined or left the batch while these steps were made, in their order, warm-up included."""
    steps = step_ms[WARM_UP_STEPS:]
    wander = _wander(steps)
    last = len(steps) - LEVEL_STEPS
    return any(
        _is_edge(
            steps[start : start + LEVEL_STEPS],
            steps[start + LEVEL_STEPS : after],
            steps[after : after + LEVEL_STEPS],
            wander,
        )
        for start in range(last)
        for after in range(start + LEVEL_STEPS, min(start + LEVEL_STEPS + ODD_STEPS, last) + 1)
    )


def _wander(steps: Sequence[float]) -> float:
    """The usual change of level between two neighbouring stretches: a single edge hardly counts in it."""
    levels = [median(steps[i : i + LEVEL_STEPS]) for i in range(len(steps) - LEVEL_STEPS + 1)]
    changes = [abs(after - before) for before, after in zip(levels, levels[LEVEL_STEPS:], strict=False)]
    return median(changes) if changes else 0.0


def _is_edge(before: Sequence[float], between: Sequence[float], after: Sequence[float], wander: float) -> bool:
    """Whether two stretches are levels, and different ones."""
    (low, *_), (high, *_) = sorted(((median(s), *sorted(s)) for s in (before, after)), key=lambda s: s[0])
    edge = high - low
    margin = PROMPT_MARGIN if max(between, default=0.0) > PROMPT_STEP * high else WANDER_MARGIN
    if not low * (1 + LEAST_EDGE) <= high <= low * MOST_EDGE or edge < margin * wander:
        return False
    # But for its two extremes, a level is flat.
    return all(FLATNESS * (s[-2] - s[1]) <= edge for s in (sorted(before), sorted(after)))
