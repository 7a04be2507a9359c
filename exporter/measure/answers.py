"""What llama-server's answers mean: JSON parsed defensively into the few values that a probe needs.

A missing field is None, never a guess. The fields that came or changed over two years of builds are told by their
presence, never by the build's number, which a build made outside git does not have.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import PurePath
from typing import Final

from exporter.measure.json_values import Json, integer, label, loads, mapping, milliseconds, positive, text
from exporter.roofline.proof import LEAST_MS, Stream
from exporter.roofline.reason import Reason
from exporter.roofline.slots import PROBE_SEED, Slot

_ROUTER_REFUSALS: Final = {
    "model name is missing from the request": Reason.MODEL_NOT_NAMED,
    "model is not loaded": Reason.MODEL_UNLOADED,
    "model not found": Reason.UNKNOWN_MODEL,
}
"""A router's words for a model that was taken away between two questions."""

_WANTS_TLS: Final = re.compile(rb"HTTPS (port|server)|SSL-enabled server port", re.IGNORECASE)
"""In what nginx, Go and Apache say to plain HTTP on a port of TLS."""


@dataclass(frozen=True, slots=True)
class Props:
    """What GET /props says: the slots, each slot's context (tokens), and which model this is.

    Attributes:
        model: A base name, fit for a label.
        path: Where the server found the model; never shown.
        marker: A random word of this start of the server; empty where the build has none.
        sleep_idle: Seconds of rest after which the model sleeps, where a router tells.
    """

    slots: int
    context: int | None
    model: str
    path: str
    quantization: str
    build: str
    sleeping: bool
    has_slots_endpoint: bool
    has_metrics_endpoint: bool = False
    marker: str = ""
    sleep_idle: float | None = None


@dataclass(slots=True)
class StreamTokens:
    """What has arrived of one stream so far."""

    first_event: int | None = None
    last_event: int = 0
    token_ms: list[float] = field(default_factory=list)
    final: Mapping[str, Json] | None = None


def parse_health(body: Json) -> Reason | None:
    """None for `{"status": "ok"}`."""
    return None if mapping(body).get("status") == "ok" else Reason.NOT_LLAMA


def parse_props(body: Json) -> Props | Reason:
    """The answer of GET /props. A router has no model of its own."""
    props = mapping(body)
    if props.get("role") == "router":
        return Reason.MODEL_NOT_NAMED
    slots = positive(props.get("total_slots"))
    if slots is None:
        return Reason.NOT_LLAMA
    return Props(
        slots=slots,
        context=positive(mapping(props.get("default_generation_settings")).get("n_ctx")),
        # An alias may itself be a path; a label carries the base name only.
        model=label(PurePath(text(props.get("model_alias")) or text(props.get("model_path"))).name) or "unknown",
        path=text(props.get("model_path")),
        quantization=label(props.get("model_ftype")),
        build=label(props.get("build_info")),
        sleeping=props.get("is_sleeping") is True,
        has_slots_endpoint=props.get("endpoint_slots") is not False,
        has_metrics_endpoint=props.get("endpoint_metrics") is True,
        marker=text(props.get("media_marker")),
    )


def parse_slots(body: Json) -> tuple[Slot, ...] | Reason:
    """The answer of GET /slots; `next_token` was an object before b6723, and is an array of one since.

    An answer that does not say of each slot whether it works is none: taking it for idle would disturb a user.
    """
    if not isinstance(body, list) or not body:
        return Reason.BAD_ANSWER
    slots = [_slot(mapping(entry), place) for place, entry in enumerate(body)]
    told = tuple(slot for slot in slots if slot is not None)
    return told if len(told) == len(slots) else Reason.BAD_ANSWER


