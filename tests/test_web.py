"""The HTTP surface, and addresses to listen on."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import snapshots
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.web import Application, Request
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from exporter.present.metrics import SnapshotCollector, build_registry
from exporter.roofline.snapshot import Snapshot
from exporter.service.ask import STATUS_HEADER, parse_address
from exporter.service.clocks import Clocks
from exporter.service.web import Served, build_app

CLOCKS = Clocks(lambda: snapshots.NOW, lambda: 1.7e9)
Client = TestClient[Request, Application]


@asynccontextmanager
async def client_of(snapshot: Snapshot, *, healthy: bool = True, errors: tuple[str, ...] = ()) -> AsyncIterator[Client]:
    async def reload() -> tuple[str, ...]:
        return errors

    served = Served(
        snapshot=lambda: snapshot,
        healthy=lambda: healthy,
        config_yaml=lambda: "probe:\n  interval: 5m\n",
        reload=reload,
        version="1.2.3",
        clocks=CLOCKS,
    )
    registry = build_registry(SnapshotCollector(lambda: snapshot, CLOCKS.monotonic, "1.2.3"))
    async with TestClient(TestServer(build_app(served, registry))) as client:
        yield client


async def test_metrics_in_both_formats() -> None:
    """What Prometheus asks for by default is OpenMetrics; everybody else gets text."""
    async with client_of(snapshots.rich()) as client:
        text = await client.get("/metrics")
        assert text.content_type == "text/plain"
        names = {s.name for f in parse_text(await text.text()) for s in f.samples}
        assert "roofline_decode_floor_ratio" in names
        modern = await client.get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"})
        assert modern.content_type == "application/openmetrics-text"
        families = parse_openmetrics(await modern.text())  # type: ignore[no-untyped-call]
        assert {s.name for f in families for s in f.samples} >= names
        assert text.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("snapshot", [snapshots.rich(), snapshots.empty(), snapshots.unreachable()])
async def test_every_page_answers_whatever_is_known(snapshot: Snapshot) -> None:
    async with client_of(snapshot) as client:
        for path in ("/", "/metrics", "/api/v1/snapshot", "/config", "/-/healthy", "/-/ready"):
            answer = await client.get(path)
            assert answer.status == 200, path
            assert await answer.text()


@pytest.mark.parametrize(
    ("form", "kind"),
    [("json", "application/json"), ("table", "text/plain"), ("markdown", "text/markdown"), ("csv", "text/csv")],
)
async def test_snapshot_in_every_format_of_report(form: str, kind: str) -> None:
    async with client_of(snapshots.rich()) as client:
        answer = await client.get("/api/v1/snapshot", params={"format": form})
        assert answer.content_type == kind
        assert answer.headers[STATUS_HEADER] in {"0", "1", "3"}
        assert "local" in await answer.text()
        assert (await client.get("/api/v1/snapshot", params={"format": "xml"})).status == 400


async def test_a_dead_loop_is_not_healthy_but_metrics_go_on() -> None:
    async with client_of(snapshots.rich(), healthy=False) as client:
        answer = await client.get("/-/healthy")
        assert answer.status == 503
        assert "probe.timeout and 15 s" in await answer.text()
        assert (await client.get("/-/ready")).status == 200
        assert (await client.get("/metrics")).status == 200


async def test_a_reload_tells_every_error() -> None:
    async with client_of(snapshots.rich()) as client:
        answer = await client.post("/-/reload")
        assert (answer.status, (await client.get("/-/reload")).status) == (200, 405)
    async with client_of(snapshots.rich(), errors=("c.yaml:1: one", "c.yaml:2: two")) as client:
        answer = await client.post("/-/reload")
        assert answer.status == 500
        assert (await answer.text()).splitlines()[1:] == ["c.yaml:1: one", "c.yaml:2: two"]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:10470", ("127.0.0.1", 10470)),
        (":10470", ("0.0.0.0", 10470)),
        ("[::1]:80", ("::1", 80)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "10470", "localhost", "a:b", "a:99999", "http://a:1", "a:1/x", "u@a:1", "::1:80"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_address(text)
