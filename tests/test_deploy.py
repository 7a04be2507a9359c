"""What operators install: the Prometheus, Alertmanager, compose and systemd files, checked by the tools that read them.

No image can be pulled where these tests run: the compose file is checked against its schema and this repository.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import COMMAND
from real import missing, require

from exporter.roofline.passes import DISTURBED
from exporter.roofline.reason import Reason

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
COMPOSE = DEPLOY / "compose.yaml"
UNIT = DEPLOY / "systemd/roofline-exporter.service"
INSTALLED = "/opt/roofline-exporter/bin/roofline-exporter"


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, check=False, timeout=120, **options
    )


def program(name: str) -> str:
    path = shutil.which(name)
    return path if path is not None else missing(f"{name} is not on the PATH")


# --- Prometheus and Alertmanager ---

CONFIGS = sorted(PROMETHEUS.glob("prometheus*.yaml"))
every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


@pytest.mark.real
@every_config
def test_promtool_accepts_the_scrape_configuration(promtool: str, path: Path, tmp_path: Path) -> None:
    """Debian's Prometheus is built without discovery in Kubernetes: that one block is left out for the check."""
    config = load(path)
    for job in config["scrape_configs"]:
        if job.pop("kubernetes_sd_configs", None):
            job["static_configs"] = [{"targets": ["10.0.0.1:10470"]}]
        for discovery in job.get("file_sd_configs", []):
            discovery["files"] = [str(PROMETHEUS / name) for name in discovery["files"]]
    config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
    checked = tmp_path / path.name
    checked.write_text(yaml.safe_dump(config))
    done = run(promtool, "check", "config", checked)
    assert (done.returncode, done.stderr) == (0, "")
    assert "14 rules found" in done.stdout


@every_config
def test_the_rules_find_the_scrape_job_by_its_name(path: Path) -> None:
    (pattern,) = set(re.findall(r'up\{job=~"([^"]+)"\}', (PROMETHEUS / "rules.yaml").read_text()))
    for job in load(path)["scrape_configs"]:
        assert re.fullmatch(pattern, job["job_name"])
    interval = load(path)["global"]["scrape_interval"]
    assert int(interval.removesuffix("s")) <= 60, "the rules bridge a missed scrape of at most a minute"


def test_discovery_in_kubernetes_finds_the_sidecars_port_and_nothing_else() -> None:
    """Prometheus matches the whole of the labels' values, joined by a semicolon."""
    (job,) = load(PROMETHEUS / "prometheus-kubernetes.yaml")["scrape_configs"]
    keep = next(rule for rule in job["relabel_configs"] if rule.get("action") == "keep")
    pod = load(DEPLOY / "kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    found = [
        f"{container['name']}:{port['containerPort']}"
        for container in (*pod["containers"], *pod["initContainers"])
        for port in container["ports"]
        if re.fullmatch(keep["regex"], f"{container['name']};{port['name']}")
    ]
    assert found == ["roofline-exporter:10470"]


@pytest.mark.real
def test_amtool_accepts_the_alertmanager_configuration() -> None:
    done = run(program("amtool"), "check-config", PROMETHEUS / "alertmanager.yaml")
    assert done.returncode == 0, done.stderr
    assert "5 inhibit rules" in done.stdout


def test_inhibition_and_routes_name_alerts_that_exist() -> None:
    alerts = {rule["alert"] for group in load(PROMETHEUS / "rules.yaml")["groups"] for rule in group["rules"]}
    inhibited = re.findall(r'alertname=~?"([^"]+)"', (PROMETHEUS / "alertmanager.yaml").read_text())
    assert len(inhibited) == 11
    for names in inhibited:
        assert set(names.split("|")) <= alerts


# --- compose ---


