"""From metadata and tensors to the footprint: the rules of llama.cpp's files, by example."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from exporter.measure.gguf import read_gguf
from exporter.measure.gguf_types import GgufHeader
from exporter.roofline.architecture import Architecture, Kind, Metadata, classify, footprint_of
from exporter.roofline.footprint import Footprint


@dataclass(frozen=True)
class T:
    """A tensor of 2-byte elements."""

    name: str
    elements: int

    @property
    def bytes(self) -> int:
        return 2 * self.elements


def meta(architecture: str = "llama", **keys: float | str | tuple[bool | float, ...]) -> Metadata:
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{k.replace('__', '.')}": v for k, v in keys.items()},
    }


DENSE = meta(block_count=2, embedding_length=64, attention__head_count=4, attention__head_count_kv=2)
TENSORS = (
    T("token_embd.weight", 1000),
    T("blk.0.attn_q.weight", 10),
    T("blk.1.ffn_up.weight", 20),
    T("output_norm.weight", 3),
    T("output.weight", 1000),
    T("rope_freqs.weight", 1),
)


def kv(found: Footprint) -> list[float]:
    """Cache bytes a token, layer by layer."""
    assert found.attention is not None
    return [layer.kv_bytes_per_token for layer in found.attention]


def windows(found: Footprint) -> list[int | None]:
    assert found.attention is not None
    return [layer.window for layer in found.attention]


def test_an_own_head_leaves_the_embedding_to_be_looked_up() -> None:
    found = footprint_of(DENSE, TENSORS)
    assert found.parameters == 10 + 20 + 3 + 1000 + 1
    assert found.head_bytes == 2000
    assert found.step(1).bytes == 2 * 1034


def test_a_tied_head_reads_the_embedding_whole_and_once() -> None:
    found = footprint_of(DENSE, [t for t in TENSORS if t.name != "output.weight"])
    assert found.head_bytes == 2000
    assert found.step(1).bytes == 2 * 1034


def test_grouped_heads_cache_less_and_compute_alike() -> None:
    """2 of 4 heads cached: 2 x 16 x (2 + 2) bytes a token and layer; 4 x heads x head_dim FLOPs."""
    found = footprint_of(DENSE, TENSORS)
    assert kv(found) == [2 * 16 * 4] * 2
    assert found.step(1, depth=100).flops == 2 * 1034 + 2 * 4 * 4 * 16 * 100


def test_without_a_count_of_kv_heads_every_head_is_cached() -> None:
    found = footprint_of(meta(block_count=1, embedding_length=64, attention__head_count=4), TENSORS)
    assert kv(found) == [4 * 16 * 4]


def test_cache_types_apart() -> None:
    found = footprint_of(DENSE, TENSORS, cache_type_k="q8_0", cache_type_v="q4_0")
    assert kv(found) == pytest.approx([2 * 16 * (34 / 32 + 18 / 32)] * 2)


def test_heads_layer_by_layer_where_zero_is_no_attention() -> None:
    found = footprint_of(
        meta(block_count=3, embedding_length=64, attention__head_count=4, attention__head_count_kv=(2, 0, 4)), TENSORS
    )
    assert kv(found) == [2 * 16 * 4, 4 * 16 * 4]


@pytest.mark.parametrize(
    ("architecture", "layers", "full"),
    [("gemma3", 18, [5, 11, 17]), ("gemma2", 4, [1, 3]), ("gpt-oss", 4, [1, 3]), ("cohere2", 8, [3, 7])],
)
def test_windows_of_architectures_that_leave_the_pattern_out(architecture: str, layers: int, full: list[int]) -> None:
    found = footprint_of(
        meta(
            architecture, block_count=layers, embedding_length=64, attention__head_count=4, attention__sliding_window=8
        ),
        TENSORS,
    )
    assert [i for i, window in enumerate(windows(found)) if window is None] == full
    assert {w for w in windows(found) if w} == {8}


def test_a_window_pattern_in_the_file_counts() -> None:
    keys = {"block_count": 4, "embedding_length": 64, "attention__head_count": 4, "attention__sliding_window": 8}
    told = footprint_of(meta("new", attention__sliding_window_pattern=(True, False, True, True), **keys), TENSORS)
    assert windows(told) == [8, None, 8, 8]
    period = footprint_of(meta("new", attention__sliding_window_pattern=2, **keys), TENSORS)
    assert windows(period) == [8, None, 8, None]


def test_a_window_without_a_pattern_is_not_believed() -> None:
    """An upper bound is kept rather than a guess."""
    keys = {"block_count": 2, "embedding_length": 64, "attention__head_count": 4, "attention__sliding_window": 8}
    assert windows(footprint_of(meta("new", **keys), TENSORS)) == [None, None]


def test_latent_attention_caches_compressed_keys_only() -> None:
    found = footprint_of(
        meta(
            "deepseek2",
            block_count=1,
            embedding_length=64,
            attention__head_count=16,
            attention__head_count_kv=1,
            attention__key_length=576,
            attention__value_length=512,
            attention__key_length_mla=192,
            attention__value_length_mla=128,
            attention__kv_lora_rank=512,
        ),
        TENSORS,
    )
    assert kv(found) == [576 * 2]
    assert found.attention
    assert found.attention[0].flops_per_token == 2 * 16 * (576 + 512)


def test_routed_experts_are_apart_and_shared_ones_whole() -> None:
    tensors = (
        *TENSORS,
        T("blk.0.ffn_up_exps.weight", 800),
        T("blk.0.ffn_gate_inp.weight", 5),
        T("blk.0.ffn_up_shexp.weight", 7),
        T("blk.1.ffn_up_exps.weight", 800),
    )
    found = footprint_of({**DENSE, "llama.expert_count": 8, "llama.expert_used_count": 2}, tensors)
    assert [(e.count, e.used, e.bytes) for e in found.experts] == [(8, 2, 1600)] * 2
    assert found.step(1).bytes == 2 * (1034 + 5 + 7) + 2 * 400
    assert found.step(1).flops == 2 * (1034 + 5 + 7 + 400)


def test_layers_that_predict_further_tokens_are_not_read() -> None:
    metadata = {**DENSE, "llama.block_count": 3, "llama.nextn_predict_layers": 1}
    tensors = (*TENSORS, T("blk.2.nextn.eh_proj.weight", 99), T("blk.2.ffn_up_exps.weight", 500))
    kinds = classify(tensors, Architecture(metadata))
    assert [name for name, kind in kinds.items() if kind is Kind.NEXT_TOKEN] == [t.name for t in tensors[-2:]]
    assert footprint_of(metadata, tensors).step(1) == footprint_of(DENSE, TENSORS).step(1)


def test_per_layer_embeddings_are_looked_up() -> None:
    tensors = (*TENSORS, T("per_layer_token_embd.weight", 10**9), T("per_layer_model_proj.weight", 11))
    assert footprint_of(DENSE, tensors).step(1).bytes == 2 * (1034 + 11)


def test_recurrent_layers_keep_a_state_instead_of_a_cache() -> None:
    """A hybrid with every second layer attending: (4 - 1) x (inner + 2 x groups x state) + state x inner floats."""
    metadata = meta(
        "hybrid",
        block_count=4,
        embedding_length=64,
        attention__head_count=4,
        attention__head_count_kv=4,
        full_attention_interval=2,
        ssm__state_size=16,
        ssm__inner_size=128,
        ssm__group_count=1,
        ssm__conv_kernel=4,
    )
    found = footprint_of(metadata, TENSORS)
    assert len(kv(found)) == 2
    assert found.state_bytes == 2 * (2 * 4 * (3 * (128 + 2 * 16) + 16 * 128))


def test_a_pure_recurrent_model_has_no_cache() -> None:
    metadata = meta(
        "mamba", block_count=3, embedding_length=64, ssm__state_size=16, ssm__inner_size=128, ssm__conv_kernel=4
    )
    found = footprint_of(metadata, TENSORS)
    assert kv(found) == []
    assert found.state_bytes == 3 * 2 * 4 * (3 * 128 + 16 * 128)
    rwkv = meta("rwkv6", block_count=2, embedding_length=64, wkv__head_size=8, token_shift_count=2)
    assert footprint_of(rwkv, TENSORS).state_bytes == 2 * 2 * 4 * (2 * 64 + 64 * 8)


def test_a_file_that_tells_nothing_has_no_cache_figures() -> None:
    found = footprint_of({}, TENSORS)
    assert found.attention is None
    assert found.kv_bytes_per_token is None
    assert found.step(2, depth=100).bytes == 2 * 1034


@pytest.mark.real
def test_the_real_model(real_model: Path) -> None:
    """Bytes by part are the sum of its tensors; the tied head is read whole; 18 layers x 1 KiB of cache a token."""
    header = read_gguf(real_model)
    assert isinstance(header, GgufHeader)
    found = footprint_of(header.metadata, header.tensors)
    assert found.step(1).bytes == header.weight_bytes == 246_587_904
    assert found.head_bytes == next(t.bytes for t in header.tensors if t.name == "token_embd.weight")
    assert found.parameters == 268_098_176
    assert found.kv_bytes_per_token == 18_432
    assert found.step(1, depth=4096).bytes == 246_587_904 + 1024 * (3 * 4096 + 15 * 512)
