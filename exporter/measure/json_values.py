"""Single values out of foreign JSON: what is not of the kind asked for is absent, never a guess and never an exception.

Numbers that are strings, booleans, NaN or infinite are not numbers.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

Json: TypeAlias = Mapping[str, "Json"] | Sequence["Json"] | str | int | float | bool | None

MAX_VALUES: Final = 200_000
"""Commas and brackets of one answer: parsing holds the interpreter, 20 ms for so many, a second for 8 MiB of `[],`."""
MAX_MILLISECONDS: Final = 1e9
"""No request takes 11 days."""
_MAX_LABEL: Final = 128


def loads(body: bytes) -> Json:
    """JSON; NaN and Infinity, which it does not know, become null.

    Raises:
        ValueError: Not JSON, not UTF-8, or more or deeper than any answer of the API.
    """
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError("more values than any answer has")
    try:
        parsed: Json = json.loads(body, parse_constant=lambda _: None)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return parsed


def mapping(value: Json) -> Mapping[str, Json]:
    """The object, or an empty one."""
    return value if isinstance(value, dict) else {}


def text(value: Json) -> str:
    """The string, or an empty one."""
    return value if isinstance(value, str) else ""


def label(value: Json) -> str:
    """The string, fit for a metric's label: of bounded length, without control characters and lone surrogates."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text(value)[:_MAX_LABEL])


def number(value: Json) -> float | None:
    """A finite number; booleans and numbers as strings are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def integer(value: Json) -> int | None:
    """A whole number that a double holds exactly."""
    found = number(value)
    return int(found) if found is not None and found == int(found) and abs(found) < 2**53 else None


def positive(value: Json) -> int | None:
    """A whole number above 0."""
    found = integer(value)
    return found if found is not None and found > 0 else None


def milliseconds(value: Json) -> float | None:
    """A duration that a request can have had."""
    found = number(value)
    return found if found is not None and 0 <= found <= MAX_MILLISECONDS else None
