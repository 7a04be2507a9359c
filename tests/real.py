"""Real parts that some tests need: a missing one skips the test, or fails it where everything is required."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Skip the test, or fail it when ROOFLINE_REQUIRE_ALL=1."""
    if os.environ.get("ROOFLINE_REQUIRE_ALL") == "1":
        pytest.fail(f"required by ROOFLINE_REQUIRE_ALL=1: {reason}", pytrace=False)
    pytest.skip(reason)


def require(condition: object, reason: str) -> None:
    """Go on only if the condition holds; otherwise the part is `missing`."""
    if not condition:
        missing(reason)
