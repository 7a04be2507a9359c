"""The log: one event a line, whatever clients send, libraries say or becomes of its reader."""

import json
import os
import socket
import subprocess
import sys
import urllib.error
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from processes import COMMAND, Exporter, free_port, get, running, wait_for

NOBODY = "servers: [{name: local, url: 'http://127.0.0.1:1'}]"
HOSTILE = {
    "a header of 20 kB": b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 20_000 + b"\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03hello\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "no URL": b"GET http://[\x1b[31m HTTP/1.1\r\nHost: x\r\n\r\n",
    "no chunk": b"POST /config HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "no gzip": b"GET /config HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde",
}
LOOSE_ENDS = """
import asyncio, logging, warnings
from exporter.service.logs import configure_logs
configure_logs("info", "json")
async def fails(): raise ValueError("in a task")
async def main():
    asyncio.ensure_future(fails())
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0.01)
    warnings.warn("old ways")
    fails()
    logging.getLogger("library").warning("two\\nlines, \\x1b[31mred")
    logging.getLogger("library").log(35, "a level without a name")
    logging.getLogger("library").error("%d of %d", 1)
    logging.getLogger("library").info("chatter")
asyncio.run(main())"""


def lines(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines()]


@pytest.mark.parametrize("level", ["info", "debug"])
def test_clients_that_speak_no_http_are_told_to_who_debugs_in_a_line_each(level: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(NOBODY)
    options = ("--config.file", str(file), "--web.listen-address", "127.0.0.1:0", "--log.format", "json")
    with running((*COMMAND, *options, "--log.level", level), stderr=subprocess.PIPE) as process:
        started = Exporter(process)
        host, port = started.url.removeprefix("http://").split(":")
        for words in HOSTILE.values():
            with socket.create_connection((host, int(port))) as client:
                client.settimeout(30)
                client.sendall(words)
                with suppress(ConnectionError):
                    assert client.recv(1)
        assert started.end()[0] == 0
    assert not started.logged("?"), "nothing but log lines"
    told = [line for line in started.log if line.get("logger") == "roofline_exporter.web"]
    assert [line["level"] for line in told] == (["debug"] * len(HOSTILE) if level == "debug" else [])
    assert all("127.0.0.1" in line["event"] or "gzip" in line["event"] for line in told)
    assert all("exception" not in line and line["event"].isprintable() for line in told)


def test_a_page_that_fails_is_one_line_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(NOBODY)
    fails = "import exporter.present.page as page, exporter.__main__ as program\npage.landing_page = None\n"
    options = ("--config.file", tmp_path / "c.yaml", "--web.listen-address", "127.0.0.1:0", "--log.format", "json")
    with running((sys.executable, "-c", f"{fails}program.main()", *options), stderr=subprocess.PIPE) as process:
        started = Exporter(process)
        with pytest.raises(urllib.error.HTTPError, match="500"):
            started.get("/")
        assert started.end()[0] == 0
    assert not started.logged("?")
    (line,) = [line for line in started.log if "exception" in line]
    assert line["level"] == "error"
    assert "Traceback" in line["exception"]
    assert "TypeError" in line["exception"]


def test_loose_ends_of_asyncio_warnings_and_libraries_are_events() -> None:
    done = subprocess.run((sys.executable, "-c", LOOSE_ENDS), stderr=subprocess.PIPE, text=True, check=True, timeout=60)
    told = lines(done.stderr)
    by_logger: dict[str, list[dict[str, Any]]] = {}
    for line in told:
        by_logger.setdefault(line["logger"], []).append(line)
    assert {name: len(found) for name, found in by_logger.items()} == {"asyncio": 2, "py.warnings": 2, "library": 3}
    assert {line["exception"].splitlines()[-1] for line in by_logger["asyncio"]} == {
        "ValueError: in a task",
        "ZeroDivisionError: division by zero",
    }
    assert any("old ways" in line["event"] for line in by_logger["py.warnings"])
    assert any("never awaited" in line["event"] for line in by_logger["py.warnings"])
    assert [(line["level"], line["event"]) for line in by_logger["library"]] == [
        ("warning", r"'two lines, \x1b[31mred'"),
        ("warning", "a level without a name"),
        ("error", "%d of %d (1,)"),
    ]


def test_a_reader_that_comes_back_reads_on(tmp_path: Path) -> None:
    """A pipe that is full and would make its writer wait: what does not fit is lost, the daemon is not."""
    file, address = tmp_path / "c.yaml", f"127.0.0.1:{free_port()}"
    file.write_text(NOBODY)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while os.write(writer, b"x" * 4096):
            pass
    command = (*COMMAND, "--config.file", str(file), "--web.listen-address", address, "--log.format", "json")
    with running(command, stderr=writer) as process:
        wait_for("the page", 60, lambda: get(f"http://{address}/-/ready"))
        os.close(writer)
        os.set_blocking(reader, False)
        with suppress(BlockingIOError):
            while os.read(reader, 65_536):
                pass
        process.terminate()
        assert process.wait(60) == 0
    said = os.read(reader, 65_536).decode()
    os.close(reader)
    assert "stopping" in [line["event"] for line in lines(said)]


def test_a_log_that_was_closed_from_the_start(tmp_path: Path) -> None:
    """`2>&-`, as some supervisors start what they watch."""
    file, address = tmp_path / "c.yaml", f"127.0.0.1:{free_port()}"
    file.write_text(NOBODY)
    command = (*COMMAND, "--config.file", str(file), "--web.listen-address", address)
    with running(("sh", "-c", 'exec "$@" 2>&-', "sh", *command)) as process:
        wait_for("the page", 60, lambda: get(f"http://{address}/-/ready"))
        process.terminate()
        assert process.wait(60) == 0
