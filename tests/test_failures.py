"""What an operator reads when a server cannot be asked: TLS, names, redirects, proxies, sockets, keys.

The state's line in the log says what went wrong in its own words; page and report say what it means and what to do.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from fake_llama import Behaviour, FakeLlama
from fake_llama_faults import HTML, answer, at
from processes import free_port
from real import missing
from stations import station
from structlog.testing import capture_logs

from exporter.measure.failure import failure_of
from exporter.present.words import REASONS
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import ServerState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from stations import Station

_NEW = ("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_AUTHORITY = """
[ca]
default_ca = d
[d]
database = index.txt
serial = serial
new_certs_dir = .
policy = p
[p]
commonName = supplied
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Self-signed certificates with their keys: of this machine, of another name, and one that has expired."""
    program = shutil.which("openssl") or missing("openssl is not on the PATH")
    directory = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run((program, *arguments), check=True, capture_output=True, cwd=directory)

    for name, alternative in (("good", "IP:127.0.0.1"), ("other", "DNS:other.example")):
        keys = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        openssl(*_NEW, "-x509", "-days", "2", *keys, "-subj", f"/CN={name}", "-addext", f"subjectAltName={alternative}")
    (directory / "ca.cnf").write_text(_AUTHORITY)
    (directory / "index.txt").touch()
    (directory / "serial").write_text("01\n")
    (directory / "san.cnf").write_text("subjectAltName = IP:127.0.0.1\n")
    openssl(*_NEW, "-keyout", "expired.key", "-out", "expired.csr", "-subj", "/CN=127.0.0.1")
    dates = ("-startdate", "20200101000000Z", "-enddate", "20200102000000Z")
    own = ("-selfsign", "-in", "expired.csr", "-keyfile", "expired.key", "-out", "expired.pem", "-notext")
    openssl("ca", "-batch", "-config", "ca.cnf", "-extfile", "san.cnf", "-md", "sha256", *own, *dates)
    return directory


def tls(certificates: Path, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
    return context


@dataclass
class Told:
    """What is told of a server after its first check and cycle."""

    running: Station
    logs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def reason(self) -> Reason | None:
        return self.running.server.state_reason

    def state_line(self) -> dict[str, Any]:
        (line,) = [line for line in self.logs if line["event"] == "state"]
        return line

    async def report(self) -> dict[str, Any]:
        answer = await self.running.web.get("/api/v1/snapshot")
        (found,) = json.loads(await answer.text())["servers"]
        assert isinstance(found, dict)
        return found

    async def everywhere(self) -> str:
        """Metrics, page and report."""
        await self.running.scrape()
        paths = ("/metrics", "/", "/api/v1/snapshot?format=table", "/api/v1/snapshot")
        return "\n".join([await (await self.running.web.get(path)).text() for path in paths])


@asynccontextmanager
async def told_of(url: str, empty: Path, **keys: object) -> AsyncIterator[Told]:
    async with station([{"url": url, **keys}], empty) as running:
        with capture_logs() as logs:
            await running.watches[0].check()
            await running.watches[0].cycle()
        yield Told(running, [dict(line) for line in logs])


async def tells(url: str, empty: Path, reason: Reason, detail: str, **keys: object) -> None:
    """Whether log, page and report all say what is wrong, and what to do."""
    async with told_of(url, empty, **keys) as told:
        assert told.reason is reason
        line = told.state_line()
        assert (line["reason"], line["means"]) == (reason.value, REASONS[reason])
        assert re.fullmatch(detail, line["detail"]), line["detail"]
        assert line["log_level"] == "warning"
        shown = " ".join((await told.everywhere()).replace("&#39;", "'").split())
        assert shown.count(REASONS[reason]) >= 1
        assert shown.count(f"{REASONS[reason]} ({line['detail']}).") == 2, "page and report"
        assert (await told.report())["state_detail"] == line["detail"]
        assert "secret" not in shown + str(told.logs)


# TLS


@pytest.mark.parametrize(
    ("name", "ca_file", "words"),
    [
        ("good", None, "self-signed certificate"),
        ("expired", "expired.pem", "certificate has expired"),
        ("other", "other.pem", r"IP address mismatch, certificate is not valid for '127\.0\.0\.1'"),
    ],
)
async def test_a_certificate_that_is_refused(
    name: str, ca_file: str | None, words: str, certificates: Path, tmp_path: Path
) -> None:
    fake = FakeLlama()
    await fake.start(tls=tls(certificates, name))
    keys = {} if ca_file is None else {"ca_file": certificates / ca_file}
    try:
        reason = Reason.CERTIFICATE_REFUSED
        await tells(fake.url, tmp_path, reason, f"GET /health: certificate: {words}", **keys)
        assert "ca_file" in REASONS[reason]
    finally:
        await fake.stop()


@asynccontextmanager
async def listening(greeting: bytes = b"", port: int = 0) -> AsyncIterator[int]:
    """A port that accepts, greets, and waits for ever for the end of a line, as llama-server does."""
    done = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        if not greeting:
            await done.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    yield server.sockets[0].getsockname()[1]
    done.set()
    server.close()


async def test_https_to_a_server_without_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The handshake gets less time than the whole; a machine that others load may stand still for the difference.
    monkeypatch.setattr("exporter.measure.probe.ASK_TIMEOUT", 3.0)
    async with FakeLlama() as fake:
        answering = fake.url.replace("http:", "https:")
        await tells(answering, tmp_path, Reason.TLS_FAILED, "GET /health: what answers does not speak TLS")
    async with listening() as port:
        words = "GET /health: the TLS handshake hangs, so what accepts may not speak TLS"
        await tells(f"https://127.0.0.1:{port}", tmp_path, Reason.TLS_FAILED, words)
    async with listening() as port:
        await tells(f"http://127.0.0.1:{port}", tmp_path, Reason.TIMEOUT, "GET /health: no answer in time")


async def test_http_to_a_server_with_tls(certificates: Path, tmp_path: Path) -> None:
    """OpenSSL's servers say nothing, others send an alert, proxies say it in words."""
    fake = FakeLlama()
    await fake.start(tls=tls(certificates, "good"))
    try:
        words = "GET /health: the connection was closed without an answer"
        await tells(fake.url.replace("https:", "http:"), tmp_path, Reason.UNREACHABLE, words)
    finally:
        await fake.stop()
    async with listening(b"\x15\x03\x01\x00\x02\x02\x46") as port:
        await tells(f"http://127.0.0.1:{port}", tmp_path, Reason.TLS_FAILED, "GET /health: what answers speaks TLS")
    for body in (
        b"<center>The plain HTTP request was sent to HTTPS port</center>",
        b"Client sent an HTTP request to an HTTPS server.\n",
        b"Reason: You're speaking plain HTTP to an SSL-enabled server port.<br />",
    ):
        async with FakeLlama(Behaviour(**at("*", answer(body, status="400 Bad Request")))) as proxy:
            await tells(proxy.url, tmp_path, Reason.TLS_FAILED, "GET /health: status 400")


