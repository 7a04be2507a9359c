"""Commands that ask a running exporter, or what answers in its place."""

import re
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from processes import run


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1", "127.0.0.1:1", "file:///etc/passwd", "http://[::1", "http://h:port", "http://h/ x", ""],
)
def test_report_from_where_no_exporter_runs(url: str) -> None:
    done = run("report", "--url", url)
    assert done.returncode == 3
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr
    assert "urlopen" not in done.stderr
    assert "--url" in done.stderr


@pytest.mark.parametrize("url", ["http://bob:PLANTED@127.0.0.1:1", "bob:PLANTED@h", "http://127.0.0.1:1/?key=PLANTED"])
def test_a_url_that_may_hold_a_password_is_refused_and_not_repeated(url: str) -> None:
    done = run("report", "--url", url)
    assert done.returncode == 3
    assert "write it as http://HOST:PORT" in done.stderr
    assert "PLANTED" not in done.stderr


@contextmanager
def answering(words: bytes) -> Iterator[str]:
    """A port that answers everything with those words: its address."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(words)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    "words",
    [
        b"SSH-2.0-\x1b[31mOpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nX-Roofline-Report-Status: fine\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Roofline-Report-Status: 0\r\nContent-Length: 9\r\n\r\n",
    ],
    ids=["no HTTP", "no status", "cut off"],
)
def test_a_report_from_what_is_no_exporter(words: bytes) -> None:
    with answering(words) as address:
        done = run("report", "--url", f"http://{address}")
    assert done.returncode == 3
    assert re.fullmatch(rf"Error: http://{address}/api/v1/snapshot: [ -~]+\n", done.stderr)


def test_the_health_of_what_speaks_no_http() -> None:
    with answering(b"SSH-2.0-OpenSSH\r\n") as address:
        done = run("--web.listen-address", address, "healthcheck")
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: http://{address}/-/healthy: no answer in HTTP: SSH-2.0-OpenSSH; start an")


def test_the_health_of_an_exporter_that_is_stuck() -> None:
    """Its own words, and not the remedy for one that does not run."""
    with answering(b"HTTP/1.0 503 Service Unavailable\r\n\r\nThe loop is\nstuck: \x1b[31m\n") as address:
        done = run("--web.listen-address", address, "healthcheck")
    assert done.returncode == 1
    said = r"it answers 503: The loop is stuck: \x1b[31m"
    assert done.stderr == f"Error: http://{address}/-/healthy: '{said}'\n"


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY"])
def test_an_exporter_is_asked_through_no_proxy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker sets them in every container when its client is configured with proxies."""
    answer = b"HTTP/1.1 200 OK\r\nX-Roofline-Report-Status: 0\r\nContent-Length: 2\r\n\r\nok"
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with answering(answer) as address:
        assert run("--web.listen-address", address, "healthcheck").returncode == 0
        done = run("report", "--url", f"http://{address}")
    assert (done.returncode, done.stdout) == (0, "ok")
