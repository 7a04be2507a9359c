"""What a server's own /metrics says, read defensively: the few counters that users' traffic shows in."""

import json
import math
import re
from typing import Final

from exporter.roofline.counters import Counters
from exporter.roofline.reason import Reason

RESTART_HEADER: Final = "Process-Start-Time-Unix"
"""Not Unix time in any version, but microseconds since the machine's start: it serves as a token of this process."""
MAX_BYTES: Final = 64 << 10
"""Twenty times what a server sends; parsing more would hold the event loop."""
_LINE: Final = re.compile(r"^llamacpp:(\w+)[ \t]+(\S+)", re.MULTILINE)
"""A series without labels. (A parser for Prometheus's text renames a counter like n_tokens_max, which lacks _total.)"""


def parse_counters(body: bytes, restart: str | None, at: float) -> Counters | Reason:
    """The answer of GET /metrics.

    Args:
        body: The text; builds b7090 to b7190 send it as a JSON string.
        restart: The header that changes with each start of the server.
        at: When it was asked, monotonic seconds.
    """
    if len(body) > MAX_BYTES:
        return Reason.BAD_ANSWER
    try:
        text = body.decode()
        if text.startswith('"'):
            text = json.loads(text)
        values = {name: float(value) for name, value in _LINE.findall(text)}
    except (ValueError, RecursionError):
        return Reason.BAD_ANSWER
    # A value that is no number says nothing: builds before March 2025 print -nan.
    known = {name: value for name, value in values.items() if math.isfinite(value) and value >= 0}
    tokens, seconds = known.get("tokens_predicted_total"), known.get("tokens_predicted_seconds_total")
    processing = known.get("requests_processing")
    if tokens is None or seconds is None or processing is None:
        return Reason.BAD_ANSWER if known else Reason.NOT_LLAMA
    return Counters(
        at=at,
        restart=restart,
        tokens=tokens,
        seconds=seconds,
        accepted=known.get("spec_decode_num_accepted_tokens_total"),
        processing=int(processing),
        longest=known.get("n_tokens_max", known.get("n_past_max")),
        deferred=int(known.get("requests_deferred", 0)),
    )
