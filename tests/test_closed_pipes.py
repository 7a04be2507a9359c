"""A reader that leaves, as `| head` does, or a full disk: a command ends with its own status, the daemon goes on."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from gguf_files import write_model
from processes import COMMAND, free_port, wait_for

OF_SIGPIPE = 128 + signal.SIGPIPE
"""What a shell says of a program that SIGPIPE ended."""
CONFIG = "servers: [{name: local, url: 'http://127.0.0.1:1'}]"
MEASURED = """
import exporter.service.once as once, snapshots
async def measured(*_, **__): return snapshots.rich_view()
once.measure_once = measured"""
HANGS_UP = """
import exporter.service.once as once
async def measured(*_, **__): raise BrokenPipeError(32, "Broken pipe")
once.measure_once = measured"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "c.yaml"
    file.write_text(CONFIG)
    return str(file)


def after(code: str) -> tuple[str, ...]:
    """The command in an interpreter that ran the code before."""
    path = f"import sys; sys.path.append({str(Path(__file__).parent)!r})"
    return sys.executable, "-c", f"{path}\n{code}\nimport exporter.__main__\nexporter.__main__.main()"


def unread(*command: str, streams: str) -> tuple[int, str]:
    """Runs a command, of whose named streams nobody reads: its exit status, and its stderr if that was read."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            command,
            stdout=writer if "stdout" in streams else subprocess.DEVNULL,
            stderr=writer if "stderr" in streams else subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize("arguments", ["check-config", "--help", "report --help", "--version"])
def test_nobody_reads_what_is_printed(arguments: str, config: str) -> None:
    command = (*COMMAND, "--config.file", config, *arguments.split())
    assert unread(*command, streams="stdout") == (OF_SIGPIPE, "")


@pytest.mark.parametrize("form", ["table", "json"])
@pytest.mark.parametrize("command", ["report", "bandwidth"])
def test_nobody_reads_what_was_measured(command: str, form: str, config: str) -> None:
    """Rich prints the table, click the rest."""
    arguments = ("--config.file", config, command, "--format", form)
    assert unread(*after(MEASURED), *arguments, streams="stdout") == (OF_SIGPIPE, "")


@pytest.mark.parametrize("form", ["table", "json"])
def test_nobody_reads_what_was_inspected(form: str, tmp_path: Path) -> None:
    (file,) = write_model(tmp_path / "m.gguf")
    arguments = ("inspect", str(file), "--bandwidth", "50GB/s", "--format", form)
    assert unread(*COMMAND, *arguments, streams="stdout") == (OF_SIGPIPE, "")


@pytest.mark.parametrize(("arguments", "own"), [("report", 3), ("check-config", 1), ("no-such-command", 2)])
def test_nobody_reads_an_error(arguments: str, own: int, tmp_path: Path) -> None:
    """`2>&1 | head`: the error is lost, its status is not."""
    missing = str(tmp_path / "none.yaml")
    status, _ = unread(*COMMAND, "--config.file", missing, *arguments.split(), streams="stdout, stderr")
    assert status == own


@pytest.mark.parametrize("log", ["a pipe without a reader", "a full disk"])
def test_the_daemon_outlives_its_log(log: str, config: str) -> None:
    """A log shipper that ended, or a disk that is full, takes the monitor away no more than the log itself."""
    address = f"127.0.0.1:{free_port()}"
    reader, writer = os.pipe()
    os.close(reader)
    sink = writer if log.startswith("a pipe") else os.open("/dev/full", os.O_WRONLY)
    with subprocess.Popen((*COMMAND, "--config.file", config, "--web.listen-address", address), stderr=sink) as daemon:

        def loaded() -> bool:
            with suppress(OSError), urlopen(f"http://{address}/metrics") as answer:
                return b"roofline_config_last_reload_successful 1.0" in answer.read()
            return False

        wait_for("the page", 60, loaded)
        # Each is answered, and told in the log.
        for _ in range(3):
            with urlopen(Request(f"http://{address}/-/reload", method="POST")) as answer:
                assert answer.status == 200
        assert loaded()
        daemon.terminate()
        assert daemon.wait(60) == 0
    os.close(writer)


def test_a_full_disk_is_told(config: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = (*COMMAND, "--config.file", config, "check-config")
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert done.returncode == 3
    assert done.stderr == "Error: cannot write the output: No space left on device\n"


def test_one_line_is_read_of_a_long_answer(tmp_path: Path) -> None:
    """More than a pipe holds: the reader leaves in the middle of it."""
    file, servers = (
        tmp_path / "c.yaml",
        "".join(f"- {{name: s{n}, url: 'http://127.0.0.1:{n + 1}'}}\n" for n in range(999)),
    )
    file.write_text(f"servers:\n{servers}")
    command = (*COMMAND, "--config.file", str(file), "check-config")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "bandwidth:\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        wait_for("the end", 60, lambda: process.poll() is not None)
    assert process.returncode == OF_SIGPIPE


def test_a_connection_that_breaks_is_no_reader_that_left(config: str) -> None:
    status, error = unread(*after(HANGS_UP), "--config.file", config, "report", streams="")
    assert status == 3
    assert "BrokenPipeError" in error


def test_what_is_read_is_all_there(config: str, tmp_path: Path) -> None:
    """A file is appended to; a stream that was closed from the start is no reader that left."""
    file = tmp_path / "out.txt"
    file.write_text("before\n")
    command = (*COMMAND, "--config.file", config, "check-config")
    with file.open("a") as out:
        assert subprocess.run(command, stdout=out, check=False, timeout=60).returncode == 0
    assert file.read_text().startswith("before\nbandwidth:\n")
    assert file.read_text().endswith("\n")
    closed = ("sh", "-c", 'exec "$@" >&-', "sh", *command)
    assert subprocess.run(closed, check=False, timeout=60).returncode == 0
