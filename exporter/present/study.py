"""The study table, once: its columns and rows as text, for the terminal, Markdown, CSV and the page alike.

Also what goes with it: where each step's time went, how it stands to its threshold, and a suggestion for one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import floor
from typing import Final, Generic, TypeAlias, TypeVar

from exporter.present.words import MISSING, three_digits
from exporter.roofline.ceiling import Bandwidth, CeilingSource, Kernel, ThreadScope
from exporter.roofline.decode import DecodePoint
from exporter.roofline.footprint import Part
from exporter.roofline.snapshot import BatchRecord, ServerView, View
from exporter.roofline.verdict import Doubt, disturbance

SUGGESTED_FRACTION: Final = 0.8
"""A suggested threshold is this much of the measured floor ratio."""
PART_WORDS: Final = {
    Part.WEIGHTS: "weights",
    Part.OUTPUT_HEAD: "output head",
    Part.KV_CACHE: "KV cache",
    Part.OVERHEAD: "overhead",
}

Cell: TypeAlias = float | str | None


@dataclass(frozen=True, slots=True)
class Row:
    """One configured batch of one server."""

    server: ServerView
    batch: int
    record: BatchRecord
    point: DecodePoint | None


Subject = TypeVar("Subject")


class Group(StrEnum):
    """What a column is about, for readers who must split a wide table: the key columns go into every piece."""

    KEY = "key"
    MAIN = "main"
    RATE = "rate"
    READ = "read"


@dataclass(frozen=True, slots=True)
class Column(Generic[Subject]):
    """A column: its head, one word group per line, and its value.

    Attributes:
        numeric: Whether it is set flush right.
        wraps: Whether it may take several lines where the terminal is narrow.
    """

    head: tuple[str, ...]
    value: Callable[[Subject], Cell]
    group: Group = Group.RATE
    numeric: bool = True
    wraps: bool = False

    @property
    def title(self) -> str:
        """The head on one line."""
        return " ".join(self.head)

    def text(self, subject: Subject) -> str:
        """The value for people: three significant digits."""
        value = self.value(subject)
        if isinstance(value, float):
            return three_digits(value)
        return MISSING if value is None else value


class Standing(StrEnum):
    """How a batch with a threshold stands."""

    MET = "met"
    BELOW = "below"
    NOT_MEASURED = "not_measured"


def standing(row: Row) -> Standing | None:
    """How the row stands to its threshold; None if it has none."""
    if row.record.threshold is None:
        return None
    if row.point is None or row.point.floor_ratio is None:
        return Standing.NOT_MEASURED
    return Standing.MET if row.point.floor_ratio >= row.record.threshold else Standing.BELOW


def rows(servers: Iterable[ServerView]) -> list[Row]:
    """A row for every configured batch."""
    return [
        Row(s, batch, record, s.points.get(batch))
        for s in servers
        for batch, record in sorted(s.server.batches.items())
    ]


def budgeted(servers: Iterable[ServerView]) -> list[tuple[Row, DecodePoint]]:
    """The rows whose step's time is known by part, with their points."""
    return [(row, row.point) for row in rows(servers) if row.point is not None and row.point.budget_seconds]


def ceilings_of(servers: Iterable[ServerView]) -> list[CeilingSource]:
    """The ceilings that any of the servers has, in a fixed order."""
    known = {source for s in servers for source in s.roof.ceilings}
    return [source for source in CeilingSource if source in known]


def columns(servers: Sequence[ServerView], *, everything: bool = False) -> tuple[Column[Row], ...]:
    """The columns that these servers need.

    Args:
        servers: The servers of the table.
        everything: Also the columns that one reader does not need but a program does: the server's name if there is
            only one, the floor's reference, and why there is no sample.
    """
    ceilings = ceilings_of(servers)
    references = {s.roof.reference for s in servers}
    several = everything or len(references) != 1
    return (
        *([Column(("server",), _server_name, Group.KEY, numeric=False)] if everything or len(servers) > 1 else []),
        Column(("batch",), _batch, Group.KEY),
        Column(("intensity", "FLOP/byte"), _of_point(lambda p: p.intensity_flops_per_byte)),
        Column(("tokens/s",), _of_point(lambda p: p.sample.tokens_per_second)),
        Column(("step", "ms"), _of_point(lambda p: p.sample.step_seconds, 1e3)),
        Column(("GFLOP/s",), _of_point(lambda p: p.flops_per_second, 1e-9)),
        Column(("per-token", "read GB/s"), _of_point(lambda p: p.token_read_bytes_per_second, 1e-9), Group.READ),
        *(Column(("per-token", "% of", c), _token_percent(c), Group.READ) for c in ceilings),
        Column(("per-step", "read GB/s"), _of_point(lambda p: p.step_bytes_per_second, 1e-9), Group.READ),
        *(Column(("per-step", "% of", c), _step_percent(c), Group.READ) for c in ceilings),
        Column(("floor", *(["ratio"] if several else ["ratio of", *references])), _of_point(_floor_ratio), Group.MAIN),
        *([Column(("reference",), _reference, numeric=False)] if several else []),
        *([Column(("reason",), _reason, numeric=False)] if everything else []),
    )


