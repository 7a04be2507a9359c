"""`inspect`: a model file by part, and what decode steps read of it: the arithmetic, every format, and the command."""

import csv
import json
import re
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any

import gguf_files
import pytest
import snapshots
from processes import COMMAND, free_port

from exporter.measure.gguf import read_gguf
from exporter.measure.gguf_types import GgufHeader, Tensor
from exporter.present.inspect import inspect_json, inspect_text
from exporter.present.report import report_text
from exporter.present.tables import Format
from exporter.roofline.architecture import Kind, Metadata
from exporter.roofline.inspection import BATCHES, DEPTHS, Inspection, inspect_model
from exporter.service.ask import STATUS_HEADER, ask_read_ceiling

LLAMA: Metadata = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.expert_count": 8,
    "llama.expert_used_count": 2,
    "llama.nextn_predict_layers": 0,
}


def tensor(name: str, elements: int, size: int, type_name: str = "Q8_0", *, guessed: bool = False) -> Tensor:
    return Tensor(name, (elements,), type_name, 8, elements, size, guessed)


TENSORS = (
    tensor("token_embd.weight", 1000, 1062),
    tensor("output.weight", 1000, 820, "Q6_K"),
    tensor("output_norm.weight", 10, 40, "F32"),
    tensor("blk.0.attn_q.weight", 4000, 2250, "Q4_K"),
    tensor("blk.0.attn_norm.weight", 10, 40, "F32"),
    tensor("blk.0.ffn_up_exps.weight", 80_000, 45_000, "Q4_K"),
    tensor("blk.1.attn_q.weight", 4000, 3281, "Q6_K"),
    tensor("blk.1.ffn_up_exps.weight", 80_000, 45_000, "Q4_K"),
)


def found(**options: Any) -> Inspection:
    return inspect_model("mix.gguf", LLAMA, TENSORS, **options)


def part(inspection: Inspection, kind: Kind) -> Any:
    return next(p for p in inspection.parts if p.kind is kind)


# --- the arithmetic ----------------------------------------------------------------------------------------------


def test_every_tensor_is_in_one_part() -> None:
    seen = found()
    assert [p.kind for p in seen.parts] == [
        Kind.REPEATING,
        Kind.EXPERTS,
        Kind.SHARED,
        Kind.OUTPUT_HEAD,
        Kind.EMBEDDING,
    ]
    assert sum(p.bytes for p in seen.parts) == seen.weight_bytes == sum(t.bytes for t in TENSORS)
    assert sum(p.parameters for p in seen.parts) == seen.parameters == sum(t.elements for t in TENSORS)
    assert sum(p.tensors for p in seen.parts) == len(TENSORS)
    repeating = part(seen, Kind.REPEATING)
    assert list(repeating.type_bytes.items()) == [("Q6_K", 3281), ("Q4_K", 2250), ("F32", 40)]
    assert seen.head_tied is False


def test_a_step_reads_the_distinct_experts_and_computes_the_active_ones() -> None:
    dense, experts = 2250 + 3281 + 40 + 40 + 820, 90_000
    steps = {(s.batch, s.depth): s.work for s in found().steps}
    assert set(steps) == {(b, d) for b in BATCHES for d in DEPTHS}
    assert steps[1, 0].bytes == pytest.approx(dense + experts / 4)
    assert steps[2, 0].bytes == pytest.approx(dense + experts * (1 - (3 / 4) ** 2))
    assert steps[4, 0].flops == pytest.approx(4 * 2 * (1000 + 10 + 8000 + 10 + 160_000 / 4))
    # Two layers, each of 2 heads of 16 keys and 16 values in f16.
    assert steps[2, 4096].bytes - steps[2, 0].bytes == pytest.approx(2 * 4096 * 2 * 2 * 32 * 2)
    assert found().active_weight_bytes == dense + experts // 4


def test_the_cache_types_count() -> None:
    halved = found(cache_type_k="q8_0", cache_type_v="q8_0").footprint.kv_bytes_per_token
    assert halved == pytest.approx((found().footprint.kv_bytes_per_token or 0) * 34 / 64)
    assert "(K q8_0, V f16)" in inspect_text(found(cache_type_k="q8_0"), Format.TABLE)


