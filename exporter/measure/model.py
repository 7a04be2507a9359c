"""The model behind a server: exact bytes from its file where that can be read, else the server's own figures."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from exporter.measure.answers import Props
from exporter.measure.gguf import read_gguf
from exporter.measure.gguf_types import GgufHeader, GgufProblem
from exporter.measure.listing import ModelSize
from exporter.roofline.architecture import footprint_of
from exporter.roofline.footprint import BytesSource, Footprint
from exporter.roofline.snapshot import Model

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


class ModelReader:
    """Describes one server's model; a file is read again only when it changed.

    Args:
        hints: What the configuration says about the model.
        server: The server's name, for the log.
    """

    def __init__(self, hints: ModelHints, server: str = "") -> None:
        self._hints = hints
        self._known: tuple[object, GgufHeader | GgufProblem] | None = None
        self._log = log.bind(server=server)
        self._told: dict[str, str | int | None] = {}

    async def describe(self, props: Props, size: ModelSize) -> Model:
        """The model, with its footprint from the best source that there is: file, configuration, server."""
        path = self._hints.gguf or _visible(props.path)
        header = None if path is None else await asyncio.to_thread(self._header, path)
        problem = None
        if isinstance(header, GgufProblem):
            problem, header = header.message if self._hints.gguf else None, None
        self._tell_once("the model's file cannot be used: its bytes come from elsewhere", "problem", problem)
        model = describe(props, size, header, self._hints)
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

    def _header(self, path: Path) -> GgufHeader | GgufProblem:
        try:
            status = path.stat()
            key: object = (path, status.st_mtime_ns, status.st_size)
        except OSError:
            key = None
        if self._known is None or key is None or self._known[0] != key:
            self._known = (key, read_gguf(path))
        return self._known[1]


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
            return replace(model, parameters=header.parameters, weight_bytes=header.weight_bytes, footprint=footprint)
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