async def test_a_tls_server_that_has_stalled_is_not_taken_for_one_without(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeLlama()
    await fake.start(tls=tls(certificates, "good"))
    port = int(fake.url.rsplit(":", 1)[1])
    async with station([{"url": fake.url, "ca_file": certificates / "good.pem"}], tmp_path) as running:
        try:
            await running.watches[0].check()
            assert running.server.state is ServerState.READY
        finally:
            await fake.stop()
        monkeypatch.setattr("exporter.measure.probe.ASK_TIMEOUT", 1.0)
        async with listening(port=port):
            await running.watches[0].check()
            assert (running.server.state, running.server.state_reason) == (ServerState.STALLED, Reason.TIMEOUT)


# what stands before a server


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("https://llama.example/", ", redirected to https://llama.example/"),
        ("/login?token=secret", ", redirected to /login"),
        ("https://user:secret@sso.example:8443/a#secret", ", redirected to https://sso.example:8443/a"),
        ("//[broken", ""),
    ],
)
async def test_a_redirect(location: str, shown: str, tmp_path: Path) -> None:
    for status in ("301 Moved Permanently", "302 Found"):
        fault = answer(HTML, f"Location: {location}", status=status)
        async with FakeLlama(Behaviour(**at("*", fault))) as fake:
            detail = re.escape(f"GET /health: status {status[:3]}{shown}")
            await tells(fake.url, tmp_path, Reason.HTTP_ERROR, detail)
    assert "redirect" in REASONS[Reason.HTTP_ERROR]


@pytest.mark.parametrize("status", ["502 Bad Gateway", "503 Service Unavailable", "504 Gateway Time-out", "407 Proxy"])
async def test_a_proxy_without_a_server_behind_it(status: str, tmp_path: Path) -> None:
    async with FakeLlama(Behaviour(**at("*", answer(HTML, "Location: /secret", status=status)))) as fake:
        await tells(fake.url, tmp_path, Reason.HTTP_ERROR, f"GET /health: status {status[:3]}")
    assert "proxy" in REASONS[Reason.HTTP_ERROR]


