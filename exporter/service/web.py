"""The HTTP surface. Every page renders what is already known; none of them does I/O or waits for a server."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.aiohttp import make_aiohttp_handler

from exporter.roofline.snapshot import Snapshot, view
from exporter.service.ask import STATUS_HEADER
from exporter.service.clocks import Clocks

_CONTENT_TYPES: Final[Mapping[str, str]] = {
    "json": "application/json",
    "table": "text/plain",
    "markdown": "text/markdown",
    "csv": "text/csv",
}

_STUCK: Final = (
    "The measuring loop is stuck: it has not ticked for 3 health intervals, and what it was last seen to begin had its"
    " time before that: a request of a probe probe.timeout and 15 s, a bandwidth run 60 s.\n"
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Served:
    """What the pages show and do.

    Attributes:
        snapshot: The newest snapshot.
        healthy: Whether the measuring loop is alive.
        config_yaml: The configuration in force as text, secrets masked.
        reload: Reads the configuration again; returns every error, none on success.
    """

    snapshot: Callable[[], Snapshot]
    healthy: Callable[[], bool]
    config_yaml: Callable[[], str]
    reload: Callable[[], Awaitable[Sequence[str]]]
    version: str
    clocks: Clocks


def build_app(served: Served, registry: CollectorRegistry) -> web.Application:
    """The application with all routes of the exporter."""

    async def page(_: web.Request) -> web.Response:
        # Here and below: templates and tables take 4 MiB, and most exporters are only scraped.
        from exporter.present.page import landing_page

        seen = view(served.snapshot(), served.clocks.monotonic())
        html = landing_page(seen, served.version, served.clocks.unix())
        return web.Response(text=html, content_type="text/html")

    async def snapshot(request: web.Request) -> web.Response:
        from exporter.present.report import Format, report_exit_code, report_text

        seen = view(served.snapshot(), served.clocks.monotonic())
        form = request.query.get("format", "json")
        if form not in _CONTENT_TYPES:
            raise web.HTTPBadRequest(text=f"format is one of {', '.join(_CONTENT_TYPES)}\n")
        return web.Response(
            text=report_text(seen, Format(form)),
            content_type=_CONTENT_TYPES[form],
            headers={STATUS_HEADER: str(report_exit_code(seen))},
        )

    async def config(_: web.Request) -> web.Response:
        return web.Response(text=served.config_yaml())

    async def reload(_: web.Request) -> web.Response:
        if errors := await served.reload():
            # As Prometheus answers, so that its tools understand it.
            return web.Response(status=500, text="\n".join(["the configuration cannot be used:", *errors, ""]))
        return web.Response(text="Reloaded; in force as soon as the measurement at hand ends.\n")

    async def healthy(_: web.Request) -> web.Response:
        if served.healthy():
            return web.Response(text="Healthy\n")
        return web.Response(status=503, text=_STUCK)

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text="Ready\n")

    app = web.Application(middlewares=[_headers])
    app.router.add_get("/", page)
    app.router.add_get("/metrics", make_aiohttp_handler(registry))
    app.router.add_get("/api/v1/snapshot", snapshot)
    app.router.add_get("/config", config)
    app.router.add_post("/-/reload", reload)
    app.router.add_get("/-/healthy", healthy)
    app.router.add_get("/-/ready", ready)
    return app


@web.middleware
async def _headers(request: web.Request, handler: Handler) -> web.StreamResponse:
    response = await handler(request)
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Cache-Control"] = "no-store"
    return response
