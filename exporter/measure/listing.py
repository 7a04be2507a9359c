"""What GET /models says of one model, and whether it may be asked anything.

A router lists every model that it could load, each with a status; a plain server lists the one that it has, with none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from exporter.measure.json_values import Json, label, mapping, positive, text
from exporter.roofline.reason import Reason

_MAX_NAMES: Final = 20
_SLEEP_OPTION: Final = "--sleep-idle-seconds"
_MOST_DIGITS: Final = 10
"""Of the option's number; the server takes none beyond 2**31."""
_STATUSES: Final = {
    "unloaded": Reason.MODEL_UNLOADED,
    "downloaded": Reason.MODEL_UNLOADED,
    "sleeping": Reason.SLEEPING,
    "loading": Reason.LOADING,
    "downloading": Reason.LOADING,
}
"""Of a router's model that is not loaded: asking it anything would load or wake it."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What GET /models says of a model: sums over all tensors, and the vocabulary's size."""

    parameters: int | None
    weight_bytes: int | None
    vocabulary: int | None
    quantization: str


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that is loaded: the name to ask for it by, and its size and sleep as far as they are told.

    Attributes:
        sleep_idle: Seconds of rest after which a router's model sleeps.
    """

    name: str
    size: ModelSize
    sleep_idle: float | None = None


def parse_first_size(body: Json) -> ModelSize | Reason:
    """The size of the first model listed, which is a plain server's only one."""
    data = mapping(body).get("data")
    if not isinstance(data, list) or not data:
        return Reason.BAD_ANSWER
    return _size(mapping(data[0]))


def find_model(body: Json, name: str) -> ListedModel | Reason:
    """The model of that name or alias, if it is loaded, or why it must not be asked anything."""
    data = mapping(body).get("data")
    if not isinstance(data, list):
        return Reason.BAD_ANSWER
    entries = [mapping(entry) for entry in data]
    # A name goes before another model's alias.
    named = [e for e in entries if e.get("id") == name] or [e for e in entries if name in _aliases(e)]
    if not named:
        return Reason.UNKNOWN_MODEL
    entry = named[0]
    if (fault := _status_fault(entry)) is not None:
        return fault
    return ListedModel(text(entry.get("id")) or name, _size(entry), _sleep_idle(entry))


def model_names(body: Json) -> tuple[str, ...]:
    """The names listed, the first ones of many, fit for a log line."""
    data = mapping(body).get("data")
    entries = data[:_MAX_NAMES] if isinstance(data, list) else []
    return tuple(label(mapping(entry).get("id")) for entry in entries)


def told_sleep(arguments: Sequence[object]) -> float | None:
    """Seconds of rest after which a llama-server of this command line sleeps; None where it never does."""
    given = [value for option, value in pairwise(arguments) if option == _SLEEP_OPTION]
    # The last one counts; a negative number means never.
    last = given[-1] if given else None
    if not isinstance(last, str) or not last.isdecimal() or len(last) > _MOST_DIGITS:
        return None
    return float(last) or None


def _status_fault(entry: Mapping[str, Json]) -> Reason | None:
    if "status" not in entry:
        # A plain server: it answers only when its model is loaded, and GET /props tells whether it sleeps.
        return None
    status = mapping(entry["status"])
    if status.get("failed") is True:
        return Reason.MODEL_FAILED
    value = text(status.get("value"))
    return None if value == "loaded" else _STATUSES.get(value, Reason.BAD_ANSWER)


def _sleep_idle(entry: Mapping[str, Json]) -> float | None:
    arguments = mapping(entry.get("status")).get("args")
    return told_sleep(arguments) if isinstance(arguments, list) else None


def _aliases(entry: Mapping[str, Json]) -> tuple[Json, ...]:
    aliases = entry.get("aliases")
    return tuple(aliases) if isinstance(aliases, list) else ()


def _size(entry: Mapping[str, Json]) -> ModelSize:
    meta = mapping(entry.get("meta"))
    return ModelSize(
        parameters=positive(meta.get("n_params")),
        weight_bytes=positive(meta.get("size")),
        vocabulary=positive(meta.get("n_vocab")),
        quantization=label(meta.get("ftype")),
    )
