"""The dashboards with real parts: asked of a real Prometheus, its answers put through Grafana's own transformations.

One exporter watches the same llama.cpp server as a CPU's and as a GPU's, whose compute peak is unknown, and a server
that is down. Prometheus scrapes it under two addresses and by two jobs, with the labels that its operator adds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import transforms
from answers import Answers, asked_by
from board.roofline import INTENSITIES
from boards import FILES, filled_in, load, names_of, panels
from processes import exporter, free_port, llama, prometheus_running, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

BATCHES = ("1", "2", "3", "4")
CONFIG = """
bandwidth: {{interval: 15s}}
probe:
  interval: 10s
  health_interval: 1s
  batches: [1, 2, 3, 4, 8]
  seconds: 0.3
  max_duty_cycle: 0.5
servers:
  - {{name: cpu, url: "http://127.0.0.1:{port}", floor_fraction: {{1: 0.01, 4: 0.99}}}}
  - {{name: gpu, url: "http://localhost:{port}", device: gpu, peak_bandwidth: 1TB/s}}
  - {{name: down, url: "http://127.0.0.1:{nobody}"}}
"""
RULES = {
    "groups": [
        {
            "name": "test",
            "interval": "1s",
            "rules": [{"alert": "BelowThreshold", "expr": "roofline_decode_below_threshold_samples > 0"}],
        }
    ]
}
MAY_BE_EMPTY = {
    "roofline_live_": "no user is served in this test",
    "roofline_probes_rejected_total": "every answer proves its batch: nobody else asks the server",
    "roofline_memory_bandwidth_rejected_passes_total": "on a quiet machine every pass is good",
}


@dataclass(frozen=True)
class Scene:
    """A Prometheus that holds a moment of everything, and the address that is scraped."""

    answers: Answers
    instance: str

    def choices(self, board: str) -> list[dict[str, str]]:
        """What a reader chooses in the variables: each server, or the fleet at batch 1."""
        jobs = self.answers.label_values("roofline_server_up", "job")  # All, as Grafana writes it
        common = {"job": f"({'|'.join(jobs)})", "__rate_interval": "30s", "__range": "60s"}
        if board == "fleet":
            return [{**common, "instance": ".+", "batch": "1"}]
        return [
            {**common, "instance": self.instance, "server": server, "batch": ".+"} for server in ("cpu", "gpu", "down")
        ]

    def shown(self, wanted: Sequence[tuple[dict[str, Any], Mapping[str, str]]]) -> list[transforms.Shown]:
        """What panels show, each with what is chosen."""
        jobs = []
        for panel, chosen in wanted:
            found = {t["refId"]: self.answers.now(filled_in(t["expr"], chosen)) for t in panel["targets"]}
            jobs.append((panel, transforms.table_frames(found)))
        return transforms.run(jobs)

    def one(self, expression: str) -> float:
        """The value of an expression with one series."""
        ((_, value),) = self.answers.now(expression)
        return value


def prometheus_config(target: str, directory: Path) -> dict[str, Any]:
    """Two jobs, two addresses of the exporter, and the operator's labels."""
    labels = {"namespace": "llm", "pod": "llama-0", "container": "exporter", "endpoint": "metrics"}
    port = target.rpartition(":")[2]
    jobs = {
        "llm/llama": [{"targets": [target], "labels": labels}, {"targets": [f"localhost:{port}"]}],
        "again": [{"targets": [target]}],
        "somebody else's": [{"targets": [f"localhost:{free_port()}"]}],
    }
    rules = directory / "rules.yml"
    rules.write_text(json.dumps(RULES))
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": name, "static_configs": found} for name, found in jobs.items()],
    }