def test_floors_stand_under_the_bandwidth() -> None:
    for step in found(bandwidth_bytes_per_second=50e9).steps:
        assert step.floor_seconds == pytest.approx(step.work.bytes / 50e9)
        assert step.floor_tokens_per_second == pytest.approx(step.batch * 50e9 / step.work.bytes)
    assert {step.floor_tokens_per_second for step in found().steps} == {None}


def test_further_layers_and_encoders_are_parts_of_their_own() -> None:
    keys = {**LLAMA, "llama.nextn_predict_layers": 1}
    more = (*TENSORS, tensor("v.blk.0.attn_q.weight", 5, 10, "F16"))
    seen = inspect_model("x", keys, more)
    assert part(seen, Kind.NEXT_TOKEN).bytes == 3281 + 45_000
    assert part(seen, Kind.ENCODER).bytes == 10


# --- what is printed -----------------------------------------------------------------------------------------------


def test_the_table_by_part_fits_80_columns() -> None:
    large = [replace(t, elements=1000 * t.elements, bytes=1000 * t.bytes) for t in TENSORS]
    seen = inspect_model("mix.gguf", LLAMA, large, bandwidth_bytes_per_second=50e9)
    lines = inspect_text(seen, Format.TABLE).splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]
    for golden in (
        r"mix\.gguf, llama: 97,493,000 bytes of weights, 170,020,000 parameters",
        r"repeating layers +5,571,000 +5\.71 +8\.01 +Q6_K 59 %, Q4_K 40 %,",
        r" +F32 <1 %",
        r"routed experts +90,000,000 +92\.3 +160 +Q4_K 100 %",
        r"other weights +40,000 +0\.0410 +0\.0100 +F32 100 %",
        r"output head \(own\) +820,000 +0\.841 +1\.00 +Q6_K 100 %",
        r"embedding rows \(looked up\) +1,062,000 +1\.09 +1\.00 +Q8_0 100 %",
        r" +1 +0 +28\.1 +0\.820 +0 +28\.9 +0\.0980 +3\.39 +0\.579 +1730",
        r"KV cache: 256 bytes for each token of a stream \(K f16, V f16\)\.",
        r"active_weight_bytes: 28931000",
    ):
        assert any(re.fullmatch(golden, line) for line in lines), (golden, lines)


@pytest.mark.parametrize(("rate", "word"), [("1e30GB/s", "too large"), ("1kB/s", "too small"), ("5GB", "per second")])
def test_a_bandwidth_that_no_memory_has_is_refused(rate: str, word: str) -> None:
    done = run(Path("any.gguf"), "--bandwidth", rate)
    assert done.returncode == 2
    assert word in done.stderr


def test_without_a_bandwidth_it_says_how_to_get_floors() -> None:
    text = inspect_text(found(), Format.TABLE, 200)
    assert "Floors need a bandwidth: give --bandwidth 50GB/s, or start the exporter" in text
    assert "tok/s" not in text
    assert "Floors stand under 50.0 GB/s" in inspect_text(found(bandwidth_bytes_per_second=50e9), Format.TABLE, 200)


def test_a_tied_head_is_called_tied() -> None:
    tied = inspect_model("x", LLAMA, [t for t in TENSORS if t.name != "output.weight"])
    text = inspect_text(tied, Format.TABLE, 200)
    assert "output head (tied)" in text
    assert "The output head is the embedding (tied), which is read whole in every step." in text
    assert "embedding rows" not in text
    assert inspect_json(tied)["output_head"] == "tied"


def test_tensors_of_unknown_types_are_named_and_flagged() -> None:
    unknown = [replace(t, type_name="type 99", sized_from_offsets=True) for t in TENSORS[3:]]
    seen = inspect_model("x", LLAMA, [*TENSORS[:3], *unknown])
    text = inspect_text(seen, Format.TABLE, 300)
    assert "Of a type that is not known here, so their bytes are a guess" in text
    assert "blk.0.attn_q.weight, blk.0.attn_norm.weight, blk.0.ffn_up_exps.weight and 2 more." in text
    assert inspect_json(seen)["sized_from_offsets"] == [t.name for t in unknown]