def _of_point(value: Callable[[DecodePoint], float | None], scale: float = 1.0) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        known = value(row.point) if row.point else None
        return None if known is None else known * scale

    return cell


def _server_name(row: Row) -> Cell:
    return row.server.server.name


def _batch(row: Row) -> Cell:
    return str(row.batch)


def _floor_ratio(point: DecodePoint) -> float | None:
    return point.floor_ratio


def _reference(row: Row) -> Cell:
    return row.server.roof.reference


def _reason(row: Row) -> Cell:
    return row.record.reason


def _token_percent(ceiling: CeilingSource) -> Callable[[Row], Cell]:
    return _of_point(lambda p: p.token_read_ratio.get(ceiling), 100.0)


def _step_percent(ceiling: CeilingSource) -> Callable[[Row], Cell]:
    return _of_point(lambda p: p.ceiling_ratio.get(ceiling), 100.0)


def disturbed_batches(server: ServerView) -> list[int]:
    """Batches whose floor ratio is not the server's own: others disturbed the sample, or it is not typical."""
    verdict = server.verdict
    # It is not known which of the two it is.
    odd = {1, verdict.largest_batch} if verdict.doubt is Doubt.FASTER_TOGETHER else set()
    known = ((batch, p.sample) for batch, p in server.points.items() if p.floor_ratio is not None)
    return [batch for batch, sample in known if batch in odd or disturbance(sample) is not None]


def suggested_floor_fractions(server: ServerView) -> dict[int, float]:
    """A threshold for each batch with an undisturbed floor ratio: 0.8 of it, rounded down to 2 decimals; none at 0."""
    disturbed = disturbed_batches(server)
    measured = {
        batch: p.floor_ratio
        for batch, p in server.points.items()
        if p.floor_ratio is not None and batch not in disturbed
    }
    suggested = {batch: floor(100 * SUGGESTED_FRACTION * ratio) / 100 for batch, ratio in measured.items()}
    return {batch: fraction for batch, fraction in suggested.items() if fraction > 0}


def budget_columns(servers: Sequence[ServerView]) -> tuple[Column[Row], ...]:
    """The columns of the budget: the step, and each part that any of the servers knows, in ms."""
    known = {part for _, point in budgeted(servers) for part in point.budget_seconds}
    return (
        *([Column(("server",), _server_name, Group.KEY, numeric=False)] if len(servers) > 1 else []),
        Column(("batch",), _batch, Group.KEY),
        Column(("step", "ms"), _of_point(lambda p: p.sample.step_seconds, 1e3)),
        *(Column((PART_WORDS[part], "ms"), _budget(part)) for part in Part if part in known),
    )


def _budget(part: Part) -> Callable[[Row], Cell]:
    return _of_point(lambda p: p.budget_seconds.get(part), 1e3)


def measurements(view: View) -> list[Bandwidth]:
    """The ceilings in force in one order, in whichever they were measured: all threads first, then by kernel."""
    scopes, kernels = [ThreadScope.ALL, ThreadScope.SINGLE], list(Kernel)
    return sorted(view.in_force, key=lambda b: (scopes.index(b.threads), kernels.index(b.kernel)))


def bandwidth_columns() -> tuple[Column[Bandwidth], ...]:
    """The columns of the ceilings' own table, narrow enough for 80 characters."""
    return (
        Column(("kernel",), lambda b: b.kernel, Group.KEY, numeric=False),
        Column(("threads",), lambda b: f"{b.threads} {b.thread_count}", Group.KEY, numeric=False),
        Column(("best", "GB/s"), lambda b: b.best_bytes_per_second * 1e-9),
        Column(("median", "GB/s"), lambda b: b.median_bytes_per_second * 1e-9),
        Column(("spread", "%"), lambda b: b.spread_ratio * 100),
        Column(("array", "MB"), lambda b: b.array_bytes * 1e-6, Group.READ),
        Column(("isa,", "store"), lambda b: f"{b.isa} {b.store}", Group.READ, numeric=False),
        Column(("pages",), lambda b: b.pages, Group.READ, numeric=False),
        Column(("how",), lambda b: " ".join((b.method, *b.flags)), Group.READ, numeric=False, wraps=True),
    )
