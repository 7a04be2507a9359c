"""What a GGUF header says, and the closed list of ways in which a file fails to say it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

Scalar: TypeAlias = bool | int | float | str
Value: TypeAlias = Scalar | tuple[bool | int | float, ...]


class GgufProblemKind(StrEnum):
    """Why a file gives no header."""

    MISSING = "missing"
    DIRECTORY = "directory"
    NOT_A_FILE = "not_a_file"
    """A pipe, a socket or a device; never opened."""
    PERMISSION = "permission"
    UNREADABLE = "unreadable"
    EMPTY = "empty"

    LFS_POINTER = "lfs_pointer"
    WEB_PAGE = "web_page"
    ARCHIVE = "archive"
    SAFETENSORS = "safetensors"
    OLD_GGML = "old_ggml"
    NOT_GGUF = "not_gguf"
    BIG_ENDIAN = "big_endian"
    VERSION = "version"

    HEADER_TRUNCATED = "header_truncated"
    DATA_TRUNCATED = "data_truncated"

    ABSURD = "absurd"
    """A count or a length that no model has; refused before anything is allocated for it."""
    BAD_TEXT = "bad_text"
    BAD_VALUE_TYPE = "bad_value_type"
    NESTED_ARRAY = "nested_array"
    BAD_DIMENSIONS = "bad_dimensions"
    BAD_ALIGNMENT = "bad_alignment"
    BAD_OFFSET = "bad_offset"
    DUPLICATE_KEY = "duplicate_key"
    DUPLICATE_TENSOR = "duplicate_tensor"

    MISSING_SHARD = "missing_shard"
    SHARDS_DISAGREE = "shards_disagree"


@dataclass(frozen=True, slots=True)
class GgufProblem:
    """Why there is no header.

    Attributes:
        kind: For code.
        message: For people: one sentence that names the file and the remedy, all of it printable.
    """

    kind: GgufProblemKind
    message: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a model.

    Attributes:
        name: As in the file.
        dims: Elements along each dimension, the fastest first.
        type_name: ggml's name in capitals, or `type N` for an id that ggml does not know.
        type_id: ggml's number of the type.
        elements: The product of `dims`.
        bytes: Without padding, except where `sized_from_offsets` is set.
        sized_from_offsets: The type is unknown, so `bytes` reaches to the next tensor or to the end of the file.
    """

    name: str
    dims: tuple[int, ...]
    type_name: str
    type_id: int
    elements: int
    bytes: int
    sized_from_offsets: bool


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A model as its header describes it, over all of its shards.

    Attributes:
        version: 2 or 3.
        metadata: Scalars, short texts, and small arrays of numbers that are not the tokenizer's.
        array_lengths: Elements of every array, kept or not.
        tensors: In the order of the file, shard by shard.
        alignment: Of the tensors' data, bytes; the first shard's.
        paths: The files, in the order of the shards.
    """

    version: int
    metadata: Mapping[str, Value]
    array_lengths: Mapping[str, int]
    tensors: tuple[Tensor, ...]
    alignment: int
    paths: tuple[Path, ...]

    @property
    def shards(self) -> int:
        """The number of files that the model is made of."""
        return len(self.paths)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def sized_from_offsets(self) -> bool:
        """Whether the bytes of any tensor are a guess from its neighbour's place."""
        return any(tensor.sized_from_offsets for tensor in self.tensors)


class TensorType(NamedTuple):
    """How ggml stores a row: in blocks of so many elements, each of so many bytes."""

    name: str
    block_elements: int
    block_bytes: int


TENSOR_TYPES: Final[Mapping[int, TensorType]] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    # Two half floats and 32 bytes in llama.cpp since 2023; gguf-py 0.19 still counts full floats. Never seen in a file.
    9: TensorType("Q8_1", 32, 36),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
    42: TensorType("Q2_0", 64, 18),
}
"""By id. The ids between (4, 5, 31-33, 36-38) are retired; the forks number theirs from 97 on."""
