"""What `inspect` prints: a model file by part, and what decode steps read of it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.text import Text

from exporter.present.shapes import Json, JsonObject
from exporter.present.study import Cell, Column
from exporter.present.tables import (
    TEXT_WIDTH,
    Format,
    csv_text,
    json_text,
    markdown_lines,
    markdown_table,
    plain_text,
    rich_table,
)
from exporter.present.words import MISSING, si
from exporter.roofline.architecture import Kind
from exporter.roofline.footprint import Part
from exporter.roofline.inspection import FilePart, Inspection, Step

_HEADS: Final = {True: "output head (tied)", False: "output head (own)", None: "output head"}
_CSV_HEADS: Final = (
    *("part", "batch", "depth tokens", "bytes", "share %", "parameters", "types"),
    *("FLOP", "intensity FLOP/byte", "floor ms", "floor tokens/s"),
)
_SHOWN_NAMES: Final = 3


def inspect_text(found: Inspection, format_: Format, width: int = TEXT_WIDTH) -> str:
    """The inspection in one of the formats, ending with a newline."""
    match format_:
        case Format.JSON:
            return json_text(inspect_json(found))
        case Format.CSV:
            return csv_text([Column((head,), _cell(head)) for head in _CSV_HEADS], _csv_rows(found))
        case Format.MARKDOWN:
            parts = [*markdown_table(_part_columns(found), found.parts), ""]
            steps = [*markdown_table(_step_columns(found), found.steps), ""]
            lines = [*markdown_lines(_head_lines(found)), *parts, *steps, *markdown_lines(_foot_lines(found))]
            return "\n".join(lines).rstrip("\n") + "\n"
        case Format.TABLE:
            return plain_text(inspect_renderable(found), width)


def inspect_renderable(found: Inspection) -> RenderableType:
    """The inspection for a terminal."""
    return Lines(
        *map(Text, _head_lines(found)),
        "",
        rich_table(_part_columns(found), found.parts),
        "",
        rich_table(_step_columns(found), found.steps),
        "",
        *map(Text, _foot_lines(found)),
    )


def inspect_json(found: Inspection) -> JsonObject:
    """The promised shape; parts under short names, and every key with its unit."""
    footprint = found.footprint
    parts: list[Json] = [
        {
            "part": part.kind.name.lower(),
            "tensors": part.tensors,
            "bytes": part.bytes,
            "share_ratio": _share(found, part),
            "parameters": part.parameters,
            "type_bytes": dict(part.type_bytes),
        }
        for part in found.parts
    ]
    return {
        "model": found.name,
        "architecture": found.architecture,
        "weight_bytes": found.weight_bytes,
        "parameters": found.parameters,
        "active_weight_bytes": found.active_weight_bytes,
        "output_head": {True: "tied", False: "own", None: None}[found.head_tied],
        "kv_bytes_per_token": footprint.kv_bytes_per_token,
        "state_bytes": footprint.state_bytes,
        "cache_type_k": found.cache_type_k,
        "cache_type_v": found.cache_type_v,
        "bandwidth_bytes_per_second": found.bandwidth_bytes_per_second,
        "parts": parts,
        "steps": [_step_json(step) for step in found.steps],
        "sized_from_offsets": list(found.sized_from_offsets),
    }


def _step_json(step: Step) -> JsonObject:
    return {
        "batch": step.batch,
        "depth": step.depth,
        "bytes": step.work.bytes,
        "bytes_by_part": {str(part): size for part, size in step.work.bytes_by_part.items()},
        "flops": step.work.flops,
        "intensity_flops_per_byte": step.work.intensity_flops_per_byte,
        "floor_seconds": step.floor_seconds,
        "floor_tokens_per_second": step.floor_tokens_per_second,
    }


def _share(found: Inspection, part: FilePart) -> float:
    return part.bytes / found.weight_bytes if found.weight_bytes else 0.0


def _head_lines(found: Inspection) -> Iterable[str]:
    subject = _printable(f"{found.name}, {found.architecture}" if found.architecture else found.name)
    yield f"{subject}: {found.weight_bytes:,} bytes of weights, {found.parameters:,} parameters"


def _foot_lines(found: Inspection) -> Iterable[str]:
    footprint, bandwidth = found.footprint, found.bandwidth_bytes_per_second
    if found.head_tied:
        yield "The output head is the embedding (tied), which is read whole in every step."
    if footprint.kv_bytes_per_token is None:
        yield "The file does not tell its layers, so its KV cache is not counted."
    else:
        types = f"K {found.cache_type_k}, V {found.cache_type_v}"
        yield f"KV cache: {footprint.kv_bytes_per_token:,.0f} bytes for each token of a stream ({types})."
    if footprint.state_bytes:
        yield f"Recurrent state: {footprint.state_bytes:,.0f} bytes read and written for each stream in every step."
    if any(layer.window is not None for layer in footprint.attention or ()):
        yield "Some layers attend to a sliding window, so deep caches are read in part."
    if names := found.sized_from_offsets:
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        yield (
            "Of a type that is not known here, so their bytes are a guess from the tensors' places:"
            f" {_printable(', '.join(names[:_SHOWN_NAMES]))}{more}."
        )
    if bandwidth is None:
        yield (
            "Floors need a bandwidth: give --bandwidth 50GB/s, or start the exporter on this machine to have its"
            " measured read ceiling used."
        )
    else:
        yield f"Floors stand under {si(bandwidth, 'B/s')}: the least time that reading takes; computing is not in them."
    yield "Where the exporter cannot read this file, put into its configuration:"
    yield f"active_weight_bytes: {found.active_weight_bytes}"


def _printable(text: str) -> str:
    """A text from the file without anything that would steer the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _part_words(found: Inspection, kind: Kind) -> str:
    return _HEADS[found.head_tied] if kind is Kind.OUTPUT_HEAD else kind


