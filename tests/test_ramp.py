"""A request that joins or leaves the batch makes an edge in the step times; nothing else may look like one."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.roofline.ramp import has_ramp


def noisy(count: int, deviation: float, seed: int, *, growth: float = 0.0, stalls: float = 0.0) -> list[float]:
    """Step times around 20 ms that grow with the cache; some steps are stalled."""
    rng = random.Random(seed)
    return [
        20.0
        * (1 + growth * i / count)
        * rng.gauss(1, deviation)
        * (rng.uniform(1.5, 6) if rng.random() < stalls else 1.0)
        for i in range(count)
    ]


def with_request(steps: list[float], at: int, tokens: int, factor: float, prompt: float) -> list[float]:
    """The same steps with a request among them: its prompt takes a step longer, then it shares `tokens - 1` steps."""
    joined = list(steps)
    joined[at] += prompt
    for i in range(at + 1, min(at + tokens, len(joined))):
        joined[i] *= factor
    return joined


@settings(max_examples=60)
@given(
    st.integers(16, 256),
    st.sampled_from([0.003, 0.01, 0.02, 0.05]),
    st.floats(0, 0.1),
    st.sampled_from([0.0, 0.02, 0.05]),
    st.integers(0, 1_000_000),
)
def test_an_idle_run_rarely_has_one(count: int, deviation: float, growth: float, stalls: float, seed: int) -> None:
    """Of 20 runs of any such kind at most 2 look disturbed; see the rate of all kinds together below."""
    found = [has_ramp(noisy(count, deviation, seed + i, growth=growth, stalls=stalls)) for i in range(20)]
    assert sum(found) <= 2


def test_fewer_than_one_idle_run_in_fifty_has_one() -> None:
    runs = [
        noisy(count, deviation, seed, growth=0.06, stalls=0.03)
        for count in (16, 60, 157, 256)
        for deviation in (0.005, 0.02, 0.05)
        for seed in range(40)
    ]
    assert sum(map(has_ramp, runs)) < len(runs) / 50


@given(
    st.builds(noisy, st.integers(40, 256), st.sampled_from([0.003, 0.01, 0.015]), st.integers(0, 1_000_000)),
    st.floats(0.1, 0.8),
    st.integers(8, 60),
    st.floats(1.35, 2.2),
    st.floats(0, 500),
)
def test_a_request_of_8_tokens_and_more_is_found(
    steps: list[float], place: float, tokens: int, factor: float, prompt: float
) -> None:
    """Wherever it comes, however long its prompt takes, and whether or not it ends within the run."""
    at = max(8, int(place * len(steps)))
    assert has_ramp(with_request(steps, at, tokens, factor, prompt))


def test_a_request_that_was_there_first_is_found_when_it_ends() -> None:
    steps = noisy(100, 0.01, 1)
    assert has_ramp([s * (1.6 if i < 30 else 1.0) for i, s in enumerate(steps)])


@pytest.mark.parametrize("factor", [1.0, 1.03])
def test_a_change_too_small_to_tell_is_none(factor: float) -> None:
    steps = [20.0] * 40 + [20.0 * factor] * 40
    assert not has_ramp(steps)
    assert has_ramp([20.0] * 40 + [20.0 * 1.06] * 40), "on a perfectly quiet machine a small edge shows"


def test_a_gap_alone_is_none() -> None:
    """A stall, even a huge one, or three in a row, leaves the level as it was."""
    for gap in ([900.0], [30.0, 900.0, 40.0]):
        assert not has_ramp([20.0] * 40 + gap + [20.0] * 40)


def test_uneven_steps_of_a_busy_machine_are_none() -> None:
    rng = random.Random(3)
    stormy = [20.0 * rng.uniform(1, 8) for _ in range(30)]
    assert not has_ramp(noisy(60, 0.02, 4) + stormy + noisy(60, 0.02, 5))


@given(st.lists(st.floats(0, 1e6), max_size=40))
def test_any_steps_have_an_answer(steps: list[float]) -> None:
    assert has_ramp(steps) in {True, False}
