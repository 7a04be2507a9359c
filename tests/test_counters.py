"""Users' traffic from the server's own counters."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.measure.counters import parse_counters
from exporter.roofline.counters import MAX_COUNTER_ERROR, Counters, CounterTrack, quantum
from exporter.roofline.live import (
    LiveSample,
    LiveSource,
)
from exporter.roofline.reason import Reason


def reading(at: float, tokens: float, seconds: float, processing: int = 0, **how: object) -> Counters:
    known = Counters(at, "1", tokens, seconds, 0.0, processing, 500.0)
    return replace(known, **how)  # type: ignore[arg-type]


def counted(*readings: Counters) -> LiveSample | None:
    found = CounterTrack()
    for each in readings:
        found = found.add(each)
    return found.sample()


class TestCounters:
    """Six digits, resets, and requests that count when they end."""

    def test_one_request_from_idle_to_idle(self) -> None:
        sample = counted(
            *(reading(float(n), 1000.0, 50.0, 1 if 0 < n < 41 else 0) for n in range(41)),
            reading(41.0, 1000.0 + 2001, 50.0 + 40.0, 0),
        )
        assert sample is not None
        assert sample.step_seconds == pytest.approx(40.0 / 2000)
        assert sample.tokens_per_second == pytest.approx(2001 / 40, rel=0.03)
        assert sample.streams == pytest.approx(1.0, rel=0.03)
        assert (sample.source, sample.shares) == (LiveSource.METRICS, ())

    def test_a_count_that_moved_too_little_waits_for_more(self) -> None:
        first, second, third = (
            reading(0, 2e6, 4e4, 1),
            reading(1, 2e6 + 100, 4e4 + 5, 1),
            reading(2, 2e6 + 1e3, 4e4 + 50),
        )
        assert counted(first, second) is None, "a printed digit is 10 tokens of 100"
        sample = counted(first, second, third)
        assert sample is not None
        assert sample.step_seconds == pytest.approx(45 / 899)

    @pytest.mark.parametrize(
        "after",
        [
            reading(1, 9000.0, 500.0, restart="2"),
            reading(1, 500.0, 500.0),
            reading(1, 9000.0, 10.0),
            reading(1, 9000.0, 500.0, accepted=None),
        ],
    )
    def test_a_restart_drops_the_window(self, after: Counters) -> None:
        before = reading(0, 1000.0, 50.0, 1)
        assert counted(before, after) is None
        assert counted(before, reading(1, 9000.0, 500.0)) is not None

    def test_accepted_drafts_are_not_steps(self) -> None:
        sample = counted(reading(0, 0, 0, 1), reading(1, 3001, 30.0, 0, accepted=2000.0))
        assert sample is not None
        assert sample.step_seconds == pytest.approx(30.0 / 1000)

    def test_without_the_speculation_counters_a_token_may_be_no_step(self) -> None:
        old = [reading(float(n), 0.0, 0.0, 1, accepted=None) for n in range(1, 41)]
        sample = counted(reading(0, 0, 0, 0, accepted=None), *old, reading(41, 2001, 40.0, 0, accepted=None))
        assert sample is not None
        assert sample.step_seconds is None
        assert sample.tokens_per_second == pytest.approx(2001 / 40, rel=0.03)

    def test_how_many_requests_ended_is_part_of_the_error(self) -> None:
        def ended(tokens: float) -> LiveSample | None:
            return counted(reading(0, 0, 0, 20), reading(1, tokens, 10.0, 19, longest=None))

        assert ended(100) is None, "between 1 and 20 first tokens"
        assert ended(1000) is not None

    def test_short_answers_between_unknown_ends_have_no_rate(self) -> None:
        sample = counted(reading(0, 0, 0, 2), reading(1, 2000, 30.0, 2))
        assert sample is not None
        assert sample.step_seconds is not None
        assert (sample.tokens_per_second, sample.streams) == (None, None)

    @given(value=st.floats(1e-6, 1e9), whole=st.booleans())
    def test_printing_never_moves_a_value_by_more_than_half_a_quantum(self, *, value: float, whole: bool) -> None:
        exact = float(int(value)) if whole else value
        assert abs(float(f"{exact:.6g}") - exact) <= 0.5 * quantum(exact, whole=whole) * 1.2 + 1e-12

    @given(
        seed=st.integers(0, 10**9),
        tokens=st.floats(0, 3e7).map(int),
        step=st.floats(0.005, 0.2),
        streams=st.integers(1, 4),
    )
    def test_what_is_published_is_within_its_error(self, seed: int, tokens: int, step: float, streams: int) -> None:
        """Requests of at least 50 tokens, read once a second through six digits."""
        chance = random.Random(seed)
        total, seconds, now = float(tokens), tokens * step, 0.0
        found, running = CounterTrack(), [chance.uniform(0, 5) for _ in range(streams)]
        for _ in range(120):
            printed = (float(f"{total:.6g}"), float(f"{seconds:.6g}"))
            found = found.add(Counters(now, "t", *printed, 0.0, streams, 5000.0))
            if (sample := found.sample()) is not None and sample.step_seconds is not None:
                assert sample.step_seconds == pytest.approx(step, rel=MAX_COUNTER_ERROR + 0.021)
            now += 1.0
            for number, until in enumerate(running):
                if until <= now:
                    length = chance.randint(max(50, int(1 / step)), 600)
                    total, seconds = total + length, seconds + (length - 1) * step
                    running[number] = now + length * step


RECORDED = b"""# HELP llamacpp:tokens_predicted_total Number of generation tokens processed
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 1.23457e+06
# TYPE llamacpp:tokens_predicted_seconds_total counter
llamacpp:tokens_predicted_seconds_total 0.24653
# TYPE llamacpp:n_tokens_max counter
llamacpp:n_tokens_max 63
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 1
# TYPE llamacpp:n_busy_slots_per_decode gauge
llamacpp:n_busy_slots_per_decode -nan
"""


class TestParsing:
    """GET /metrics of several years."""

    def test_the_text(self) -> None:
        found = parse_counters(RECORDED, "2273383613", 5.0)
        assert found == Counters(5.0, "2273383613", 1234570.0, 0.24653, None, 1, 63.0)

    def test_a_json_string_of_november_2025(self) -> None:
        quoted = b'"' + RECORDED.replace(b"\n", b"\\n") + b'"'
        assert parse_counters(quoted, "1", 5.0) == parse_counters(RECORDED, "1", 5.0)

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            (b"", Reason.NOT_LLAMA),
            (b"<html>502</html>", Reason.NOT_LLAMA),
            (b"up 1\n", Reason.NOT_LLAMA),
            (b'"unterminated', Reason.BAD_ANSWER),
            (RECORDED.replace(b"0.24653", b"many"), Reason.BAD_ANSWER),
            (b"\xff\xfe", Reason.BAD_ANSWER),
            (RECORDED.replace(b"0.24653", b"nan"), Reason.BAD_ANSWER),
            (RECORDED.replace(b"0.24653", b"-1"), Reason.BAD_ANSWER),
            (RECORDED.replace(b"_processing 1", b"_processing inf"), Reason.BAD_ANSWER),
        ],
    )
    def test_anything_else_is_a_reason(self, body: bytes, reason: Reason) -> None:
        assert parse_counters(body, None, 0.0) is reason

    @given(st.binary(max_size=300))
    def test_no_body_is_an_exception(self, body: bytes) -> None:
        assert parse_counters(body, None, 0.0) in {Reason.NOT_LLAMA, Reason.BAD_ANSWER}
