"""The alert rules: what they promise, tested by promtool (tests/rules/), and that runbook and rules fit each other."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from board.promql import full_name
from processes import COMMAND

ROOT = Path(__file__).parent.parent
RULES = ROOT / "deploy/prometheus/rules.yaml"
TESTS = sorted((ROOT / "tests/rules").glob("*.yaml"))
RUNBOOK = ROOT / "docs/runbook.md"
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
}
PROMISED = {
    "DecodeBelowFloor",
    "LiveBelowFloor",
    "FloorUnknown",
    "DecodeRegressed",
    "CeilingDropped",
    "DecodeStalled",
    "ServerDown",
    "ProbesFailing",
    "ResultsStale",
    "ExporterDown",
    "ExporterAbsent",
    "DecodeImplausible",
    "ConfigReloadFailed",
    "CollectorErrors",
}
SITUATIONS = ("silent", "pending", "firing", "recovered", "series gone", "one bad sample", "idle", "operator labels")
WEAKENED = (
    ("DecodeBelowFloor", ">= 3", ">= 2"),
    ("LiveBelowFloor", "7 * clamp_min", "0 * clamp_min"),
    (
        "LiveBelowFloor",
        "min without (batch) (last_over_time(roofline_d",
        "max without (batch)(last_over_time(roofline_d",
    ),
    ("LiveBelowFloor", "[10m]) >= 5", "[10m]) >= 0"),
    ("LiveBelowFloor", "and last_over_time(roofline_model_kv_bytes_per_token[10m])", ""),
    ("LiveBelowFloor", "<= 8", "<= 16"),
    ("LiveBelowFloor", "20m", "5m"),
    *(("LiveBelowFloor", f'step_bytes{{batch="{batch}"}}', 'step_bytes{batch="1"}') for batch in (2, 4, 8)),
    ("FloorUnknown", "unless last_over_time(roofline_decode_implausible[5m]) == 1", ""),
    (
        "FloorUnknown",
        "and ignoring (batch) max without (batch) (last_over_time(roofline_decode_tokens_per_second[5m]))",
        "",
    ),
    ("FloorUnknown", "too_few_slots|", ".*|"),
    ("FloorUnknown", "count without (batch)", ""),
    (
        "FloorUnknown",
        "last_over_time(roofline_decode_floor_ratio_threshold[5m])\n      and ignoring (batch)",
        "roofline_probe_last_success_timestamp_seconds == 0 and ignoring (batch)",
    ),
    ("DecodeImplausible", "[30m:1m]) >= 1", "[30m:1m]) >= 0"),
    (
        "DecodeImplausible",
        "(roofline_probe_last_success_timestamp_seconds and roofline_decode_implausible == 1)[30m:1m]",
        "roofline_probe_last_success_timestamp_seconds[30m]",
    ),
    ("DecodeStalled", '{state="stalled"}[5m]', '{state=~"stalled|sleeping"}[5m]'),
    ("ServerDown", 'unless ignoring (state) last_over_time(roofline_server_state{state="stalled"}[2m]) == 1', ""),
    ("ServerDown", "unauthorized|unsupported", "stalled|unauthorized|unsupported"),
    ("ServerDown", ">= 4", ">= 100"),
    ("ServerDown", "< 0.75", "< 0.5"),
    ("ServerDown", "< 0.9", "< 0.75"),
    ("ServerDown", "and changes(roofline_server_up[30m]) >= 4", ""),
    ("ProbesFailing", "increase(roofline_probes_total[1h]) >= 3\n", "increase(roofline_probes_total[1h]) >= 0\n"),
    ("ProbesFailing", '{reason!~"foreign_request|gave_way"}', ""),
    ("ProbesFailing", '"firing"}[5m]', '"none"}[5m]'),
    ("ProbesFailing", "/ increase(roofline_probes_total[6h]) > 0", "/ increase(roofline_probes_total[6h]) >= 0"),
    ("ResultsStale", "unless last_over_time(roofline_live_tokens_per_second[15m])", ""),
    ("CeilingDropped", "[10m]) >= 1", "[10m]) >= 0"),
    ("CeilingDropped", '"firing"}[10m]', '"none"}[10m]'),
    ("CeilingDropped", "1h", "15m"),
    ("CeilingDropped", 'scope="server"', 'scope=~".+"'),
    ("DecodeRegressed", "unless ignoring (batch) (", "unless on (server) ("),
    ("DecodeRegressed", "timestamp_seconds and roofline_decode_tokens_per_second)[4h:1m]", "timestamp_seconds)[4h:1m]"),
    ("DecodeRegressed", "or changes(roofline_model_weight_bytes[1w:10m]) > 0", ""),
    ("ExporterDown", '{job=~"(.*/)?roofline.*"}', ""),
    ("ExporterDown", "[15m]) >= 4", "[15m]) >= 100"),
    ("ExporterDown", "[30m]) >= 4", "[30m]) >= 3"),
    ("ExporterDown", 'process_start_time_seconds{job=~"(.*/)?roofline.*"}[30m]) >= 4', "vector(0)[30m:1m]) >= 4"),
    ("ExporterDown", "< 0.5", "< 1"),
    ("ExporterDown", 'and up{job=~"(.*/)?roofline.*"}', ""),
    ("ExporterAbsent", "(.*/)?roofline.*", "roofline"),
    ("ConfigReloadFailed", "max_over_time", "min_over_time"),
    ("CollectorErrors", "increase(roofline_collector_errors_total[10m])", "roofline_collector_errors_total"),
    ("CollectorErrors", "increase(", "changes("),
    ("CollectorErrors", "[10m]", "[2m]"),
    ("CollectorErrors", "15m", "10m"),
)
"""A change to each alert's expression, `for` or `keep_firing_for` that takes one of its promises back."""

