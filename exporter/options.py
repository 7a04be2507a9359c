"""What may be said to every command, before its name or after it."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Final, Literal, ParamSpec, TypeVar

import click

if TYPE_CHECKING:
    from exporter.config import Settings

_P = ParamSpec("_P")
_R = TypeVar("_R")

DEFAULT_CONFIG: Final = Path("config.yaml")
DEFAULT_ADDRESS: Final = "127.0.0.1:10470"


class Options:
    """The options that every command takes; of an option said twice, the last counts."""

    config_file: Path | None = None
    log_level: str | None = None
    log_format: Literal["console", "json"] | None = None
    listen: Sequence[str] = (DEFAULT_ADDRESS,)

    def load(self) -> "Settings":
        """The configuration as the file says it now.

        Raises:
            ConfigError: With every error in it.
        """
        from exporter.config import load, parse

        path = self.config_file or DEFAULT_CONFIG
        if self.config_file is None and not _is_there(path):
            return parse("servers: [{name: local, url: 'http://127.0.0.1:8080'}]", "built-in default")
        return load(path)

    def settings(self, *, files: bool = False) -> "Settings":
        """The configuration, peaks looked up, warnings (warn.py) told; or the program's end with every error in it."""
        from exporter.config import ConfigError
        from exporter.service.peaks import PeakError, with_peaks
        from exporter.service.warn import told

        try:
            return told(with_peaks(self.load()), files=files)
        except (ConfigError, PeakError) as error:
            raise click.ClickException("the configuration cannot be used:\n" + str(error)) from error

    def addresses(self) -> list[tuple[str, int]]:
        """Where to listen, or the program's end when an address is none."""
        from exporter.service.ask import parse_address

        try:
            return [parse_address(address) for address in self.listen]
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--web.listen-address") from error

    def start_logs(self, command: str | None) -> None:
        """Logs as the command does by itself, or as was said; a health check, which must cost little, not at all."""
        if command != "healthcheck":
            # Here and above: commands import what they need, for the sake of their start-up time.
            from exporter.service.logs import configure_logs

            configure_logs(self.log_level or ("warning" if command == "demo" else "info"), self.log_format)


def _said(context: click.Context, parameter: click.Parameter, value: object) -> None:
    """Keeps what was said here, in place of what was said before the command."""
    options = context.ensure_object(Options)
    if value and parameter.name:
        setattr(options, parameter.name, value)


_option: Final = partial(click.option, expose_value=False, callback=_said)
_GENERAL: Final = (
    _option(
        "--config.file",
        "config_file",
        type=click.Path(path_type=Path),
        help="Configuration.  [default: config.yaml, or one server at http://127.0.0.1:8080]",
    ),
    _option(
        "--web.listen-address",
        "listen",
        multiple=True,
        metavar="HOST:PORT",
        help=f"Where to listen; may be repeated.  [default: {DEFAULT_ADDRESS}]",
    ),
    _option(
        "--log.level",
        "log_level",
        type=click.Choice(("debug", "info", "warning", "error")),
        help="[default: info; the demo shows only warnings]",
    ),
    _option(
        "--log.format",
        "log_format",
        type=click.Choice(("console", "json")),
        help="[default: by terminal]",
    ),
)


def takes_general(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function with the general options, which go to the context's `Options`."""
    for option in reversed(_GENERAL):
        function = option(function)
    return function


def general(function: Callable[Concatenate[Options, _P], _R]) -> Callable[_P, _R]:
    """A command's function, given the `Options`, its own after them; the logs are started before it."""

    @wraps(function)
    def started(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        context = click.get_current_context()
        options = context.ensure_object(Options)
        options.start_logs(context.info_name)
        return function(options, *args, **kwargs)

    return takes_general(started)


def _is_there(path: Path) -> bool:
    """Whether there is such a file; one that may not be looked at is left to `load`, which says so."""
    try:
        return path.exists()
    except OSError:
        return True
