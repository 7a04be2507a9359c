"""The model behind a server: exact bytes from its file where that can be read, else the server's own figures."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import structlog

from exporter.measure.answers import Props
from exporter.measure.gguf import read_gguf
from exporter.measure.gguf_file import shown
from exporter.measure.gguf_types import GgufHeader, GgufProblem, GgufProblemKind
from exporter.measure.listing import ModelSize
from exporter.roofline.architecture import footprint_of
from exporter.roofline.footprint import BytesSource, Footprint
from exporter.roofline.snapshot import Model

RETRY_SECONDS: Final = 60.0
"""A file that could not be used is read again after this: its own size and time do not tell of a missing shard."""
_NOT_STREAMED: Final = (
    "has no weights that decoding reads (a projector or a bare vocabulary?): name the language model's own file"
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ModelHints:
    """What the configuration says about a server's model.

    Attributes:
        gguf: The model's file, as this process sees it.
        active_weight_bytes: What one token reads, from `inspect`, where the file cannot be mounted.
    """

    gguf: Path | None = None
    active_weight_bytes: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"


@dataclass(frozen=True, slots=True)
class _Read:
    """What reading a file gave; `key` changes with the file, `at` is in monotonic seconds."""

    path: Path
    key: object
    found: GgufHeader | GgufProblem
    at: float


class ModelReader:
    """Describes one server's model; a file is read again when it changed, and from time to time one that is no use.

    Args:
        hints: What the configuration says about the model.
        server: The server's name, for the log.
        clock: Monotonic seconds.
    """

    def __init__(self, hints: ModelHints, server: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._hints = hints
        self._clock = clock
        self._known: _Read | None = None
        self._log = log.bind(server=server)
        self._told: dict[str, str | int | None] = {}

    async def describe(self, props: Props, size: ModelSize) -> Model:
        """The model, with its footprint from the best source that there is: file, configuration, server."""
        path = self._hints.gguf or await asyncio.to_thread(_visible, props.path)
        header = None if path is None else await self._read(path)
        model = describe(props, size, None if isinstance(header, GgufProblem) else header, self._hints)
        problem = header.message if isinstance(header, GgufProblem) else model.unused or None
        if self._hints.gguf is None:
            # Nobody asked for the server's own path to be read.
            problem = None
        self._tell_once("the model's file cannot be used: its bytes come from elsewhere", "problem", problem)
        by_server = model.footprint is not None and model.footprint.source is BytesSource.SERVER
        whole = size.weight_bytes if by_server and self._hints.active_weight_bytes is not None else None
        self._tell_once("active_weight_bytes is more than the whole model has: it is ignored", "whole", whole)
        unused = [] if problem is None else [problem]
        if whole is not None:
            unused.append(f"active_weight_bytes is more than the whole model's {whole} bytes")
        return replace(model, unused="; ".join(unused))

    def _tell_once(self, event: str, key: str, why: str | int | None) -> None:
        """A warning when it becomes true, or true in another way; not again at every health check."""
        if why is not None and why != self._told.get(key):
            self._log.warning(event, **{key: why})
        self._told[key] = why

    async def _read(self, path: Path) -> GgufHeader | GgufProblem:
        """The file's header; without a thread to read it in, what was last read of it."""
        try:
            found = await asyncio.to_thread(self._header, path)
        except RuntimeError as error:
            # Python's word for a machine that gives no more threads.
            self._tell_once("no thread to read the model's file in", "error", str(error))
            known = self._known
            if known is not None and known.path == path and isinstance(known.found, GgufHeader):
                return known.found
            text = f"{shown(path)} could not be read, {error}: raise the process limit (pids.max, ulimit -u)"
            return GgufProblem(GgufProblemKind.UNREADABLE, text)
        self._tell_once("no thread to read the model's file in", "error", None)
        return found

    def _header(self, path: Path) -> GgufHeader | GgufProblem:
        try:
            status = path.stat()
            key: object = (status.st_mtime_ns, status.st_size)
        except OSError:
            key = None
        known, now = self._known, self._clock()
        if known is not None and key is not None and (known.path, known.key) == (path, key):
            fresh = now - known.at < RETRY_SECONDS
            if fresh or isinstance(known.found, GgufHeader):
                return known.found
        found = read_gguf(path)
        self._known = _Read(path, key, found, now)
        return found


def describe(props: Props, size: ModelSize, header: GgufHeader | None, hints: ModelHints) -> Model:
    """The model from what is known of it; a file that is not the server's gives way to the server's figures."""
    model = Model(
        name=props.model,
        quantization=props.quantization or size.quantization,
        build=props.build,
        parameters=size.parameters,
        weight_bytes=size.weight_bytes,
        footprint=None,
    )
    if header is not None:
        told = (size.parameters or header.parameters, size.weight_bytes or header.weight_bytes)
        if told == (header.parameters, header.weight_bytes):
            footprint = footprint_of(
                header.metadata, header.tensors, cache_type_k=hints.cache_type_k, cache_type_v=hints.cache_type_v
            )
            if footprint.weight_bytes_of(1) > 0:
                return replace(
                    model, parameters=header.parameters, weight_bytes=header.weight_bytes, footprint=footprint
                )
            model = replace(model, unused=f"{shown(header.paths[0])} {_NOT_STREAMED}")
        else:
            model = replace(model, file_mismatch=True)
    if size.parameters is None or size.weight_bytes is None:
        return model
    active = hints.active_weight_bytes
    if active is not None and active <= size.weight_bytes:
        # Active parameters are not told; weights of one model weigh alike on the whole.
        share = active / size.weight_bytes
        return replace(model, footprint=Footprint(size.parameters * share, active, BytesSource.CONFIGURED))
    return replace(model, footprint=Footprint(size.parameters, size.weight_bytes, BytesSource.SERVER))


def _visible(path: str) -> Path | None:
    """The server's own path, if this process can see a file there; a relative one starts where the server does."""
    found = Path(path)
    try:
        return found if found.is_absolute() and found.is_file() else None
    except (OSError, ValueError):
        return None