def compose_errors(path: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", path)


def test_the_compose_file_fits_its_schema(tmp_path: Path) -> None:
    done = compose_errors(COMPOSE)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(COMPOSE.read_text().replace("network_mode:", "network_mod:"))
    assert compose_errors(wrong).returncode == 1


def test_the_compose_exporter_lives_beside_the_server_and_without_a_cpu_limit() -> None:
    services = load(COMPOSE)["services"]
    exporter = services["exporter"]
    server_side = services["llama-server"]
    assert exporter["network_mode"] == exporter["pid"] == "service:llama"
    assert server_side["network_mode"] == server_side["pid"] == "service:llama"
    assert "command" not in services["llama"], "it only holds the namespaces: a server's crash must not take them away"
    assert exporter["read_only"] is True
    assert exporter["cap_drop"] == ["ALL"]
    assert exporter["security_opt"] == ["no-new-privileges:true"]
    assert exporter["mem_limit"] == "512m"
    assert not {"cpus", "cpu_quota", "cpuset", "ports"} & set(exporter)
    # The model is where the server has it: its own path is read for exact bytes.
    assert exporter["volumes"][-1] == server_side["volumes"][0]
    (server,) = load(ROOT / "config.yaml")["servers"]
    port = server_side["command"][server_side["command"].index("--port") + 1]
    assert server["url"] == f"http://127.0.0.1:{port}"


def test_every_file_that_the_compose_file_mounts_is_in_the_repository() -> None:
    mounted = [
        DEPLOY / volume.split(":")[0]
        for service in load(COMPOSE)["services"].values()
        for volume in service.get("volumes", [])
        if volume.startswith(("./", "../"))
    ]
    assert len(mounted) == 5
    for path in mounted:
        assert path.exists(), path
    assert (DEPLOY / load(COMPOSE)["services"]["exporter"]["build"] / "Dockerfile").exists()


def test_the_parts_of_the_compose_file_find_each_other() -> None:
    services = load(COMPOSE)["services"]
    config = next(c for c in services["prometheus"]["command"] if c.startswith("--config.file="))
    name = Path(config.partition("=")[2]).name
    (manager,) = load(PROMETHEUS / name)["alerting"]["alertmanagers"]
    assert manager["static_configs"][0]["targets"] == ["alertmanager:9093"]
    ((target,),) = [group["targets"] for group in load(PROMETHEUS / "targets/llama.yaml")]
    host, _, port = target.partition(":")
    assert any(p.endswith(f":{port}:{port}") for p in services[host]["ports"]), (
        "the exporter listens in llama's network"
    )
    (source,) = load(ROOT / "grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = load(ROOT / "grafana/provisioning/dashboards/roofline.yaml")["providers"]
    mounts = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounts


def test_nothing_of_the_compose_file_listens_beyond_this_machine() -> None:
    ports = [port for service in load(COMPOSE)["services"].values() for port in service.get("ports", [])]
    assert len(ports) >= 5
    assert all(port.startswith("127.0.0.1:") for port in ports)


# --- systemd ---


@pytest.mark.real
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With the command of this environment in place of the installed one, which systemd looks for."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(INSTALLED, str(Path(sys.executable).parent / "roofline-exporter")))
    done = run(program("systemd-analyze"), "verify", unit)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.real
def test_systemd_finds_the_unit_well_confined() -> None:
    """At most 2 of 10 by its own measure. What is left is mainly that it may reach every address."""
    done = run(program("systemd-analyze"), "security", "--offline=true", "--threshold=20", UNIT)
    assert done.returncode == 0, done.stdout[-500:]


def allowed_calls() -> set[str]:
    """The system calls that the unit's filter lets through, as this systemd reads its groups."""

    def expand(group: str) -> set[str]:
        lines = run(program("systemd-analyze"), "syscall-filter", group).stdout.split("\n")[1:]
        names = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        return {call for name in names for call in (expand(name) if name.startswith("@") else {name})}

    allowed: set[str] = set()
    for line in re.findall(r"^SystemCallFilter=(.+)$", UNIT.read_text(), flags=re.MULTILINE):
        taken = {call for group in line.removeprefix("~").split() for call in expand(group)}
        allowed = allowed - taken if line.startswith("~") else allowed | taken
    return allowed


@pytest.mark.real
def test_the_units_filter_lets_the_kernels_through() -> None:
    """Their calls, and those of a Python that starts threads and listens."""
    needed = {"sched_setaffinity", "sched_getaffinity", "madvise", "mmap", "munmap", "mprotect", "clone3", "futex"}
    needed |= {"socket", "bind", "listen", "accept4", "epoll_wait", "getdents64", "getrandom", "rseq", "prlimit64"}
    assert needed <= allowed_calls()
    assert not {"ptrace", "mount", "setuid", "reboot", "bpf"} & allowed_calls()


_PR_SET_MDWE, _REFUSE_EXEC_GAIN = 65, 1


def _deny_write_execute() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_MDWE, _REFUSE_EXEC_GAIN, 0, 0, 0)


@pytest.mark.real
def test_the_kernels_run_where_memory_cannot_be_written_and_executed(tmp_path: Path) -> None:
    """MemoryDenyWriteExecute as the kernel itself does it (Linux 6.3), inherited by the command."""
    writable_code = "import mmap; mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)"
    refused = run(sys.executable, "-c", writable_code, preexec_fn=_deny_write_execute)
    require(refused.returncode != 0, "this kernel cannot deny writable and executable memory (PR_SET_MDWE)")
    config = tmp_path / "config.yaml"
    config.write_text("bandwidth: {max_memory: 64MiB, threads: 1}\nservers: []")
    done = run(*COMMAND, "--config.file", config, "bandwidth", "--format", "json", preexec_fn=_deny_write_execute)
    found = json.loads(done.stdout)
    # On a busy machine they run all the same, and their passes are disturbed.
    assert found["measurements"] or found["host"]["problem"] in DISTURBED | {Reason.CACHE_SUSPECT}, done.stderr
    assert done.returncode in {0, 3}, done.stderr


def test_the_unit_reloads_by_the_signal_that_the_exporter_takes() -> None:
    unit = UNIT.read_text()
    assert "ExecReload=/bin/kill -HUP $MAINPID" in unit
    for key in ("CPUQuota=", "CPUWeight=", "Nice="):
        assert not re.search(rf"^{key}", unit, flags=re.MULTILINE), "it would lower the ceiling"
