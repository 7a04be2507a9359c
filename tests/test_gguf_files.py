"""Models in several files, and what is not there, not a file, or not a model."""

from __future__ import annotations

import os
import shutil
import socket
import struct
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gguf_files import (
    ARRAY,
    BOOL,
    INT32,
    STRING,
    Raw,
    gguf_package,
    key,
    shard,
    tensor,
    text,
    write_model,
)
from gguf_reads import MIB, NOBODY, header, peak_bytes, problem

from exporter.measure import gguf_header
from exporter.measure.gguf import MAX_SHARDS, read_gguf
from exporter.measure.gguf_types import GgufProblem, GgufProblemKind

if TYPE_CHECKING:
    from collections.abc import Iterator


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
