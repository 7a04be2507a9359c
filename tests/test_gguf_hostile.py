"""GGUF files that were made to hurt, and any bytes at all."""

from __future__ import annotations

import os
import struct
import time
from typing import TYPE_CHECKING

import pytest
from gguf_files import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    UINT64,
    Raw,
    key,
    strings,
    tensor,
    text,
)
from gguf_reads import MAX_MEMORY, MIB, header, peak_bytes, problem
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from exporter.measure.gguf import read_gguf
from exporter.measure.gguf_types import GgufHeader, GgufProblem, GgufProblemKind

if TYPE_CHECKING:
    from pathlib import Path

# What is hostile.


def alignment(value: int, code: int = UINT32, layout: str = "<I") -> Raw:
    return Raw([key("general.alignment", code, struct.pack(layout, value))], [tensor("a", (8,))], 64)


HOSTILE = {
    "tensors": (Raw(tensor_count=1 << 40), "absurd"),
    "tensors that fit the bound": (Raw(tensor_count=1000), "header_truncated"),
    "keys": (Raw(key_count=1 << 63), "absurd"),
    "key name": (Raw([struct.pack("<Q", 1 << 60)]), "absurd"),
    "key name of zeros": (Raw([text(bytes(1 << 10))]), "absurd"),
    "key name not text": (Raw([key(b"\xff", UINT32, bytes(4))]), "bad_text"),
    "text": (Raw([key("k", STRING, struct.pack("<Q", 1 << 60))]), "absurd"),
    "text to the sky": (Raw([key("k", STRING, struct.pack("<Q", (1 << 64) - 1))]), "absurd"),
    "text beyond the end": (Raw([key("k", STRING, struct.pack("<Q", 1 << 20))]), "header_truncated"),
    "value type": (Raw([key("k", 13, bytes(8))]), "bad_value_type"),
    "item type": (Raw([key("k", ARRAY, struct.pack("<IQ", 13, 1))]), "bad_value_type"),
    "nested": (Raw([key("k", ARRAY, struct.pack("<IQ", ARRAY, 1 << 60))]), "nested_array"),
    "array": (Raw([key("k", ARRAY, struct.pack("<IQ", UINT64, (1 << 64) - 1))]), "absurd"),
    "array beyond the end": (Raw([key("k", ARRAY, struct.pack("<IQ", BOOL, 2000))]), "header_truncated"),
    "strings": (Raw([key("k", ARRAY, struct.pack("<IQ", STRING, 1 << 60))]), "absurd"),
    "strings beyond the end": (Raw([key("k", ARRAY, struct.pack("<IQ", STRING, 1 << 20))]), "header_truncated"),
    "string in strings": (Raw([key("k", ARRAY, struct.pack("<IQQ", STRING, 2, 1 << 60))]), "absurd"),
    "string to the sky": (Raw([key("k", ARRAY, struct.pack("<IQQ", STRING, 2, (1 << 64) - 1))]), "absurd"),
    "string past the end": (Raw([key("k", ARRAY, struct.pack("<IQQ", STRING, 2, 1 << 20))]), "header_truncated"),
    "numbers": (
        Raw([key(f"{n}", ARRAY, struct.pack("<IQ", 0, 2048) + bytes(2048)) for n in range(17)]),
        "absurd",
    ),
    "key twice": (Raw([key("k", UINT32, bytes(4)), key("k", UINT32, bytes(4))]), "duplicate_key"),
    "long text twice": (Raw([key("k", STRING, text("x" * 2000))] * 2), "duplicate_key"),
    "tensor twice": (Raw(tensors=[tensor("a", (8,)), tensor("a", (8,), 0, 32)], data=64), "duplicate_tensor"),
    "tensor name": (Raw(tensors=[text("a" * 300)]), "absurd"),
    "no dimensions": (Raw(tensors=[tensor("a", ())], data=64), "bad_dimensions"),
    "5 dimensions": (Raw(tensors=[tensor("a", (1,) * 5)], data=64), "bad_dimensions"),
    "dimensions": (Raw(tensors=[text("a") + struct.pack("<I", (1 << 32) - 1)]), "bad_dimensions"),
    "zero": (Raw(tensors=[tensor("a", (32, 0))], data=64), "bad_dimensions"),
    "overflow": (Raw(tensors=[tensor("a", (1 << 32, 1 << 32))], data=64), "bad_dimensions"),
    "overflow to a small number": (Raw(tensors=[tensor("a", (1 << 63, 2))], data=64), "bad_dimensions"),
    "half a block": (Raw(tensors=[tensor("a", (48,), 8)], data=64), "bad_dimensions"),
    "alignment 0": (alignment(0), "bad_alignment"),
    "alignment 24": (alignment(24), "bad_alignment"),
    "alignment 2^31": (alignment(1 << 31), "bad_alignment"),
    "alignment -32": (alignment(-32, INT32, "<i"), "bad_alignment"),
    "alignment of float": (alignment(32, FLOAT32, "<f"), "bad_alignment"),
    "alignment of truth": (alignment(1, BOOL, "<B"), "bad_alignment"),
    "alignment of text": (Raw([key("general.alignment", STRING, text("32\n"))]), "bad_alignment"),
    "overlap": (Raw(tensors=[tensor("a", (16,)), tensor("b", (8,), 0, 32)], data=64), "bad_offset"),
    "same place": (Raw(tensors=[tensor("a", (8,)), tensor("b", (8,))], data=64), "bad_offset"),
    "same place of unknown type": (Raw(tensors=[tensor("a", (8,), 99), tensor("b", (8,))], data=64), "bad_offset"),
    "offset 8": (Raw(tensors=[tensor("a", (8,), 0, 8)], data=64), "bad_offset"),
    "offset 2^60": (Raw(tensors=[tensor("a", (8,), 0, 1 << 60)], data=64), "bad_offset"),
    "gap": (Raw(tensors=[tensor("a", (8,)), tensor("b", (8,), 0, 64)], data=128), "bad_offset"),
    "gap at the start": (Raw(tensors=[tensor("a", (8,), 0, 32)], data=64), "bad_offset"),
    "past the end": (Raw(tensors=[tensor("a", (8,)), tensor("b", (8,), 0, 32)], data=32), "data_truncated"),
    "unknown type past the end": (
        Raw(tensors=[tensor("a", (8,)), tensor("b", (8,), 99, 32)], data=32),
        "data_truncated",
    ),
    "known type between unknown ones": (
        Raw(tensors=[tensor("a", (8,), 99), tensor("b", (8,), 0, 64), tensor("c", (8,), 98, 160)], data=256),
        "bad_offset",
    ),
    "unknown type not aligned": (
        Raw(tensors=[tensor("a", (8,), 99), tensor("b", (8,), 0, 40)], data=256),
        "bad_offset",
    ),
    "unknown type and 2^60": (
        Raw(tensors=[tensor("a", (8,), 99), tensor("b", (8,), 0, 1 << 60)], data=256),
        "bad_offset",
    ),
    "far past the end": (Raw(tensors=[tensor("a", (1 << 60,), 28)], data=64), "data_truncated"),
    "name with a line break": (Raw(tensors=[tensor("a\n\x1b[31m", (0,))]), "bad_dimensions"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_named_and_cost_nothing(tmp_path: Path, name: str) -> None:
    raw, kind = HOSTILE[name]
    path = raw.write(tmp_path / "hostile.gguf")
    assert problem(path).kind == kind
    assert peak_bytes(lambda: read_gguf(path)) < 2 * MIB


def test_a_sparse_file_of_empty_strings_ends(tmp_path: Path) -> None:
    """Far longer than any header may be, and every byte of it a valid one."""
    path = Raw([key("k", ARRAY, struct.pack("<IQ", STRING, 8 * MIB))]).write(tmp_path / "sparse.gguf")
    os.truncate(path, 1 << 32)
    assert problem(path).kind is GgufProblemKind.ABSURD


# Fuzz.


def valid() -> bytes:
    keys = [
        key("general.architecture", STRING, text("llama")),
        key("general.alignment", UINT32, struct.pack("<I", 32)),
        key("llama.attention.head_count_kv", ARRAY, struct.pack("<IQ4i", INT32, 4, 8, 8, 0, 4)),
        key("tokenizer.ggml.tokens", ARRAY, strings(["a", "bc", "", "long" * 90])),
        key("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ4f", FLOAT32, 4, 0, 1, 2, 3)),
        key("split.count", UINT32, struct.pack("<I", 1)),
        key("yes", BOOL, b"\1"),
    ]
    entries = [tensor("token_embd.weight", (64, 4), 8), tensor("b", (3, 3), 0, 288), tensor("c", (7,), 140, 352)]
    return Raw(keys, entries, 400).build()


VALID = valid()
NUMBERS = st.one_of(
    st.sampled_from([0, 1, 8, 9, 13, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 60, 1 << 63, (1 << 64) - 1]),
    st.integers(0, (1 << 64) - 1),
)
MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["set", "insert", "delete", "cut", "u32", "u64", "copy"]),
        st.integers(0, len(VALID) - 1),
        NUMBERS,
    ),
    min_size=1,
    max_size=6,
)


