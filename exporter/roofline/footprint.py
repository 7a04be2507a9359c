"""What one decode step must move and compute.

A step is one `llama_decode` that advances every generating stream by one token.
Step bytes = W(B) + KV + state; W(B) = weights streamed at batch B (looked-up embedding rows not, the head once, the
distinct experts that B tokens touch); KV = each stream's cache at its own mean depth, unpadded.
FLOPs of a step = B x [2 x parameters multiplied for one token + 4 x sum over layers of heads x head_dim x depth].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Part(StrEnum):
    """The parts that a token's time is split into; the first three are bytes, the last is the rest."""

    WEIGHTS = "weights"
    OUTPUT_HEAD = "output_head"
    KV_CACHE = "kv_cache"
    OVERHEAD = "overhead"


class BytesSource(StrEnum):
    """Where the weight bytes come from; `server` is an upper bound for what a step reads."""

    FILE = "file"
    CONFIGURED = "configured"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class StepWork:
    """Bytes (by part) and FLOPs of one step. Recurrent state counts with the KV cache: both belong to the streams."""

    bytes_by_part: Mapping[Part, float]
    flops: float

    @property
    def bytes(self) -> float:
        """All bytes of the step."""
        return sum(self.bytes_by_part.values())

    @property
    def intensity_flops_per_byte(self) -> float:
        """FLOPs of the step / bytes of the step."""
        return self.flops / self.bytes


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of one layer.

    Attributes:
        bytes: Of all experts together.
        parameters: Of all experts together.
        count: How many there are.
        used: How many one token is sent to.
    """

    bytes: float
    parameters: float
    count: int
    used: int

    def distinct(self, batch: int) -> float:
        """Expected number of distinct experts that `batch` tokens touch, each routed uniformly and on its own."""
        return self.count * (1 - (1 - self.used / self.count) ** batch)


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer that attends to a cache.

    Attributes:
        kv_bytes_per_token: Cache bytes read for each token of depth and stream.
        flops_per_token: FLOPs for each token of depth and stream: 4 x heads x head_dim where K and V are alike.
        window: The layer attends to this many last tokens; None for all.
    """

    kv_bytes_per_token: float
    flops_per_token: float
    window: int | None = None

    def attended(self, depth: float) -> float:
        """Tokens that the layer reads at that depth."""
        return depth if self.window is None else min(depth, self.window)


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model as a decode step meets it.

    Attributes:
        parameters: Parameters multiplied for every token: all but routed experts and looked-up rows.
        weight_bytes: Their bytes; for the source `server` the bytes of all tensors.
        head_bytes: The output head's share of `weight_bytes`; None when unknown.
        experts: The routed experts, layer by layer; empty for a dense model or when unknown.
        attention: The layers that attend to a cache; None when unknown.
        state_bytes: Recurrent state of one stream, read and written in every step; None when unknown.
        head_parameters: The output head's share of `parameters`; None when unknown.
    """

    parameters: float
    weight_bytes: float
    source: BytesSource
    head_bytes: float | None = None
    experts: tuple[Experts, ...] = ()
    attention: tuple[Attention, ...] | None = None
    state_bytes: float | None = None
    head_parameters: float | None = None

    @property
    def kv_bytes_per_token(self) -> float | None:
        """Cache bytes for each token of a stream that no window cuts off; None when unknown."""
        return None if self.attention is None else sum(layer.kv_bytes_per_token for layer in self.attention)

    def weight_bytes_of(self, batch: int) -> float:
        """W(B): weight bytes that a step at that batch streams, the head included, without cache and state."""
        return self.weight_bytes + sum(e.bytes * e.distinct(batch) / e.count for e in self.experts)

    def step(self, batch: int, depth: float = 0.0) -> StepWork:
        """Bytes and FLOPs of one step.

        Args:
            batch: Streams that generate together.
            depth: Mean number of cached tokens of a stream over the step.

        Raises:
            ValueError: `batch` is below 1 or `depth` is negative.
        """
        if batch < 1 or depth < 0:
            raise ValueError(f"batch must be at least 1 and depth at least 0, not {batch} and {depth}")
        active = sum(e.parameters * e.used / e.count for e in self.experts)
        parts = {Part.WEIGHTS: self.weight_bytes_of(batch) - (self.head_bytes or 0.0)}
        if self.head_bytes is not None:
            parts[Part.OUTPUT_HEAD] = self.head_bytes
        attention_flops = 0.0
        if self.attention is not None:
            cache = sum(layer.kv_bytes_per_token * layer.attended(depth) for layer in self.attention)
            parts[Part.KV_CACHE] = batch * (cache + (self.state_bytes or 0.0))
            attention_flops = sum(layer.flops_per_token * layer.attended(depth) for layer in self.attention)
        return StepWork(parts, batch * (2 * (self.parameters + active) + attention_flops))
