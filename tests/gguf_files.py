"""Writes GGUF files for tests: small models that llama.cpp loads through the `gguf` package, hostile ones by hand."""

from __future__ import annotations

import importlib.util
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from real import require

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import ModuleType

    import numpy as np

UINT32 = 4
INT32 = 5
FLOAT32 = 6
BOOL = 7
STRING = 8
ARRAY = 9
UINT64 = 10
UINT16 = 2

FIRST_TEXT_TOKEN = 3 + 256
"""Behind <unk>, <s>, </s> and the 256 bytes."""


def gguf_package() -> ModuleType:
    """The public reader and writer, the oracle here."""
    require(importlib.util.find_spec("gguf"), "gguf is not installed")
    import gguf  # noqa: PLC0415 - optional

    return gguf


@dataclass(frozen=True)
class Shape:
    """A small llama model with grouped heads; a mixture of experts when `experts` is not 0.

    Attributes:
        tied: The output head is the embedding.
        quantization: ggml's name of the matrices' type: F32, F16, ... that the package can write, or one of BLOCKS.
    """

    layers: int = 2
    embedding: int = 64
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 128
    vocabulary: int = 512
    context: int = 512
    experts: int = 0
    experts_used: int = 0
    tied: bool = False
    quantization: str = "Q8_0"

    @property
    def head_size(self) -> int:
        return self.embedding // self.heads

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Dimensions by name, the slowest first as in numpy."""
        width, inner, kv = self.embedding, self.feed_forward, self.kv_heads * self.head_size
        embedding = (self.vocabulary, width)
        found: dict[str, tuple[int, ...]] = {"token_embd.weight": embedding, "output_norm.weight": (width,)}
        if not self.tied:
            found["output.weight"] = embedding
        many, suffix = ((self.experts,), "_exps") if self.experts else ((), "")
        for layer in range(self.layers):
            block = {
                "attn_norm": (width,),
                "attn_q": (width, width),
                "attn_k": (kv, width),
                "attn_v": (kv, width),
                "attn_output": (width, width),
                "ffn_norm": (width,),
                f"ffn_gate{suffix}": (*many, inner, width),
                f"ffn_up{suffix}": (*many, inner, width),
                f"ffn_down{suffix}": (*many, width, inner),
            }
            if self.experts:
                block["ffn_gate_inp"] = (self.experts, width)
            found |= {f"blk.{layer}.{name}.weight": dims for name, dims in block.items()}
        return found


BLOCKS = {"Q8_0": (32, 34, 0.05 / 74), "IQ2_XXS": (256, 66, 0.05 / 53)}
"""Types whose weights can be drawn instead of quantized, which would take a minute for a few hundred megabytes: weights
and bytes of a block, and the scale at its head with which the weights deviate by 0.05 whatever the other bytes are."""

DENSE = Shape()
EXPERTS = Shape(experts=8, experts_used=2)


def write_model(path: Path, shape: Shape = DENSE, *, split_max_tensors: int = 0, seed: int = 0) -> list[Path]:
    """A model with random weights that llama.cpp loads.

    Args:
        path: Of the file; with a split, `model.gguf` gives `model-00001-of-00003.gguf` and so on.
        shape: Of the model.
        split_max_tensors: Tensors in a shard at most; 0 writes one file.
        seed: Of the weights.

    Returns:
        The files, in the order of the shards.
    """
    gguf = gguf_package()
    import numpy as np  # noqa: PLC0415 - comes with gguf

    generator = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split_max_tensors)
    _add_metadata(writer, shape)
    matrix_type = gguf.GGMLQuantizationType[shape.quantization]
    for name, dims in shape.tensors().items():
        norm = len(dims) == 1
        # Norms and the router stay in F32, as converters leave them.
        kind = gguf.GGMLQuantizationType.F32 if norm or "ffn_gate_inp" in name else matrix_type
        if kind.name in BLOCKS:
            writer.add_tensor(name, _drawn(generator, dims, *BLOCKS[kind.name]), raw_dtype=kind)
            continue
        weights: np.ndarray = generator.standard_normal(dims, dtype=np.float32) * 0.05 + (1 if norm else 0)
        writer.add_tensor(name, gguf.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}*.gguf"))


def _drawn(generator: np.random.Generator, dims: tuple[int, ...], weights: int, size: int, scale: float) -> np.ndarray:
    """Random blocks, each a scale in half precision and bytes of which every value is valid."""
    import numpy as np  # noqa: PLC0415 - comes with gguf

    blocks = generator.integers(0, 256, (*dims[:-1], dims[-1] // weights, size), dtype=np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(scale).tobytes(), dtype=np.uint8)
    drawn: np.ndarray = blocks.reshape(*dims[:-1], -1)
    return drawn


def _add_metadata(writer: object, shape: Shape) -> None:
    gguf = gguf_package()
    assert isinstance(writer, gguf.GGUFWriter)
    writer.add_name("synthetic")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.embedding)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
    texts = [f"\N{LOWER ONE EIGHTH BLOCK}w{number}" for number in range(shape.vocabulary - FIRST_TEXT_TOKEN)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *texts])
    writer.add_token_scores([0.0] * FIRST_TEXT_TOKEN + [-float(number) for number in range(len(texts))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(texts))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def text(value: str | bytes) -> bytes:
    """A string as GGUF stores it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def strings(values: Sequence[str | bytes]) -> bytes:
    """The value of an array of strings."""
    return struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values))


def key(name: str | bytes, code: int, value: bytes) -> bytes:
    """A key with its value."""
    return text(name) + struct.pack("<I", code) + value


def tensor(name: str | bytes, dims: Sequence[int], type_id: int = 0, offset: int = 0) -> bytes:
    """A tensor's entry."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


@dataclass
class Raw:
    """A file byte by byte: as broken as a test wants it.

    Attributes:
        keys: Entries made with `key`.
        tensors: Entries made with `tensor`.
        data: Bytes behind the padded header.
        key_count: Claimed; None tells the truth.
        tensor_count: Claimed; None tells the truth.
    """

    keys: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    data: int = 0
    version: int = 3
    alignment: int = 32
    key_count: int | None = None
    tensor_count: int | None = None
    magic: bytes = b"GGUF"

    def build(self) -> bytes:
        tensors = len(self.tensors) if self.tensor_count is None else self.tensor_count
        keys = len(self.keys) if self.key_count is None else self.key_count
        head = self.magic + struct.pack("<IQQ", self.version, tensors, keys) + b"".join(self.keys + self.tensors)
        return head + bytes(-len(head) % self.alignment + self.data)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path


def shard(
    path: Path, split: tuple[int, int, int], entries: Sequence[bytes] = (), data: int = 0, *, more: Sequence[bytes] = ()
) -> Path:
    """A shard with its three keys, under the name that belongs to them.

    Args:
        path: The directory.
        split: This shard's number from 0, the number of shards, the tensors of all shards.
        entries: This shard's tensors.
        data: Bytes of them.
        more: Other keys.
    """
    number, count, total = split
    keys = [
        key("split.no", UINT16, struct.pack("<H", number)),
        key("split.count", UINT16, struct.pack("<H", count)),
        key("split.tensors.count", INT32, struct.pack("<i", total)),
    ]
    return Raw([*keys, *more], list(entries), data).write(path / f"model-{number + 1:05d}-of-{count:05d}.gguf")
