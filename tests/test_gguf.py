"""The header reader: against the `gguf` package, llama.cpp itself, and files that nobody should send."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import socket
import struct
import time
import tracemalloc
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gguf_files import (
    ARRAY,
    BOOL,
    DENSE,
    EXPERTS,
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    UINT64,
    Raw,
    Shape,
    gguf_package,
    key,
    shard,
    strings,
    tensor,
    text,
    write_model,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from real import require

from exporter.measure import gguf_header
from exporter.measure.gguf import MAX_SHARDS, read_gguf
from exporter.measure.gguf_types import TENSOR_TYPES, GgufHeader, GgufProblem, GgufProblemKind
from exporter.measure.listing import ModelSize
from exporter.measure.llama import LlamaClient, open_session
from exporter.service.llama_child import LlamaChild

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
MAX_MEMORY = 32 * MIB
NOBODY = 65534


def header(path: Path) -> GgufHeader:
    found = read_gguf(path)
    assert isinstance(found, GgufHeader), found
    return found


def problem(path: Path) -> GgufProblem:
    """The problem, after a look at its message: one printable sentence with the file's name and a remedy."""
    found = read_gguf(path)
    assert isinstance(found, GgufProblem), found
    assert found.message.isprintable()
    assert len(found.message) < 1000
    assert path.name[:8] in found.message
    assert ": " in found.message
    assert "\n" not in found.message
    return found