@pytest.mark.parametrize("format_", [Format.TABLE, Format.MARKDOWN, Format.CSV])
def test_names_from_a_strangers_file_do_not_steer_the_terminal(format_: Format) -> None:
    nasty = "\x1b[2J\r\udc80[bold]"
    keys: Metadata = {"general.architecture": nasty}
    text = inspect_text(inspect_model(nasty, keys, [tensor(nasty, 8, 8, guessed=True)]), format_)
    assert not [c for c in text if c != "\n" and not c.isprintable()]


def test_json_has_the_promised_shape() -> None:
    document = json.loads(inspect_text(found(bandwidth_bytes_per_second=50e9), Format.JSON))
    assert (document["weight_bytes"], document["parameters"]) == (97_493, 170_020)
    assert document["active_weight_bytes"] == 28_931
    assert document["output_head"] == "own"
    assert document["kv_bytes_per_token"] == 256
    assert [p["part"] for p in document["parts"]] == ["repeating", "experts", "shared", "output_head", "embedding"]
    assert sum(p["bytes"] for p in document["parts"]) == document["weight_bytes"]
    assert sum(p["share_ratio"] for p in document["parts"]) == pytest.approx(1)
    assert document["parts"][0]["type_bytes"] == {"Q6_K": 3281, "Q4_K": 2250, "F32": 40}
    assert [(s["batch"], s["depth"]) for s in document["steps"]] == [(b, d) for d in DEPTHS for b in BATCHES]
    for step in document["steps"]:
        assert step["intensity_flops_per_byte"] == pytest.approx(step["flops"] / step["bytes"])
        assert sum(step["bytes_by_part"].values()) == pytest.approx(step["bytes"])
        assert step["floor_seconds"] == pytest.approx(step["bytes"] / 50e9)


def test_csv_is_one_table_with_exact_counts() -> None:
    rows = list(csv.DictReader(StringIO(inspect_text(found(), Format.CSV))))
    assert rows[1]["part"] == "routed experts"
    assert rows[1]["bytes"] == "90000"
    assert rows[5] == {
        "part": "decode step",
        "batch": "1",
        "depth tokens": "0",
        "bytes": "28931",
        "share %": "",
        "parameters": "",
        "types": "",
        "FLOP": "98040",
        "intensity FLOP/byte": "3.38875",
        "floor ms": "",
        "floor tokens/s": "",
    }
    assert len(rows) == 5 + len(BATCHES) * len(DEPTHS)


def test_markdown_has_both_tables() -> None:
    text = inspect_text(found(), Format.MARKDOWN)
    assert "| routed experts | 90,000 | 92.3 | 0.160 | Q4\\_K 100 % |" in text
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert [len(table.splitlines()) for table in tables] == [2 + 5, 2 + 9]


@pytest.mark.parametrize("format_", list(Format))
@pytest.mark.parametrize("tensors", [(), TENSORS[:1], TENSORS[5:6]], ids=["none", "embedding", "experts"])
@pytest.mark.parametrize(
    "keys",
    [{}, LLAMA, {**LLAMA, "llama.block_count": 2**31}, {**LLAMA, "llama.block_count": float("nan")}],
    ids=["no keys", "llama", "absurd layers", "layers that are no number"],
)
def test_damaged_and_empty_files_print_all_the_same(
    keys: dict[str, Any], tensors: tuple[Tensor, ...], format_: Format
) -> None:
    text = inspect_text(inspect_model("x", keys, tensors, bandwidth_bytes_per_second=1e9), format_)
    assert text.endswith("\n")
    assert "None" not in text


# --- real files ----------------------------------------------------------------------------------------------------


