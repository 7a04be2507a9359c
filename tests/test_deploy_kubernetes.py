"""The Kubernetes files: valid by its schemas, true to their comments, equal to what they are made from.

No cluster runs here: the manifests are checked, not applied.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import prometheus_rule
import pytest
import yaml
from processes import get, prometheus_running, wait_for

from exporter.config import parse

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent.parent
KUBERNETES = ROOT / "deploy/kubernetes"
NATIVE_SIDECARS = "1.29.0"
"""The first version that has them switched on."""
NEWEST = "1.37.0"
PLAIN = ("namespace", "configmap", "deployment", "service", "networkpolicy")
OF_THE_OPERATOR = ("podmonitor", "prometheusrule")


def load(name: str) -> Any:
    return yaml.safe_load((KUBERNETES / f"{name}.yaml").read_text())


def pod() -> Any:
    return load("deployment")["spec"]["template"]["spec"]


def sidecar() -> Any:
    (container,) = pod()["initContainers"]
    return container


@pytest.mark.parametrize("version", [NATIVE_SIDECARS, NEWEST])
@pytest.mark.parametrize("name", PLAIN)
def test_a_manifest_fits_its_schema_without_an_unknown_field(name: str, version: str) -> None:
    kubernetes_validate.validate(load(name), version, strict=True)


def test_the_schema_finds_a_mistake() -> None:
    manifest = load("deployment")
    manifest["spec"]["template"]["spec"]["initContainers"][0]["restartpolicy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, NEWEST, strict=True)


def test_kustomization_names_every_file() -> None:
    files = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(load("kustomization")["resources"]) == files == {f"{name}.yaml" for name in (*PLAIN, *OF_THE_OPERATOR)}


@pytest.mark.real
def test_kustomize_builds_and_puts_the_image_in() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not on the PATH (Debian's kubernetes-client)")
    done = subprocess.run((kubectl, "kustomize", KUBERNETES), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    built = {manifest["kind"]: manifest for manifest in yaml.safe_load_all(done.stdout)}
    assert len(built) == len(PLAIN) + len(OF_THE_OPERATOR)
    assert {m["metadata"].get("namespace") for kind, m in built.items() if kind != "Namespace"} == {"llama"}
    (container,) = built["Deployment"]["spec"]["template"]["spec"]["initContainers"]
    assert container["image"] == "registry.example.com/roofline-exporter:0.1.0"


def test_the_sidecar_is_a_native_one_that_sees_the_server_and_cannot_hold_it_up() -> None:
    assert sidecar()["restartPolicy"] == "Always"
    assert pod()["shareProcessNamespace"] is True
    assert not {"startupProbe", "readinessProbe"} & set(sidecar())
    assert sidecar()["livenessProbe"]["httpGet"]["path"] == "/-/healthy"


def test_the_sidecar_has_a_memory_limit_and_no_cpu_limit() -> None:
    assert sidecar()["resources"]["limits"] == {"memory": "512Mi"}
    assert set(sidecar()["resources"]["requests"]) == {"cpu", "memory"}


def test_the_sidecar_may_do_nothing_special() -> None:
    assert sidecar()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    context = pod()["securityContext"]
    assert context["runAsNonRoot"] is True
    assert isinstance(context["runAsUser"], int)
    assert f"USER {context['runAsUser']}:{context['runAsGroup']}\n" in (ROOT / "Dockerfile").read_text()


def test_the_exporters_configuration_is_valid_and_fits_the_pod() -> None:
    (file, text), *others = load("configmap")["data"].items()
    assert not others
    settings = parse(text, file)
    (server,) = settings.servers
    (llama,) = pod()["containers"]
    assert server.url == f"http://127.0.0.1:{llama['ports'][0]['containerPort']}"
    assert str(server.gguf) == llama["args"][llama["args"].index("--model") + 1]
    mounts = {mount["name"]: mount for mount in sidecar()["volumeMounts"]}
    assert f"--config.file={mounts['config']['mountPath']}/{file}" in sidecar()["args"]
    assert "subPath" not in mounts["config"], "it would never follow the ConfigMap"
    assert str(server.gguf).startswith(mounts["models"]["mountPath"] + "/")
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    assert volumes["config"]["configMap"]["name"] == load("configmap")["metadata"]["name"]


def test_the_pod_monitor_finds_the_sidecar_and_the_rules_find_its_job() -> None:
    monitor = load("podmonitor")
    labels = load("deployment")["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (port,) = sidecar()["ports"]
    assert endpoint["port"] == port["name"]
    assert f"0.0.0.0:{port['containerPort']}" in " ".join(sidecar()["args"])
    # The operator names a job by its namespace and its monitor.
    job = f"{load('kustomization')['namespace']}/{monitor['metadata']['name']}"
    (pattern,) = set(re.findall(r'up\{job=~"([^"]+)"\}', prometheus_rule.RULES.read_text()))
    assert re.fullmatch(pattern, job)


def as_prometheus_does(relabelings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rules of a PodMonitor as the operator writes them into Prometheus' configuration."""
    return [{re.sub(r"[A-Z]", lambda c: f"_{c[0].lower()}", key): rule[key] for key in rule} for rule in relabelings]