async def test_a_question_is_told_without_its_query(tmp_path: Path) -> None:
    async with FakeLlama(Behaviour(**at("/props", "html"))) as fake:
        await tells(fake.url, tmp_path, Reason.HTTP_ERROR, "GET /props: status 502", model="tiny")


async def test_another_server_and_another_path(tmp_path: Path) -> None:
    async with FakeLlama(Behaviour(api_prefix="/llm")) as fake:
        for url in (fake.url.removesuffix("/llm"), fake.url + "/v1"):
            await tells(url, tmp_path, Reason.NOT_LLAMA, "GET /(health|props): status 404")
    async with listening(b"SSH-2.0-OpenSSH_9.2\r\n") as port:
        await tells(f"http://127.0.0.1:{port}", tmp_path, Reason.NOT_LLAMA, "GET /health: the answer is not HTTP")


# the way there


def unknown_name(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


async def test_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = Reason.UNREACHABLE
    await tells(f"http://127.0.0.1:{free_port()}", tmp_path, reason, "GET /health: connection refused")
    await tells(f"https://127.0.0.1:{free_port()}", tmp_path, reason, "GET /health: connection refused")
    with monkeypatch.context() as patched:  # what a network says of an unknown name, and how soon, is its own affair
        patched.setattr(socket, "getaddrinfo", unknown_name)
        unknown = "GET /health: name or service not known"
        await tells("http://no-such-host.invalid:8080", tmp_path, reason, unknown)
    missing_socket = f"unix:{tmp_path}/none.sock"
    await tells(missing_socket, tmp_path, reason, "GET /health: no such file or directory")
    await tells(f"http://{'a' * 70}.example", tmp_path, reason, "GET /health: .*label.*too long.*")


async def test_a_socket_that_is_not_ours_to_write_to(tmp_path: Path) -> None:
    fake, user = FakeLlama(), os.geteuid()
    await fake.start(unix=tmp_path / "llama.sock")
    try:
        (tmp_path / "llama.sock").chmod(0)
        if user == 0:
            os.seteuid(65534)  # nothing is forbidden to root
        await tells(fake.url, tmp_path, Reason.UNREACHABLE, "GET /health: permission denied")
    finally:
        os.seteuid(user)
        await fake.stop()


def test_the_systems_words_hold_no_address() -> None:
    found = failure_of(PermissionError(13, "Connect call failed ('10.0.0.1', 80)"))
    assert found == (Reason.UNREACHABLE, "permission denied")
    assert failure_of(ConnectionResetError()) == (Reason.UNREACHABLE, "connection reset")
    assert failure_of(ssl.SSLError(1, "[SSL] no name for it")) == (Reason.TLS_FAILED, "[ssl] no name for it")
    unnamed = ssl.SSLCertVerificationError(1, "not trusted")
    assert failure_of(unnamed) == (Reason.CERTIFICATE_REFUSED, "certificate: not trusted")
    assert failure_of(RuntimeError("can't start new thread")) == (Reason.UNREACHABLE, "can't start new thread")
    assert failure_of(ValueError("Line\nis\x1b[31m too long" + "x" * 500))[1].isprintable()


# the key


async def test_a_key_file_that_changes_is_read_anew(tmp_path: Path) -> None:
    """Without a reload; one that is spoilt is named, and what is in it is not shown."""
    key = tmp_path / "key"
    async with FakeLlama(Behaviour(api_key="secret")) as fake:
        key.write_text("old\nsecret\n")
        words = re.escape(f"'{key}' holds 2 lines; leave the one key in it that is to be sent") + ".*"
        await tells(fake.url, tmp_path, Reason.API_KEY_UNREADABLE, words, api_key_file=key)
        async with station([{"url": fake.url, "api_key_file": key}], tmp_path) as running:
            for text, state in (("secret\n", ServerState.READY), ("other", ServerState.UNAUTHORIZED)):
                key.write_text(text)
                await running.watches[0].check()
                assert running.server.state is state


async def test_a_state_that_stays_is_told_once(tmp_path: Path) -> None:
    async with FakeLlama(Behaviour(**at("*", "html"))) as fake, station([{"url": fake.url}], tmp_path) as running:
        with capture_logs() as logs:
            for _ in range(3):
                await running.watches[0].check()
            fake.behaviour = Behaviour(loading=True)
            await running.watches[0].check()
            fake.behaviour = Behaviour()
            await running.watches[0].check()
        states = [(line["state"], line.get("reason"), line["log_level"]) for line in logs if line["event"] == "state"]
        assert states == [
            ("unreachable", "http_error", "warning"),
            ("loading", "loading", "warning"),
            ("ready", None, "info"),
        ]