def _types(part: FilePart) -> str:
    """The mix of types in percent of the bytes; what rounds to nothing is still named."""
    if part.bytes == 0:
        return MISSING
    shares = ((name, 100 * size / part.bytes) for name, size in part.type_bytes.items())
    return ", ".join(f"{name} {'<1' if share < 1 else f'{share:.0f}'} %" for name, share in shares)


def _part_columns(found: Inspection) -> tuple[Column[FilePart], ...]:
    return (
        Column(("part",), lambda p: _part_words(found, p.kind), numeric=False),
        Column(("bytes",), lambda p: f"{p.bytes:,}"),
        Column(("share", "%"), lambda p: 100 * _share(found, p)),
        Column(("params", "M"), lambda p: p.parameters * 1e-6),
        Column(("types",), _types, numeric=False, wraps=True),
    )


def _step_columns(found: Inspection) -> tuple[Column[Step], ...]:
    known = {part for step in found.steps for part in step.work.bytes_by_part}
    names = {Part.WEIGHTS: "weights", Part.OUTPUT_HEAD: "head", Part.KV_CACHE: "KV"}
    floors = found.bandwidth_bytes_per_second is not None
    return (
        Column(("batch",), lambda s: str(s.batch)),
        Column(("depth",), lambda s: str(s.depth)),
        *(Column((words, "MB"), _megabytes(part)) for part, words in names.items() if part in known),
        Column(("step", "MB"), lambda s: s.work.bytes * 1e-6),
        Column(("step", "GFLOP"), lambda s: s.work.flops * 1e-9),
        Column(("FLOP/", "byte"), lambda s: s.work.intensity_flops_per_byte),
        *([Column(("floor", "ms"), _floor_milliseconds)] if floors else []),
        *([Column(("floor", "tok/s"), lambda s: s.floor_tokens_per_second)] if floors else []),
    )


def _megabytes(part: Part) -> Callable[[Step], Cell]:
    return lambda step: step.work.bytes_by_part.get(part, 0.0) * 1e-6


def _floor_milliseconds(step: Step) -> Cell:
    return None if step.floor_seconds is None else step.floor_seconds * 1e3


def _cell(head: str) -> Callable[[Mapping[str, Cell]], Cell]:
    return lambda row: row.get(head)


def _csv_rows(found: Inspection) -> Iterable[Mapping[str, Cell]]:
    """The parts and then the steps as rows of one table; counts are exact."""
    for part in found.parts:
        yield {
            "part": _part_words(found, part.kind),
            "bytes": str(part.bytes),
            "share %": 100 * _share(found, part),
            "parameters": str(part.parameters),
            "types": _types(part),
        }
    for step in found.steps:
        yield {
            "part": "decode step",
            "batch": str(step.batch),
            "depth tokens": str(step.depth),
            "bytes": str(round(step.work.bytes)),
            "FLOP": str(round(step.work.flops)),
            "intensity FLOP/byte": step.work.intensity_flops_per_byte,
            "floor ms": _floor_milliseconds(step),
            "floor tokens/s": step.floor_tokens_per_second,
        }
