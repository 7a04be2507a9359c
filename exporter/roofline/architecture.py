"""From a model file's metadata and tensors to its footprint: which tensors a step streams, and what it caches.

The rules are llama.cpp's: the names of its tensors and the keys of its hyperparameters.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from exporter.roofline.footprint import Attention, BytesSource, Experts, Footprint

Metadata = Mapping[str, bool | int | float | str | tuple[bool | int | float, ...]]

CACHE_TYPE_BYTES: Final[Mapping[str, float]] = {
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
"""Bytes of one cached element by the name that llama-server's --cache-type-k and -v take."""

_F32_BYTES: Final = 4
_WINDOW_PERIODS: Final[Mapping[str, int]] = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "llama4": 4,
    "cohere2": 4,
    "exaone4": 4,
    "olmo2": 4,
}
"""Architectures whose file may leave the pattern out: the last layer of each group attends to everything."""
_LOOKED_UP: Final = frozenset({"per_layer_token_embd.weight", "position_embd.weight", "token_types.weight"})
_EXPERTS: Final = re.compile(r"_(ch)?exps\.")
_BLOCK: Final = re.compile(r"blk\.(\d+)\.")
_ENCODER: Final = re.compile(r"(enc\.|v\.|mm\.)")
_DEFAULT_FULL_ATTENTION_INTERVAL: Final = 4
_MOST_LAYERS: Final = 10_000
"""Far beyond any model; a damaged file must not cost memory by the layer that it claims."""
_TOKEN_SHIFTS: Final = 2
_TOO_LARGE: Final = 2**53


class TensorLike(Protocol):
    """What is asked of a tensor."""

    @property
    def name(self) -> str:
        """As in the file."""

    @property
    def elements(self) -> int:
        """Its parameters."""

    @property
    def bytes(self) -> int:
        """Its size."""


class Kind(StrEnum):
    """What a decode step does with a tensor."""

    REPEATING = "repeating layers"
    EXPERTS = "routed experts"
    SHARED = "other weights"
    OUTPUT_HEAD = "output head"
    EMBEDDING = "embedding rows (looked up)"
    NEXT_TOKEN = "next-token prediction (not used)"  # noqa: S105 - no password
    ENCODER = "encoder (not used)"


STREAMED: Final = frozenset({Kind.REPEATING, Kind.SHARED, Kind.OUTPUT_HEAD})
"""Read whole in every step; of the routed experts only those that tokens are sent to."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model's hyperparameters, asked for without the architecture's prefix."""

    metadata: Metadata

    @property
    def name(self) -> str:
        """`general.architecture`, or empty."""
        return str(self.metadata.get("general.architecture", ""))

    def number(self, key: str, default: int = 0) -> int:
        """A scalar; of an array the largest, for keys that may be either."""
        value = self.metadata.get(f"{self.name}.{key}", default)
        if isinstance(value, tuple):
            return max((_whole(v, default) for v in value), default=default)
        return _whole(value, default)

    def per_layer(self, key: str, default: int) -> list[int]:
        """A value for each layer, whether the file has one for all or one for each."""
        value = self.metadata.get(f"{self.name}.{key}", default)
        if isinstance(value, tuple):
            found = [_whole(v, default) for v in value] or [default]
            return found[: self.layers] + found[-1:] * (self.layers - len(found))
        return [_whole(value, default)] * self.layers

    def has(self, key: str) -> bool:
        """Whether the file says anything about it."""
        return f"{self.name}.{key}" in self.metadata

    @property
    def layers(self) -> int:
        """Repeating layers, without those that only predict further tokens; 0 when unknown or beyond belief."""
        found = self.number("block_count") - self.number("nextn_predict_layers")
        return found if 0 <= found <= _MOST_LAYERS else 0


def _whole(value: float | str, default: int) -> int:
    """The number as an integer; what is no count, or none that a double holds, is as good as not said."""
    return int(value) if not isinstance(value, str) and 0 <= value < _TOO_LARGE else default


def classify(tensors: Iterable[TensorLike], architecture: Architecture) -> dict[str, Kind]:
    """What a decode step does with each tensor, by name."""
    names = [t.name for t in tensors]
    tied = "output.weight" not in names
    kinds = {}
    for name in names:
        block = _BLOCK.match(name)
        if _ENCODER.match(name):
            kind = Kind.ENCODER
        elif block is not None and int(block[1]) >= architecture.layers > 0:
            kind = Kind.NEXT_TOKEN
        elif name == "token_embd.weight":
            kind = Kind.OUTPUT_HEAD if tied else Kind.EMBEDDING
        elif name == "output.weight":
            kind = Kind.OUTPUT_HEAD
        elif name in _LOOKED_UP:
            kind = Kind.EMBEDDING
        elif _EXPERTS.search(name):
            kind = Kind.EXPERTS
        else:
            kind = Kind.REPEATING if block is not None else Kind.SHARED
        kinds[name] = kind
    return kinds


def footprint_of(
    metadata: Metadata, tensors: Sequence[TensorLike], *, cache_type_k: str = "f16", cache_type_v: str = "f16"
) -> Footprint:
    """The footprint of a model file.

    Args:
        metadata: The file's keys and values.
        tensors: All tensors, of all shards.
        cache_type_k: The server's --cache-type-k.
        cache_type_v: The server's --cache-type-v.
    """
    architecture = Architecture(metadata)
    kinds = classify(tensors, architecture)
    streamed = [t for t in tensors if kinds[t.name] in STREAMED]
    head = [t for t in tensors if kinds[t.name] is Kind.OUTPUT_HEAD]
    return Footprint(
        parameters=sum(t.elements for t in streamed),
        weight_bytes=sum(t.bytes for t in streamed),
        source=BytesSource.FILE,
        head_bytes=sum(t.bytes for t in head),
        experts=_experts(architecture, [t for t in tensors if kinds[t.name] is Kind.EXPERTS]),
        attention=_attention(architecture, CACHE_TYPE_BYTES[cache_type_k], CACHE_TYPE_BYTES[cache_type_v]),
        state_bytes=_state_bytes(architecture),
        head_parameters=sum(t.elements for t in head),
    )


