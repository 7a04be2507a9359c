"""Figures that no sound server or file gives: none raises, and none that is not finite is published."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_architecture import TENSORS, meta
from test_proof import PROMPT, TOKENS, stream, timed

from exporter.measure.listing import told_sleep
from exporter.roofline.architecture import Metadata, footprint_of
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


class TestHyperparameters:
    """A model file's numbers of any type that a file can have."""

    KEYS = (
        *("block_count", "embedding_length", "attention__head_count", "attention__head_count_kv"),
        *("attention__key_length", "attention__value_length", "attention__sliding_window"),
        *("attention__sliding_window_pattern", "attention__key_length_mla", "attention__value_length_mla"),
        *("attention__kv_lora_rank", "nextn_predict_layers", "expert_count", "expert_used_count"),
        *("ssm__state_size", "ssm__inner_size", "ssm__group_count", "ssm__conv_kernel", "wkv__head_size"),
        *("token_shift_count", "full_attention_interval"),
    )
    VALUES = (
        st.sampled_from([-5, -1, 0, 1, 2, 64, 2**53, 2**64 - 1, -(2**63), 1.7e308, -1.7e308, math.inf, math.nan, 0.5])
        | st.integers(1, 4096)
        | st.booleans()
        | st.just("64")
    )

    @pytest.mark.parametrize("heads", [1.7e308, -5, -1e300, 2**64 - 1, math.inf, math.nan])
    def test_a_count_that_is_none_is_as_good_as_not_said(self, heads: float) -> None:
        told = meta(block_count=1, attention__key_length=64, attention__value_length=64, embedding_length=64)
        unsaid = footprint_of(told, TENSORS)
        for value in (heads, (heads,)):
            assert footprint_of({**told, "llama.attention.head_count": value}, TENSORS) == unsaid

    @given(
        st.dictionaries(st.sampled_from(KEYS), VALUES | st.lists(VALUES.filter(lambda v: v != "64"), max_size=3)),
        st.sampled_from(["llama", "gemma2", "qwen3moe"]),
        st.integers(1, 64),
        st.floats(0, 1e6),
    )
    def test_any_footprint_is_finite_and_not_negative(
        self, keys: dict[str, float | str | list[float]], name: str, batch: int, depth: float
    ) -> None:
        told = {k: tuple(v) if isinstance(v, list) else v for k, v in keys.items()}
        usual = meta(name, block_count=2, embedding_length=64, attention__head_count=4)
        metadata: Metadata = {**usual, **{f"{name}.{k.replace('__', '.')}": v for k, v in told.items()}}
        work = footprint_of(metadata, TENSORS).step(batch, depth)
        assert all(math.isfinite(size) and size >= 0 for size in work.bytes_by_part.values())
        assert math.isfinite(work.flops)
        assert work.flops > 0


@pytest.mark.parametrize(
    ("digits", "seconds"), [("9" * 5000, None), ("9" * 400, None), ("9" * 11, None), ("9" * 10, 9999999999.0)]
)
def test_a_sleep_of_absurdly_many_digits_is_none(digits: str, seconds: float | None) -> None:
    assert told_sleep(["--sleep-idle-seconds", digits]) == seconds
