"""Dashboards asked of a real Prometheus: what each query answers, and what is wrong with a dashboard."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import urlencode

from boards import filled_in, targets, variables
from processes import get

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from transforms import Series

_SELECTOR = re.compile(r"\b(?:roofline_\w+|process_\w+|up|ALERTS)\{[^}]*\}")
_LABEL_VALUES = re.compile(r"label_values\((?P<selector>.*), (?P<label>\w+)\)")
SETTLED_SECONDS = 3.0
SPAN_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Asked:
    """A query of a dashboard: where it stands, what it asks, and whether over time."""

    where: str
    expression: str
    over_time: bool


def asked_by(board: Mapping[str, Any]) -> Iterator[Asked]:
    """Every query of panels and annotations."""
    for panel, target in targets(dict(board)):
        yield Asked(f"{panel['title']} {target['refId']}", target["expr"], over_time=target["range"])
    for annotation in board["annotations"]["list"]:
        yield Asked(annotation["name"], annotation["expr"], over_time=True)


class Answers:
    """A Prometheus, asked as Grafana asks it.

    Attributes:
        moment: Unix seconds at which everything is asked, so that answers agree; None for now.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.moment: float | None = None

    def _get(self, path: str, **parameters: str) -> Any:
        try:
            answer = json.loads(get(f"{self.url}/api/v1/{path}?{urlencode(parameters)}"))
        except HTTPError as error:
            raise AssertionError(f"{error.read().decode()} for {parameters}") from error
        return answer["data"]

    def settle(self, wanted: str) -> bool:
        """Whether `wanted` had a series a moment ago; if so, everything is asked about that moment from now on."""
        # A little ago: a scrape of this very moment may still be on its way, and be there for the next question.
        self.moment = time.time() - SETTLED_SECONDS
        if not self.now(wanted):
            self.moment = None
        return self.moment is not None

    def now(self, expression: str) -> list[Series]:
        """The instant vector: labels and value of each series."""
        at = str(self.moment or time.time())
        return [(s["metric"], float(s["value"][1])) for s in self._get("query", query=expression, time=at)["result"]]

    def samples(self, expression: str) -> list[float]:
        """Every sample of the last moments, of every series."""
        end = self.moment or time.time()
        data = self._get("query_range", query=expression, start=str(end - SPAN_SECONDS), end=str(end), step="2")
        return [float(value) for series in data["result"] for _, value in series["values"]]

    def label_values(self, selector: str, label: str) -> list[str]:
        """The values of a label."""
        found: list[str] = self._get(f"label/{label}/values", **{"match[]": selector})
        return found

    def values(self, asked: Asked, chosen: Mapping[str, str]) -> list[float]:
        """What a query of a dashboard answers."""
        expression = filled_in(asked.expression, chosen)
        return self.samples(expression) if asked.over_time else [value for _, value in self.now(expression)]

    def problems(self, every: Iterable[Asked], choices: Sequence[Mapping[str, str]]) -> list[str]:
        """What is wrong with the queries, for whatever is chosen in the variables.

        A query must answer for one choice at least, and so must each selector in it, for an `or` can hide a name that
        nobody exports. Every value must be finite.
        """
        found = []
        for asked in every:
            values = [value for chosen in choices for value in self.values(asked, chosen)]
            if not values:
                found.append(f"{asked.where}: no data: {asked.expression}")
            if not all(map(isfinite, values)):
                found.append(f"{asked.where}: not finite: {asked.expression}")
            for selector in set(_SELECTOR.findall(asked.expression)):
                series = [s for chosen in choices for s in self.samples(filled_in(selector, chosen))]
                if not series:
                    found.append(f"{asked.where}: no series: {selector}")
        return found

    def unanswered_variables(self, board: dict[str, Any], chosen: Mapping[str, str]) -> list[str]:
        """Variables whose query finds no value."""
        found = []
        for variable in variables(board):
            if variable["type"] == "query":
                match = _LABEL_VALUES.fullmatch(filled_in(variable["query"]["query"], chosen))
                assert match is not None, variable
                if not self.label_values(match["selector"], match["label"]):
                    found.append(variable["name"])
        return found
