"""Quantities as people write them: durations, sizes, rates and fractions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.config import units

PARSERS = [units.parse_duration, units.parse_size, units.parse_bandwidth, units.parse_flops, units.parse_fraction]
NEVER = ["", " ", "x", "-1", "-5m", "0", "0.0", 0, -1, True, False, None, [], {}, "1_000", "1,000", "1e", "--1", "1 2"]
NEVER_EITHER = [float("nan"), float("inf"), float("-inf"), "nan", "inf", "1e999", "1e-999", "0x10", "٣", "9" * 100]
POSITIVE = st.floats(min_value=1e-9, max_value=1e18, allow_nan=False)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300),
        ("15s", 15),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("500ms", 0.5),
        ("2", 2),
        ("1.5h", 5400),
        (".5s", 0.5),
        ("1d", 86_400),
        ("2 min", 120),
        ("10sec", 10),
        ("1e2s", 100),
        ("1e2", 100),
        ("+3s", 3),
        (2, 2),
        (0.25, 0.25),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GiB", 1024**3),
        ("512MB", 512 * 10**6),
        ("5.5 GB", 5_500_000_000),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("512Mi", 512 * 1024**2),
        ("1G", 10**9),
        ("0.1GiB", 107_374_182),
        ("7B", 7),
        ("1e9", 10**9),
        (1e9, 10**9),
        (4096, 4096),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("640GB/s", 640e9),
        ("50 GB/s", 50e9),
        ("1.5TB/s", 1.5e12),
        ("50GBps", 50e9),
        ("10GiB/s", 10 * 1024**3),
        ("900MB/s", 9e8),
        (5e10, 5e10),
        ("1e9", 1e9),
    ],
)
def test_bandwidths(text: object, rate: float) -> None:
    assert units.parse_bandwidth(text) == rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [("2000GFLOP/s", 2e12), ("2 TFLOPS", 2e12), ("2TFLOPs", 2e12), ("2tflops/s", 2e12), (1e12, 1e12), ("9e11", 9e11)],
)
def test_compute_rates(text: object, rate: float) -> None:
    assert units.parse_flops(text) == rate


@pytest.mark.parametrize(("text", "fraction"), [("25%", 0.25), (0.25, 0.25), (1, 1), ("12.5 %", 0.125)])
def test_fractions(text: object, fraction: float) -> None:
    assert units.parse_fraction(text) == fraction


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("value", NEVER + NEVER_EITHER)
def test_what_no_quantity_can_be_is_refused(parser: object, value: object) -> None:
    assert callable(parser)
    with pytest.raises(ValueError, match=r"is (not|0|below|too|less)|in bits"):
        parser(value)


@pytest.mark.parametrize("text", ["5M", "1m1m", "1m1h", "1m30", "5 months", "1h-3m", "5mss"])
def test_doubtful_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a duration|repeats or swaps"):
        units.parse_duration(text)


@pytest.mark.parametrize("text", ["1Gb", "1gb", "1Mib", "8 kbit", "1b"])
def test_sizes_in_bits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="in bits, as its lower-case b says"):
        units.parse_size(text)


@pytest.mark.parametrize("text", ["640Gb/s", "640Gbps", "640gb/s", "640Gbit/s"])
def test_bandwidths_in_bits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="in bits, as its lower-case b says"):
        units.parse_bandwidth(text)


def test_amounts_are_not_rates() -> None:
    with pytest.raises(ValueError, match=r"'640GB' is an amount, not a bandwidth; write it per second"):
        units.parse_bandwidth("640GB")
    with pytest.raises(ValueError, match="'2TFLOP' is an amount, not a compute rate"):
        units.parse_flops("2TFLOP")
    with pytest.raises(ValueError, match=r"'0\.2B' is less than one byte"):
        units.parse_size("0.2B")


def test_quantities_are_written_as_people_do() -> None:
    assert [units.format_duration(s) for s in (300.0, 5400.0, 0.5, 2.5, 86_400.0)] == [
        "5m",
        "1h30m",
        "500ms",
        "2.5s",
        "1d",
    ]
    assert [units.format_bytes(b) for b in (1024**3, 5_500_000_000, 1_234_567)] == ["1GiB", "5.5GB", "1234567B"]
    assert [units.format_bandwidth(b) for b in (640e9, 1.5e12, 0.5)] == ["640GB/s", "1.5TB/s", "0.5B/s"]
    assert [units.format_flops(2e12), units.format_fraction(1e-05)] == ["2TFLOP/s", "0.00001"]


@given(POSITIVE)
def test_a_formatted_number_parses_to_itself(value: float) -> None:
    assert units.parse_duration(units.format_duration(value)) == value
    assert units.parse_bandwidth(units.format_bandwidth(value)) == value
    assert units.parse_flops(units.format_flops(value)) == value
    assert units.parse_fraction(units.format_fraction(value)) == value


@given(st.integers(min_value=1, max_value=2**70) | st.integers(1, 2000).map(lambda n: n * 1024**3))
def test_a_formatted_size_parses_to_itself(size: int) -> None:
    assert units.parse_size(units.format_bytes(size)) == size


@given(
    st.text() | st.from_regex(r"[0-9.e+-]{0,6} ?[kKmMgGbBhdsFLOP/]{0,6}", fullmatch=True) | st.integers() | st.floats()
)
def test_a_parser_returns_a_positive_number_or_a_value_error(value: object) -> None:
    for parser in PARSERS:
        try:
            number = parser(value)
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right
        else:
            assert 0 < number < float("inf")
