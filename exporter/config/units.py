"""Quantities as people write them: durations, sizes, rates and fractions.

Every parser takes text or a plain number in the base unit, and raises `ValueError` with a sentence that names the value
and the remedy. Every formatter is exact: parsing its output gives the same number back.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

__all__ = [
    "format_bandwidth",
    "format_bytes",
    "format_duration",
    "format_flops",
    "format_fraction",
    "parse_bandwidth",
    "parse_duration",
    "parse_flops",
    "parse_fraction",
    "parse_size",
    "shown",
]

_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?"
_QUANTITY = re.compile(rf"({_NUMBER})\s*([^\d\s.+-].*)?", re.ASCII)
_DURATION_PART = re.compile(rf"({_NUMBER})\s*(ms|sec|s|min|m|h|d)(?![A-Za-z])\s*", re.ASCII)
# Prefixes may be of either case, for nobody means milli-bytes; the B may not, for a lower-case b means bits.
_SIZE_UNIT = re.compile(r"([kmgtp]?)(i?)(?-i:B)", re.IGNORECASE)
_BARE_PREFIX = re.compile(r"([kmgtp])(i?)", re.IGNORECASE)  # as Kubernetes writes memory limits: 512Mi
_RATE_UNIT = re.compile(r"([kmgtp]?)(i?)(?-i:B(?:/s|ps))", re.IGNORECASE)
_FLOPS_UNIT = re.compile(r"([kmgtp]?)flop(?:s/s|/s|s)", re.IGNORECASE)
_FLOP_AMOUNT = re.compile(r"[kmgtp]?flop", re.IGNORECASE)
_BITS = re.compile(r"(?:[kmgtp]i?)?(?-i:b)(?:its?)?(?:/s|ps)?", re.IGNORECASE)

_SECONDS = {
    unit: Decimal(seconds)
    for unit, seconds in (
        ("d", 86_400),
        ("h", 3_600),
        ("min", 60),
        ("m", 60),
        ("sec", 1),
        ("s", 1),
        ("ms", "0.001"),
    )
}
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SI_PREFIXES = ("", "k", "M", "G", "T", "P")
_BINARY_PREFIXES = ("", "Ki", "Mi", "Gi", "Ti", "Pi")

_LONGEST_TEXT = 64  # no quantity is longer, and short input keeps every pattern cheap
_LONGEST_SHOWN = 60

_DURATIONS = "a duration; write e.g. 5m, 15s, 1h30m, 500ms or plain seconds"
_SIZES = "a size; write e.g. 1GiB, 512MB or plain bytes"
_BANDWIDTHS = "a bandwidth; write e.g. 640GB/s or plain bytes per second"
_FLOPS = "a compute rate; write e.g. 2000GFLOP/s, 2TFLOPS or plain FLOP/s"
_FRACTIONS = "a fraction; write e.g. 0.25 or 25%"


def shown(value: object) -> str:
    """Return the value as an error message quotes it: short, on one line, never the inside of a list or mapping."""
    if value is None:
        return "an empty value"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def parse_duration(value: object) -> float:
    """Return seconds from `5m`, `15s`, `1h30m`, `500ms` or a plain number of seconds.

    Raises:
        ValueError: The value is not a duration above 0.
    """
    text = _text(value, _DURATIONS)
    if re.fullmatch(_NUMBER, text, re.ASCII):
        return _positive(Decimal(text), value)
    total, position, last = Decimal(0), 0, Decimal("Infinity")
    while position < len(text):
        part = _DURATION_PART.match(text, position)
        if part is None:
            raise ValueError(f"{shown(value)} is not {_DURATIONS}")
        factor = _SECONDS[part[2]]
        if factor >= last:
            raise ValueError(f"{shown(value)} repeats or swaps its units; write the larger one first, e.g. 1h30m")
        total, position, last = total + Decimal(part[1]) * factor, part.end(), factor
    return _positive(total, value)


def parse_size(value: object) -> int:
    """Return bytes from `1GiB` (1024 x 1024 x 1024), `5.5 GB` (1e9), `512Mi` or a plain number of bytes.

    Raises:
        ValueError: The value is not a size of at least one byte.
    """
    number, unit = _split(value, _SIZES)
    match = _SIZE_UNIT.fullmatch(unit) or _BARE_PREFIX.fullmatch(unit)
    if unit and match is None:
        raise ValueError(f"{shown(value)} is not {_SIZES}")
    size = number * _factor(match)
    _positive(size, value)
    if size.to_integral_value() < 1:
        raise ValueError(f"{shown(value)} is less than one byte; write e.g. 1GiB or 512MB")
    return int(size.to_integral_value())


def parse_bandwidth(value: object) -> float:
    """Return bytes per second from `640GB/s`, `1.5 TB/s`, `50GBps` or a plain number.

    Raises:
        ValueError: The value is not a bandwidth above 0.
    """
    number, unit = _split(value, _BANDWIDTHS)
    match = _RATE_UNIT.fullmatch(unit)
    if unit and match is None:
        if _SIZE_UNIT.fullmatch(unit):
            raise ValueError(f"{shown(value)} is an amount, not a bandwidth; write it per second, e.g. 640GB/s")
        raise ValueError(f"{shown(value)} is not {_BANDWIDTHS}")
    return _positive(number * _factor(match), value)


def parse_flops(value: object) -> float:
    """Return FLOP per second from `2000GFLOP/s`, `2 TFLOPS` or a plain number.

    Raises:
        ValueError: The value is not a compute rate above 0.
    """
    number, unit = _split(value, _FLOPS)
    match = _FLOPS_UNIT.fullmatch(unit)
    if unit and match is None:
        if _FLOP_AMOUNT.fullmatch(unit):
            raise ValueError(f"{shown(value)} is an amount, not a compute rate; write it per second, e.g. 2000GFLOP/s")
        raise ValueError(f"{shown(value)} is not {_FLOPS}")
    factor = 1000 ** _POWER[match[1].lower()] if match else 1
    return _positive(number * factor, value)


def parse_fraction(value: object) -> float:
    """Return a fraction from `0.25` or `25%`; bounds above 0 are the caller's.

    Raises:
        ValueError: The value is not a number above 0.
    """
    number, unit = _split(value, _FRACTIONS)
    if unit not in {"", "%"}:
        raise ValueError(f"{shown(value)} is not {_FRACTIONS}")
    return _positive(number.scaleb(-2) if unit else number, value)


def format_duration(seconds: float) -> str:
    """Return the duration as `1h30m`, `500ms` or `2.5s`."""
    exact = Decimal(repr(seconds))
    if exact < 1 and exact * 1000 == (exact * 1000).to_integral_value():
        return f"{int(exact * 1000)}ms"
    if exact != exact.to_integral_value():
        return f"{_plain(exact)}s"
    left, text = int(exact), ""
    for unit in ("d", "h", "m", "s"):
        count, left = divmod(left, int(_SECONDS[unit]))
        text += f"{count}{unit}" if count else ""
    return text


def format_bytes(size: int) -> str:
    """Return the size in the unit that says it exactly and shortest: `1GiB`, `5.5GB`, `1234567B`."""
    exact = [f"{size}B"]
    for power in range(1, len(_SI_PREFIXES)):
        exact.append(f"{_plain(Decimal(size).scaleb(-3 * power))}{_SI_PREFIXES[power]}B")
        if size % 1024**power == 0:
            exact.append(f"{size // 1024**power}{_BINARY_PREFIXES[power]}B")
    return min(exact, key=len)


def format_bandwidth(bytes_per_second: float) -> str:
    """Return the bandwidth as `640GB/s`."""
    return _si(bytes_per_second, "B/s")


def format_flops(flops_per_second: float) -> str:
    """Return the compute rate as `2TFLOP/s`."""
    return _si(flops_per_second, "FLOP/s")


def format_fraction(fraction: float) -> str:
    """Return the fraction as `0.25`."""
    return _plain(Decimal(repr(fraction)))


def _text(value: object, expected: str) -> str:
    """Return the value as trimmed text, or refuse what can never be a quantity."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{shown(value)} is not {expected}")
    text = str(value).strip()
    if text.startswith("-"):
        raise ValueError(f"{shown(value)} is below 0; it must be more than 0")
    if len(text) > _LONGEST_TEXT or text in {"nan", "inf"}:
        raise ValueError(f"{shown(value)} is not {expected}")
    return text.removeprefix("+")


