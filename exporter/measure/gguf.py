"""Reads the header of a GGUF model, all of its shards, and nothing of its weights."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from exporter.measure.gguf_file import AGAIN, RefusalError, shown
from exporter.measure.gguf_header import MAX_HEADER_BYTES, MAX_TENSORS, UNSAID, GgufFile, Split, read_file
from exporter.measure.gguf_types import GgufHeader, GgufProblem
from exporter.measure.gguf_types import GgufProblemKind as Kind

MAX_SHARDS: Final = 1_024

_SHARD_NAME: Final = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII | re.DOTALL)


def read_gguf(path: Path) -> GgufHeader | GgufProblem:
    """The header of a model, or why there is none.

    Blocks on the disk for as long as that takes, so call it from a thread.

    Args:
        path: The model's file, or any one of its shards: the others are looked for beside it.
    """
    given = _read_file(path, MAX_HEADER_BYTES, MAX_TENSORS)
    if isinstance(given, GgufProblem):
        return given
    try:
        return _read_split(given) if given.split.shards > 1 else _joined([given])
    except RefusalError as refusal:
        return GgufProblem(refusal.kind, f"{shown(path)} {refusal.text}")


def _read_file(path: Path, max_header_bytes: int, max_tensors: int) -> GgufFile | GgufProblem:
    try:
        return read_file(path, max_header_bytes, max_tensors)
    except RefusalError as refusal:
        return GgufProblem(refusal.kind, f"{shown(path)} {refusal.text}")


def _read_split(given: GgufFile) -> GgufHeader | GgufProblem:
    """All shards of a model, from any one of them."""
    count, number, total = given.split
    if count > MAX_SHARDS:
        raise RefusalError(Kind.ABSURD, f"claims to be one of {count} shards, so it is damaged: {AGAIN}")
    name = _SHARD_NAME.fullmatch(given.path.name)
    if name is None or (int(name["count"]), int(name["number"]) - 1) != (count, number):
        raise RefusalError(
            Kind.SHARDS_DISAGREE,
            f"is shard {number + 1} of {count} but its name does not say so: restore its name",
        )
    if number != 0:
        given = _without_keys(given)
    files = []
    header_bytes, tensors = given.header_bytes, len(given.tensors)
    for index in range(count):
        path = given.path.with_name(f"{name['prefix']}-{index + 1:05d}-of-{count:05d}.gguf")
        file = given if index == number else _read_file(path, MAX_HEADER_BYTES - header_bytes, MAX_TENSORS - tensors)
        if isinstance(file, GgufProblem):
            if file.kind is not Kind.MISSING:
                return file
            text = f"{shown(path)}, shard {index + 1} of {count}, is missing: put all shards into one directory"
            return GgufProblem(Kind.MISSING_SHARD, text)
        if file.split != (count, index, total):
            said = f"says {_said(file.split)}, unlike {shown(given.path.name)}, which says {_said(given.split)}"
            text = f"{shown(path)} {said}: fetch all shards from one place"
            return GgufProblem(Kind.SHARDS_DISAGREE, text)
        if file is not given:
            header_bytes += file.header_bytes
            tensors += len(file.tensors)
        # The model's keys stand in its first shard; those of the others are let go, to stay small.
        files.append(file if index == 0 else _without_keys(file))
    if total not in (tensors, UNSAID):
        raise RefusalError(
            Kind.SHARDS_DISAGREE, f"and its shards hold {tensors} tensors, not {total}: fetch all shards from one place"
        )
    return _joined(files)


def _said(split: Split) -> str:
    return f"shard {split.number + 1} of {split.shards} with {split.tensors} tensors in all"


def _without_keys(file: GgufFile) -> GgufFile:
    return replace(file, metadata={}, array_lengths={})


def _joined(files: Sequence[GgufFile]) -> GgufHeader:
    first = files[0]
    tensors = tuple(tensor for file in files for tensor in file.tensors)
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            text = f"has the tensor {shown(tensor.name)} in two shards: fetch all shards from one place"
            raise RefusalError(Kind.DUPLICATE_TENSOR, text)
        seen.add(tensor.name)
    paths = tuple(file.path for file in files)
    return GgufHeader(first.version, first.metadata, first.array_lengths, tensors, first.alignment, paths)
