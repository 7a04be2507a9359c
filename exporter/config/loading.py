"""config.yaml -> validated, immutable settings.

`load` reports every problem at once, each with its file, line, dotted path, value as written and what to write instead.
A secret is never in the settings: only the path of the file that holds it.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import ValidationError

from exporter.config.settings import (
    COMPARED,
    BandwidthSettings,
    ProbeSettings,
    Section,
    ServerSettings,
    Settings,
    inconsistencies,
)
from exporter.config.units import format_bandwidth, format_bytes, format_duration, format_flops, shown
from exporter.config.values import MANDATORY, in_order, masked_url
from exporter.config.yamltext import NUMBER, Location, Problem, read_yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pydantic_core import ErrorDetails

_LARGEST_FILE = 1024**2


class ConfigError(Exception):
    """The configuration cannot be used; `errors` holds every reason, one line each."""

    def __init__(self, errors: Iterable[str]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(self.errors))


def load(path: Path) -> Settings:
    """Read and validate a configuration file.

    Raises:
        ConfigError: With every problem found.
    """
    if path == Path():
        # What an unset variable of a shell leaves of the option.
        raise ConfigError(["the file's name is empty, or this directory's; name a readable file with --config.file"])
    try:
        if path.is_fifo():
            # Opening one waits for a writer, and the daemon with it.
            raise ConfigError([f"{path}: is a pipe; name a readable file with --config.file"])
        with path.open("rb") as file:
            raw = file.read(_LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        why = (getattr(error, "strerror", None) or str(error)).lower()
        if isinstance(error, PermissionError):
            # In a container it is another one than the file's owner may think.
            why += f" for user {os.geteuid()}"
        raise ConfigError([f"{path}: cannot be read: {why}; name a readable file with --config.file"]) from None
    if len(raw) > _LARGEST_FILE:
        raise ConfigError([_too_large(str(path))])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: byte {error.start + 1} is not UTF-8; save the file as UTF-8"]) from None
    return parse(text, str(path), path.parent)


def parse(text: str, source: str, base: Path = Path()) -> Settings:
    """Validate the text of a configuration.

    Args:
        text: YAML.
        source: What error messages call the text, usually its file name.
        base: Where relative paths in it start.

    Raises:
        ConfigError: With every problem found.
    """
    if len(text) > _LARGEST_FILE:
        raise ConfigError([_too_large(source)])
    document = read_yaml(text)
    problems = list(document.problems)
    settings = None
    if document.complete:
        settings = _validate(document.data, base, problems)
    if problems or settings is None:
        ordered = sorted(problems, key=lambda problem: problem.line or document.line_of(problem.location) or 0)
        raise ConfigError(
            _sentence(source, problem.line or document.line_of(problem.location), problem, document.data)
            for problem in ordered
        )
    return settings


def _too_large(source: str) -> str:
    return f"{source}: is larger than {format_bytes(_LARGEST_FILE)}; name the configuration file, which is far smaller"


def _validate(data: object, base: Path, problems: list[Problem]) -> Settings | None:
    """Return the settings, or add to the problems why there are none."""
    data = {} if data is None else data
    if not isinstance(data, dict):
        keys = ", ".join(Settings.model_fields)
        problems.append(Problem((), f"{shown(data)} is not a mapping; write {keys}, each followed by a colon"))
        return None
    context = {"base": base}
    try:
        return Settings.model_validate(data, context=context)
    except ValidationError as error:
        details = error.errors(include_url=False)
    if details[0]["type"] == "inconsistent":
        problems.extend(details[0]["ctx"]["all"])
        return None
    problems.extend(_problem(detail) for detail in details)
    # The comparisons ran on nothing yet: make them on what is right in itself.
    problems.extend(inconsistencies(_right_batches(data, details, problems), _right_servers(data, details, context)))
    return None


def _right_batches(
    data: Mapping[str, object], details: Sequence[ErrorDetails], problems: list[Problem]
) -> tuple[int, ...] | None:
    """Return the batches that are probed, or None where they are wrong; twins beside wrong ones are added."""
    probe = {} if data.get("probe") is None else data["probe"]
    if not isinstance(probe, dict):
        return None
    batches = probe.get("batches")
    if "batches" not in _wrong_keys(details, "probe"):
        return ProbeSettings.model_validate({"batches": batches}).batches
    wrong = _wrong_keys(details, "probe", "batches")
    right = tuple(b for i, b in enumerate(batches) if i not in wrong) if isinstance(batches, list) else ()
    if not wrong or not right:
        return tuple(sorted(set(right))) or None
    try:
        in_order(right)
    except ValueError as error:
        problems.append(Problem(("probe", "batches"), str(error)))
    return None


def _right_servers(
    data: Mapping[str, object], details: Sequence[ErrorDetails], context: Mapping[str, Path]
) -> list[tuple[int, ServerSettings]]:
    """Return of each server what is compared with others and right in itself, with an empty name or url where not."""
    servers, found = data.get("servers"), []
    stand_ins = {"name": "-", "url": "http://_"}
    for i, server in enumerate(servers if isinstance(servers, list) else ()):
        if isinstance(server, dict):
            wrong = _wrong_keys(details, "servers", i)
            right = {key: server[key] for key in COMPARED if key in server and key not in wrong}
            if isinstance(floors := server.get("floor_fraction"), dict) and "floor_fraction" in wrong:
                # Which batches these are is compared, whatever the thresholds.
                section = ("servers", i, "floor_fraction")
                none = {d["loc"][3] for d in details if d["loc"][:3] == section and d["loc"][-1] == "[key]"}
                right["floor_fraction"] = dict.fromkeys(floors.keys() - none, 1.0)
            whole = ServerSettings.model_validate({**stand_ins, **right}, context=context)
            # An address whose model is wrong may be that of any model.
            unknown = stand_ins.keys() - right.keys() | ({"url"} if "model" in wrong else set())
            found.append((i, whole.model_copy(update=dict.fromkeys(unknown, ""))))
    return found


def _wrong_keys(details: Sequence[ErrorDetails], *section: str | int) -> set[str | int]:
    """Return the keys of a section that have a problem."""
    place = len(section)
    return {d["loc"][place] for d in details if d["loc"][:place] == section and len(d["loc"]) > place}


def _problem(detail: ErrorDetails) -> Problem:
    """Say in our words what pydantic found."""
    location: Location = tuple(part for part in detail["loc"] if part != "[key]")
    value, kind = detail["input"], detail["type"]
    if kind == "value_error":
        return Problem(location, str(detail["ctx"]["error"]))
    if kind in {"extra_forbidden", "invalid_key"}:
        return Problem(location, _unknown_key(location))
    if kind == "missing":
        example = MANDATORY.get(str(location[-1]), "")
        return Problem(location, f"is missing; every server needs one, e.g. {location[-1]}: {example}")
    if kind == "literal_error":
        return Problem(location, f"{shown(value)} is not a choice; write {detail['ctx']['expected']}")
    if kind in {"model_type", "mapping_type", "dict_type"}:
        return Problem(location, f"{shown(value)} is not a mapping; write its keys as 'key: value'")
    return Problem(location, detail["msg"])


def _unknown_key(location: Location) -> str:
    """Say what the key was probably meant to be; its value is not shown, for it may be a misplaced secret."""
    sections: dict[str, type[Section]] = {
        "bandwidth": BandwidthSettings,
        "probe": ProbeSettings,
        "servers[]": ServerSettings,
    }
    key = str(location[-1])
    section = (
        Settings if len(location) == 1 else sections["servers[]" if location[0] == "servers" else str(location[0])]
    )
    if close := difflib.get_close_matches(key, section.model_fields, 1):
        return f"unknown key; did you mean {close[0]}?"
    if others := [name for name, other in sections.items() if key in other.model_fields]:
        return f"unknown key here; it belongs under {' or '.join(others)}"
    return f"unknown key; known here are {', '.join(section.model_fields)}"


def _sentence(source: str, line: int | None, problem: Problem, data: object) -> str:
    where = source if line is None else f"{source}:{line}"
    path = _dotted(problem.location, data)
    return f"{where}: {path}: {problem.message}" if path else f"{where}: {problem.message}"


def _dotted(location: Location, data: object) -> str:
    """Return the location as people write it: `servers[0].floor_fraction.3`."""
    text = ""
    for part in location:
        listed = isinstance(data, list) or (data is None and isinstance(part, int))
        text += f"[{part}]" if listed else f".{_printable(part)}"
        if isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return text.removeprefix(".")


def _printable(part: str | int) -> str:
    return str(part) if str(part).isprintable() else shown(part)


class _Dumper(yaml.SafeDumper):
    """Writes an empty value as nothing, and puts in quotes what our reader would take for a number."""


_Dumper.add_representer(type(None), lambda _, __: yaml.ScalarNode("tag:yaml.org,2002:null", ""))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"(?:{NUMBER.pattern})\Z"), list("-+.0123456789"))

_FORMATS: Mapping[str, Callable[..., object]] = {
    "interval": format_duration,
    "health_interval": format_duration,
    "seconds": format_duration,
    "timeout": format_duration,
    "sleep_idle": format_duration,
    "max_memory": format_bytes,
    "active_weight_bytes": format_bytes,
    "peak_bandwidth": format_bandwidth,
    "compute_peak": format_flops,
    "url": masked_url,
    "api_key_file": str,
    "ca_file": str,
    "gguf": str,
    "batches": list,
    "floor_fraction": dict,
}


def to_yaml(settings: Settings) -> str:
    """Return the effective configuration, every default written out; `parse` reads it back as equal settings."""
    effective = {
        "bandwidth": _written(settings.bandwidth),
        "probe": _written(settings.probe),
        "servers": [_written(server) for server in settings.servers],
    }
    return yaml.dump(effective, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def _written(section: Section) -> dict[str, object]:
    written: dict[str, object] = {}
    for key in type(section).model_fields:
        value = getattr(section, key)
        write = _FORMATS.get(key)
        written[key] = value if value is None or write is None else write(value)
    if isinstance(section, BandwidthSettings) and section.threads is None:
        written["threads"] = "auto"
    return written