def _experts(architecture: Architecture, tensors: Sequence[TensorLike]) -> tuple[Experts, ...]:
    """The routed experts of each layer that has some; without a known count they are all read."""
    by_layer: dict[int, list[TensorLike]] = {}
    for tensor in tensors:
        block = _BLOCK.match(tensor.name)
        by_layer.setdefault(int(block[1]) if block else 0, []).append(tensor)
    counts = dict(enumerate(architecture.per_layer("expert_count", 1)))
    used = dict(enumerate(architecture.per_layer("expert_used_count", 1)))
    found = []
    for layer, group in sorted(by_layer.items()):
        count = max(1, counts.get(layer, 1))
        found.append(
            Experts(
                sum(t.bytes for t in group),
                sum(t.elements for t in group),
                count,
                min(max(1, used.get(layer, 1)), count),
            )
        )
    return tuple(found)


def _attention(architecture: Architecture, k_bytes: float, v_bytes: float) -> tuple[Attention, ...] | None:
    """The layers that attend to a cache, or None for a file that tells no layers."""
    if architecture.layers == 0:
        return None
    heads = architecture.per_layer("attention.head_count", 0)
    kv_heads = [
        given if architecture.has("attention.head_count_kv") else heads[i]
        for i, given in enumerate(architecture.per_layer("attention.head_count_kv", 0))
    ]
    width = architecture.number("embedding_length") // max(1, *heads)
    latent = architecture.has("attention.key_length_mla") and architecture.has("attention.value_length_mla")
    windowed, recurrent = _windowed(architecture), _recurrent(architecture)
    found = []
    for layer in range(architecture.layers):
        if recurrent[layer] or heads[layer] == 0 or kv_heads[layer] == 0:
            continue
        suffix = "_swa" if windowed[layer] and architecture.has("attention.key_length_swa") else ""
        key = architecture.number(f"attention.key_length{suffix}", width)
        value = architecture.number(f"attention.value_length{suffix}", width)
        if latent:
            # The cache holds the compressed keys only; the values are a part of them.
            value_read, value = 0.0, architecture.number("attention.kv_lora_rank", value)
        else:
            value_read = kv_heads[layer] * value * v_bytes
        found.append(
            Attention(
                kv_bytes_per_token=kv_heads[layer] * key * k_bytes + value_read,
                flops_per_token=2.0 * heads[layer] * (key + value),
                window=architecture.number("attention.sliding_window") if windowed[layer] else None,
            )
        )
    return tuple(found)


def _windowed(architecture: Architecture) -> list[bool]:
    """Which layers attend to a sliding window; a window without a known pattern is not believed: an upper bound."""
    layers, key = architecture.layers, "attention.sliding_window_pattern"
    if architecture.number("attention.sliding_window") <= 0:
        return [False] * layers
    pattern = architecture.metadata.get(f"{architecture.name}.{key}")
    if isinstance(pattern, tuple):
        found = [bool(p) for p in pattern]
        return (found * -(-layers // max(1, len(found))))[:layers] if found else [False] * layers
    period = architecture.number(key, _WINDOW_PERIODS.get(architecture.name, 1))
    return [period > 1 and (layer + 1) % period != 0 for layer in range(layers)]


def _recurrent(architecture: Architecture) -> list[bool]:
    """Which layers keep a state instead of a cache."""
    layers = architecture.layers
    if architecture.has("wkv.head_size"):
        return [True] * layers
    if not architecture.has("ssm.state_size"):
        return [False] * layers
    told = architecture.metadata.get(f"{architecture.name}.attention.recurrent_layers")
    if isinstance(told, tuple):
        return [bool(flag) for flag in told][:layers] + [False] * (layers - len(told))
    kv_heads = architecture.metadata.get(f"{architecture.name}.attention.head_count_kv")
    if isinstance(kv_heads, tuple):
        return [heads == 0 for heads in architecture.per_layer("attention.head_count_kv", 0)]
    if not architecture.number("attention.head_count"):
        return [True] * layers
    interval = max(1, architecture.number("full_attention_interval", _DEFAULT_FULL_ATTENTION_INTERVAL))
    return [(layer + 1) % interval != 0 for layer in range(layers)]


def _state_bytes(architecture: Architecture) -> float:
    """Recurrent state of one stream over all layers, read and written in each step, bytes."""
    if architecture.has("wkv.head_size"):
        embedding = architecture.number("embedding_length")
        shifts = architecture.number("token_shift_count", _TOKEN_SHIFTS)
        elements = shifts * embedding + embedding * architecture.number("wkv.head_size")
    else:
        inner, state = architecture.number("ssm.inner_size"), architecture.number("ssm.state_size")
        groups = architecture.number("ssm.group_count")
        convolved = max(0, architecture.number("ssm.conv_kernel") - 1) * (inner + 2 * groups * state)
        elements = convolved + state * inner
    return 2.0 * _F32_BYTES * elements * sum(_recurrent(architecture))
