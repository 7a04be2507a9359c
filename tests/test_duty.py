"""What probes may take: the share of every hour, and the pause after failures."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.config import ProbeSettings
from exporter.roofline.reason import Reason
from exporter.service.backoff import JITTER, Backoff
from exporter.service.duty import DutyAccount
from exporter.service.rounds import Rounds


@dataclass
class Time:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@given(
    st.sampled_from([0.002, 0.02, 0.1, 0.5]),
    st.lists(st.tuples(st.floats(0, 900), st.floats(0.05, 30)), min_size=1, max_size=60),
    st.integers(1, 6),
)
def test_no_hour_takes_more_than_its_share_and_one_probe(
    limit: float, probes: list[tuple[float, float]], burst: int
) -> None:
    """However long probes take, whenever users let them begin, and though a round is not interrupted to pay it off."""
    time = Time()
    account = DutyAccount(limit, time)
    ended: list[tuple[float, float]] = []
    for number, (wait, seconds) in enumerate(probes):
        time.now += wait
        if number % burst == 0:
            # A round begins.
            time.now += account.pause() + 1e-6
            assert account.free()
        elif account.hour_pause():
            time.now += account.hour_pause()
        time.now += seconds
        account.charge(seconds)
        ended.append((time.now, seconds))
        in_hour = sum(s for at, s in ended if at >= time.now - 3600)
        longest = max(s for at, s in ended if at >= time.now - 3600)
        assert in_hour <= limit * 3600 + longest + 1e-6
        assert account.ratio() == pytest.approx(in_hour / 3600)


def test_the_hours_share_comes_back_when_the_hour_is_over() -> None:
    time = Time()
    account = DutyAccount(0.01, time)
    for _ in range(4):
        time.now += 10
        account.charge(10)
    assert account.hour_pause() == pytest.approx(3600 + 10 - 40, abs=0.01)
    time.now += account.hour_pause()
    assert account.hour_pause() == 0


@given(st.floats(1, 100), st.integers(1, 8), st.lists(st.floats(0, 0.999), min_size=12, max_size=12))
def test_pauses_double_up_to_the_limit_and_start_again_after_a_success(
    first: float, times: int, chances: list[float]
) -> None:
    chance = iter(chances)
    backoff = Backoff(first, first * times, lambda: next(chance))
    for number in range(10):
        plain = min(first * 2**number, first * times)
        assert plain * (1 - JITTER) <= backoff.fail() <= plain * (1 + JITTER)
    backoff.succeed()
    assert backoff.fail() <= first * (1 + JITTER)


def test_retries_of_two_exporters_part_ways() -> None:
    assert Backoff(10, 100, lambda: 0.1).fail() != Backoff(10, 100, lambda: 0.9).fail()


def rounds(time: Time, **probing: object) -> Rounds:
    settings = ProbeSettings.model_validate(probing)
    account = DutyAccount(settings.max_duty_cycle, time)
    return Rounds(
        name="local", batches=settings.batches, probing=settings, duty=account, clock=time, chance=lambda: 0.5
    )


def test_a_server_that_fails_is_asked_ever_more_rarely() -> None:
    """Soon at first, at last every fourth interval; a success begins anew."""
    time = Time()
    r = rounds(time)
    pauses = []
    for _ in range(9):
        r.begin()
        r.took(Reason.SERVER_ERROR)
        r.took(Reason.SERVER_ERROR)
        r.took(Reason.NOT_TOGETHER)
        r.end(None)
        pauses.append(r.due - time.now)
    assert pauses == [30, 60, 120, 240, 480, 960, 1200, 1200, 1200]
    r.failed()
    assert r.due - time.now == 1200


@pytest.mark.parametrize("reason", [Reason.TIMEOUT, Reason.UNREACHABLE, Reason.LOADING, Reason.UNAUTHORIZED])
def test_what_every_batch_would_meet_ends_the_round(reason: Reason) -> None:
    """A hung server is waited for once, not once for each batch."""
    r = rounds(Time())
    r.begin()
    assert r.goes_on(whole=True)
    r.took(reason)
    assert not r.goes_on(whole=True)
    r.end(None)
    assert r.owed == [1, 2, 4]


def test_skipped_batches_are_no_failures() -> None:
    time = Time()
    r = rounds(time)
    r.begin()
    for _ in range(3):
        assert r.goes_on(whole=False)
        r.took(Reason.TOO_FEW_SLOTS)
    r.end(None)
    assert r.due - time.now == 300


def test_a_round_stops_where_the_hour_is_used_up_and_goes_on_there() -> None:
    time = Time()
    r = rounds(time, max_duty_cycle=0.001)
    r.begin()
    r.spent(4.0, failed=False)
    r.took(Reason.NOT_TOGETHER)
    assert r.goes_on(whole=True), "the operator asked for it"
    assert not r.goes_on(whole=False)
    r.end(None)
    assert r.owed == [2, 4]
    assert r.due - time.now >= 3600
