"""The commands. They wire and print; they compute nothing."""

import asyncio
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import click

from exporter.options import Options, general, takes_general
from exporter.roofline.architecture import CACHE_TYPE_BYTES

if TYPE_CHECKING:
    from exporter.present.tables import Format

_T = TypeVar("_T")

FORMATS: Final = ("table", "json", "markdown", "csv")
COULD_NOT_MEASURE: Final = 3

cache_type = click.Choice(tuple(CACHE_TYPE_BYTES))

format_option = click.option(
    "--format", "form", type=click.Choice(FORMATS), default="table", show_default=True, help="How to print the result."
)


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@takes_general
@click.version_option(package_name="roofline-exporter", prog_name="roofline-exporter")
@click.pass_context
def main(context: click.Context) -> None:
    """How fast llama.cpp decode could go on this machine, how fast it does go, and where the rest of the time is.

    Without a command: serve. The options here may also stand after a command, where they win. Whatever the command,
    the exit status is 141 when the reader of its output has left, as in `| head`.
    """
    if context.invoked_subcommand in {None, "serve"}:
        # The daemon's end is no failure, and before it listens there is nothing to put in order.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os._exit(0))
    elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if context.invoked_subcommand is None:
        context.invoke(serve)


@contextmanager
def _or_could_not_measure() -> Iterator[None]:
    """Ends with 3 what fails: 1, click's own and Python's, would say that a batch is below its threshold."""
    try:
        yield
    except (click.UsageError, click.exceptions.Exit, click.Abort):
        raise
    except click.ClickException as error:
        error.show()
        raise click.exceptions.Exit(COULD_NOT_MEASURE) from error
    except Exception as error:
        traceback.print_exc()
        raise click.exceptions.Exit(COULD_NOT_MEASURE) from error


@main.command()
@general
def serve(options: Options) -> None:
    """Run the exporter until SIGTERM or Ctrl-C."""
    from exporter.service import daemon

    settings, addresses = options.settings(), options.addresses()
    try:
        # At its end the interpreter would wait for threads that nothing stops: looking up a name, at a disk.
        asyncio.run(daemon.serve(settings, addresses, load=options.load, leave=lambda: os._exit(0)))
    except daemon.ListenError as error:
        raise click.ClickException(str(error)) from error


@main.command("check-config")
@general
def check_config(options: Options) -> None:
    """Validate the configuration and print it as it is in force, secrets masked."""
    from exporter.config import to_yaml

    click.echo(to_yaml(options.settings(files=True)), nl=False)


@main.command()
@format_option
@_or_could_not_measure()
@general
def bandwidth(options: Options, form: str) -> None:
    """Measure this machine's ceilings now: every kernel, one thread and all.

    Exit status 0: `read` on all threads, the reference, was measured; 3: it was not.
    """
    from exporter.present.report import bandwidth_renderable, bandwidth_text
    from exporter.present.sentences import reads
    from exporter.service.once import measure_once

    seen = asyncio.run(measure_once(options.settings(), probe=False))
    _print(form, seen, bandwidth_renderable, bandwidth_text)
    if not reads(seen):
        raise click.exceptions.Exit(COULD_NOT_MEASURE)


@main.command()
@format_option
@click.option(
    "--url", help="Read a running exporter, e.g. http://127.0.0.1:10470, through no proxy, instead of measuring."
)
@click.option("--prefill", is_flag=True, help="Also send each idle server one prompt of 512 tokens and place it.")
@_or_could_not_measure()
@general
def report(options: Options, form: str, url: str | None, *, prefill: bool) -> None:
    """Measure everything once and print the study table.

    Exit status 0: every batch with a threshold is at or above it; 1: one is below; 3: one of those could not be
    measured, or no batch at all.
    """
    if url is not None and prefill:
        raise click.UsageError("--prefill measures, --url only reads; use one of the two")
    if url is not None:
        from exporter.service.ask import AskError, fetch_report

        try:
            text, status = fetch_report(url, form)
        except AskError as error:
            raise click.ClickException(str(error)) from error
        click.echo(text, nl=False)
        raise click.exceptions.Exit(status)
    from exporter.present.report import report_exit_code, report_renderable, report_text
    from exporter.service.once import measure_once

    seen = asyncio.run(measure_once(options.settings(), prefill=prefill))
    _print(form, seen, report_renderable, report_text)
    raise click.exceptions.Exit(report_exit_code(seen))


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@format_option
@click.option("--bandwidth", metavar="RATE", help="Add floors under this bandwidth, e.g. 50GB/s.")
@click.option("--cache-type-k", type=cache_type, default="f16", show_default=True, help="As given to llama-server.")
@click.option("--cache-type-v", type=cache_type, default="f16", show_default=True, help="As given to llama-server.")
@general
def inspect(  # noqa: PLR0917 - click passes them by name
    options: Options, model: Path, form: str, bandwidth: str | None, cache_type_k: str, cache_type_v: str
) -> None:
    """Print what one decode step reads of a GGUF file, by part.

    Without --bandwidth the floors stand under this machine's read ceiling, if an exporter is running on it.
    """
    from exporter.config.values import memory_bandwidth
    from exporter.measure.gguf import read_gguf
    from exporter.measure.gguf_types import GgufProblem
    from exporter.present.inspect import inspect_renderable, inspect_text
    from exporter.roofline.inspection import inspect_model
    from exporter.service.ask import ask_read_ceiling

    try:
        rate = memory_bandwidth(bandwidth) if bandwidth is not None else ask_read_ceiling(options.addresses()[0])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--bandwidth") from error
    header = read_gguf(model)
    if isinstance(header, GgufProblem):
        raise click.ClickException(header.message)
    found = inspect_model(
        model.name,
        header.metadata,
        header.tensors,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        bandwidth_bytes_per_second=rate,
    )
    _print(form, found, inspect_renderable, inspect_text)


@main.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Another GGUF file.")
@general
def demo(options: Options, model: Path | None) -> None:
    """Run a real llama.cpp server on a small real model with the exporter beside it; Ctrl-C ends both."""
    from exporter.service import daemon
    from exporter.service.demo import DemoError, run_demo

    try:
        asyncio.run(run_demo(options.addresses(), model))
    except (DemoError, daemon.ListenError) as error:
        raise click.ClickException(str(error)) from error


@main.command()
@general
def healthcheck(options: Options) -> None:
    """Exit with 0 if the exporter on this machine answers; for containers."""
    from exporter.service.ask import ask_health

    problem = ask_health(options.addresses()[0])
    if problem is not None:
        raise click.ClickException(problem)
    click.echo("healthy")


def _print(form: str, found: _T, table: Callable[[_T], object], text: Callable[[_T, "Format"], str]) -> None:
    """Prints what was found: a table as wide as the terminal, or the text of another format."""
    from exporter.present.tables import Format, standard_output

    if form == Format.TABLE:
        standard_output().print(table(found))
    else:
        click.echo(text(found, Format(form)), nl=False)