def peak_bytes(read: Callable[[], object]) -> int:
    """The most memory that a call holds beyond what was there before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        read()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def package_tensors(path: Path) -> dict[str, tuple[tuple[int, ...], str, int, int, int]]:
    reader = gguf_package().GGUFReader(path)
    return {
        t.name: (tuple(map(int, t.shape)), t.tensor_type.name, int(t.tensor_type), int(t.n_elements), int(t.n_bytes))
        for t in reader.tensors
    }


def our_tensors(found: GgufHeader) -> dict[str, tuple[tuple[int, ...], str, int, int, int]]:
    return {t.name: (t.dims, t.type_name, t.type_id, t.elements, t.bytes) for t in found.tensors}


# What is right.


@pytest.mark.parametrize(
    "shape",
    [
        DENSE,
        EXPERTS,
        Shape(tied=True),
        Shape(quantization="F32"),
        Shape(quantization="BF16"),
        Shape(quantization="Q4_0"),
        Shape(layers=1, embedding=256, feed_forward=256, quantization="TQ2_0"),
    ],
)
def test_agrees_with_the_package(tmp_path: Path, shape: Shape) -> None:
    (path,) = write_model(tmp_path / "model.gguf", shape)
    found = header(path)
    expected = package_tensors(path)
    assert our_tensors(found) == expected
    assert [t.name for t in found.tensors] == list(expected)
    assert found.weight_bytes == sum(t[4] for t in expected.values())
    assert found.parameters == sum(t[3] for t in expected.values())
    assert (found.version, found.alignment, found.shards, found.paths) == (3, 32, 1, (path,))
    assert not found.sized_from_offsets
    assert found.metadata["general.architecture"] == "llama"
    assert found.metadata["llama.attention.head_count_kv"] == shape.kv_heads
    assert found.metadata.get("llama.expert_count", 0) == shape.experts
    assert found.array_lengths["tokenizer.ggml.tokens"] == shape.vocabulary
    assert "tokenizer.ggml.scores" not in found.metadata


def test_values_of_every_type(tmp_path: Path) -> None:
    gguf = gguf_package()
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    integers = {f"u{bits}": 2**bits - 1 for bits in (8, 16, 32, 64)} | {
        f"i{bits}": -(2 ** (bits - 1)) for bits in (8, 64)
    }
    writer.add_uint8("u8", integers["u8"])
    writer.add_uint16("u16", integers["u16"])
    writer.add_uint32("u32", integers["u32"])
    writer.add_uint64("u64", integers["u64"])
    writer.add_int8("i8", integers["i8"])
    writer.add_int64("i64", integers["i64"])
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", val=True)
    writer.add_bool("no", val=False)
    writer.add_string("text", "naïve")
    writer.add_array("heads", [8, 8, 0, 4])
    writer.add_array("pattern", [True, False, True])
    writer.add_array("factors", [0.5, 1.5])
    writer.add_array("long", list(range(gguf_header.MAX_ARRAY + 1)))
    writer.add_array("languages", ["en", "de"])
    writer.add_string("long_text", "x" * (gguf_header.MAX_TEXT_BYTES + 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = header(path)
    expected = {"general.architecture": "llama", "f32": 0.5, "f64": 0.1, "yes": True, "no": False, "text": "naïve"}
    arrays = {"heads": (8, 8, 0, 4), "pattern": (True, False, True), "factors": (0.5, 1.5)}
    assert found.metadata == expected | integers | arrays
    assert all(type(value) is bool for value in (found.metadata["yes"], *arrays["pattern"]))
    assert found.array_lengths == {
        "heads": 4,
        "pattern": 3,
        "factors": 2,
        "long": gguf_header.MAX_ARRAY + 1,
        "languages": 2,
    }
    assert (found.tensors, found.weight_bytes, found.parameters) == ((), 0, 0)


def test_alignment_of_its_own(tmp_path: Path) -> None:
    gguf = gguf_package()
    path = tmp_path / "aligned.gguf"
    import numpy as np  # noqa: PLC0415 - comes with gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    for name in "abc":
        writer.add_tensor(name, np.zeros((3, 5), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = header(path)
    assert found.alignment == 256
    assert our_tensors(found) == package_tensors(path)


def test_version_2(tmp_path: Path) -> None:
    raw = Raw(tensors=[tensor("a", (32, 2), 8)], data=68, version=2)
    found = header(raw.write(tmp_path / "two.gguf"))
    assert (found.version, found.weight_bytes, found.parameters) == (2, 68, 64)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, 6, 8, 20, 26, 30]),
            st.lists(st.integers(1, 5), min_size=1, max_size=4),
        ),
        max_size=12,
    )
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sums_are_the_packages_sums(tmp_path: Path, listed: list[tuple[int, list[int]]]) -> None:
    entries = []
    offset = 0
    for index, (type_id, dims) in enumerate(listed):
        _, block, size = TENSOR_TYPES[type_id]
        entries.append(tensor(f"t{index}", (dims[0] * block, *dims[1:]), type_id, offset))
        rows = dims[0]
        for dim in dims[1:]:
            rows *= dim
        offset += -(-rows * size // 32) * 32
    path = Raw(tensors=entries, data=max(1, offset)).write(tmp_path / "sums.gguf")
    assert our_tensors(header(path)) == package_tensors(path)


def test_the_real_model(real_model: Path) -> None:
    found = header(real_model)
    assert found.weight_bytes == 246_587_904
    assert found.parameters == 268_098_176
    assert len(found.tensors) == 236
    assert found.array_lengths["tokenizer.ggml.tokens"] == 262_144
    assert found.metadata["gemma3.attention.head_count_kv"] == 1
    embedding = next(t for t in found.tensors if t.name == "token_embd.weight")
    assert (embedding.dims, embedding.type_name, embedding.bytes) == ((640, 262_144), "Q8_0", 178_257_920)


# Time and memory.


def test_a_large_vocabulary_takes_little_memory(
    real_model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The bar is 100 ms and 8 MiB; the time is shown, and compared in benchmarks/gguf_header.py."""
    tokens = [b"t" * (1 + index % 13) for index in range(262_144)]
    keys = [
        key("tokenizer.ggml.tokens", ARRAY, strings(tokens)),
        key("tokenizer.ggml.merges", ARRAY, strings([b"a" * (index % 11) for index in range(500_000)])),
        key("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ", FLOAT32, len(tokens)) + bytes(4 * len(tokens))),
    ]
    with_merges = Raw(keys, [tensor("a", (32,))], 128).write(tmp_path / "merges.gguf")
    assert header(with_merges).array_lengths["tokenizer.ggml.merges"] == 500_000
    for path in (real_model, with_merges):
        begin = time.perf_counter()
        header(path)
        seconds = time.perf_counter() - begin
        memory = peak_bytes(lambda path=path: header(path))  # type: ignore[misc]
        record_property(path.name, f"{seconds:.3f} s, {memory} bytes")
        print(f"{path.name}: {seconds * 1e3:.0f} ms, {memory / MIB:.2f} MiB")  # noqa: T201 - with pytest -s
        assert memory < 8 * MIB


