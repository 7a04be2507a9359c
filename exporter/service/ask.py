"""Asking a running exporter, with the standard library alone: a health check must cost next to nothing.

No proxy is asked, whatever the environment names: the exporter is near, and Docker sets `http_proxy` in containers.
"""

import json
import urllib.request
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from typing import Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode, urlsplit

STATUS_HEADER: Final = "X-Roofline-Report-Status"
"""Carries the exit status that `report` would have, so that `report --url` can have it too."""
_TIMEOUT: Final = 10.0
_REMEDY: Final = "write it as http://HOST:PORT"
_START: Final = "start an exporter there"
_WORDS: Final = 300
"""Bytes at most of what an answer says that is no success."""
_GLANCE_TIMEOUT: Final = 1.0
"""For a question whose answer is welcome but not needed."""


class AskError(Exception):
    """A running exporter did not answer as one."""


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `:PORT` (every interface) or `[::1]:PORT` as host and port.

    Raises:
        ValueError: It is none of these.
    """
    parts = urlsplit(f"//{text}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        port = None
    if port is None or parts.path or parts.query or parts.fragment or "@" in text:
        raise ValueError(f"{text!r} is not an address to listen on; write HOST:PORT, :PORT or [::1]:PORT")
    return host or "0.0.0.0", port


def fetch_report(url: str, form: str) -> tuple[str, int]:
    """The report of a running exporter, as text in that format, and its exit status.

    Raises:
        AskError: Nothing answers there, or not a roofline-exporter.
    """
    # What may hold a password is not repeated.
    if not url.startswith(("http://", "https://")):
        raise AskError(f"--url is no http address; {_REMEDY}")
    if set("@?#") & set(url):
        raise AskError(f"--url takes no user, query or fragment; {_REMEDY}")
    base = url.rstrip("/").removesuffix("/api/v1/snapshot").removesuffix("/metrics").rstrip("/")
    try:
        parts = urlsplit(base)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host:
        raise AskError(f"--url {url}: names no host, or a port that is none; {_REMEDY}")
    address = base + "/api/v1/snapshot"
    try:
        with _open(f"{address}?{urlencode({'format': form})}", _TIMEOUT) as answer:
            status, text = answer.headers.get(STATUS_HEADER, ""), answer.read().decode()
    except (OSError, HTTPException, ValueError) as error:
        raise AskError(f"{address}: {_why(error)}; {_START}, or name another with --url") from error
    if not status.isdecimal():
        raise AskError(f"{address}: this is not a roofline-exporter")
    return text, int(status)


def ask_health(address: tuple[str, int]) -> str | None:
    """Why the exporter listening at the address is not healthy, or None."""
    url = f"http://{_authority(address)}/-/healthy"
    try:
        with _open(url, _TIMEOUT):
            return None
    except (OSError, HTTPException, ValueError) as error:
        remedy = "" if isinstance(error, HTTPError) else f"; {_START}, or name another with --web.listen-address"
        return f"{url}: {_why(error)}{remedy}"


def ask_read_ceiling(address: tuple[str, int]) -> float | None:
    """This machine's read ceiling, bytes/s, from the exporter listening at the address; None where it tells none."""
    url = f"http://{_authority(address)}/api/v1/snapshot"
    try:
        with _open(url, _GLANCE_TIMEOUT) as answer:
            found = json.load(answer)["host"]["memory_bandwidth"] if STATUS_HEADER in answer.headers else []
            rates = [m["best_bytes_per_second"] for m in found if (m["kernel"], m["threads"]) == ("read", "all")]
            return float(rates[0]) if rates else None
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        # Anything may listen there; what does not answer as an exporter is none.
        return None


def _open(url: str, timeout: float) -> HTTPResponse:
    """Asks that address, and no proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    answer: HTTPResponse = opener.open(url, timeout=timeout)
    return answer


def _why(error: Exception) -> str:
    """The error in one line, in plain words: what answers there may say anything."""
    if isinstance(error, HTTPError):
        body = ""
        with suppress(OSError, HTTPException):
            body = error.read(_WORDS).decode(errors="replace")
        said = f"it answers {error.code}: {body or error.reason}"
    else:
        cause = error.reason if isinstance(error, URLError) and isinstance(error.reason, OSError) else error
        # Python's own errors have numbers before their words, and a time-out no more than its name.
        said = (cause.strerror or str(cause)).lower() if isinstance(cause, OSError) else str(cause)
    said = " ".join(said.split()) or type(error).__name__
    said = said if said.isprintable() else ascii(said)
    return f"no answer in HTTP: {said}" if isinstance(error, HTTPException) else said


def _authority(address: tuple[str, int]) -> str:
    """The address as it stands in a URL; one that listens everywhere is asked on this machine."""
    host, port = address
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{f'[{local}]' if ':' in local else local}:{port}"