@pytest.fixture(scope="module")
def scene(real_model: Path, prometheus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    directory, port = tmp_path_factory.mktemp("dashboards"), free_port()
    with (
        llama(real_model, port, "--threads", "1"),
        exporter(CONFIG.format(port=port, nobody=free_port()), directory) as watching,
    ):
        target = watching.url.removeprefix("http://")
        with prometheus_running(prometheus, prometheus_config(target, directory), directory) as server:
            found = Scene(Answers(server.url), target)
            for what in (
                f'count(roofline_decode_floor_ratio{{instance="{target}", job="again"}}) == {2 * len(BATCHES)}',
                'sum(increase(roofline_probe_failures_total{server="down"}[30s])) > 0',
                'sum(increase(roofline_probes_skipped_total{server="cpu"}[30s])) > 0',
                "roofline_compute_peak_flops_per_second",
                "ALERTS",
            ):
                wait_for(what, 400, partial(found.answers.now, what))
            yield found


every_board = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


@every_board
def test_every_query_answers(scene: Scene, path: Path) -> None:
    assert scene.answers.problems(asked_by(load(path)), scene.choices(path.stem), MAY_BE_EMPTY) == []


@every_board
def test_every_variable_has_values(scene: Scene, path: Path) -> None:
    assert scene.answers.unanswered_variables(load(path), scene.choices(path.stem)[0]) == []


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


@every_board
def test_a_renamed_metric_is_found_wherever_it_stands(scene: Scene, path: Path) -> None:
    board = load(path)
    names = {name for asked in asked_by(board) for name in names_of(asked.expression)} - {"up", "ALERTS"}
    tried = [name for name in names if not name.startswith(tuple(MAY_BE_EMPTY))]
    assert len(tried) > 15
    for name in tried:
        renamed = json.loads(json.dumps(board).replace(f"{name}{{", f"{name}_renamed{{"))
        affected = [asked for asked in asked_by(renamed) if f"{name}_renamed" in asked.expression]
        found = "\n".join(scene.answers.problems(affected, scene.choices(path.stem), MAY_BE_EMPTY))
        assert affected
        assert [asked.where for asked in affected if f"{asked.where}: no series: {name}_renamed" not in found] == []


def roofline_of(scene: Scene, server: str) -> transforms.Shown:
    (path,) = (path for path in FILES if path.stem == "decode-roofline")
    (panel,) = (panel for panel in panels(load(path)) if panel["type"] == "xychart")
    (chosen,) = (choice for choice in scene.choices(path.stem) if choice["server"] == server)
    (shown,) = scene.shown([(panel, chosen)])
    return shown


def every_point(scene: Scene, server: str) -> str:
    """Answers when every batch of the server has a point: under load a sample may expire before the next one."""
    mine = f'server="{server}", instance="{scene.instance}", job="again"'
    return f"count(roofline_decode_flops_per_second{{{mine}}}) == {len(BATCHES)}"


def points_of(scene: Scene, server: str) -> dict[str, list[tuple[float, float]]]:
    """Where each batch stands, as the metrics tell."""

    def by_batch(name: str) -> dict[str, float]:
        matchers = f'server="{server}", instance="{scene.instance}", job="again"'
        return {m["batch"]: value for m, value in scene.answers.now(f"roofline_decode_{name}{{{matchers}}}")}

    x, y = by_batch("intensity_flops_per_byte"), by_batch("flops_per_second")
    named = {f"Batch {batch}": [(x[batch], y[batch])] for batch in ("1", "2", "4")}
    return {**named, "Other batches": [(x["3"], y["3"])]}


def test_the_chart_draws_roof_ridge_and_points(scene: Scene) -> None:
    with scene.answers.at_one_moment(every_point(scene, "cpu")):
        lines = roofline_of(scene, "cpu").lines()
        mine = f'server="cpu", instance="{scene.instance}", job="again"'
        peak = scene.one(f"roofline_server_compute_peak_flops_per_second{{{mine}}}")
        ridge = scene.one(f"roofline_ridge_flops_per_byte{{{mine}}}")
        bandwidth = scene.one(f'roofline_ceiling_bytes_per_second{{{mine}, ceiling="read"}}')
        xs = [x for x, _ in lines["Roof"]]
        assert xs == sorted([*INTENSITIES, ridge])
        assert [y for _, y in lines["Roof"]] == pytest.approx([min(peak, x * bandwidth) for x in xs])
        assert lines["Ridge"] == [(ridge, peak)]
        assert {name: lines[name] for name in lines if "atch" in name} == points_of(scene, "cpu")


def test_only_the_diagonal_where_no_compute_peak_is_known(scene: Scene) -> None:
    with scene.answers.at_one_moment(every_point(scene, "gpu")):
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
    ratios = frame["Floor ratio"][:4]
    assert ratios == sorted(ratios)
    assert frame["Floor ratio"][4:] == [None, None], "servers without a sample come last"
    assert sorted(histogram.frames[0]["Floor ratio"]) == ratios
