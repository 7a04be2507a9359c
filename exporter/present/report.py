"""What `report` and `bandwidth` print, in every format. The figures come from `study`, `sentences` and `shapes`."""

import csv
import json
from collections.abc import Iterable, Sequence
from enum import StrEnum
from io import StringIO
from typing import Final, TypeVar

from rich.console import Console, RenderableType

from exporter.present.sentences import (
    ACCOUNTING,
    ceiling_lines,
    host_lines,
    notes,
    server_lines,
    standing_lines,
    suggestion_lines,
)
from exporter.present.shapes import Json, JsonObject, bandwidth_json, snapshot_json
from exporter.present.study import (
    Cell,
    Column,
    Standing,
    bandwidth_columns,
    budget_columns,
    columns,
    rows,
    standing,
)
from exporter.present.terminal import bandwidth_renderable, report_renderable
from exporter.roofline.snapshot import View

__all__ = [
    "Format",
    "Json",
    "JsonObject",
    "bandwidth_json",
    "bandwidth_renderable",
    "bandwidth_text",
    "report_exit_code",
    "report_renderable",
    "report_text",
    "snapshot_json",
]

EXIT_OK: Final = 0
EXIT_BELOW: Final = 1
EXIT_NOT_MEASURED: Final = 3

TEXT_WIDTH: Final = 80
"""Columns of the table format where there is no terminal to ask."""

Subject = TypeVar("Subject")


class Format(StrEnum):
    """How `report` and `bandwidth` can be printed."""

    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"
    CSV = "csv"


def report_exit_code(view: View) -> int:
    """0: every batch with a threshold is at or above it; 1: one is below; 3: nothing, or one of them, not measured."""
    standings = [standing(row) for row in rows(view.servers)]
    if Standing.BELOW in standings:
        return EXIT_BELOW
    measured = any(s.points for s in view.servers)
    return EXIT_OK if measured and Standing.NOT_MEASURED not in standings else EXIT_NOT_MEASURED


def report_text(view: View, format_: Format, width: int = TEXT_WIDTH) -> str:
    """The report in one of the formats, ending with a newline."""
    match format_:
        case Format.JSON:
            return _json(snapshot_json(view))
        case Format.CSV:
            return _csv(columns(view.servers, everything=True), rows(view.servers))
        case Format.MARKDOWN:
            return "\n".join(_report_markdown(view)).rstrip("\n") + "\n"
        case Format.TABLE:
            return _plain(report_renderable(view), width)


def bandwidth_text(view: View, format_: Format, width: int = TEXT_WIDTH) -> str:
    """The ceilings in one of the formats, ending with a newline."""
    match format_:
        case Format.JSON:
            return _json(bandwidth_json(view))
        case Format.CSV:
            return _csv(bandwidth_columns(), view.in_force)
        case Format.MARKDOWN:
            table = _markdown_table(bandwidth_columns(), view.in_force)
            return "\n".join([*_markdown_lines(host_lines(view)), *table]) + "\n"
        case Format.TABLE:
            return _plain(bandwidth_renderable(view), width)


def _json(document: JsonObject) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _csv(columns_: Sequence[Column[Subject]], subjects: Iterable[Subject]) -> str:
    """Numbers in the units of the heads, to six significant digits."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.title for column in columns_])
    writer.writerows([_csv_cell(column.value(subject)) for column in columns_] for subject in subjects)
    return out.getvalue()


def _csv_cell(value: Cell) -> Cell:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _plain(renderable: RenderableType, width: int) -> str:
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False, force_jupyter=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def _report_markdown(view: View) -> Iterable[str]:
    yield from _markdown_lines([*host_lines(view), *ceiling_lines(view)])
    if not view.servers:
        yield "No server is configured."
        return
    yield from _markdown_table(columns(view.servers), rows(view.servers))
    yield from ("", ACCOUNTING, "")
    if budgeted := [row for row in rows(view.servers) if row.point and row.point.budget_seconds]:
        yield from ("Where the time of a step goes:", "")
        yield from (*_markdown_table(budget_columns(view.servers), budgeted), "")
    for s in view.servers:
        remarks = [*server_lines(s), *notes(s), *standing_lines(s), *suggestion_lines(s)]
        yield from (f"**{s.server.name}**", "", *_markdown_lines(remarks))


def _markdown_lines(lines: Iterable[str]) -> list[str]:
    return [*(f"- {_escaped(line)}" for line in lines), ""]


def _markdown_table(columns_: Sequence[Column[Subject]], subjects: Iterable[Subject]) -> Iterable[str]:
    yield _markdown_row(column.title for column in columns_)
    yield _markdown_row("---:" if column.numeric else "---" for column in columns_)
    for subject in subjects:
        yield _markdown_row(column.text(subject) for column in columns_)


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    """The text with nothing left in it that Markdown would read as a table's edge, a tag or emphasis."""
    for special in ("\\", "|", "<", "*", "_", "`", "["):
        text = text.replace(special, f"\\{special}")
    return " ".join(text.split())