def test_the_worst_header_that_is_accepted(tmp_path: Path) -> None:
    """Every bound used up, and each name and text in the widest form that Python stores."""
    wide = "\N{GRINNING FACE}" + "x" * (gguf_header.MAX_NAME_BYTES - 10)
    value = text("\N{GRINNING FACE}".encode() + b"\xff" * (gguf_header.MAX_TEXT_BYTES - 4))
    arrays = gguf_header.MAX_NUMBERS // gguf_header.MAX_ARRAY
    numbers = struct.pack("<IQ", UINT64, gguf_header.MAX_ARRAY) + b"\xfe" * (8 * gguf_header.MAX_ARRAY)
    keys = [key(f"{wide}{index:06d}", STRING, value) for index in range(gguf_header.MAX_KEYS - arrays)]
    keys += [key(f"array {index}", ARRAY, numbers) for index in range(arrays)]
    entries = [
        tensor(f"{wide}{index:06d}", (2**40 + index, 3, 300, 2), 99, index * 4096)
        for index in range(gguf_header.MAX_TENSORS)
    ]
    path = Raw(keys, entries, gguf_header.MAX_TENSORS * 4096).write(tmp_path / "worst.gguf")
    del keys, entries
    assert len(header(path).tensors) == gguf_header.MAX_TENSORS
    assert peak_bytes(lambda: header(path)) < MAX_MEMORY


@pytest.mark.parametrize("length", [0, 7, 255, 256, 5_000, 200_000, 262_136, 262_137, 700_000])
def test_strings_of_any_length_across_windows(tmp_path: Path, length: int) -> None:
    entries = [b"s" * length, b"", b"x"] * 5
    after = key("after", UINT32, struct.pack("<I", 7))
    path = Raw([key("strings", ARRAY, strings(entries)), after]).write(tmp_path / "strings.gguf")
    found = header(path)
    assert found.metadata == {"after": 7}
    assert found.array_lengths == {"strings": 15}


# Types.


def test_every_type_agrees_with_the_package() -> None:
    gguf = gguf_package()
    sizes = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    # gguf-py counts two full floats in this one; llama.cpp, asked below, has two halves. Only activations use it.
    assert sizes.pop(9) in {("Q8_1", 32, 40), ("Q8_1", 32, 36)}
    assert {code: tuple(TENSOR_TYPES[code]) for code in sizes} == sizes


@pytest.mark.real
def test_every_type_agrees_with_llama_cpp() -> None:
    """Asks the ggml inside the real server for all ids, so that a new one is missed here as soon as it is there."""
    spec = importlib.util.find_spec("xllamacpp")
    require(spec, "xllamacpp is not installed")
    assert spec is not None
    assert spec.origin is not None
    (binary,) = Path(spec.origin).parent.glob("xllamacpp*.so")
    library = ctypes.CDLL(str(binary))
    require(hasattr(library, "ggml_blck_size"), "this xllamacpp does not show its ggml")
    library.ggml_blck_size.restype = ctypes.c_int64
    library.ggml_type_size.restype = ctypes.c_size_t
    library.ggml_type_name.restype = ctypes.c_char_p
    ids = range(max(TENSOR_TYPES) + 1)  # beyond its last type, ggml aborts the process
    theirs = {
        code: (
            library.ggml_type_name(code).decode().upper(),
            library.ggml_blck_size(code),
            library.ggml_type_size(code),
        )
        for code in ids
    }
    assert {code: tuple(kind) for code, kind in TENSOR_TYPES.items()} == {k: v for k, v in theirs.items() if v[1]}