@pytest.mark.real
def test_the_real_gemma_model(real_model: Path) -> None:
    header = read_gguf(real_model)
    assert isinstance(header, GgufHeader)
    seen = inspect_model(real_model.name, header.metadata, header.tensors)
    assert seen.weight_bytes == sum(p.bytes for p in seen.parts) == 246_587_904
    assert seen.parameters == 268_098_176
    assert part(seen, Kind.OUTPUT_HEAD).bytes == 178_257_920
    assert seen.head_tied is True
    assert seen.active_weight_bytes == 246_587_904, "the tied head is read whole"
    assert seen.footprint.kv_bytes_per_token == 18_432
    assert part(seen, Kind.REPEATING).type_bytes.keys() == {"Q5_0", "Q4_K", "Q6_K", "Q8_0", "F32"}
    steps = {(s.batch, s.depth): s.work.bytes for s in seen.steps}
    assert steps[1, 0] == 246_587_904
    # Of 18 layers every sixth attends to everything, the others to the last 512.
    assert steps[2, 4096] == 246_587_904 + 2 * 1024 * (3 * 4096 + 15 * 512)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = (*COMMAND, "--web.listen-address", f"127.0.0.1:{free_port()}", "inspect", *map(str, arguments))
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_command_on_a_mixture_of_experts(tmp_path: Path) -> None:
    (file,) = gguf_files.write_model(tmp_path / "moe.gguf", gguf_files.EXPERTS)
    done = run(file, "--format", "json", "--bandwidth", "50GB/s", "--cache-type-k", "q8_0")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    experts = next(p for p in document["parts"] if p["part"] == "experts")
    # 2 layers x 3 matrices x 8 experts of 64 x 128 in Q8_0.
    assert experts["bytes"] == 2 * 3 * 8 * 64 * 128 * 34 // 32
    rest = sum(p["bytes"] for p in document["parts"] if p["part"] not in {"experts", "embedding"})
    assert document["active_weight_bytes"] == rest + experts["bytes"] // 4
    assert document["bandwidth_bytes_per_second"] == 50e9
    assert document["kv_bytes_per_token"] == 2 * 2 * 16 * (34 / 32 + 2)


def test_the_command_prints_the_line_for_the_configuration(tmp_path: Path) -> None:
    (file,) = gguf_files.write_model(tmp_path / "dense.gguf")
    done = run(file)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^active_weight_bytes: 114432$", done.stdout, re.MULTILINE)
    assert "Floors need a bandwidth" in done.stdout


def test_a_bad_file_or_rate_is_a_clear_error(tmp_path: Path) -> None:
    page = tmp_path / "model.gguf"
    page.write_text("<!DOCTYPE html><html>not found</html>")
    unknown = gguf_files.Raw([], [gguf_files.tensor("a", [8])], 0).write(tmp_path / "cut.gguf")
    for file, said in ((page, "page"), (unknown, "cut.gguf"), (tmp_path / "none.gguf", "none.gguf"), (tmp_path, "")):
        done = run(file)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("Error: ")
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    done = run(page, "--bandwidth", "50GB")
    assert done.returncode == 2
    assert "per second" in done.stderr


def test_a_file_of_unknown_types_is_flagged_by_the_command(tmp_path: Path) -> None:
    keys = [
        gguf_files.key("general.architecture", gguf_files.STRING, gguf_files.text("llama")),
        gguf_files.key("llama.block_count", gguf_files.UINT32, struct.pack("<I", 1)),
    ]
    tensors = [gguf_files.tensor("blk.0.w", [8, 4], 250), gguf_files.tensor("token_embd.weight", [8, 4], 0, 1024)]
    done = run(gguf_files.Raw(keys, tensors, 2048).write(tmp_path / "new.gguf"))
    assert done.returncode == 0
    assert "type 250" in done.stdout
    assert "a guess" in done.stdout


# --- the running exporter's ceiling --------------------------------------------------------------------------------


@contextmanager
def answering(text: str, header: str = STATUS_HEADER) -> Iterator[tuple[str, int]]:
    """Something on a port that answers every question so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header(header, "0")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield "127.0.0.1", server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_the_read_ceiling_of_a_running_exporter_is_used(tmp_path: Path) -> None:
    (file,) = gguf_files.write_model(tmp_path / "dense.gguf")
    with answering(report_text(snapshots.rich_view(), Format.JSON)) as address:
        assert ask_read_ceiling(address) == 50e9
        command = (
            *COMMAND,
            "--web.listen-address",
            f"127.0.0.1:{address[1]}",
            "inspect",
            str(file),
            "--format",
            "json",
        )
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["bandwidth_bytes_per_second"] == 50e9


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"host": {"memory_bandwidth": [{}]}}', "<html>"])
def test_what_is_no_exporter_tells_no_ceiling(text: str) -> None:
    with answering(text) as address:
        assert ask_read_ceiling(address) is None
    with answering(report_text(snapshots.rich_view(), Format.JSON), "X-Other") as address:
        assert ask_read_ceiling(address) is None
    assert ask_read_ceiling(("127.0.0.1", free_port())) is None
