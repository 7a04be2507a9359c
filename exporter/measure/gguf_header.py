"""The header of one GGUF file: its metadata, and where its tensors lie.

Every length in the file is an adversary's until it is checked, before anything is allocated for it. What is kept of the
largest header that the bounds allow stays below 32 MiB.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Final, NamedTuple

from exporter.measure.gguf_file import AGAIN, RefusalError, Window, check_magic, open_model, shown
from exporter.measure.gguf_types import TENSOR_TYPES, Tensor, Value
from exporter.measure.gguf_types import GgufProblemKind as Kind

MAX_HEADER_BYTES: Final = 64 << 20
"""The largest vocabularies with their merges take 20 MB."""
MAX_TENSORS: Final = 8_192
"""Models of a trillion parameters have about 2,000."""
MAX_KEYS: Final = 2_048
MAX_NAME_BYTES: Final = 256
"""Of a key or a tensor; llama.cpp stops at 63 for tensors."""
MAX_TEXT_BYTES: Final = 1_024
"""A longer text, such as a chat template, is passed over."""
MAX_ARRAY: Final = 2_048
"""Numbers in an array that is kept: per-layer values. A longer one is passed over."""
MAX_NUMBERS: Final = 32_768
"""Numbers in all arrays that are kept."""
MAX_DIMENSIONS: Final = 4
MAX_ALIGNMENT_BYTES: Final = 1 << 20
MAX_OFFSET_BYTES: Final = 1 << 50
UNSAID: Final = -1

_HEAD_BYTES: Final = 512
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_LARGEST: Final = (1 << 63) - 1
_HEAD: Final = struct.Struct("<4sI")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_COUNTS: Final = struct.Struct("<QQ")
_ARRAY_HEAD: Final = struct.Struct("<IQ")
_PLACE: Final = struct.Struct("<IQ")
_STRING: Final = 8
_ARRAY: Final = 9
_LETTERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NUMBERS: Final = {code: struct.Struct(f"<{letter}") for code, letter in _LETTERS.items()}


class _Place(NamedTuple):
    """A tensor as the header lists it."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