def test_unknown_types_are_sized_from_offsets(tmp_path: Path) -> None:
    entries = [tensor("last", (10,), 144, 128), tensor("a", (64,), 137, 0), tensor("b", (4,), 0, 96)]
    found = header(Raw(tensors=entries, data=200).write(tmp_path / "fork.gguf"))
    assert [(t.name, t.type_name, t.bytes, t.sized_from_offsets) for t in found.tensors] == [
        ("last", "type 144", 72, True),
        ("a", "type 137", 96, True),
        ("b", "F32", 16, False),
    ]
    assert found.sized_from_offsets
    assert (found.weight_bytes, found.parameters) == (184, 78)


# Splits.


@pytest.mark.parametrize("which", [0, 1, 2])
def test_any_shard_gives_all(tmp_path: Path, which: int) -> None:
    (whole,) = write_model(tmp_path / "whole.gguf")
    paths = write_model(tmp_path / "split.gguf", split_max_tensors=7)
    assert [path.name for path in paths] == [f"split-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    found, expected = header(paths[which]), header(whole)
    assert found.tensors == expected.tensors
    assert found.paths == tuple(paths)
    assert found.shards == 3
    assert expected.metadata.items() <= found.metadata.items()
    assert found.array_lengths == expected.array_lengths


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_missing_shard_is_named(tmp_path: Path, gone: int) -> None:
    paths = write_model(tmp_path / "split.gguf", split_max_tensors=7)
    paths[gone].unlink()
    found = read_gguf(paths[1 if gone != 1 else 2])
    assert isinstance(found, GgufProblem)
    assert found.kind is GgufProblemKind.MISSING_SHARD
    assert str(paths[gone]) in found.message


def test_a_bad_shard_is_named(tmp_path: Path) -> None:
    paths = write_model(tmp_path / "split.gguf", split_max_tensors=7)
    paths[1].write_text("version https://git-lfs.github.com/spec/v1\n")
    found = read_gguf(paths[0])
    assert isinstance(found, GgufProblem)
    assert found.kind is GgufProblemKind.LFS_POINTER
    assert paths[1].name in found.message


def test_shards_that_disagree(tmp_path: Path) -> None:
    one, two = (tensor("one", (8,)),), (tensor("two", (8,)),)
    for name, second in {
        "number": (0, 2, 2),
        "count": (1, 3, 2),
        "total": (1, 2, 5),
    }.items():
        directory = tmp_path / name
        directory.mkdir()
        first = shard(directory, (0, 2, 2), one, 32)
        shard(directory, (1, 2, 2), two, 32)
        assert header(first).parameters == 16
        wrong = shard(tmp_path, second, two, 32)
        wrong.replace(directory / "model-00002-of-00002.gguf")
        found = problem(first)
        assert found.kind is GgufProblemKind.SHARDS_DISAGREE
        assert "model-00002-of-00002.gguf" in found.message


def test_shards_that_do_not_add_up(tmp_path: Path) -> None:
    first = shard(tmp_path, (0, 2, 3), (tensor("one", (8,)),), 32)
    shard(tmp_path, (1, 2, 3), (tensor("two", (8,)),), 32)
    assert problem(first).kind is GgufProblemKind.SHARDS_DISAGREE
    shard(tmp_path, (0, 2, 2), (tensor("one", (8,)),), 32)
    shard(tmp_path, (1, 2, 2), (tensor("one", (8,)),), 32)
    assert problem(first).kind is GgufProblemKind.DUPLICATE_TENSOR


def test_a_renamed_shard(tmp_path: Path) -> None:
    paths = write_model(tmp_path / "split.gguf", split_max_tensors=7)
    for name in ("renamed.gguf", "split-00002-of-00003.gguf", "split-00001-of-00004.gguf"):
        target = tmp_path / "other" / name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(paths[0], target)
        assert problem(target).kind is GgufProblemKind.SHARDS_DISAGREE


def test_too_many_shards(tmp_path: Path) -> None:
    assert problem(shard(tmp_path, (0, MAX_SHARDS + 1, 1))).kind is GgufProblemKind.ABSURD


def test_bounds_hold_for_all_shards_together(tmp_path: Path) -> None:
    each = gguf_header.MAX_TENSORS // 2 + 1
    for number in range(2):
        entries = [tensor(f"{number}.{index}", (1,), 24, index * 32) for index in range(each)]
        shard(tmp_path, (number, 2, 2 * each), entries, each * 32)
    assert problem(tmp_path / "model-00002-of-00002.gguf").kind is GgufProblemKind.ABSURD
    half = gguf_header.MAX_HEADER_BYTES // 2
    long = key("long", ARRAY, struct.pack("<IQ", BOOL, half) + bytes(half))
    for number in range(2):
        shard(tmp_path, (number, 2, 0), more=[long])
    assert problem(tmp_path / "model-00001-of-00002.gguf").kind is GgufProblemKind.ABSURD


def test_keys_of_later_shards_are_let_go(tmp_path: Path) -> None:
    more = [key(f"key {index}", STRING, text("x" * gguf_header.MAX_TEXT_BYTES)) for index in range(1000)]
    for number in range(40):
        path = shard(tmp_path, (number, 40, 0), more=more)
    assert header(path).metadata["split.no"] == 0
    assert peak_bytes(lambda: header(path)) < 8 * MIB


def test_a_shard_name_without_the_keys_is_a_whole_model(tmp_path: Path) -> None:
    (path,) = write_model(tmp_path / "whole.gguf")
    assert header(path.rename(tmp_path / "a-00001-of-00002.gguf")).shards == 1


# What is not there, or not a file.


def test_what_is_not_a_regular_file(tmp_path: Path) -> None:
    """None of these may block, least of all a pipe without a writer."""
    pipe, sock, loop = tmp_path / "pipe.gguf", tmp_path / "s.gguf", tmp_path / "loop.gguf"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(sock))
        for path, kind in {
            tmp_path / "missing.gguf": GgufProblemKind.MISSING,
            pipe / "below.gguf": GgufProblemKind.MISSING,
            tmp_path: GgufProblemKind.DIRECTORY,
            pipe: GgufProblemKind.NOT_A_FILE,
            sock: GgufProblemKind.NOT_A_FILE,
            Path("/dev/zero"): GgufProblemKind.NOT_A_FILE,
            loop: GgufProblemKind.UNREADABLE,
            tmp_path / ("n" * 300): GgufProblemKind.UNREADABLE,
            Path("nul\0.gguf"): GgufProblemKind.MISSING,
            Path("no\ud800path\n"): GgufProblemKind.MISSING,
        }.items():
            found = read_gguf(path)
            assert isinstance(found, GgufProblem)
            assert found.kind is kind, found
            assert found.message.isprintable()


