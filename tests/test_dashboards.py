"""The dashboards as files: generated, valid in Grafana's schema, and naming only what the exporter has."""

from __future__ import annotations

import json
import re
import warnings
from itertools import combinations
from typing import TYPE_CHECKING, Any

import boards
import generate
import pytest
import yaml
from board.panels import now, stat
from board.promql import Scope, full_name
from boards import FILES, filled_in, load, names_of, panels, targets, variables

from exporter.present.metrics import SnapshotCollector, build_registry

if TYPE_CHECKING:
    from pathlib import Path

    from exporter.roofline.snapshot import Snapshot

PANEL_TYPES = {"stat", "timeseries", "table", "bargauge", "histogram", "xychart"}
OTHERS = {"up", "ALERTS", "process_cpu_seconds_total", "process_resident_memory_bytes", "process_start_time_seconds"}

every_board = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def exported() -> set[str]:
    """Every name that a scrape of the exporter can hold."""

    def no_snapshot() -> Snapshot:
        raise AssertionError("describing needs no snapshot")

    collector = SnapshotCollector(no_snapshot, lambda: 0.0, "0")
    build_registry(collector)  # as the exporter does: no `_created` series
    suffix = {"counter": "_total", "info": "_info"}
    return {family.name + suffix.get(family.type, "") for family in collector.describe()}


def test_the_committed_files_are_what_the_generator_writes() -> None:
    assert generate.outdated() == []
    assert {path.name for path in FILES} == {"decode-roofline.json", "fleet.json"}


def test_a_changed_or_superfluous_file_is_out_of_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "DIRECTORY", tmp_path)
    for path, text in generate.files().items():
        path.write_text(text)
    assert generate.outdated() == []
    (tmp_path / "fleet.json").write_text("{}")
    (tmp_path / "old.json").write_text("{}")
    assert [path.name for path in generate.outdated()] == ["fleet.json", "old.json"]


def test_the_generator_refuses_a_name_that_the_exporter_does_not_have() -> None:
    with pytest.raises(KeyError, match="decode_floor_rate"):
        full_name("decode_floor_rate")


@every_board
def test_every_metric_named_is_exported(path: Path) -> None:
    known = exported() | OTHERS
    for expression in boards.expressions(load(path)):
        assert names_of(expression), expression
        assert set(names_of(expression)) <= known


@every_board
def test_every_selector_is_limited_to_the_chosen_job_and_instance(path: Path) -> None:
    board = load(path)
    asked = [target["expr"] for _, target in targets(board)] + [a["expr"] for a in board["annotations"]["list"]]
    for expression in asked:
        for name, matchers in re.findall(r"\b((?:roofline|process)_\w+|up|ALERTS)\b(\{[^}]*\})?", expression):
            assert 'job=~"$job"' in matchers, (name, expression)
            assert re.search(r'instance=~?"\$instance"', matchers), (name, expression)


@every_board
def test_every_variable_in_use_is_defined(path: Path) -> None:
    board = load(path)
    values = {v["name"]: "x" for v in variables(board)} | {"__rate_interval": "2m", "__range": "6h"}
    for expression in (*boards.expressions(board), *(panel["title"] for panel in panels(board))):
        assert "$" not in filled_in(expression, values)


@every_board
def test_all_jobs_are_those_of_our_exporters(path: Path) -> None:
    """`up`, ALERTS and start times of others have other jobs: All must not be `.+`."""
    (job,) = (v for v in variables(load(path)) if v["name"] == "job")
    assert "allValue" not in job
    assert "roofline_server_up" in job["query"]["query"]


@every_board
def test_rates_use_the_rate_interval_and_a_step_that_two_scrapes_fit_in(path: Path) -> None:
    for panel, target in targets(load(path)):
        for function, window in re.findall(r"(rate|increase)\([^\[]*\[([^\]]*)\]", target["expr"]):
            assert window == ("$__range" if target["instant"] else "$__rate_interval"), function
            assert target["instant"] or panel["interval"] == "2m"


@every_board
def test_the_data_source_is_a_variable_everywhere(path: Path) -> None:
    board = load(path)
    text = path.read_text(encoding="utf-8")
    assert "__inputs" not in text
    assert "DS_" not in text
    assert variables(board)[0]["type"] == "datasource"
    assert all(v["current"] == {} for v in variables(board)), "no value of the author's"
    wanted = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels(board):
        assert [panel["datasource"], *(t["datasource"] for t in panel["targets"])] == [wanted] * (
            1 + len(panel["targets"])
        )
    for part in (*variables(board)[1:], *board["annotations"]["list"]):
        assert part["datasource"] == wanted


