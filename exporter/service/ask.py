"""Asking a running exporter, with the standard library alone: a health check must cost next to nothing."""

import json
import urllib.request
from http.client import HTTPException
from typing import Final
from urllib.parse import urlencode, urlsplit

STATUS_HEADER: Final = "X-Roofline-Report-Status"
"""Carries the exit status that `report` would have, so that `report --url` can have it too."""
_TIMEOUT: Final = 10.0
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
    if not url.startswith(("http://", "https://")):
        raise AskError(f"--url {url}: write it as http://HOST:PORT")
    base = url.rstrip("/").removesuffix("/api/v1/snapshot").removesuffix("/metrics").rstrip("/")
    try:
        host = urlsplit(base).hostname
    except ValueError:
        host = None
    if not host:
        raise AskError(f"--url {url}: names no host; write it as http://HOST:PORT")
    address = base + "/api/v1/snapshot"
    try:
        # The scheme is checked above.
        with urllib.request.urlopen(f"{address}?{urlencode({'format': form})}", timeout=_TIMEOUT) as answer:  # noqa: S310
            status, text = answer.headers.get(STATUS_HEADER), answer.read().decode()
    except (OSError, ValueError) as error:
        raise AskError(f"{address}: {error}; does an exporter run there?") from error
    if status is None:
        raise AskError(f"{address}: this is not a roofline-exporter")
    return text, int(status)


def ask_health(address: tuple[str, int]) -> str | None:
    """Why the exporter listening at the address is not healthy, or None."""
    url = f"http://{_authority(address)}/-/healthy"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT):
            return None
    except (OSError, ValueError) as error:
        return f"{url}: {error}"


def ask_read_ceiling(address: tuple[str, int]) -> float | None:
    """This machine's read ceiling, bytes/s, from the exporter listening at the address; None where it tells none."""
    url = f"http://{_authority(address)}/api/v1/snapshot"
    try:
        with urllib.request.urlopen(url, timeout=_GLANCE_TIMEOUT) as answer:
            found = json.load(answer)["host"]["memory_bandwidth"] if STATUS_HEADER in answer.headers else []
            rates = [m["best_bytes_per_second"] for m in found if (m["kernel"], m["threads"]) == ("read", "all")]
            return float(rates[0]) if rates else None
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        # Anything may listen there; what does not answer as an exporter is none.
        return None


def _authority(address: tuple[str, int]) -> str:
    """The address as it stands in a URL; one that listens everywhere is asked on this machine."""
    host, port = address
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{f'[{local}]' if ':' in local else local}:{port}"