class Split(NamedTuple):
    """A file's place among its shards; `UNSAID` where it does not tell.

    Attributes:
        shards: Of the model.
        number: This one's, from 0.
        tensors: In all shards.
    """

    shards: int
    number: int
    tensors: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One file's header.

    Attributes:
        header_bytes: Up to the padding before the tensors' data.
    """

    path: Path
    version: int
    metadata: dict[str, Value]
    array_lengths: dict[str, int]
    tensors: list[Tensor]
    alignment: int
    split: Split
    header_bytes: int


def read_file(path: Path, max_header_bytes: int, max_tensors: int) -> GgufFile:
    """One file's header.

    Args:
        path: The file.
        max_header_bytes: A longer header is refused.
        max_tensors: More tensors are refused.

    Raises:
        RefusalError: There is none, or not a usable one.
    """
    with open_model(path) as (descriptor, size):
        return _parse(path, Window(descriptor, size, max_header_bytes), size, max_tensors)


def _parse(path: Path, window: Window, size: int, max_tensors: int) -> GgufFile:
    check_magic(window.peek(_HEAD_BYTES))
    _, version = window.integers(_HEAD)
    if version not in _VERSIONS:
        raise _bad_version(version)
    tensor_count, key_count = window.integers(_COUNTS)
    if tensor_count > max_tensors or key_count > MAX_KEYS:
        raise RefusalError(Kind.ABSURD, f"claims {tensor_count} tensors and {key_count} keys: {AGAIN}")
    metadata, array_lengths = _read_metadata(window, key_count)
    places = _read_places(window, tensor_count)
    alignment = _alignment(metadata)
    data_start = -(-window.offset // alignment) * alignment
    tensors = _sized(places, alignment, max(0, size - data_start))
    return GgufFile(path, version, metadata, array_lengths, tensors, alignment, _split(metadata), window.offset)


def _bad_version(version: int) -> RefusalError:
    if version & 0xFFFF == 0 and version:
        return RefusalError(Kind.BIG_ENDIAN, "is a big-endian GGUF: fetch or convert the little-endian one")
    if version == 1:
        return RefusalError(Kind.VERSION, "is GGUF version 1 of August 2023: fetch a newer conversion")
    return RefusalError(Kind.VERSION, f"is GGUF version {version}, and versions 2 and 3 are known: update the exporter")


def _read_metadata(window: Window, count: int) -> tuple[dict[str, Value], dict[str, int]]:
    """The values that are kept, and the lengths of all arrays."""
    metadata: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    seen = set()
    numbers = 0
    for _ in range(count):
        key = _read_name(window, "key")
        if key in seen:
            raise RefusalError(Kind.DUPLICATE_KEY, f"has the key {shown(key)} twice, so it is damaged: {AGAIN}")
        seen.add(key)
        (code,) = window.integers(_U32)
        if code == _ARRAY:
            item, lengths[key] = window.integers(_ARRAY_HEAD)
            values = _read_array(window, key, item, lengths[key])
            if values is not None:
                metadata[key] = values
                numbers += len(values)
                if numbers > MAX_NUMBERS:
                    raise RefusalError(Kind.ABSURD, f"has over {MAX_NUMBERS} numbers in small arrays: {AGAIN}")
        elif code == _STRING:
            (length,) = window.integers(_U64)
            if length <= MAX_TEXT_BYTES:
                metadata[key] = window.take(length).decode("utf-8", "replace")
            else:
                window.skip(length)
        else:
            (metadata[key],) = window.numbers(_number(key, code))
    return metadata, lengths


def _read_array(window: Window, key: str, item: int, length: int) -> tuple[float, ...] | None:
    """The numbers of a small array; None for one that is passed over."""
    if item == _STRING:
        window.skip_strings(length)
        return None
    if item == _ARRAY:
        raise RefusalError(Kind.NESTED_ARRAY, f"has arrays within the array {shown(key)}: {AGAIN}")
    layout = _number(key, item)
    # Of the tokenizer nothing but its size matters here.
    if length > MAX_ARRAY or key.startswith("tokenizer."):
        window.skip(length * layout.size)
        return None
    return window.numbers(struct.Struct(f"<{length}{layout.format[-1]}"))


def _number(key: str, code: int) -> struct.Struct:
    layout = _NUMBERS.get(code)
    if layout is None:
        raise RefusalError(Kind.BAD_VALUE_TYPE, f"has the key {shown(key)} of unknown value type {code}: {AGAIN}")
    return layout


def _read_name(window: Window, what: str) -> str:
    (length,) = window.integers(_U64)
    if length > MAX_NAME_BYTES:
        raise RefusalError(Kind.ABSURD, f"has a {what} with a name of {length} bytes, so it is damaged: {AGAIN}")
    try:
        return window.take(length).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RefusalError(Kind.BAD_TEXT, f"has a {what} whose name is not UTF-8, so it is damaged: {AGAIN}") from error


def _alignment(metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is int and 0 < alignment <= MAX_ALIGNMENT_BYTES and alignment & (alignment - 1) == 0:
        return alignment
    raise RefusalError(Kind.BAD_ALIGNMENT, f"has an alignment of {shown(alignment)}, not a power of two: {AGAIN}")


def _split(metadata: dict[str, Value]) -> Split:
    values = (metadata.get(f"split.{key}") for key in ("count", "no", "tensors.count"))
    return Split(*(value if isinstance(value, int) else UNSAID for value in values))


def _read_places(window: Window, count: int) -> list[_Place]:
    places: dict[str, _Place] = {}
    for _ in range(count):
        name = _read_name(window, "tensor")
        if name in places:
            raise RefusalError(Kind.DUPLICATE_TENSOR, f"has the tensor {shown(name)} twice, so it is damaged: {AGAIN}")
        (dimensions,) = window.integers(_U32)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise RefusalError(Kind.BAD_DIMENSIONS, f"has {shown(name)} with {dimensions} dimensions: {AGAIN}")
        dims = window.integers(struct.Struct(f"<{dimensions}Q"))
        type_id, offset = window.integers(_PLACE)
        block = TENSOR_TYPES[type_id].block_elements if type_id in TENSOR_TYPES else 1
        if not 0 < prod(dims) <= _LARGEST or dims[0] % block:
            size = " x ".join(map(str, dims))
            raise RefusalError(Kind.BAD_DIMENSIONS, f"has {shown(name)} of {size} elements, which cannot be: {AGAIN}")
        places[name] = _Place(name, dims, type_id, offset)
    return list(places.values())


def _sized(places: Sequence[_Place], alignment: int, data_bytes: int) -> list[Tensor]:
    """The tensors with their bytes, once they are known to lie side by side and within the file.

    llama.cpp demands the same. A fork that gives one of ggml's numbers to a type of its own shows itself here.

    Args:
        places: In the order of the file.
        alignment: That every offset must have, bytes.
        data_bytes: What the file holds behind its header.
    """
    by_offset = sorted(places, key=lambda place: place.offset)
    tensors = {}
    end = 0
    for place, following in zip_longest(by_offset, by_offset[1:]):
        # Behind a known type there is padding only; behind an unknown one the next tensor begins wherever it says.
        padded = -(-end // alignment) * alignment
        if place.offset != padded or place.offset > MAX_OFFSET_BYTES:
            text = (
                f"has {shown(place.name)} at offset {place.offset}, not {padded}, so it is damaged or a fork's: {AGAIN}"
            )
            raise RefusalError(Kind.BAD_OFFSET, text)
        known = TENSOR_TYPES.get(place.type_id)
        elements = prod(place.dims)
        if known:
            size = elements // known.block_elements * known.block_bytes
        else:
            size = max(1, (following.offset if following else data_bytes) - place.offset)
        end = place.offset + size
        name = known.name if known else f"type {place.type_id}"
        tensors[place.name] = Tensor(place.name, place.dims, name, place.type_id, elements, size, known is None)
    if end > data_bytes:
        raise RefusalError(Kind.DATA_TRUNCATED, f"holds {data_bytes} of at least {end} bytes of tensors: {AGAIN}")
    return [tensors[place.name] for place in places]
