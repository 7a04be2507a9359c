"""Figures that no sound server or file gives: none raises, and none that is not finite is published."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_proof import PROMPT, TOKENS, stream, timed

from exporter.roofline.proof import LEAST_MS, StepTiming, prove, steps_to_probe
from exporter.roofline.reason import Reason


class TestClocks:
    """The server's own times of single tokens."""

    @pytest.mark.parametrize("tick", [0.0, 1e-320, LEAST_MS / 10])
    def test_a_clock_that_stands_until_the_last_token_proves_nothing(self, tick: float) -> None:
        stuck = timed([tick] * (TOKENS - 2) + [100.0])
        assert prove((stuck,), 1, TOKENS, PROMPT) is Reason.BAD_TIMINGS

    def test_a_generation_of_less_than_a_microsecond_proves_nothing(self) -> None:
        untimed = replace(stream(0), token_ms=(), predicted_ms=1e-320)
        assert prove((untimed,), 1, TOKENS, PROMPT) is Reason.BAD_TIMINGS

    def test_a_coarse_clock_has_no_spread(self) -> None:
        """More than half of the steps take no time by it."""
        timing = prove((timed([1e-320] * 20 + [20.0] * 12),), 1, TOKENS, PROMPT)
        assert isinstance(timing, StepTiming)
        assert timing.spread_ratio == 0

    @given(
        steps=st.lists(st.sampled_from([0.0, 1e-320, 1e-6, 1e-3, 20.0]) | st.floats(0, 1e9), min_size=TOKENS - 1),
        told=st.booleans(),
    )
    def test_what_is_proven_is_finite_and_leads_to_a_probe(self, *, steps: list[float], told: bool) -> None:
        one = timed(steps[: TOKENS - 1])
        timing = prove((one if told else replace(one, token_ms=()),), 1, TOKENS, PROMPT)
        if isinstance(timing, StepTiming):
            assert timing.step_seconds > 0
            assert timing.seconds(contended=True) > 0
            assert math.isfinite(timing.spread_ratio)
            assert steps_to_probe(60.0, timing.step_seconds, 256) >= 1