def mutate(content: bytes, mutations: list[tuple[str, int, int]]) -> bytes:
    mutant = bytearray(content)
    for how, at, number in mutations:
        match how:
            case "set":
                mutant[at : at + 1] = bytes([number & 255])
            case "insert":
                mutant[at:at] = bytes([number & 255]) * (1 + number % 40)
            case "delete":
                del mutant[at : at + 1 + number % 40]
            case "cut":
                del mutant[at:]
            case "u32":
                mutant[at : at + 4] = struct.pack("<I", number & 0xFFFFFFFF)
            case "u64":
                mutant[at : at + 8] = struct.pack("<Q", number)
            case "copy":
                mutant[at:at] = mutant[: number % 200]
    return bytes(mutant)


def check_any_content(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    begin = time.process_time()
    found: list[GgufHeader | GgufProblem] = []
    assert peak_bytes(lambda: found.append(read_gguf(path))) < MAX_MEMORY
    assert time.process_time() - begin < 5
    (result,) = found
    if isinstance(result, GgufProblem):
        assert result.message.isprintable()
    else:
        assert 0 <= result.weight_bytes <= len(content)
        assert all(t.elements > 0 and t.bytes > 0 for t in result.tensors)


@given(MUTATIONS)
@example([("cut", 24, 0)])
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutants_of_a_valid_header(tmp_path: Path, mutations: list[tuple[str, int, int]]) -> None:
    check_any_content(tmp_path / "mutant.gguf", mutate(VALID, mutations))


@given(st.binary(max_size=400), st.integers(0, 3), NUMBERS, NUMBERS)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_behind_a_magic(tmp_path: Path, content: bytes, version: int, tensors: int, keys: int) -> None:
    head = struct.pack("<IQQ", version, tensors % 5, keys % 5)
    check_any_content(tmp_path / "any.gguf", b"GGUF" + head + content)


def test_the_valid_header_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "valid.gguf"
    path.write_bytes(VALID)
    assert header(path).weight_bytes == 272 + 36 + 48