def _slot(entry: Mapping[str, Json], place: int) -> Slot | None:
    processing, state = entry.get("is_processing"), integer(entry.get("state"))
    if not isinstance(processing, bool):
        if state is None:
            return None
        # Builds before November 2024; 0 is idle.
        processing = state != 0
    next_token = entry.get("next_token")
    if isinstance(next_token, list):
        next_token = next_token[0] if next_token else None
    number, tokens = integer(entry.get("id")), integer(entry.get("n_prompt_tokens"))
    seed = integer(mapping(entry.get("params")).get("seed"))
    return Slot(
        number=place if number is None else number,
        processing=processing,
        task=integer(entry.get("id_task")),
        decoded=max(0, integer(mapping(next_token).get("n_decoded")) or 0),
        tokens=tokens if tokens is None or tokens >= 0 else None,
        speculative=entry.get("speculative") is True,
        probe=None if seed is None else seed == PROBE_SEED,
        prompt_done=integer(entry.get("n_prompt_tokens_processed")),
    )


def refusal(status: int, body: bytes | None) -> Reason:
    """The reason behind a status other than 200."""
    if status in {401, 403}:
        return Reason.UNAUTHORIZED
    try:
        parsed = loads(body or b"")
    except ValueError:
        parsed = None
    error = mapping(mapping(parsed).get("error"))
    kind, message = text(error.get("type")), text(error.get("message"))
    if kind == "unavailable_error":
        return Reason.LOADING
    if kind == "not_supported_error":
        return Reason.NOT_SUPPORTED
    if kind == "server_error":
        return Reason.SERVER_ERROR
    if kind == "exceed_context_size_error":
        return Reason.CONTEXT_TOO_SMALL
    if kind == "invalid_request_error" and message in _ROUTER_REFUSALS:
        return _ROUTER_REFUSALS[message]
    if status == HTTPStatus.BAD_REQUEST and kind == "" and _WANTS_TLS.search(body or b""):
        return Reason.TLS_FAILED
    return Reason.NOT_LLAMA if status == HTTPStatus.NOT_FOUND else Reason.HTTP_ERROR


def take_event(data: bytes, streams: Sequence[StreamTokens], place: int) -> Reason | None:
    """Takes one event into its stream; the first one of a real server is `null`, the last of some is `[DONE]`."""
    try:
        event = loads(data)
    except ValueError:
        return None if data == b"[DONE]" else Reason.BAD_ANSWER
    if event is None:
        return None
    if not isinstance(event, dict):
        return Reason.BAD_ANSWER
    if "error" in event:
        return Reason.SERVER_ERROR
    index = integer(event.get("index", 0))
    if index is None or not 0 <= index < len(streams):
        return Reason.BAD_ANSWER
    stream = streams[index]
    if event.get("stop") is True:
        stream.final = event
        return None
    stream.first_event = place if stream.first_event is None else stream.first_event
    stream.last_event = place
    elapsed = milliseconds(mapping(event.get("timings")).get("predicted_ms"))
    if elapsed is not None:
        stream.token_ms.append(elapsed)
    return None


def finished_stream(tokens: StreamTokens) -> Stream:
    """The stream's own account, from its final event and the arrival of its tokens."""
    final = tokens.final or {}
    timings = mapping(final.get("timings"))
    stop_type = final.get("stop_type")
    return Stream(
        slot=integer(final.get("id_slot")),
        predicted=integer(timings.get("predicted_n")),
        predicted_ms=_generation_ms(timings.get("predicted_ms")),
        prompt=integer(timings.get("prompt_n")),
        cached=integer(timings.get("cache_n")),
        drafted=integer(timings.get("draft_n")),
        accepted=integer(timings.get("draft_n_accepted")),
        stop_type=stop_type if isinstance(stop_type, str) else None,
        truncated=final.get("truncated") is True,
        token_ms=tuple(tokens.token_ms),
        first_event=tokens.first_event or 0,
        last_event=tokens.last_event,
        prompt_ms=milliseconds(timings.get("prompt_ms")),
    )


def _generation_ms(value: Json) -> float | None:
    """The server counts in microseconds, one at least; a smaller figure is not its own."""
    found = milliseconds(value)
    return found if found is not None and found >= LEAST_MS else None
