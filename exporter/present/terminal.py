"""The report and the ceilings as rich renderables, readable from 80 columns on."""

from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from exporter.present.sentences import (
    ACCOUNTING,
    NO_SERVERS,
    ceiling_lines,
    host_lines,
    notes,
    prefill_lines,
    server_lines,
    standing_line,
    suggestion_lines,
)
from exporter.present.study import (
    PART_WORDS,
    Row,
    Standing,
    bandwidth_columns,
    budget_columns,
    budgeted,
    columns,
    measurements,
    rows,
    standing,
)
from exporter.present.tables import SplitTable, narrowest, rich_table
from exporter.present.verdict_sentences import verdict_lines
from exporter.roofline.decode import DecodePoint
from exporter.roofline.footprint import Part
from exporter.roofline.snapshot import ServerView, View

_BAR_WIDTH: Final = 24
_STANDING_LOOK: Final = {Standing.MET: "green", Standing.BELOW: "red", Standing.NOT_MEASURED: "yellow"}
_PART_LOOK: Final = {
    Part.WEIGHTS: ("█", "blue"),
    Part.OUTPUT_HEAD: ("▓", "cyan"),
    Part.KV_CACHE: ("▒", "magenta"),
    Part.OVERHEAD: ("░", "yellow"),
}


def report_renderable(view: View) -> RenderableType:
    """The whole report: the host, then each server's table, budget, verdict, notes and suggestion."""
    parts: list[RenderableType] = [Text("Host", style="bold"), *_lines([*host_lines(view), *ceiling_lines(view)])]
    for s in view.servers:
        parts += ["", *_server(s)]
    return Group(*parts) if view.servers else Group(*parts, "", NO_SERVERS)


def bandwidth_renderable(view: View) -> RenderableType:
    """The ceilings in force."""
    lines = _lines(host_lines(view))
    found = measurements(view)
    return Group(*lines, "", SplitTable(bandwidth_columns(), found)) if found else Group(*lines)


def _server(s: ServerView) -> Iterable[RenderableType]:
    yield Text(s.server.name, style="bold")
    yield from _lines(server_lines(s))
    if s.points:
        yield from ("", SplitTable(columns([s]), rows([s])), "", Text(ACCOUNTING, style="dim"))
    if budgeted([s]):
        yield from ("", _Budget(s))
    if verdict := list(verdict_lines(s)):
        yield ""
        yield from (Text(verdict[0], style="bold"), *_lines(verdict[1:]))
    if prefill := _lines(prefill_lines(s)):
        yield ""
        yield from prefill
    remarks = [*(Text(note, style="yellow") for note in notes(s)), *_standings(s), *_lines(suggestion_lines(s))]
    if remarks:
        yield Text()
        yield from remarks


def _standings(s: ServerView) -> Iterable[Text]:
    for row in rows([s]):
        if (line := standing_line(row)) is not None:
            yield Text(line, style=_STANDING_LOOK[standing(row) or Standing.NOT_MEASURED])


def _lines(lines: Iterable[str]) -> list[Text]:
    return [Text(line) for line in lines]


class _Budget:
    """The budget in figures, and, where there is room, as bars whose lengths compare the batches' steps."""

    def __init__(self, server: ServerView) -> None:
        self._split = budgeted([server])
        self._figures = budget_columns([server])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = [row for row, _ in self._split]
        if narrowest(self._figures, found) + 2 + _BAR_WIDTH > options.max_width:
            yield SplitTable(self._figures, found)
            return
        table = rich_table(self._figures, [])
        table.add_column("", no_wrap=True)
        longest = max(point.sample.step_seconds for _, point in self._split)
        for row, point in self._split:
            table.add_row(*(Text(column.text(row)) for column in self._figures), _bar(point, longest))
        yield from (table, "", _legend(self._split))


def _bar(point: DecodePoint, longest: float) -> Text:
    """The step as a bar; each part ends where the rounded sum of all parts up to it does, so no rounding adds up."""
    bar, passed = Text(), 0.0
    for part, seconds in point.budget_seconds.items():
        passed += seconds
        glyph, colour = _PART_LOOK[part]
        bar.append(glyph * (round(_BAR_WIDTH * passed / longest) - len(bar)), style=colour)
    return bar


def _legend(split: Sequence[tuple[Row, DecodePoint]]) -> Text:
    known = {part for _, point in split for part in point.budget_seconds}
    legend = Text()
    for part in Part:
        if part in known:
            glyph, colour = _PART_LOOK[part]
            legend.append(f"{glyph * 2} ", style=colour).append(f"{PART_WORDS[part]}  ")
    return legend
