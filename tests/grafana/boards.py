"""The dashboards as tests read them: files, panels, targets, and expressions with the variables filled in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parent.parent.parent / "grafana"
FILES = sorted((ROOT / "dashboards").glob("*.json"))
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")
_METRIC = re.compile(r"\b(?:roofline|process)_\w+|\bup(?={)|\bALERTS\b")


def load(path: Path) -> dict[str, Any]:
    board: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return board


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Every panel that shows something; rows are heads."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def targets(board: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every query with its panel."""
    for panel in panels(board):
        for target in panel["targets"]:
            yield panel, target


def variables(board: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = board["templating"]["list"]
    return found


def filled_in(expression: str, values: Mapping[str, str]) -> str:
    """The expression with its variables; an unknown one is a KeyError."""
    return _VARIABLE.sub(lambda match: values[match[1] or match[2]], expression)


def names_of(expression: str) -> list[str]:
    """The metrics that an expression names, each once, in order."""
    return list(dict.fromkeys(_METRIC.findall(expression)))


def expressions(board: dict[str, Any]) -> list[str]:
    """Every expression of a dashboard: targets, variables, annotations."""
    return [
        *(target["expr"] for _, target in targets(board)),
        *(v["query"]["query"] for v in variables(board) if v["type"] == "query"),
        *(annotation["expr"] for annotation in board["annotations"]["list"]),
    ]
