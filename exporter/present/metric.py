"""What a metric is: a name, a type, a help text, labels, and how its values come out of a view.

The constructors differ only in what they ask about: the host, each server, or each batch of each server.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Final, TypeAlias

from exporter.roofline.ceiling import Bandwidth
from exporter.roofline.decode import DecodePoint
from exporter.roofline.snapshot import BatchRecord, ServerView, View

PREFIX: Final = "roofline_"

SERVER: Final = ("server",)
BATCH: Final = ("server", "batch")
KERNEL: Final = ("kernel", "threads")

Labels: TypeAlias = tuple[str, ...]
Values: TypeAlias = Iterable[tuple[Labels, float | None]]
Keyed: TypeAlias = Iterable[tuple[str, float | None]]


class Kind(StrEnum):
    """The types of metric in use; a metric of kind `info` is always 1 and speaks through its labels."""

    GAUGE = "gauge"
    COUNTER = "counter"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.

    Attributes:
        name: Without the prefix, with the suffix `_total` or `_info` where the kind wants one.
        values: The label values, in the order of `labels`, and the value of each series; None is not known.
    """

    name: str
    help: str
    labels: Labels
    values: Callable[[View], Values]

    @property
    def kind(self) -> Kind:
        """The type, which the name tells."""
        if self.name.endswith("_total"):
            return Kind.COUNTER
        return Kind.INFO if self.name.endswith("_info") else Kind.GAUGE

    @property
    def full_name(self) -> str:
        """The name with the prefix."""
        return PREFIX + self.name

    def series(self, view: View) -> list[tuple[Labels, float]]:
        """Label values and value of each series; what is not known, or not a number, is left out."""
        return [
            (tuple(map(str, labels)), float(value))
            for labels, value in self.values(view)
            if value is not None and isfinite(value)
        ]


def of_host(name: str, help_: str, value: Callable[[View], float | None]) -> Metric:
    """A metric without labels."""
    return Metric(name, help_, (), lambda view: [((), value(view))])


def of_kernel(
    name: str, help_: str, pick: Callable[[View], Iterable[Bandwidth]], value: Callable[[Bandwidth], float]
) -> Metric:
    """A metric of each kernel and thread scope."""
    return Metric(name, help_, KERNEL, lambda view: [((b.kernel, b.threads), value(b)) for b in pick(view)])


def of_server(name: str, help_: str, value: Callable[[ServerView], float | None]) -> Metric:
    """A metric of each server."""
    return Metric(name, help_, SERVER, lambda view: [((s.server.name,), value(s)) for s in view.servers])


def of_server_by(label: str, name: str, help_: str, values: Callable[[ServerView], Keyed]) -> Metric:
    """A metric of each server and each value of one more label."""
    return Metric(
        name,
        help_,
        (*SERVER, label),
        lambda view: [((s.server.name, key), value) for s in view.servers for key, value in values(s)],
    )


def of_record(name: str, help_: str, value: Callable[[BatchRecord], float | None]) -> Metric:
    """A metric of each configured batch of each server."""
    return Metric(
        name,
        help_,
        BATCH,
        lambda view: [
            ((s.server.name, str(batch)), value(record))
            for s in view.servers
            for batch, record in sorted(s.server.batches.items())
        ],
    )


def of_point(name: str, help_: str, value: Callable[[DecodePoint], float | None]) -> Metric:
    """A metric of each batch that has a sample which is not stale."""
    return Metric(
        name,
        help_,
        BATCH,
        lambda view: [((s.server.name, str(batch)), value(p)) for s in view.servers for batch, p in s.points.items()],
    )


def of_point_by(label: str, name: str, help_: str, values: Callable[[DecodePoint], Keyed]) -> Metric:
    """A metric of each such batch and each value of one more label."""
    return Metric(
        name,
        help_,
        (*BATCH, label),
        lambda view: [
            ((s.server.name, str(batch), key), value)
            for s in view.servers
            for batch, point in s.points.items()
            for key, value in values(point)
        ],
    )
