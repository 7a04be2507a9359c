"""SIGTERM and Ctrl-C, at any time."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from processes import COMMAND, NOBODY, Exporter, exporter, running, wait_for

from exporter.__main__ import _ANSWER
from exporter.cli import main
from exporter.config import parse
from exporter.service.daemon import serve
from exporter.service.scheduler import Scheduler

DEFAULT = ("env", "--default-signal=HUP")
"""The tests themselves may have been started with nohup."""
TRIES = 5
"""A machine that others load may be slow once: a bar holds when one of so many tries keeps it."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_within_a_second_also_during_a_measurement(number: int, tmp_path: Path) -> None:
    assert any(seconds_to_end(number, tmp_path) < 1 for _ in range(TRIES))


def seconds_to_end(number: int, directory: Path) -> float:
    with exporter(NOBODY, directory) as running_exporter:
        # The first bandwidth run begins at once and takes seconds.
        time.sleep(0.7)
        over = bool(
            running_exporter.logged("bandwidth")
        )  # on a busy machine no pass may be clean, which ends it at once
        status, seconds = running_exporter.end(number)
        assert status == 0
        assert running_exporter.logged("stopping")
        assert not [line for line in running_exporter.log if line["event"] == "?"], "nothing but log lines"
    return math.inf if over else seconds


def test_a_name_server_that_does_not_answer_does_not_delay_the_end(tmp_path: Path) -> None:
    """Nothing ends a thread that looks up a name, and the interpreter waits for its threads."""
    file, asked = tmp_path / "c.yaml", tmp_path / "asked"
    file.write_text("servers: [{name: local, url: 'http://llama.test:1'}]")
    hangs = "import pathlib, socket, time, exporter.__main__ as program\n"
    hangs += f"socket.getaddrinfo = lambda *_, **__: (pathlib.Path({str(asked)!r}).touch(), time.sleep(100))\n"
    arguments = ("--config.file", file, "--web.listen-address", "127.0.0.1:0", "--log.format", "json")
    command = (sys.executable, "-c", f"{hangs}program.main()", *arguments)
    with running(command, stderr=subprocess.PIPE) as process:
        stopping = Exporter(process)
        wait_for("a look-up", 60, asked.exists)
        status, seconds = stopping.end()
    assert status == 0
    # The bar is 1 s; a loaded machine gets some leave here.
    assert seconds < 30
    assert stopping.logged("stopping")


@pytest.mark.parametrize(
    ("slow", "command", "number", "status"),
    [
        ("click", "serve", signal.SIGTERM, 0),
        ("click", "serve", signal.SIGINT, 0),
        ("click", "report", signal.SIGTERM, 143),
        ("click", "check-config", signal.SIGINT, 130),
        ("structlog", "serve", signal.SIGTERM, 0),
        ("structlog", "serve", signal.SIGINT, 0),
        ("structlog", "report", signal.SIGTERM, 143),
        ("structlog", "report", signal.SIGINT, 130),
    ],
)
def test_a_signal_while_it_starts(slow: str, command: str, number: int, status: int, tmp_path: Path) -> None:
    """The daemon's end is no failure; a report that was cut short must not look like one that found nothing wrong."""
    (tmp_path / f"{slow}.py").write_text("import time\nprint('reached', flush=True)\ntime.sleep(100)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with running((*COMMAND, command), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reached\n"
        process.send_signal(number)
        assert process.wait(50) == status


@pytest.mark.parametrize(
    ("slow", "before", "command", "status"),
    [
        ("click", DEFAULT, "serve", 0),
        ("structlog", DEFAULT, "serve", 0),
        ("structlog", DEFAULT, "report", -signal.SIGHUP),
        ("structlog", ("nohup",), "report", 143),
    ],
)
def test_a_hangup_while_it_starts(
    slow: str, before: tuple[str, ...], command: str, status: int, tmp_path: Path
) -> None:
    """It does not end the daemon, which reads its configuration anyway; a report ends with its terminal."""
    (tmp_path / f"{slow}.py").write_text("import time\nprint('reached', flush=True)\ntime.sleep(100)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    started = (*before, *COMMAND, command)
    with running(started, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reached\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(50) == status


def test_every_command_but_the_daemon_answers() -> None:
    assert set(main.commands) - {"serve"} == _ANSWER


async def test_what_does_not_end_in_time_is_left() -> None:
    """Here something that goes on after its cancellation; clients that keep the loop busy are left in the same way."""
    left = asyncio.Event()

    async def stubborn(_: Scheduler, __: Sequence[str]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        finally:
            await left.wait()

    async with asyncio.timeout(30):
        await serve(parse(NOBODY, "test"), [("127.0.0.1", 0)], beside=stubborn, leave=left.set)
    assert left.is_set()
