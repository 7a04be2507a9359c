"""What a single value may be: bounds for quantities, and the shapes of names, lists, server addresses and file paths.

A wrong address or path is often a secret in the wrong place, so no message shows a password, a query or a likely key.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
import stat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator

from exporter.config.keyfile import read_key, unreadable
from exporter.config.units import format_bandwidth, parse_bandwidth, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import ValidationInfo

_N = TypeVar("_N", int, float)

LEAST_BANDWIDTH, MOST_BANDWIDTH = 1e9, 1e15
"""Bytes/s that a memory can have: slower ones are mistakes in the unit, and so are faster ones."""

MOST_THREADS = 1024
"""That the C kernels take (MEMBENCH_MAX_THREADS)."""

MANDATORY = {"name": "local", "url": "http://127.0.0.1:8080"}
"""The keys that every server needs, each with an example."""

_PATHS = {"gguf": "/models/model.gguf", "ca_file": "/etc/ssl/private-ca.pem"}


def within(
    parse: Callable[[object], _N], show: Callable[[_N], str], low: _N | None, high: _N, base_unit: str = ""
) -> BeforeValidator:
    """Return a validator that parses what people write and keeps it within what can be true."""

    def check(value: object) -> _N:
        hint = f"; a number without a unit is in {base_unit}" if base_unit and not isinstance(value, str) else ""
        return bounded(value, parse(value), show, low=low, high=high, hint=hint)

    return BeforeValidator(check)


def bounded(value: object, number: _N, show: Callable[[_N], str], *, low: _N | None, high: _N, hint: str = "") -> _N:
    """Return the number that the value was parsed to, if it can be true."""
    if low is not None and number < low:
        raise ValueError(f"{shown(value)} is too small: the least is {show(low)}{hint}")
    if number > high:
        raise ValueError(f"{shown(value)} is too large: the most is {show(high)}")
    return number


def memory_bandwidth(value: object) -> float:
    """Return bytes per second of a memory that can exist, from what people write."""
    return bounded(value, parse_bandwidth(value), format_bandwidth, low=LEAST_BANDWIDTH, high=MOST_BANDWIDTH)


def whole_number(value: object) -> int:
    """Return the value if it is a whole number and nothing that merely converts to one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{shown(value)} is not a whole number; write e.g. 4, without quotes or unit")
    return value


def thread_count(value: object) -> object:
    """Return None for `auto`, else what must be a whole number."""
    if value == "auto":
        return None
    if isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a thread count; write auto or a whole number such as 4")
    return value


def idle_time(value: object) -> object:
    """Return what must be a duration, unless it is what llama-server and others take for never."""
    if isinstance(value, str | int | float) and re.fullmatch(r"-.*|0+\s*[a-z]*", str(value).strip()):
        raise ValueError(f"{shown(value)} is not more than 0; leave it empty if the server does not sleep")
    return value


def plain_text(value: object, info: ValidationInfo) -> str:
    """Return the value if it is text on one line."""
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not text; put it in quotes")
    if not value.strip():
        example = MANDATORY.get(info.field_name or "")
        remedy = f"every server needs one, e.g. {info.field_name}: {example}"
        raise ValueError(f"{shown(value)} is empty; {remedy if example else 'write a text, or remove the key'}")
    if not value.isprintable():
        raise ValueError(f"{shown(masked_url(value))} has characters that cannot be printed; remove them")
    return value


def server_name(value: str) -> str:
    """Return the name if it is fit to be a label value and a URL part."""
    if not re.fullmatch(r"[a-z0-9_-]{1,40}", value, re.ASCII):
        raise ValueError(f"{shown(value)} is not a server name; write 1 to 40 of a-z, 0-9, _ and -")
    return value


def listed(value: object) -> object:
    """Return the list as a tuple."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{shown(value)} is not a list; write its entries within [ ], or one per line after a dash")
    return tuple(value)


def in_order(batches: tuple[int, ...]) -> tuple[int, ...]:
    """Return the batches in ascending order."""
    if not batches:
        raise ValueError("a list without a batch measures nothing; write e.g. [1, 2, 4]")
    if twice := sorted({batch for batch in batches if batches.count(batch) > 1}):
        which, each = " and ".join(map(str, twice)), "" if len(twice) == 1 else " of each"
        raise ValueError(f"{which} {'are' if each else 'is'} listed more than once; keep one{each}")
    return tuple(sorted(batches))


def file_path(value: object, info: ValidationInfo) -> Path:
    """Return the path, a relative one taken from the directory of the configuration file."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        example = _PATHS.get(info.field_name or "", "/run/secrets/key")
        raise ValueError(f"the value is not the path of a file; write e.g. {example}")  # may be a key: not shown
    return Path(info.context["base"], value) if info.context else Path(value)


