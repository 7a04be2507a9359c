"""What went wrong with a request: the reason, and in the words of TLS, of the system or of HTTP how it came.

The words are for people: short, on one line, and without what a URL may hide (user names, queries).
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Iterator
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from exporter.measure.json_values import label
from exporter.roofline.reason import Reason

HTTPS_PORT: Final = 443
_TLS_ALERT: Final = r"b'\x15\x03"
"""How a line that begins with a TLS alert is quoted in aiohttp's message."""
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"})
"""OpenSSL's names for an answer that is not TLS at all."""


def failure_of(error: Exception) -> tuple[Reason, str]:
    """The reason behind an exception of a request, and its words."""
    if isinstance(error, TimeoutError):
        connecting = isinstance(error, aiohttp.ConnectionTimeoutError)
        return Reason.TIMEOUT, f"no {'connection' if connecting else 'answer'} in time"
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError) and not isinstance(cause, aiohttp.ClientError):
            why = getattr(cause, "verify_message", None) or str(cause)
            return Reason.CERTIFICATE_REFUSED, f"certificate: {_plain(why)}"
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, aiohttp.ClientError):
            # OpenSSL's own errors carry its name for them.
            name = getattr(cause, "reason", None) or str(cause)
            return Reason.TLS_FAILED, "what answers does not speak TLS" if name in _NO_TLS else _plain(
                name.replace("_", " ").lower()
            )
    if isinstance(error, aiohttp.ClientResponseError):
        if _TLS_ALERT in error.message:
            return Reason.TLS_FAILED, "what answers speaks TLS"
        return Reason.NOT_LLAMA, "the answer is not HTTP"
    if isinstance(error, aiohttp.ClientPayloadError):
        return Reason.UNREACHABLE, "the answer ended early"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return Reason.UNREACHABLE, "the connection was closed without an answer"
    return Reason.UNREACHABLE, next(filter(None, map(_of_system, _causes(error))), _plain(str(error)))


def refusal_words(response: aiohttp.ClientResponse) -> str:
    """The status of an answer that is none, and where it leads to."""
    words = f"status {response.status}"
    target = response.headers.get("Location")
    if target is None or not HTTPStatus.MULTIPLE_CHOICES <= response.status < HTTPStatus.BAD_REQUEST:
        return words
    try:
        parts = urlsplit(target)
    except ValueError:
        return words
    host = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else ""
    return f"{words}, redirected to {_plain(host + parts.path)}"


async def accepts(url: str, seconds: float) -> bool:
    """Whether a connection is accepted at the URL, whatever is spoken there."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or HTTPS_PORT)
    except OSError:
        return False
    writer.transport.abort()
    return True


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came of, the first cause first."""
    if error is not None:
        yield from _causes(error.__cause__)
        yield error


def _of_system(error: BaseException) -> str:
    """The system's words for an error of its own, without the address that it met it at."""
    if isinstance(error, socket.gaierror):
        return _plain(error.strerror or "")
    if isinstance(error, OSError) and error.errno:
        return _plain(os.strerror(error.errno))
    return "connection reset" if isinstance(error, ConnectionResetError) else ""


def _plain(text: str) -> str:
    """The words on one line, of bounded length, in the middle of a sentence."""
    words = label(text).rstrip(".")
    return words[:1].lower() + words[1:] if words[1:2].islower() else words