OF_SERVERS = ("roofline_server_", "roofline_decode_", "roofline_live_", "roofline_probe")
ITS_OWN = (
    '{{ $of := printf "cluster=%q,node=%q,pod=%q,job=%q,instance=%q"'
    " $labels.cluster $labels.node $labels.pod $labels.job $labels.instance -}}"
)
"""How a description begins: the labels that tell exporters apart."""

every_alert = pytest.mark.parametrize("alert", sorted(ALERTS))
real = pytest.mark.real


def alert_of(path: Path) -> str:
    """The alert that a file of tests is about."""
    return "".join(word.capitalize() for word in path.stem.split("_"))


def metric_names(text: str) -> set[str]:
    """Every name of a metric of ours in a text."""
    return set(re.findall(r"\broofline_[a-z_]+\b", text))


def chapters() -> dict[str, str]:
    """The runbook's chapters, by the anchor that their heading has on GitHub."""
    parts = re.split(r"^## (.+)$", RUNBOOK.read_text(), flags=re.MULTILINE)
    return {title.lower().replace(" ", "-"): text for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def blocks(language: str) -> list[str]:
    """The lines of the runbook's code blocks in that language."""
    found = re.findall(rf"^```{language}\n(.*?)^```", RUNBOOK.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [line for block in found for line in block.splitlines() if line]


def promtool_tests(promtool: str, path: Path, rules: Path) -> subprocess.CompletedProcess[str]:
    """Runs a file of tests on other rules; the file itself names the shipped ones."""
    copy = rules.with_suffix(".tests.yaml")
    copy.write_text(path.read_text().replace("../../deploy/prometheus/rules.yaml", str(rules)))
    return subprocess.run((promtool, "test", "rules", copy), capture_output=True, text=True, check=False)


def test_every_promised_alert_is_there() -> None:
    assert set(ALERTS) == PROMISED


@every_alert
def test_an_alert_tells_how_bad_what_and_where_to_read_on(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"] == {"severity": rule["labels"]["severity"], "component": "roofline"}
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["summary"].endswith(".")
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert ROOT / page == RUNBOOK
    assert anchor == alert.lower()
    assert anchor in chapters()


@every_alert
def test_a_title_alone_tells_which_exporter(alert: str) -> None:
    of_one = "absent(" not in ALERTS[alert]["expr"]
    assert ("{{ $labels.instance }}" in ALERTS[alert]["annotations"]["summary"]) == of_one
    of_server = any(name.startswith(OF_SERVERS) for name in metric_names(ALERTS[alert]["expr"]))
    assert ("{{ $labels.server }}" in ALERTS[alert]["annotations"]["summary"]) == of_server


@every_alert
def test_a_description_asks_for_numbers_of_its_own_exporter(alert: str) -> None:
    """Of two clusters, pods or nodes that have an address or a name in common."""
    description = ALERTS[alert]["annotations"]["description"]
    selectors = re.findall(r"[a-z_(]\{([^{}]*)\}", description)
    assert description.count("| query") <= len(selectors)
    if selectors:
        assert description.startswith(ITS_OWN)
    for selector in selectors:
        assert "%s" in selector


@every_alert
def test_a_rule_names_only_metrics_that_the_exporter_has(alert: str) -> None:
    named = metric_names(ALERTS[alert]["expr"] + ALERTS[alert]["annotations"]["description"])
    assert named or "up{" in ALERTS[alert]["expr"]
    for name in named:
        assert full_name(name.removeprefix("roofline_")) == name


@every_alert
def test_a_rule_joins_by_all_labels_but_named_ones(alert: str) -> None:
    """Whatever labels a scrape adds: they differ between machines, and agree between the series of one."""
    assert not re.search(r"\b(on|by|group_left|group_right)\s*\(", ALERTS[alert]["expr"])


@real
def test_promtool_accepts_the_rules(promtool: str) -> None:
    done = subprocess.run((promtool, "check", "rules", RULES), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{len(PROMISED)} rules found" in done.stdout


def test_every_alert_is_tested_in_every_situation() -> None:
    assert {alert_of(path) for path in TESTS} == PROMISED
    for path in TESTS:
        names = [test["name"] for test in yaml.safe_load(path.read_text())["tests"]]
        for situation in SITUATIONS:
            assert any(name.startswith(f"{situation}:") for name in names), (path.name, situation)


@real
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_promtool_finds_every_promise_kept(promtool: str, path: Path) -> None:
    done = subprocess.run((promtool, "test", "rules", path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_weakened_somehow() -> None:
    assert {alert for alert, _, _ in WEAKENED} == PROMISED


@real
@pytest.mark.parametrize(("alert", "old", "new"), WEAKENED)
def test_a_weakened_rule_is_found_out(promtool: str, alert: str, old: str, new: str, tmp_path: Path) -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    ((group, rule),) = ((group, rule) for group in groups for rule in group["rules"] if rule["alert"] == alert)
    weaker = {
        key: rule[key].replace(old, new)
        for key in ("expr", "for", "keep_firing_for")
        if key in rule and old in rule[key]
    }
    assert weaker, "there is nothing to weaken"
    rule.update(weaker)
    weak = tmp_path / "rules.yaml"
    weak.write_text(yaml.safe_dump({"groups": [{**group, "rules": [rule]}]}))  # the others would only take time
    (path,) = (path for path in TESTS if alert_of(path) == alert)
    assert set(re.findall(r"alertname[:=] *\"?(\w+)", path.read_text())) == {alert}
    assert subprocess.run((promtool, "check", "rules", weak), capture_output=True, check=False).returncode == 0
    done = promtool_tests(promtool, path, weak)
    assert done.returncode != 0
    assert "FAILED" in done.stdout + done.stderr


def test_the_runbook_has_a_chapter_for_every_alert_and_no_other() -> None:
    assert set(chapters()) == {alert.lower() for alert in PROMISED}
    for anchor, text in chapters().items():
        for part in ("**Means.**", "**Machine, server or model?**", "**Do.**", "**Proof.**"):
            assert part in text, (anchor, part)


def test_the_runbook_names_only_metrics_that_the_exporter_has() -> None:
    assert len(metric_names(RUNBOOK.read_text())) > 20
    for name in metric_names(RUNBOOK.read_text()):
        assert full_name(name.removeprefix("roofline_")) == name


@real
def test_promtool_accepts_every_expression_of_the_runbook(promtool: str, tmp_path: Path) -> None:
    expressions = blocks("promql")
    assert len(expressions) > 25
    rules = [{"record": f"runbook:{n}", "expr": expression} for n, expression in enumerate(expressions)]
    file = tmp_path / "runbook.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "runbook", "rules": rules}]}))
    done = subprocess.run((promtool, "check", "rules", file), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_command_of_the_runbook_exists() -> None:
    lines = [line.removeprefix("$ ") for line in blocks("console") if line.startswith("$ roofline-exporter")]
    assert len(lines) >= 8
    for line in lines:
        command = (*COMMAND, *shlex.split(line)[1:], "--help")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 0, done.stderr


def test_every_address_of_the_runbook_exists() -> None:
    web = "".join(path.read_text() for path in (ROOT / "exporter/service").glob("web*.py"))
    routes = set(re.findall(r'add_(?:get|post)\(\s*"([^"]+)"', web))
    asked = re.findall(r"^\$ curl .*http://127\.0\.0\.1:10470(/\S*)$", RUNBOOK.read_text(), flags=re.MULTILINE)
    assert len(asked) >= 5
    assert set(asked) <= routes
