"""What of valid settings is probably a mistake: told, never refused, for each may be meant."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from exporter.config.settings import Settings


class Warned(NamedTuple):
    """One warning; `server` is the name of the server that it is about, or empty."""

    server: str
    text: str


def warnings(settings: Settings) -> Iterator[Warned]:
    """Yield what the operator should look at, with the remedy; nothing is opened or asked."""
    if not settings.servers:
        yield Warned("", "no servers: only this machine's ceilings are measured; add servers:")
    for server in settings.servers:
        if without := _without_v1(server.url):
            # A server behind `--api-prefix /v1` does have its /health there.
            text = f"url is that of the OpenAI API, not of the server: leave out /v1: write {without}"
            yield Warned(server.name, text)


def _without_v1(url: str) -> str:
    """Return a validated URL up to its /v1; empty where it has none."""
    if url.startswith("unix:"):
        return ""
    path = urlsplit(url).path
    found = re.search(r"/v1(/|$)", path)
    return url.removesuffix(path) + path[: found.start()] if found else ""
