"""The landing page: one self-contained HTML document that a person reads without Prometheus."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from exporter.present.plot import Plot, roofline_plot
from exporter.present.sentences import (
    ACCOUNTING,
    NO_SERVERS,
    ceiling_lines,
    host_lines,
    notes,
    server_lines,
    standing_line,
)
from exporter.present.study import PART_WORDS, Column, Group, Row, Standing, budgeted, columns, rows, standing
from exporter.present.verdict_sentences import verdict_lines
from exporter.present.words import age, three_digits
from exporter.roofline.footprint import Part
from exporter.roofline.snapshot import ServerView, View

REFRESH_SECONDS = 15


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar, as a percentage of the longest bar."""

    part: Part
    words: str
    percent: float
    milliseconds: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One step, split into its parts."""

    batch: int
    milliseconds: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class StandingLine:
    """A batch against its threshold."""

    words: str
    below: bool


@dataclass(frozen=True, slots=True)
class Card:
    """A server as the page shows it."""

    name: str
    state: str
    up: bool
    lines: tuple[str, ...]
    columns: tuple[Column[Row], ...]
    rows: tuple[Row, ...]
    plot: Plot | None
    bars: tuple[Bar, ...]
    notes: tuple[str, ...]
    verdict: tuple[str, ...]
    standings: tuple[StandingLine, ...]
    last_success: str


def landing_page(view: View, version: str, wall_now: float) -> str:
    """The page as HTML.

    Args:
        view: What to show.
        version: The exporter's version.
        wall_now: Unix seconds, to tell the age of the last successes.
    """
    return _template().render(
        version=version,
        refresh=REFRESH_SECONDS,
        old_config=None if view.snapshot.config_reload_ok else _moment(view.snapshot.config_reload_timestamp),
        host=[*host_lines(view), *ceiling_lines(view)],
        measured=_ago(view.snapshot.host.last_success_timestamp, wall_now),
        servers=[_card(s, wall_now) for s in view.servers],
        parts=[(part, words) for part, words in PART_WORDS.items()],
        accounting=ACCOUNTING,
        no_servers=NO_SERVERS,
    )


@cache
def _template() -> Template:
    loader = PackageLoader("exporter.present")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html")


def _card(s: ServerView, wall_now: float) -> Card:
    newest = max((record.last_success_timestamp for record in s.server.batches.values()), default=0.0)
    return Card(
        name=s.server.name,
        state=s.server.state,
        up=s.server.state.up,
        lines=tuple(server_lines(s)),
        # On a phone only the first columns are seen: the main figure comes before the rest.
        columns=tuple(sorted(columns([s]), key=lambda column: column.group not in {Group.KEY, Group.MAIN})),
        rows=tuple(rows([s])) if s.points else (),
        plot=roofline_plot(s),
        bars=tuple(_bars(s)),
        notes=tuple(notes(s)),
        verdict=tuple(verdict_lines(s)),
        standings=tuple(_standings(s)),
        last_success=_ago(newest, wall_now),
    )


def _standings(s: ServerView) -> Iterable[StandingLine]:
    for row in rows([s]):
        if (line := standing_line(row)) is not None:
            yield StandingLine(line, below=standing(row) is Standing.BELOW)


def _bars(s: ServerView) -> Iterable[Bar]:
    split = budgeted([s])
    longest = max((point.sample.step_seconds for _, point in split), default=0.0)
    for row, point in split:
        segments = (
            Segment(part, PART_WORDS[part], round(100 * seconds / longest, 2), three_digits(seconds * 1e3))
            for part, seconds in point.budget_seconds.items()
        )
        yield Bar(row.batch, three_digits(point.sample.step_seconds * 1e3), tuple(segments))


def _moment(timestamp: float) -> str:
    return f"{datetime.fromtimestamp(timestamp, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _ago(timestamp: float, wall_now: float) -> str:
    return f"{age(wall_now - timestamp)} ago" if timestamp else "never"
