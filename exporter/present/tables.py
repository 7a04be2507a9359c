"""Tables and documents in every format that the commands print, whatever the table is about."""

import csv
import json
import os
from collections.abc import Iterable, Sequence
from enum import StrEnum
from io import StringIO
from typing import Final, Generic, Literal, TypeVar

from rich import box
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from exporter.present.shapes import JsonObject
from exporter.present.study import Cell, Column, Group

TEXT_WIDTH: Final = 80
"""Columns of the table format where there is no terminal to ask."""

WIDE: Final = 200
"""Columns for a reader that is no terminal and cuts nothing: a file, a pipe."""

Subject = TypeVar("Subject")


class Format(StrEnum):
    """How a command can print its result."""

    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"
    CSV = "csv"


def json_text(document: JsonObject) -> str:
    """The document, indented, ending with a newline."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def csv_text(columns: Sequence[Column[Subject]], subjects: Iterable[Subject]) -> str:
    """Numbers in the units of the heads, to six significant digits."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.title for column in columns])
    writer.writerows([_csv_cell(column.value(subject)) for column in columns] for subject in subjects)
    return out.getvalue()


def _csv_cell(value: Cell) -> Cell:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def plain_text(renderable: RenderableType, width: int) -> str:
    """What a terminal of that width shows, without colours and trailing blanks."""
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False, force_jupyter=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def standard_output() -> Console:
    """As wide as the terminal, or as COLUMNS says; wide where it is neither."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDE
    return console


def rich_table(columns: Sequence[Column[Subject]], subjects: Iterable[Subject]) -> Table:
    """The table for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    # A cell of several lines begins on its row's first; heads otherwise stand on their rule.
    vertical: Literal["top", "bottom"] = "top" if any(column.wraps for column in columns) else "bottom"
    for column in columns:
        head = Text("\n".join(column.head))
        justify: JustifyMethod = "right" if column.numeric else "left"
        table.add_column(head, justify=justify, vertical=vertical, no_wrap=not column.wraps)
    for subject in subjects:
        table.add_row(*(Text(column.text(subject)) for column in columns))
    return table


def narrowest(columns: Iterable[Column[Subject]], subjects: Sequence[Subject]) -> int:
    """The width at which nothing is cut: words that wrap need the longest one's place; two blanks between columns."""
    return sum(2 + max(map(len, _unbroken(column, subjects))) for column in columns) - 2


def _unbroken(column: Column[Subject], subjects: Iterable[Subject]) -> list[str]:
    cells = [column.text(subject) for subject in subjects]
    return [*column.head, *((word for cell in cells for word in cell.split()) if column.wraps else cells)]


class SplitTable(Generic[Subject]):
    """A table for a terminal; in pieces, by what the columns are about, where it is so narrow that it would be cut."""

    def __init__(self, columns: Sequence[Column[Subject]], subjects: Sequence[Subject]) -> None:
        self._columns = columns
        self._subjects = subjects

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, piece in enumerate(self._pieces(options.max_width)):
            if number:
                yield ""
            yield rich_table(piece, self._subjects)

    def _pieces(self, width: int) -> Iterable[Sequence[Column[Subject]]]:
        if narrowest(self._columns, self._subjects) <= width:
            yield self._columns
            return
        keys = [c for c in self._columns if c.group is Group.KEY]
        for groups in ({Group.RATE, Group.MAIN}, {Group.READ}):
            piece: list[Column[Subject]] = []
            for column in (c for c in self._columns if c.group in groups):
                if piece and narrowest([*keys, *piece, column], self._subjects) > width:
                    yield [*keys, *piece]
                    piece = []
                piece.append(column)
            if piece:
                yield [*keys, *piece]


def markdown_lines(lines: Iterable[str]) -> list[str]:
    """A list, and the empty line that ends it."""
    return [*(f"- {_escaped(line)}" for line in lines), ""]


def markdown_table(columns: Sequence[Column[Subject]], subjects: Iterable[Subject]) -> Iterable[str]:
    """The lines of the table."""
    yield _markdown_row(column.title for column in columns)
    yield _markdown_row("---:" if column.numeric else "---" for column in columns)
    for subject in subjects:
        yield _markdown_row(column.text(subject) for column in columns)


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    """The text with nothing left in it that Markdown would read as a table's edge, a tag or emphasis."""
    for special in ("\\", "|", "<", "*", "_", "`", "["):
        text = text.replace(special, f"\\{special}")
    return " ".join(text.split())
