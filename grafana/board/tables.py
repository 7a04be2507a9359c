"""Tables: several instant queries, joined on the labels that they share, one row for each set of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from board.panels import Json, limits, named, panel, rows

COLOURED: Final[Json] = {"custom__cellOptions": {"type": "color-text"}}
"""Settings of a column whose text has the colour of its value."""
BELOW: Final[Json] = {**limits(orange=1, red=3), **COLOURED}
"""The same for samples below the threshold: three in a row ring."""


@dataclass(frozen=True, slots=True)
class Column:
    """A query whose value is a column of the table.

    Attributes:
        title: The column's head; empty for a query that only brings labels.
        expression: An instant vector with the labels of the row.
    """

    title: str
    expression: str
    unit: str = "short"
    settings: Mapping[str, object] = field(default_factory=dict)


def table(
    title: str,
    description: str,
    labels: Mapping[str, str],
    columns: Sequence[Column],
    *,
    settings: Mapping[str, Mapping[str, object]] | None = None,
    descending: bool = False,
) -> Json:
    """A table whose columns are labels, by name, and the values of the queries.

    `labels` gives the head of each label's column, in order. `settings` are field settings of label columns, by head.
    The rows are in the order of the first query's values, and those that it lacks come last: the join keeps the order,
    whereas Grafana's transformation `sortBy` leaves rows without a value anywhere.
    """
    values = {f"Value #{chr(ord('A') + n)}": column.title for n, column in enumerate(columns)}
    heads = {**labels, **{value: head for value, head in values.items() if head}}
    hidden = {"Time": True, **{value: True for value, head in values.items() if not head}}
    first, *others = (column.expression for column in columns)
    return panel(
        "table",
        title,
        description,
        [rows(f"sort{'_desc' if descending else ''}({first})"), *map(rows, others)],
        unit="short",
        options={"showHeader": True, "cellHeight": "sm"},
        custom={"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False},
        defaults={**limits(), "noValue": ""},
        overrides=[
            *(named(head, **properties) for head, properties in (settings or {}).items()),
            *(named(column.title, unit=column.unit, **column.settings) for column in columns if column.title),
        ],
        transformations=[
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": hidden,
                    "indexByName": {source: n for n, source in enumerate(heads)},
                    "renameByName": heads,
                },
            },
        ],
    )