@contextmanager
def not_root() -> Iterator[None]:
    """Root may read everything, so root steps down for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_permission_denied(tmp_path: Path) -> None:
    path = Raw().write(tmp_path / "forbidden.gguf")
    path.chmod(0)
    with not_root():
        assert problem(path).kind is GgufProblemKind.PERMISSION


@pytest.mark.parametrize(
    ("content", "kind", "word"),
    [
        (b"", "empty", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "lfs_pointer", "git lfs pull"),
        (b"<!DOCTYPE html>\n<html>", "web_page", "web page"),
        (b"\xef\xbb\xbf\n  <HTML lang=en>", "web_page", "web page"),
        (b"PK\x03\x04" + bytes(60), "archive", "zip"),
        (b"\x1f\x8b\x08" + bytes(60), "archive", "gzip"),
        (struct.pack("<Q", 30) + b'{"__metadata__":{}}', "safetensors", "convert"),
        (b"lmgg" + bytes(60), "old_ggml", "ggml"),
        (b"fmgg" + bytes(60), "old_ggml", "ggmf"),
        (b"tjgg" + bytes(60), "old_ggml", "ggjt"),
        (bytes(600), "not_gguf", "zeros"),
        (b"hello\n", "not_gguf", "b'hell'"),
        (b"GG", "header_truncated", "ends"),
        (b"GGUF", "header_truncated", "ends"),
        (Raw(version=0x03000000).build(), "big_endian", "big-endian"),
        (Raw(version=1).build(), "version", "version 1"),
        (Raw(version=0).build(), "version", "version 0"),
        (Raw(version=4).build(), "version", "version 4"),
    ],
)
def test_what_it_is_instead(tmp_path: Path, content: bytes, kind: str, word: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    found = problem(path)
    assert found.kind == kind
    assert word in found.message


def test_big_endian_from_the_package(tmp_path: Path) -> None:
    gguf = gguf_package()
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert problem(path).kind is GgufProblemKind.BIG_ENDIAN


def test_every_truncation_is_told_apart(tmp_path: Path) -> None:
    entries = [tensor("a", (32, 4), 8), tensor("b", (3,), 0, 160)]
    raw = Raw([key("heads", ARRAY, struct.pack("<IQ3i", INT32, 3, 1, 2, 3))], entries)
    head = len(raw.build())
    raw.data = 172
    whole = raw.build()
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    assert header(path).weight_bytes == 136 + 12
    for end in range(1, len(whole)):
        path.write_bytes(whole[:end])
        kind = problem(path).kind
        if end >= head:
            assert kind is GgufProblemKind.DATA_TRUNCATED
        elif end <= head - 32:
            assert kind is GgufProblemKind.HEADER_TRUNCATED


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
    begin = time.perf_counter()
    found: list[GgufHeader | GgufProblem] = []
    assert peak_bytes(lambda: found.append(read_gguf(path))) < MAX_MEMORY
    assert time.perf_counter() - begin < 5
    (result,) = found
    if isinstance(result, GgufProblem):
        assert result.message.isprintable()
    else:
        assert 0 <= result.weight_bytes <= len(content)
        assert all(t.elements > 0 and t.bytes > 0 for t in result.tensors)


@given(MUTATIONS)
@example([("cut", 24, 0)])
@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutants_of_a_valid_header(tmp_path: Path, mutations: list[tuple[str, int, int]]) -> None:
    check_any_content(tmp_path / "mutant.gguf", mutate(VALID, mutations))


@given(st.binary(max_size=400), st.integers(0, 3), NUMBERS, NUMBERS)
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_behind_a_magic(tmp_path: Path, content: bytes, version: int, tensors: int, keys: int) -> None:
    head = struct.pack("<IQQ", version, tensors % 5, keys % 5)
    check_any_content(tmp_path / "any.gguf", b"GGUF" + head + content)


def test_the_valid_header_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "valid.gguf"
    path.write_bytes(VALID)
    assert header(path).weight_bytes == 272 + 36 + 48


# The real server.


@pytest.mark.real
@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
async def test_the_real_server_counts_the_same(tmp_path: Path, shape: Shape) -> None:
    """The sums of GET /v1/models are llama.cpp's own; the synthetic models and their shards load there."""
    require(importlib.util.find_spec("xllamacpp"), "xllamacpp is not installed")
    paths = write_model(tmp_path / "model.gguf", shape, split_max_tensors=9)
    child = await LlamaChild.start(model=paths[0], parallel=1, ctx_size=512)
    try:
        await child.wait_ready(120)
        async with open_session(child.url, None) as session:
            size = await LlamaClient(session, child.url, None).model_size(30)
    finally:
        await child.stop()
    found = header(paths[0])
    assert isinstance(size, ModelSize)
    assert (found.weight_bytes, found.parameters) == (size.weight_bytes, size.parameters)
