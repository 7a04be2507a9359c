"""One HTTP request to a server, bounded in time and size: an answer, or the reason why there is none.

Connections are never reused: llama-server drops idle ones after 5 s, and a POST on a dropped one fails. Redirects are
never followed, so that a key cannot leave for another host. Bodies are bounded, and compressed ones are not unpacked: a
small one could unpack to gigabytes.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import aiohttp

from exporter.config import read_key
from exporter.measure.failure import accepts, failure_of, refusal_words
from exporter.measure.json_values import Json
from exporter.roofline.reason import Reason

OK: Final = 200
MAX_BODY_BYTES: Final = 8 << 20
CONNECT_PART: Final = 0.8
"""Of a request's time, the part within which the connection must stand, the TLS handshake included."""
_T = TypeVar("_T")


def trusting(ca_file: Path) -> ssl.SSLContext:
    """What to trust where a private certificate authority stands behind the server.

    Raises:
        OSError: The file cannot be read; ssl.SSLError, which is one too: it is not a certificate.
    """
    return ssl.create_default_context(cafile=ca_file)


def open_session(url: str, ca: Path | ssl.SSLContext | None) -> aiohttp.ClientSession:
    """A session for one server; `unix:/path` and a private certificate authority are the connector's business.

    Args:
        url: The server.
        ca: Its private certificate authority: the file, or what was read from it before.

    Raises:
        OSError: As `trusting`, where `ca` is a file.
    """
    if url.startswith("unix:"):
        connector: aiohttp.BaseConnector = aiohttp.UnixConnector(url.removeprefix("unix:"), force_close=True)
    else:
        context = trusting(ca) if isinstance(ca, Path) else ca
        connector = aiohttp.TCPConnector(ssl=True if context is None else context, force_close=True)
    # Cookies would pile up, and tie the exporter to one of several servers behind a proxy.
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False)


class Asker:
    """Asks one server.

    Args:
        session: Its connections, closed by the caller.
        url: Base URL, with the API prefix if the server has one.
        api_key_file: Read at each request, so that a rotated key needs no restart.

    Attributes:
        before_post: Called before each request that makes the server generate; the measuring loop alone sends those.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, api_key_file: Path | None) -> None:
        self._session = session
        self._base = "http://localhost" if url.startswith("unix:") else url.rstrip("/")
        self._api_key_file = api_key_file
        self.before_post: Callable[[], None] = lambda: None
        self._words: dict[Reason, str] = {}
        self._answered = False

    def words(self, reason: Reason) -> str:
        """What the last question that failed for this reason was, and how it failed, for people; may be empty."""
        return self._words.get(reason, "")

    async def _ask(
        self,
        method: str,
        path: str,
        timeout: float,
        read: Callable[[aiohttp.ClientResponse], Awaitable[_T | Reason]],
        body: Json = None,
    ) -> _T | Reason:
        """One request within `timeout` seconds; whatever goes wrong on the way is a reason."""
        if method == "POST":
            self.before_post()
        try:
            headers = self._headers()
        except ValueError as error:
            self._words[Reason.API_KEY_UNREADABLE] = str(error)
            return Reason.API_KEY_UNREADABLE
        try:
            async with (
                asyncio.timeout(timeout),
                self._session.request(
                    method,
                    self._base + path,
                    json=body,
                    headers=headers,
                    allow_redirects=False,
                    # The bound is asyncio.timeout; aiohttp's own total of 300 s would cut long probes.
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_PART * timeout),
                ) as response,
            ):
                self._answered = True
                found = await read(response)
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:
            # ValueError: aiohttp's word for lines that are too long; RuntimeError: no thread left to resolve a name in.
            cut = method == "POST" and isinstance(error, aiohttp.ClientPayloadError)
            reason, words = failure_of(error)
            if isinstance(error, aiohttp.ConnectionTimeoutError) and await self._hangs_in_tls(timeout):
                reason, words = Reason.TLS_FAILED, "the TLS handshake hangs, so what accepts may not speak TLS"
            return self._failed(method, path, Reason.STREAM_CUT if cut else reason, words)
        if isinstance(found, Reason):
            words = "" if response.status == OK else refusal_words(response)
            if found is Reason.UNAUTHORIZED:
                words += ", the key in api_key_file is refused" if self._api_key_file else ", no key was sent"
            self._failed(method, path, found, words)
        return found

    async def _hangs_in_tls(self, timeout: float) -> bool:
        """After a connection that did not come to stand: llama-server without TLS waits for the end of the first line.

        A server that ever answered does speak it, and has stalled.
        """
        if self._answered or not self._base.startswith("https:"):
            return False
        return await accepts(self._base, (1 - CONNECT_PART) * timeout)

    def _failed(self, method: str, path: str, reason: Reason, words: str) -> Reason:
        """The reason, its words kept until it comes again."""
        self._words[reason] = f"{method} {path.partition('?')[0]}: {words}" if words else ""
        return reason

    def _headers(self) -> dict[str, str]:
        """What every request carries.

        Raises:
            ValueError: The API key cannot be had; says why.
        """
        plain = {"Accept-Encoding": "identity"}
        if self._api_key_file is None:
            return plain
        return {**plain, "Authorization": f"Bearer {read_key(self._api_key_file)}"}


async def body_of(response: aiohttp.ClientResponse) -> bytes | None:
    """The body, or None when it is longer than any answer of the API."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def is_packed(response: aiohttp.ClientResponse) -> bool:
    """Whether the body is compressed, which nobody asked for."""
    return response.headers.get("Content-Encoding", "identity").strip().lower() not in {"", "identity"}
