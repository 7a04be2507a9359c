"""The dashboards with real parts: asked of a real Prometheus, its answers put through Grafana's own transformations.

What is asked about is in `scene.py`. Nothing may be empty there: no query, no variable, no selector.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import transforms
from answers import asked_by
from board.roofline import INTENSITIES
from boards import FILES, filled_in, load, names_of, panels, targets, variables
from scene import BATCHES, Scene, set_up

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def scene(slow_model: Path, prometheus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with set_up(slow_model, prometheus, tmp_path_factory.mktemp("dashboards")) as found:
        yield found


every_board = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


@every_board
def test_every_query_answers(scene: Scene, path: Path) -> None:
    found = scene.answers.problems(asked_by(load(path)), scene.choices(path.stem))
    assert found == [], "\n".join(found)


@every_board
def test_every_variable_has_values(scene: Scene, path: Path) -> None:
    assert scene.answers.unanswered_variables(load(path), scene.choices(path.stem)[0]) == []


@every_board
def test_every_legend_names_labels_that_the_answers_have(scene: Scene, path: Path) -> None:
    for panel, target in targets(load(path)):
        named = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
        for chosen in scene.choices(path.stem):
            for labels, _ in scene.answers.now(filled_in(target["expr"], chosen)):
                assert named <= set(labels), panel["title"]


def test_what_others_export_is_not_counted(scene: Scene) -> None:
    assert scene.one("count(up == 0)") == 1
    (path,) = (path for path in FILES if path.stem == "fleet")
    (panel,) = (panel for panel in panels(load(path)) if panel["title"] == "Exporters unreachable")
    assert scene.one(filled_in(panel["targets"][0]["expr"], scene.choices("fleet")[0])) == 0


def test_both_addresses_can_be_chosen(scene: Scene) -> None:
    found = scene.answers.label_values('roofline_server_up{job=~".+"}', "instance")
    assert sorted(address.partition(":")[0] for address in found) == ["127.0.0.1", "localhost"]


@every_board
def test_each_batch_of_a_repeated_panel_answers(scene: Scene, path: Path) -> None:
    for panel in panels(load(path)):
        for batch in BATCHES if panel.get("repeat") == "batch" else ():
            for target in panel["targets"]:
                chosen = {**scene.choices(path.stem)[0], "batch": batch}
                assert len(scene.answers.now(filled_in(target["expr"], chosen))) == 1


def renamed(board: dict[str, Any], name: str) -> dict[str, Any]:
    """The dashboard as if the exporter had another name for a metric."""
    changed: dict[str, Any] = json.loads(re.sub(rf"\b{name}\b", f"{name}_renamed", json.dumps(board)))
    return changed


@every_board
def test_a_renamed_metric_is_found_wherever_it_stands(scene: Scene, path: Path) -> None:
    board = load(path)
    names = {name for asked in asked_by(board) for name in names_of(asked.expression)} - {"up", "ALERTS"}
    assert len(names) > 10
    assert any(name.startswith("roofline_live_") for name in names) == (path.stem == "decode-roofline")
    for name in names:
        affected = [asked for asked in asked_by(renamed(board, name)) if f"{name}_renamed" in asked.expression]
        found = "\n".join(scene.answers.problems(affected, scene.choices(path.stem)))
        assert affected
        assert [asked.where for asked in affected if f"{asked.where}: no series: {name}_renamed" not in found] == []


@every_board
def test_a_renamed_metric_leaves_a_variable_without_values(scene: Scene, path: Path) -> None:
    board = load(path)
    asked = {v["name"]: v["query"]["query"] for v in variables(board) if v["type"] == "query"}
    for name in {name for query in asked.values() for name in names_of(query)}:
        without = [variable for variable, query in asked.items() if name in names_of(query)]
        assert scene.answers.unanswered_variables(renamed(board, name), scene.choices(path.stem)[0]) == without


def roofline_of(scene: Scene, server: str) -> transforms.Shown:
    (path,) = (path for path in FILES if path.stem == "decode-roofline")
    (panel,) = (panel for panel in panels(load(path)) if panel["type"] == "xychart")
    (chosen,) = (choice for choice in scene.choices(path.stem) if choice["server"] == server)
    (shown,) = scene.shown([(panel, chosen)])
    return shown


def points_of(scene: Scene, server: str) -> dict[str, list[tuple[float, float]]]:
    """Where each batch stands, as the metrics tell."""

    def by_batch(name: str) -> dict[str, float]:
        found = scene.answers.now(f"roofline_decode_{name}{{{scene.of(server)}}}")
        return {labels["batch"]: value for labels, value in found}

    x, y = by_batch("intensity_flops_per_byte"), by_batch("flops_per_second")
    named = {f"Batch {batch}": [(x[batch], y[batch])] for batch in ("1", "2", "4")}
    return {**named, "Other batches": [(x["3"], y["3"])]}


def test_the_chart_draws_roof_ridge_and_points(scene: Scene) -> None:
    lines = roofline_of(scene, "cpu").lines()
    mine = scene.of("cpu")
    peak = scene.one(f"roofline_server_compute_peak_flops_per_second{{{mine}}}")
    ridge = scene.one(f"roofline_ridge_flops_per_byte{{{mine}}}")
    bandwidth = scene.one(f'roofline_ceiling_bytes_per_second{{{mine}, ceiling="read"}}')
    xs = [x for x, _ in lines["Roof"]]
    assert xs == sorted([*INTENSITIES, ridge])
    assert [y for _, y in lines["Roof"]] == pytest.approx([min(peak, x * bandwidth) for x in xs])
    assert lines["Ridge"] == [(ridge, peak)]
    assert {name: lines[name] for name in lines if "atch" in name} == points_of(scene, "cpu")


def test_only_the_diagonal_where_no_compute_peak_is_known(scene: Scene) -> None:
    lines = roofline_of(scene, "gpu").lines()
    xs = [x for x, _ in lines["Roof"]]
    assert xs == list(INTENSITIES)
    assert [y for _, y in lines["Roof"]] == pytest.approx([x * 0.8 * 1e12 for x in xs])
    assert not lines.get("Ridge")
    assert {name: lines[name] for name in lines if "atch" in name} == points_of(scene, "gpu")


def test_a_server_without_samples_has_a_roof_and_no_points(scene: Scene) -> None:
    lines = roofline_of(scene, "down").lines()
    assert len(lines["Roof"]) == 10
    assert len(lines["Ridge"]) == 1
    assert set(lines) == {"Roof", "Ridge"}


def test_the_points_carry_model_batch_and_ratio_for_the_tooltip(scene: Scene) -> None:
    _, points = roofline_of(scene, "cpu").frames
    assert set(points) == {
        "batch",
        "model",
        "Intensity",
        "Batch 1",
        "Batch 2",
        "Batch 4",
        "Other batches",
        "Floor ratio",
    }
    assert sorted(points["batch"]) == list(BATCHES)
    assert len(set(points["model"])) == 1
    assert all(0 < ratio <= 1 for ratio in points["Floor ratio"])


def test_every_axis_setting_of_the_chart_meets_its_columns(scene: Scene) -> None:
    axes, roof, ridge, *batches, ratio = roofline_of(scene, "cpu").overridden
    assert axes == ["Roof intensity", "Intensity"]
    assert (roof, ridge, ratio) == (["Roof"], ["Ridge"], ["Floor ratio"])
    assert batches == [["Batch 1"], ["Batch 2"], ["Batch 4"], ["Other batches"]]


@every_board
def test_tables_keep_every_column_and_every_setting_meets_one(scene: Scene, path: Path) -> None:
    tables = [panel for panel in panels(load(path)) if panel["type"] == "table"]
    chosen = scene.choices(path.stem)[0]
    for panel, shown in zip(tables, scene.shown([(panel, chosen) for panel in tables]), strict=True):
        (frame,) = shown.frames
        heads = set(panel["transformations"][-1]["options"]["renameByName"].values())
        assert set(frame) == heads, panel["title"]
        assert all(shown.overridden), panel["title"]


@every_board
def test_grafana_knows_every_unit(path: Path) -> None:
    shown = transforms.run([(panel, []) for panel in panels(load(path))])
    assert [one.unknown_units for one in shown] == [[]] * len(shown)


def test_the_fleet_has_a_row_for_each_server_lowest_ratio_first(scene: Scene) -> None:
    (path,) = (path for path in FILES if path.stem == "fleet")
    found = {panel["title"]: panel for panel in panels(load(path))}
    wanted = [
        (found[t], scene.choices("fleet")[0]) for t in ("Servers by floor ratio", "Distribution of the floor ratios")
    ]
    table, histogram = scene.shown(wanted)
    (frame,) = table.frames
    assert len(set(zip(frame["Instance"], frame["Server"], strict=True))) == len(frame["Server"]) == 6
    assert dict(zip(frame["Server"], frame["State"], strict=True))["down"] == "unreachable"
    references = dict(zip(frame["Server"], frame["Reference"], strict=True))
    assert references == {"cpu": "read", "gpu": "sustained", "down": "read"}
    ratios = frame["Floor ratio"][:4]
    assert ratios == sorted(ratios)
    assert frame["Floor ratio"][4:] == [None, None], "servers without a sample come last"
    assert sorted(histogram.frames[0]["Floor ratio"]) == ratios
