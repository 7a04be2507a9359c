"""The header reader: against the `gguf` package, llama.cpp itself, and files that nobody should send."""

from __future__ import annotations

import ctypes
import importlib.util
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gguf_files import (
    ARRAY,
    DENSE,
    EXPERTS,
    FLOAT32,
    STRING,
    UINT32,
    UINT64,
    Raw,
    Shape,
    gguf_package,
    key,
    strings,
    tensor,
    text,
    write_model,
)
from gguf_reads import MAX_MEMORY, MIB, header, peak_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real import require

from exporter.measure import gguf_header
from exporter.measure.gguf_types import TENSOR_TYPES, GgufHeader
from exporter.measure.listing import ModelSize
from exporter.measure.llama import LlamaClient, open_session
from exporter.service.llama_child import LlamaChild

if TYPE_CHECKING:
    from collections.abc import Callable


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
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