def operator_relabelings() -> list[dict[str, Any]]:
    """Those of the PodMonitor, after the operator's own."""
    (endpoint,) = load("podmonitor")["spec"]["podMetricsEndpoints"]
    own = [
        {"source_labels": [f"__meta_kubernetes_{name}"], "target_label": label}
        for name, label in (("namespace", "namespace"), ("pod_name", "pod"), ("pod_container_name", "container"))
    ]
    keep = {"source_labels": ["__meta_kubernetes_pod_container_port_name"], "regex": endpoint["port"], "action": "keep"}
    return [keep, *own, *as_prometheus_does(endpoint["relabelings"])]


def plain_relabelings() -> list[dict[str, Any]]:
    (job,) = yaml.safe_load((ROOT / "deploy/prometheus/prometheus-kubernetes.yaml").read_text())["scrape_configs"]
    found: list[dict[str, Any]] = job["relabel_configs"]
    return found


def discovered(address: str, pod: str, node: str, port: str = "metrics") -> dict[str, Any]:
    """A target as Prometheus discovers it in Kubernetes."""
    meta = {"namespace": "llama", "pod_name": pod, "pod_node_name": node, "pod_phase": "Running"}
    meta |= {"pod_container_name": "roofline-exporter", "pod_container_port_name": port}
    return {"targets": [address], "labels": {f"__meta_kubernetes_{key}": value for key, value in meta.items()}}


@pytest.mark.real
@pytest.mark.parametrize("relabelings", [operator_relabelings, plain_relabelings], ids=["operator", "plain"])
def test_a_pod_that_keeps_its_name_keeps_its_series_and_no_two_share_them(
    prometheus: str, relabelings: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Addresses change at each start; two pods on one node stay two, and a pod on another node is another machine."""
    pods = [
        discovered("127.0.0.1:1", "llama-0", "node-a"),
        discovered("127.0.0.1:2", "llama-1", "node-a"),
        discovered("127.0.0.1:3", "llama-2", "node-b"),
        discovered("127.0.0.1:4", "llama-2", "node-b", port="http"),
    ]
    scrape = {"job_name": "roofline", "relabel_configs": relabelings(), "static_configs": pods}
    with prometheus_running(prometheus, {"scrape_configs": [scrape]}, tmp_path) as running:
        targets = wait_for(
            "targets", 60, lambda: json.loads(get(f"{running.url}/api/v1/targets"))["data"]["activeTargets"]
        )
    labels = {target["discoveredLabels"]["__address__"]: target["labels"] for target in targets}
    assert sorted(labels) == ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"], "the server's own port is no target"
    assert [labels[address]["instance"] for address in sorted(labels)] == [f"llama/llama-{n}" for n in range(3)]
    assert [labels[address]["node"] for address in sorted(labels)] == ["node-a", "node-a", "node-b"]
    for address, found in labels.items():
        assert found["pod"] == found["instance"].removeprefix("llama/")
        assert address not in found.values()


def test_the_network_policy_lets_users_and_prometheus_in_and_nothing_out() -> None:
    policy = load("networkpolicy")["spec"]
    labels = load("deployment")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    users, metrics = policy["ingress"]
    assert "from" not in users
    assert users["ports"][0]["port"] == pod()["containers"][0]["ports"][0]["containerPort"]
    assert metrics["from"]
    assert metrics["ports"][0]["port"] == sidecar()["ports"][0]["containerPort"]
    assert policy["egress"] == []
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}


def test_the_prometheus_rule_is_the_rules_file() -> None:
    rules = prometheus_rule.RULES.read_text()
    assert (KUBERNETES / "prometheusrule.yaml").read_text() == prometheus_rule.prometheus_rule(rules, {})
    assert load("prometheusrule")["spec"] == yaml.safe_load(rules)


def test_the_generator_adds_labels_and_makes_links_absolute(capsys: pytest.CaptureFixture[str]) -> None:
    prometheus_rule.main(["--label", "release=prometheus", "--runbook-base", "https://wiki.example.com/"])
    manifest = yaml.safe_load(capsys.readouterr().out)
    assert manifest["metadata"]["labels"]["release"] == "prometheus"
    links = [rule["annotations"]["runbook_url"] for g in manifest["spec"]["groups"] for rule in g["rules"]]
    assert all(link.startswith("https://wiki.example.com/docs/runbook.md#") for link in links)


def test_the_generator_prints_the_rules_file_with_absolute_links(capsys: pytest.CaptureFixture[str]) -> None:
    """Its comments too; without a base, the file as it is."""
    rules = prometheus_rule.RULES.read_text()
    prometheus_rule.main(["--plain"])
    assert capsys.readouterr().out == rules
    prometheus_rule.main(["--plain", "--runbook-base", "https://wiki.example.com/roofline"])
    linked = capsys.readouterr().out
    assert linked.replace("https://wiki.example.com/roofline/docs/", "docs/") == rules
    links = [rule["annotations"]["runbook_url"] for g in yaml.safe_load(linked)["groups"] for rule in g["rules"]]
    assert all(link.startswith("https://wiki.example.com/roofline/docs/runbook.md#") for link in links)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--label", "release"], "'release' is not KEY=VALUE"),
        (["--runbook-base", "wiki/roofline"], "'wiki/roofline' is no address"),
        (["--plain", "--label", "release=prometheus"], "a plain rules file has no labels"),
    ],
)
def test_the_generator_refuses_what_it_cannot_do(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        prometheus_rule.main(arguments)
    assert problem in capsys.readouterr().err