def readable_file(path: Path, info: ValidationInfo) -> Path:
    """Check that the file can be read; only when loading, so that settings made in code touch no disk."""
    if not info.context:
        return path
    seen = "the value (not shown: it looks like a secret)" if _looks_secret(path, info.context["base"]) else f"'{path}'"
    try:
        status = path.stat()
        seen = f"'{path}'"  # it exists, so it is a path
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{seen} is not a regular file; write the path of a file")
        if status.st_size == 0:
            raise ValueError(f"{seen} is an empty file; fill it, or remove the key")
        path.open("rb").close()
    except OSError as error:
        raise ValueError(unreadable(seen, error)) from None
    return path


def key_file(path: Path, info: ValidationInfo) -> Path:
    """Check that the file holds one API key; only when loading, as `readable_file`."""
    if info.context:
        read_key(path)
    return path


def certificate_file(path: Path, info: ValidationInfo) -> Path:
    """Check that the file holds certificates that TLS can use; only when loading, as `readable_file`."""
    if info.context:
        try:
            ssl.create_default_context(cafile=path)
        except (ssl.SSLError, OSError):
            raise ValueError(f"'{path}' holds no certificate; write the path of a PEM file") from None
    return path


def _looks_secret(path: Path, base: Path) -> bool:
    # People paste the key itself where its file belongs, and the error message ends up in a log.
    text = str(path.relative_to(base) if path.is_relative_to(base) else path)
    return re.match(r"sk-|eyJ|hf_|Bearer |[^./~][^.]{15,}$", text) is not None


def server_url(value: str) -> str:
    """Return the URL without a trailing slash, its scheme and host in lower case."""
    seen = shown(masked_url(value))
    if any(character.isspace() for character in value) or not value.isascii():
        raise ValueError(f"{seen} has spaces or characters beyond ASCII; write e.g. http://127.0.0.1:8080")
    if "@" in value:
        raise ValueError(f"{seen} has an @: no user name or password belongs here; remove it, and use api_key_file")
    if value.lower().startswith("unix:"):
        return _unix_url(value, seen)
    if "://" not in value:
        raise ValueError(f"{seen} has no scheme; write e.g. http://127.0.0.1:8080, or unix:/path/to.sock")
    try:
        parts = urlsplit(value)
        port = parts.port
        host = (parts.hostname or "").lower()
        if parts.netloc.startswith("["):
            ipaddress.IPv6Address(host)
            host = f"[{host}]"
    except ValueError:
        raise ValueError(f"{seen} has an impossible address or port; write e.g. http://[::1]:8080") from None
    if parts.scheme not in {"http", "https"}:
        raise ValueError(f"{seen} has a scheme other than http, https and unix; write e.g. http://127.0.0.1:8080")
    if "?" in value or "#" in value:
        raise ValueError(f"{seen} has a query or fragment; end the address with the host, port or API prefix")
    if port == 0 or not re.fullmatch(r"[a-z0-9_](?:[a-z0-9._-]*)|\[[0-9a-f:.%]+[a-z0-9]*\]", host):
        raise ValueError(f"{seen} has an impossible address or port; write e.g. http://127.0.0.1:8080")
    address = host if port is None else f"{host}:{port}"
    return f"{parts.scheme}://{address}{parts.path.rstrip('/')}"


def same_server(url: str) -> str:
    """Return a form of a validated URL that two ways to write the same address share; it is not for asking.

    A scheme's own port, a closing dot of the host, and the zeros of an IPv6 address and the slashes of a socket's path
    may be written or left out.
    """
    if url.startswith("unix:"):
        return f"unix:{PurePosixPath(url.removeprefix('unix:'))}"
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    if ":" in host:
        host = str(ipaddress.IPv6Address(host))
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    return f"{parts.scheme}://[{host}]:{port}{parts.path}"


def _unix_url(value: str, seen: str) -> str:
    path = re.sub(r"^/+", "/", value[len("unix:") :])
    longest = 107  # sockaddr_un on Linux, with its closing zero
    if not path.startswith("/") or path == "/" or len(path) > longest or "?" in path or "#" in path:
        raise ValueError(f"{seen} is not the absolute path of a socket; write e.g. unix:/run/llama.sock")
    return f"unix:{path}"


def masked_url(url: str) -> str:
    """Return the URL with anything that may be a secret replaced: userinfo, query and fragment."""
    return re.sub(r"[?#].*", "?***", re.sub(r"^([^/]*//)?.*@", r"\1***@", url, flags=re.DOTALL), flags=re.DOTALL)
