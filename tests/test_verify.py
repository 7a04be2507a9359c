"""tools/verify.py: it passes true reports, finds every altered figure, and refuses figures that it does not know."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import snapshots
import verify
from hypothesis import given
from hypothesis import strategies as st

from exporter.present.metric_table import DECODE
from exporter.present.report import Format, report_text
from exporter.roofline.footprint import Attention, BytesSource, Experts, Footprint
from exporter.roofline.snapshot import BatchRecord, Model, Server, Snapshot, view

TOOL = Path(verify.__file__)
GIB = 2**30 / 1e9

MIXTURE = Footprint(
    parameters=2e9,
    weight_bytes=1.2e9,
    source=BytesSource.FILE,
    head_bytes=100e6,
    experts=(Experts(100e6, 2e8, 8, 2), Experts(100e6, 2e8, 8, 2), Experts(120e6, 2e8, 8, 2)),
    attention=(Attention(4_000, 8_000, window=64), Attention(4_000, 8_000, window=64), Attention(4_000, 8_000)),
    state_bytes=1e6,
)
"""Everything that a footprint can have; at depth 100 the windows cut off."""


def mixture() -> Snapshot:
    model = replace(snapshots.MODEL, footprint=MIXTURE)
    records = {b: snapshots.record(b, seconds) for b, seconds in ((1, 0.05), (2, 0.07), (4, 0.1))}
    return Snapshot(snapshots.host(), (replace(snapshots.cpu_server(model=model), batches=records),))


def awkward() -> Snapshot:
    """An implausible server, one without a model, one whose bytes nobody knows, one without a sample."""
    fast = replace(snapshots.cpu_server("fast"), batches={1: snapshots.record(1, 0.008), 2: snapshots.record(2, 0.03)})
    nameless = Model("x", "", "", None, None, None)
    return Snapshot(
        snapshots.host(),
        (
            fast,
            replace(snapshots.cpu_server("bare"), model=None),
            snapshots.cpu_server("untold", model=nameless),
            replace(snapshots.cpu_server("cold"), batches={1: BatchRecord(), 2: BatchRecord()}),
        ),
    )


def doubtful() -> Snapshot:
    """Servers whose samples were disturbed, each in its way, and one that drafts tokens."""

    def server(name: str, *changes: dict[str, Any]) -> Server:
        records = {b: snapshots.record(b, seconds) for b, seconds in ((1, 0.05), (4, 0.1))}
        for (batch, known), change in zip(list(records.items()), changes, strict=False):
            assert known.sample is not None
            records[batch] = replace(known, sample=replace(known.sample, **change))
        return replace(snapshots.cpu_server(name), batches=records)

    return Snapshot(
        snapshots.host(),
        (
            server("contended", {"contended": True}),
            server("uneven", {}, {"step_spread_ratio": 0.3}),
            server("faster", {"step_seconds": 0.2}),
            server("nearly", {"step_seconds": 0.102}),
            server("slowed", {"contended": True, "step_seconds": 0.02}),
            server("drafting", {"speculative": True, "tokens_per_step": 1.625}),
        ),
    )


def report(snapshot: Snapshot) -> Any:
    return json.loads(report_text(view(snapshot, snapshots.NOW), Format.JSON))


BUILDS = (snapshots.rich, snapshots.empty, snapshots.unreachable, mixture, awkward, doubtful)


@pytest.mark.parametrize("build", BUILDS)
def test_a_true_report_passes(build: Callable[[], Snapshot]) -> None:
    _, wrong = verify.verify(report(build()))
    assert wrong == []


def test_it_says_how_many_figures_it_checked() -> None:
    checked, _ = verify.verify(report(snapshots.rich()))
    assert checked == len([place for place, _ in derived(report(snapshots.rich()))])
    assert checked > 100


def derived(document: Any) -> Iterator[tuple[str, Any]]:
    """The place and value of every figure that is recomputed."""
    found = {f"host.{place}" for place in verify.host_figures(document["host"])}
    for number, server in enumerate(document["servers"]):
        found |= {f"servers.{number}.{place}" for place in verify.Server(document["host"], server).figures()}
    yield from ((place, value) for place, value in verify.leaves(document) if place in found)


def altered(document: Any, place: str, value: object) -> Any:
    """The document with another value at that place."""
    copy = json.loads(json.dumps(document))
    *way, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    inner = copy
    for part in way:
        inner = inner[part] if not isinstance(inner, dict) else inner[str(part)]
    inner[last if isinstance(inner, list) else str(last)] = value
    return copy


@pytest.mark.parametrize("factor", [1.01, 0.99, GIB, 1 + 2e-6])
@pytest.mark.parametrize("build", [snapshots.rich, mixture, doubtful])
def test_every_altered_figure_is_found(build: Callable[[], Snapshot], factor: float) -> None:
    document = report(build())
    numbers = [(p, v) for p, v in derived(document) if isinstance(v, int | float) and not isinstance(v, bool) and v]
    assert len(numbers) > 60
    for place, value in numbers:
        _, wrong = verify.verify(altered(document, place, value * factor))
        assert any("published" in line for line in wrong), place


@pytest.mark.parametrize("build", [snapshots.rich, mixture, doubtful])
def test_every_altered_word_and_flag_is_found(build: Callable[[], Snapshot]) -> None:
    document = report(build())
    others = [(p, v) for p, v in derived(document) if isinstance(v, bool | str) or not v]
    assert len(others) > 8
    for place, value in others:
        opposite = "something-else" if isinstance(value, str) else not value
        assert verify.verify(altered(document, place, opposite))[1], place


@pytest.mark.parametrize("build", [snapshots.rich, mixture, doubtful])
def test_every_missing_figure_is_found(build: Callable[[], Snapshot]) -> None:
    document = report(build())
    published = [p for p, _ in derived(document) if not verify.RAW.fullmatch(re.sub(r"^(host|servers\.\d+)\.", "", p))]
    assert len(published) > 60
    for place in published:
        assert any("not published" in line for line in verify.verify(altered(document, place, None))[1]), place


@pytest.mark.parametrize(
    "place",
    [
        "servers.0.batches.0.decode_step_seconds",
        "servers.0.batches.0.depth_tokens",
        "servers.0.ceilings.1.bytes_per_second",
        "servers.0.footprint.weight_bytes",
        "servers.0.footprint.parameters",
        "servers.0.footprint.experts.0.used",
        "servers.0.footprint.attention.0.window_tokens",
        "servers.0.footprint.state_bytes",
        "host.memory_bandwidth.1.best_bytes_per_second",
        "host.compute.0.flops_per_second",
    ],
)
def test_a_measurement_that_the_figures_do_not_follow_from_is_found(place: str) -> None:
    document = report(mixture())
    assert verify.verify(altered(document, place, dict(verify.leaves(document))[place] * GIB))[1]


@pytest.mark.parametrize("where", ["host", "servers.0", "servers.0.batches.1", "servers.0.verdict.evidence"])
def test_a_figure_that_it_does_not_know_is_an_error(where: str) -> None:
    document = report(snapshots.rich())
    _, wrong = verify.verify(altered(document, f"{where}.new_ratio", 0.5))
    assert len(wrong) == 1
    assert "new_ratio: published 0.5, but verify.py does not know how to recompute it" in wrong[0]


def test_every_decode_metric_is_raw_or_recomputed() -> None:
    """A new one in the table fails here until verify.py knows it."""
    document = report(snapshots.rich())
    known = {place for place, _ in derived(document)}
    for metric in DECODE:
        place = f"batches.2.{metric.name}"
        assert verify.RAW.fullmatch(place) or any(k.startswith(f"servers.0.{place}") for k in known), metric.name


def test_a_line_names_server_batch_figure_and_both_values() -> None:
    document = altered(report(snapshots.rich()), "servers.0.batches.2.decode_floor_ratio", 0.5)
    assert verify.verify(document)[1] == ["local: batch 4: decode_floor_ratio: published 0.5, recomputed 0.38"]


@given(
    st.dictionaries(st.integers(1, 9), st.floats(1e-4, 10), min_size=1, max_size=4),
    st.floats(0, 1e5),
    st.sampled_from([MIXTURE, snapshots.MODEL.footprint, None]),
)
def test_any_report_passes(seconds: Mapping[int, float], depth: float, footprint: Footprint | None) -> None:
    records = {b: BatchRecord(sample=replace(snapshots.sample(b, t), depth=depth)) for b, t in seconds.items()}
    model = replace(snapshots.MODEL, footprint=footprint)
    server = replace(snapshots.cpu_server(model=model), batches=records)
    _, wrong = verify.verify(report(Snapshot(snapshots.host(), (server,))))
    assert wrong == []


def test_a_step_above_its_reference_has_a_budget_and_an_implausible_one_no_floor() -> None:
    """A GPU whose steps read at 0.9 and at 1.2 of the peak; the reference is 0.8 of it."""
    server = snapshots.gpu_server()
    footprint = Footprint(1e9, 64e8, BytesSource.FILE, head_bytes=4e8)
    records = {b: snapshots.record(b, 0.01 / share) for b, share in ((1, 0.9), (2, 1.2))}
    server = replace(server, batches=records, model=replace(snapshots.MODEL, footprint=footprint))
    document = report(Snapshot(snapshots.host(), (server,)))
    assert verify.verify(document)[1] == []
    exceeding, implausible = document["servers"][0]["batches"]
    assert exceeding["decode_floor_ratio"] == pytest.approx(1.125)
    budget = exceeding["decode_budget_seconds"]
    assert (sum(budget.values()), budget["overhead"]) == (pytest.approx(0.01 / 0.9), 0)
    assert implausible["decode_implausible"] == 1
    withheld = {"decode_floor_seconds", "decode_attainable_tokens_per_second", "decode_budget_seconds"}
    assert withheld <= exceeding.keys()
    assert not withheld & implausible.keys()


def test_it_shares_no_code_with_the_exporter() -> None:
    for node in ast.walk(ast.parse(TOOL.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert all(name.split(".")[0] in sys.stdlib_module_names for name in names), names


# --- as a command --------------------------------------------------------------------------------------------------


def run(text: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-I", str(TOOL), *arguments)
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)


def test_the_command_tells_by_its_exit_status(tmp_path: Path) -> None:
    document = report(snapshots.rich())
    file = tmp_path / "report.json"
    file.write_text(json.dumps(document))
    done = run(None, str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(" derived figures checked, 0 differences\n")
    done = run(json.dumps(altered(document, "servers.0.ridge_flops_per_byte", 9)), "-")
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == "local: ridge_flops_per_byte: published 9, recomputed 8.0"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"host": 1, "servers": []}', "# HELP x"])
def test_what_is_no_report_is_told_without_a_traceback(text: str) -> None:
    done = run(text, "-")
    assert done.returncode == 2
    assert "not a report" in done.stderr
    assert "Traceback" not in done.stderr
    assert run(None).returncode == 2
    assert run(None, "/none.json").returncode == 2
