"""A model file taken apart: what its tensors weigh by what a decode step does with them, and what steps read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from exporter.roofline.architecture import Architecture, Kind, Metadata, TensorLike, classify, footprint_of
from exporter.roofline.footprint import Footprint, StepWork

BATCHES: Final = (1, 2, 4)
DEPTHS: Final = (0, 4096, 32768)


class TypedTensor(TensorLike, Protocol):
    """A tensor that also tells how it is stored."""

    @property
    def type_name(self) -> str:
        """The name that ggml has for its type."""

    @property
    def sized_from_offsets(self) -> bool:
        """Its type is unknown, and its bytes are a guess from its neighbour's place."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """The tensors that a decode step treats alike.

    Attributes:
        type_bytes: Bytes by ggml type, the largest first.
    """

    kind: Kind
    tensors: int
    bytes: int
    parameters: int
    type_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step, and the least time that reading its bytes takes.

    Attributes:
        floor_seconds: None without a bandwidth.
    """

    batch: int
    depth: int
    work: StepWork
    floor_seconds: float | None

    @property
    def floor_tokens_per_second(self) -> float | None:
        """The rate of all streams together that the bandwidth allows at most."""
        return None if self.floor_seconds is None else self.batch / self.floor_seconds


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a model file means for decode.

    Attributes:
        name: The file's base name.
        head_tied: The output head is the embedding; None where neither is in the file.
        sized_from_offsets: Names of the tensors whose bytes are a guess.
        bandwidth_bytes_per_second: Under which the floors stand; None when none is known.
    """

    name: str
    architecture: str
    footprint: Footprint
    parts: tuple[FilePart, ...]
    head_tied: bool | None
    sized_from_offsets: tuple[str, ...]
    cache_type_k: str
    cache_type_v: str
    bandwidth_bytes_per_second: float | None
    steps: tuple[Step, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.bytes for part in self.parts)

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(part.parameters for part in self.parts)

    @property
    def active_weight_bytes(self) -> int:
        """W(1): what one token reads."""
        return round(self.footprint.weight_bytes_of(1))


def inspect_model(
    name: str,
    metadata: Metadata,
    tensors: Sequence[TypedTensor],
    *,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    bandwidth_bytes_per_second: float | None = None,
) -> Inspection:
    """The model by part, and its steps at a few batches and depths.

    Args:
        name: The file's base name.
        metadata: The file's keys and values.
        tensors: All tensors, of all shards.
        cache_type_k: The server's --cache-type-k.
        cache_type_v: The server's --cache-type-v.
        bandwidth_bytes_per_second: For the floors.
    """
    architecture = Architecture(metadata)
    kinds = classify(tensors, architecture)
    footprint = footprint_of(metadata, tensors, cache_type_k=cache_type_k, cache_type_v=cache_type_v)
    names = {tensor.name for tensor in tensors}
    head = {"output.weight", "token_embd.weight"} & names
    return Inspection(
        name=name,
        architecture=architecture.name,
        footprint=footprint,
        parts=tuple(
            _part(kind, members) for kind in Kind if (members := [t for t in tensors if kinds[t.name] is kind])
        ),
        head_tied="output.weight" not in names if head else None,
        sized_from_offsets=tuple(t.name for t in tensors if t.sized_from_offsets),
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        bandwidth_bytes_per_second=bandwidth_bytes_per_second,
        steps=tuple(_steps(footprint, bandwidth_bytes_per_second)),
    )


def _part(kind: Kind, tensors: Sequence[TypedTensor]) -> FilePart:
    by_type: dict[str, int] = {}
    for tensor in tensors:
        by_type[tensor.type_name] = by_type.get(tensor.type_name, 0) + tensor.bytes
    return FilePart(
        kind=kind,
        tensors=len(tensors),
        bytes=sum(t.bytes for t in tensors),
        parameters=sum(t.elements for t in tensors),
        type_bytes=dict(sorted(by_type.items(), key=lambda item: (-item[1], item[0]))),
    )


def _steps(footprint: Footprint, bandwidth: float | None) -> Iterable[Step]:
    """Every batch at every depth; without known layers a cache cannot be told, and only the empty one is."""
    # A footprint without bytes has no floor to speak of.
    if footprint.weight_bytes_of(1) <= 0:
        return
    for depth in DEPTHS if footprint.attention is not None else DEPTHS[:1]:
        for batch in BATCHES:
            work = footprint.step(batch, depth)
            yield Step(batch, depth, work, None if bandwidth is None else work.bytes / bandwidth)