def _split(value: object, expected: str) -> tuple[Decimal, str]:
    """Return the number and the unit of a quantity that has one of each."""
    match = _QUANTITY.fullmatch(_text(value, expected))
    if match is None:
        raise ValueError(f"{shown(value)} is not {expected}")
    unit = match[2] or ""
    if _BITS.fullmatch(unit):
        raise ValueError(f"{shown(value)} is in bits, as its lower-case b says; write bytes with an upper-case B")
    return Decimal(match[1]), unit


def _factor(match: re.Match[str] | None) -> int:
    """Return how many base units one unit is; no unit is the base unit."""
    if match is None:
        return 1
    return int((1024 if match[2] else 1000) ** _POWER[match[1].lower()])


def _positive(number: Decimal, value: object) -> float:
    """Return the number as a float that is finite and above 0."""
    result = float(number)
    if result == 0:
        raise ValueError(f"{shown(value)} is too small: it must be more than 0")
    if math.isinf(result):
        raise ValueError(f"{shown(value)} is too large to be true; check its exponent")
    return result


def _si(value: float, unit: str) -> str:
    """Return the value with the largest prefix that leaves at least 1 before the point."""
    exact = Decimal(repr(value))
    power = max(p for p in range(len(_SI_PREFIXES)) if p == 0 or exact.scaleb(-3 * p) >= 1)
    return f"{_plain(exact.scaleb(-3 * power))}{_SI_PREFIXES[power]}{unit}"


def _plain(number: Decimal) -> str:
    """Return the number without exponent and without trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
