"""What one decode step must move and compute.

A step is one `llama_decode` that advances every generating stream by one token.
Step bytes = W(B) + KV; W(B) = weights streamed at batch B, KV = each stream's cache at its own mean depth, unpadded.
FLOPs of a step = B x 2 x parameters (one multiplication and one addition for each weight and token).
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
    """Bytes (by part) and FLOPs of one step."""

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
class Footprint:
    """A model as a decode step meets it.

    Attributes:
        parameters: Parameters multiplied for one token.
        weight_bytes: Bytes of weights read by a step, W(B); for the source `server` the bytes of all tensors.
        head_bytes: The output head's share of `weight_bytes`; None when unknown.
        kv_bytes_per_token: Cache bytes read for each token of depth and stream; None when unknown.
    """

    parameters: float
    weight_bytes: float
    source: BytesSource
    head_bytes: float | None = None
    kv_bytes_per_token: float | None = None

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
        parts = {Part.WEIGHTS: self.weight_bytes - (self.head_bytes or 0.0)}
        if self.head_bytes is not None:
            parts[Part.OUTPUT_HEAD] = self.head_bytes
        if self.kv_bytes_per_token is not None:
            parts[Part.KV_CACHE] = batch * depth * self.kv_bytes_per_token
        return StepWork(parts, batch * 2 * self.parameters)
