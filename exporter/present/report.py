"""What `report` and `bandwidth` print, in every format. The figures come from `study`, `sentences` and `shapes`."""

from collections.abc import Iterable
from typing import Final

from exporter.present.sentences import (
    ACCOUNTING,
    NO_SERVERS,
    ceiling_lines,
    host_lines,
    notes,
    prefill_lines,
    server_lines,
    standing_lines,
    suggestion_lines,
)
from exporter.present.shapes import Json, JsonObject, bandwidth_json, snapshot_json
from exporter.present.study import (
    Standing,
    bandwidth_columns,
    budget_columns,
    budgeted,
    columns,
    measurements,
    rows,
    standing,
)
from exporter.present.tables import (
    TEXT_WIDTH,
    Format,
    csv_text,
    json_text,
    markdown_lines,
    markdown_table,
    plain_text,
)
from exporter.present.terminal import bandwidth_renderable, report_renderable
from exporter.present.verdict_sentences import verdict_lines
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
            return json_text(snapshot_json(view))
        case Format.CSV:
            return csv_text(columns(view.servers, everything=True), rows(view.servers))
        case Format.MARKDOWN:
            return "\n".join(_report_markdown(view)).rstrip("\n") + "\n"
        case Format.TABLE:
            return plain_text(report_renderable(view), width)


def bandwidth_text(view: View, format_: Format, width: int = TEXT_WIDTH) -> str:
    """The ceilings in one of the formats, ending with a newline."""
    match format_:
        case Format.JSON:
            return json_text(bandwidth_json(view))
        case Format.CSV:
            return csv_text(bandwidth_columns(), measurements(view))
        case Format.MARKDOWN:
            table = markdown_table(bandwidth_columns(), measurements(view))
            return "\n".join([*markdown_lines(host_lines(view)), *table]) + "\n"
        case Format.TABLE:
            return plain_text(bandwidth_renderable(view), width)


def _report_markdown(view: View) -> Iterable[str]:
    yield from markdown_lines([*host_lines(view), *ceiling_lines(view)])
    if not view.servers:
        yield NO_SERVERS
        return
    yield from markdown_table(columns(view.servers), rows(view.servers))
    yield from ("", ACCOUNTING, "")
    if split := budgeted(view.servers):
        yield from ("Where the time of a step goes:", "")
        yield from (*markdown_table(budget_columns(view.servers), (row for row, _ in split)), "")
    for s in view.servers:
        said = [*server_lines(s), *verdict_lines(s), *prefill_lines(s)]
        remarks = [*said, *notes(s), *standing_lines(s), *suggestion_lines(s)]
        yield from (f"**{s.server.name}**", "", *markdown_lines(remarks))
