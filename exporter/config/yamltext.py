"""A small, strict reader of YAML: what surprises people in YAML 1.1 is refused or read as the text it looks like.

Only `true` and `false` are booleans, only decimal numbers are numbers (`1e9` too; `1:30`, `010` and `on` are text).
Duplicate keys, anchors, aliases, tags and further documents are problems. Lines are kept: a later check can name them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NUMBER", "Location", "Problem", "YamlText", "read_yaml"]

Location: TypeAlias = tuple[str | int, ...]

NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?", re.ASCII)
_INTEGER = re.compile(r"[-+]?(?:0|[1-9]\d{0,29})", re.ASCII)
_LEADING_ZERO = re.compile(r"[-+]?0\d")
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_LONGEST_NUMBER = 64
_DEEPEST = 16  # the configuration needs 4; a bound keeps hostile nesting from exhausting the stack


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and where."""

    location: Location
    message: str
    line: int | None = None


@dataclass
class YamlText:
    """What a text says. After a problem that stopped the reading, `data` is None and `complete` False."""

    data: object = None
    complete: bool = False
    lines: dict[Location, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line_of(self, location: Location) -> int | None:
        """Return the line of the value, or of the nearest thing around it that was written down."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location)


class _StopReadingError(Exception):
    """The text cannot be read any further."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def read_yaml(text: str) -> YamlText:
    """Read one YAML document into plain dicts, lists and scalars."""
    result = YamlText()
    try:
        result.data = _read_document(yaml.parse(text, Loader=yaml.SafeLoader), result)
        result.complete = True
    except _StopReadingError as stop:
        result.problems.append(stop.problem)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"the character U+{ord(text[error.position]):04X} is not allowed in YAML; remove it"
        result.problems.append(Problem((), message, line))
    except yaml.MarkedYAMLError as error:
        # The mark's own text would quote the line, and the line may hold a secret.
        mark = error.problem_mark or error.context_mark
        why = ", ".join(part for part in (error.context, error.problem) if part)
        message = f"this is not YAML: {why}; check indentation, quotes and brackets"
        result.problems.append(Problem((), message, None if mark is None else int(mark.line) + 1))
    return result


def _read_document(events: Iterator[yaml.Event], result: YamlText) -> object:
    data: object = None
    seen = False
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent) and seen:
            message = "a second document starts here; keep one, without further '---' lines"
            raise _StopReadingError(Problem((), message, _line(event)))
        if isinstance(event, yaml.NodeEvent):
            data, seen = _read_node(event, events, (), result), True
    return data


def _read_node(event: yaml.Event, events: Iterator[yaml.Event], location: Location, result: YamlText) -> object:
    result.lines.setdefault(location, _line(event))
    _refuse_indirection(event, location)
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event)
    if len(location) >= _DEEPEST:
        raise _StopReadingError(Problem(location, "this is nested too deeply; nothing here needs it", _line(event)))
    if isinstance(event, yaml.MappingStartEvent):
        return _read_mapping(events, location, result)
    items: list[object] = []
    while not isinstance(item := next(events), yaml.SequenceEndEvent):
        items.append(_read_node(item, events, (*location, len(items)), result))
    return items


def _read_mapping(events: Iterator[yaml.Event], location: Location, result: YamlText) -> dict[str | int, object]:
    mapping: dict[str | int, object] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        _refuse_indirection(event, location)
        if not isinstance(event, yaml.ScalarEvent):
            raise _StopReadingError(Problem(location, "a list or mapping cannot be a key; write a name", _line(event)))
        # Only whole numbers stay numbers: in Python True == 1 == 1.0, and as keys they would shadow each other.
        key = int(event.value) if event.implicit[0] and _INTEGER.fullmatch(event.value) else str(event.value)
        here = (*location, key)
        if key in mapping:
            message = f"the key is written twice, first on line {result.lines[here]}; keep one"
            result.problems.append(Problem(here, message, _line(event)))
            _read_node(next(events), events, here, YamlText())
            continue
        result.lines[here] = _line(event)
        mapping[key] = _read_node(next(events), events, here, result)
    return mapping


def _refuse_indirection(event: yaml.Event, location: Location) -> None:
    # An alias can repeat its anchor without bound, and a tag can name a type: neither has a use here.
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
        message = "YAML anchors and aliases (& and *) are not supported; write the value out, or quote it"
        raise _StopReadingError(Problem(location, message, _line(event)))
    if getattr(event, "tag", None):
        message = "YAML tags (!) are not supported; remove the tag, or quote the value"
        raise _StopReadingError(Problem(location, message, _line(event)))


def _scalar(event: yaml.ScalarEvent) -> str | float | bool | None:
    text = event.value
    if not event.implicit[0]:  # quoted, or a block: text, whatever it looks like
        return str(text)
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if NUMBER.fullmatch(text) and not _LEADING_ZERO.match(text) and len(text) <= _LONGEST_NUMBER:
        return float(text)
    return str(text)


def _line(event: yaml.Event) -> int:
    mark = event.start_mark
    return 1 if mark is None else int(mark.line) + 1