@every_board
def test_the_file_is_what_provisioning_takes_in_every_release(path: Path) -> None:
    board = load(path)
    assert board["schemaVersion"] == 39
    assert not {"elements", "apiVersion", "spec", "version", "iteration", "gnetId"} & set(board)
    assert board["id"] is None
    assert re.fullmatch(r"roofline-[a-z]+", board["uid"])
    assert "roofline" in board["tags"]


def test_uids_are_unique() -> None:
    assert len({load(path)["uid"] for path in FILES}) == len(FILES)


@every_board
def test_every_panel_has_type_unit_and_overrides(path: Path) -> None:
    for panel in panels(load(path)):
        assert panel["type"] in PANEL_TYPES
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert isinstance(panel["fieldConfig"]["overrides"], list)
        assert panel["pluginVersion"] == "11.1.0", "an empty one makes Grafana migrate xychart's options away"
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) > 0


@every_board
def test_every_description_ends_with_the_metrics_that_are_read(path: Path) -> None:
    for panel in panels(load(path)):
        read = dict.fromkeys(name for target in panel["targets"] for name in names_of(target["expr"]))
        text, _, named = panel["description"].rpartition(" Metric: " if len(read) == 1 else " Metrics: ")
        assert len(text) > 20
        assert named == ", ".join(f"`{name}`" for name in read)


@every_board
def test_panels_have_their_own_id_and_place(path: Path) -> None:
    board = load(path)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in board["panels"]]
    for place in places:
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
    for a, b in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or below, (a, b)


@every_board
def test_tables_are_instant_and_the_rest_is_one_or_the_other(path: Path) -> None:
    for panel, target in targets(load(path)):
        assert target["instant"] is not target["range"]
        tabular = panel["type"] in {"table", "xychart", "histogram"}
        assert (target.get("format") == "table") is tabular
        assert target["range"] is (panel["type"] == "timeseries")


def lost(before: Any, after: Any, where: str = "") -> set[str]:
    """Where the second lacks a key or a value of the first; list positions are left out of the names."""
    if isinstance(before, dict):
        if not isinstance(after, dict):
            return {where}
        return {
            gone
            for key, value in before.items()
            for gone in (
                lost(value, after[key], f"{where}.{key}".lstrip("."))
                if key in after
                else {f"{where}.{key}".lstrip(".")}
                if value is not None
                else ()
            )
        }
    if isinstance(before, list):
        if not isinstance(after, list) or len(after) != len(before):
            return {where}
        return {gone for b, a in zip(before, after, strict=True) for gone in lost(b, a, f"{where}[]")}
    return set() if before == after else {where}


def round_trip(board: dict[str, Any]) -> dict[str, Any]:
    """The dashboard through Grafana's own typed models and back."""
    with warnings.catch_warnings():
        # The newer schema is preferred there; file provisioning takes only this one.
        warnings.filterwarnings("ignore", "Prefer using", DeprecationWarning)
        from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: PLC0415 - importing it warns
        from grafana_foundation_sdk.cog.plugins import register_default_plugins  # noqa: PLC0415
        from grafana_foundation_sdk.models.dashboard import Dashboard  # noqa: PLC0415

        register_default_plugins()
        encoded: dict[str, Any] = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
    return encoded


@every_board
def test_grafanas_typed_models_know_every_key(path: Path) -> None:
    board = load(path)
    assert lost(board, round_trip(board)) == set()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda panel: panel.update(discription="x"), "panels[].discription"),
        (lambda panel: panel["options"].update(colourMode="x"), "panels[].options.colourMode"),
        (lambda panel: panel["fieldConfig"]["defaults"].update(units="x"), "panels[].fieldConfig.defaults.units"),
        (lambda panel: panel["targets"][0].update(legend="x"), "panels[].targets[].legend"),
    ],
)
def test_a_misspelt_key_is_found(change: Any, where: str) -> None:
    panel = stat("A title", "A long enough description.", now(Scope("")("server_up")), unit="short")
    change(panel)
    board = {"panels": [{"id": 1, "gridPos": {"x": 0, "y": 0, "w": 4, "h": 4}, **panel}]}
    assert lost(board, round_trip(board)) == {where}


def test_provisioning_files_load_the_dashboards_and_no_author_of_theirs() -> None:
    directory = boards.ROOT / "provisioning"
    (provider,) = yaml.safe_load((directory / "dashboards" / "roofline.yaml").read_text())["providers"]
    assert provider["type"] == "file"
    assert provider["allowUiUpdates"] is False
    assert provider["options"]["path"].startswith("/")
    (source,) = yaml.safe_load((directory / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    assert source["jsonData"]["timeInterval"]
