"""What llama-server's answers mean: JSON parsed defensively into the few values that a probe needs.

Numbers that are strings, booleans, NaN or infinite are not numbers; a missing field is None, never a guess.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TypeAlias

from exporter.roofline.proof import Stream
from exporter.roofline.reason import Reason
from exporter.roofline.slots import Slot

Json: TypeAlias = Mapping[str, "Json"] | Sequence["Json"] | str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Props:
    """What GET /props says: the slots, each slot's context (tokens), and which model this is.

    Attributes:
        model: A base name, fit for a label.
        path: Where the server found the model; never shown.
    """

    slots: int
    context: int | None
    model: str
    path: str
    quantization: str
    build: str
    sleeping: bool
    has_slots_endpoint: bool


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What GET /v1/models says: sums over all tensors, and the vocabulary's size."""

    parameters: int | None
    weight_bytes: int | None
    vocabulary: int | None
    quantization: str


@dataclass(slots=True)
class StreamTokens:
    """What has arrived of one stream so far."""

    first_event: int | None = None
    last_event: int = 0
    token_ms: list[float] = field(default_factory=list)
    final: Mapping[str, Json] | None = None


def parse_health(body: Json) -> Reason | None:
    """None for `{"status": "ok"}`."""
    return None if _mapping(body).get("status") == "ok" else Reason.NOT_LLAMA


def parse_props(body: Json) -> Props | Reason:
    """The answer of GET /props. A router has no model of its own and is not supported."""
    props = _mapping(body)
    if props.get("role") == "router":
        return Reason.NOT_SUPPORTED
    slots = _positive(props.get("total_slots"))
    if slots is None:
        return Reason.NOT_LLAMA
    return Props(
        slots=slots,
        context=_positive(_mapping(props.get("default_generation_settings")).get("n_ctx")),
        # An alias may itself be a path; a label carries the base name only.
        model=PurePath(_text(props.get("model_alias")) or _text(props.get("model_path"))).name or "unknown",
        path=_text(props.get("model_path")),
        quantization=_text(props.get("model_ftype")),
        build=_text(props.get("build_info")),
        sleeping=props.get("is_sleeping") is True,
        has_slots_endpoint=props.get("endpoint_slots") is not False,
    )


def parse_model_size(body: Json) -> ModelSize | Reason:
    """The first entry of GET /v1/models."""
    data = _mapping(body).get("data")
    if not isinstance(data, list) or not data:
        return Reason.BAD_ANSWER
    meta = _mapping(_mapping(data[0]).get("meta"))
    return ModelSize(
        parameters=_positive(meta.get("n_params")),
        weight_bytes=_positive(meta.get("size")),
        vocabulary=_positive(meta.get("n_vocab")),
        quantization=_text(meta.get("ftype")),
    )


def parse_slots(body: Json) -> tuple[Slot, ...] | Reason:
    """The answer of GET /slots; `next_token` was an object before b6723, and is an array of one since."""
    if not isinstance(body, list):
        return Reason.BAD_ANSWER
    return tuple(_slot(_mapping(entry), place) for place, entry in enumerate(body))


def _slot(entry: Mapping[str, Json], place: int) -> Slot:
    next_token = entry.get("next_token")
    if isinstance(next_token, list):
        next_token = next_token[0] if next_token else None
    number, tokens = _integer(entry.get("id")), _integer(entry.get("n_prompt_tokens"))
    return Slot(
        number=place if number is None else number,
        processing=entry.get("is_processing") is True,
        task=_integer(entry.get("id_task")),
        decoded=max(0, _integer(_mapping(next_token).get("n_decoded")) or 0),
        tokens=tokens if tokens is None or tokens >= 0 else None,
        speculative=entry.get("speculative") is True,
        prompt_done=_integer(entry.get("n_prompt_tokens_processed")),
    )


def refusal(status: int, body: bytes | None) -> Reason:
    """The reason behind a status other than 200."""
    if status in {401, 403}:
        return Reason.UNAUTHORIZED
    try:
        parsed = loads(body or b"")
    except ValueError:
        parsed = None
    kind = _text(_mapping(_mapping(parsed).get("error")).get("type"))
    if kind == "unavailable_error":
        return Reason.LOADING
    if kind == "not_supported_error":
        return Reason.NOT_SUPPORTED
    if kind == "server_error":
        return Reason.SERVER_ERROR
    if kind == "exceed_context_size_error":
        return Reason.CONTEXT_TOO_SMALL
    return Reason.NOT_LLAMA if status == 404 else Reason.HTTP_ERROR  # noqa: PLR2004 - HTTP Not Found


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
    index = _integer(event.get("index", 0))
    if index is None or not 0 <= index < len(streams):
        return Reason.BAD_ANSWER
    stream = streams[index]
    if event.get("stop") is True:
        stream.final = event
        return None
    stream.first_event = place if stream.first_event is None else stream.first_event
    stream.last_event = place
    elapsed = _number(_mapping(event.get("timings")).get("predicted_ms"))
    if elapsed is not None:
        stream.token_ms.append(elapsed)
    return None


def finished_stream(tokens: StreamTokens) -> Stream:
    """The stream's own account, from its final event and the arrival of its tokens."""
    final = tokens.final or {}
    timings = _mapping(final.get("timings"))
    stop_type = final.get("stop_type")
    return Stream(
        slot=_integer(final.get("id_slot")),
        predicted=_integer(timings.get("predicted_n")),
        predicted_ms=_number(timings.get("predicted_ms")),
        prompt=_integer(timings.get("prompt_n")),
        cached=_integer(timings.get("cache_n")),
        drafted=_integer(timings.get("draft_n")),
        stop_type=stop_type if isinstance(stop_type, str) else None,
        truncated=final.get("truncated") is True,
        token_ms=tuple(tokens.token_ms),
        first_event=tokens.first_event or 0,
        last_event=tokens.last_event,
        prompt_ms=_number(timings.get("prompt_ms")),
    )


def loads(body: bytes) -> Json:
    """JSON; NaN and Infinity, which it does not know, become null.

    Raises:
        ValueError: Not JSON, not UTF-8, or nested beyond reason.
    """
    try:
        parsed: Json = json.loads(body, parse_constant=lambda _: None)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return parsed


def _mapping(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, dict) else {}


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Json) -> float | None:
    """A finite number; booleans and numbers as strings are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _integer(value: Json) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number == int(number) and abs(number) < 2**53 else None


def _positive(value: Json) -> int | None:
    number = _integer(value)
    return number if number is not None and number > 0 else None
