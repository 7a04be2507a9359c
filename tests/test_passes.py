import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.roofline.ceiling import Bandwidth, Kernel, PassSummary, ThreadScope
from exporter.roofline.passes import (
    CACHE_MULTIPLE,
    LEAST_CLEAN_PASSES,
    PREFERRED_ARRAY_BYTES,
    SMALLEST_ARRAY_BYTES,
    SPREAD_LIMIT,
    Pass,
    SizePlan,
    fastest,
    flaw,
    is_plateau,
    judge,
    plan_sizes,
    sift,
)
from exporter.roofline.reason import Reason

MIB = 1 << 20
TIMES = st.floats(1e-4, 10.0)
PASSES = st.builds(
    Pass,
    seconds=TIMES,
    cpu_ratio=st.floats(0.0, 1.0),
    imbalance=st.floats(1.0, 5.0),
    stagger=st.floats(1.0, 3.0),
    involuntary_switches=st.integers(0, 20),
    page_faults=st.integers(0, 2),
)


@pytest.mark.parametrize(
    ("timed", "reason"),
    [
        (Pass(1, 1.0, 1.0, 0, 0), None),
        (Pass(1, 0.998, 1.01, 2, 0), None),
        (Pass(1, 0.96, 1.0, 0, 0), None),
        (Pass(1, 0.96, 1.0, 1, 0), Reason.PREEMPTED),
        (Pass(1, 0.94, 1.0, 0, 0), Reason.PREEMPTED),
        (Pass(1, 0.5, 2.0, 9, 9), Reason.PREEMPTED),
        (Pass(1, 1.0, 1.0, 0, 1), Reason.PAGE_FAULTS),
        (Pass(1, 1.0, 1.16, 0, 0), Reason.IMBALANCED),
        (Pass(1, 1.0, 1.0, 0, 0, 1.04), None),
        (Pass(1, 1.0, 1.0, 0, 0, 1.9), Reason.PREEMPTED),
    ],
)
def test_flaws(timed: Pass, reason: Reason | None) -> None:
    assert flaw(timed) is reason


@given(st.lists(PASSES))
def test_every_pass_but_the_warm_up_is_either_clean_or_counted(passes: list[Pass]) -> None:
    sifted = sift(passes)
    assert len(sifted.seconds) + sum(sifted.rejected.values()) == max(0, len(passes) - 1)
    assert set(sifted.seconds) <= {timed.seconds for timed in passes[1:]}


@given(st.lists(TIMES))
def test_a_verdict_needs_enough_passes_that_agree(seconds: list[float]) -> None:
    verdict = judge(seconds)
    if len(seconds) < LEAST_CLEAN_PASSES:
        assert verdict is None
    elif isinstance(verdict, PassSummary):
        assert verdict.best_seconds == min(seconds)
        assert 0 <= verdict.spread_ratio <= SPREAD_LIMIT
    else:
        assert verdict is Reason.UNSTABLE
        assert max(seconds) > min(seconds)


@given(TIMES, st.integers(LEAST_CLEAN_PASSES, 9))
def test_equal_passes_are_stable(seconds: float, count: int) -> None:
    verdict = judge([seconds] * count)
    assert isinstance(verdict, PassSummary)
    assert verdict.spread_ratio == 0


@given(st.floats(1e6, 1e13), st.floats(1.0, 10.0))
def test_a_faster_small_size_is_no_plateau(rate: float, factor: float) -> None:
    assert is_plateau(rate / factor, rate)
    assert is_plateau(rate * factor, rate) is (rate * factor <= 1.03 * rate)


@given(st.integers(0, 1 << 42), st.integers(0, 1 << 42))
def test_sizes_stay_within_the_budget_and_beyond_the_cache(cache: int, budget: int) -> None:
    plan = plan_sizes(cache, budget)
    if isinstance(plan, SizePlan):
        assert SMALLEST_ARRAY_BYTES <= plan.wanted <= plan.largest
        assert 3 * plan.largest <= budget
        assert 3 * plan.largest > cache - 3
        for smaller, size in plan.comparisons:
            assert 0 < smaller < plan.largest
            assert size in {smaller, plan.largest}
            assert size >= plan.wanted
    elif plan is Reason.NO_MEMORY:
        assert budget < 3 * (SMALLEST_ARRAY_BYTES + 64)
    else:
        assert plan is Reason.CACHE_SUSPECT
        assert budget < cache + 3 * 64


@pytest.mark.parametrize(
    ("cache", "budget", "wanted", "comparisons"),
    [
        # A desktop: STREAM's rule fits, and is compared with all that the budget allows before its own half is tried.
        (32 * MIB, 1024 * MIB, CACHE_MULTIPLE * 32 * MIB, 2),
        # A tiny cache: arrays are long enough to time.
        (2 * MIB, 1024 * MIB, PREFERRED_ARRAY_BYTES, 2),
        # A server whose cache is a quarter of the budget: the rule does not fit, half the size decides.
        (260 * MIB, 1024 * MIB, 1024 * MIB // 3 // 64 * 64, 1),
    ],
)
def test_sizes_of_known_machines(cache: int, budget: int, wanted: int, comparisons: int) -> None:
    plan = plan_sizes(cache, budget)
    assert isinstance(plan, SizePlan)
    assert plan.wanted == wanted
    assert len(plan.comparisons) == comparisons


class TestFastest:
    def bandwidth(self, rate: float, count: int) -> Bandwidth:
        scope = ThreadScope.SINGLE if count == 1 else ThreadScope.ALL
        return Bandwidth(
            Kernel.READ, scope, count, rate, rate, 0.0, 4, 1, "plain", "i", "4KiB", "stream", "exporter", 0.0
        )

    def test_the_best_count_wins_under_the_name_all(self) -> None:
        best = fastest([self.bandwidth(1.0, 8), self.bandwidth(3.0, 4), self.bandwidth(2.0, 1)])
        assert best == self.bandwidth(3.0, 4)

    def test_a_single_thread_may_be_the_best(self) -> None:
        best = fastest([self.bandwidth(1.0, 2), self.bandwidth(2.0, 1)])
        assert isinstance(best, Bandwidth)
        assert (best.threads, best.thread_count) == (ThreadScope.ALL, 1)

    def test_reasons(self) -> None:
        one = self.bandwidth(1.0, 1)
        assert fastest([Reason.PREEMPTED, one]) is Reason.PREEMPTED
        assert fastest([Reason.IMBALANCED, Reason.PREEMPTED]) is Reason.IMBALANCED
        assert fastest([Reason.IMBALANCED, self.bandwidth(1.0, 4)]) == self.bandwidth(1.0, 4)
