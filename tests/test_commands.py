"""The commands as processes, as their user starts them."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from processes import COMMAND, NOBODY, Exporter, exporter, needs_ipv6, run, running, wait_for

from exporter.cli import main
from exporter.config import ConfigError, load, parse
from exporter.service.daemon import serve
from exporter.service.scheduler import Scheduler


def run_after(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in an interpreter that ran the code before."""
    whole = f"{code}\nimport exporter.__main__\nexporter.__main__.main()"
    command = (
        sys.executable,
        "-c",
        f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n{whole}",
        *arguments,
    )
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


def test_version_and_help() -> None:
    assert re.fullmatch(r"roofline-exporter, version \d+\.\d+\.\d+\n", run("--version").stdout)
    helped = run("--help").stdout
    for command in ("serve", "demo", "report", "bandwidth", "check-config", "healthcheck"):
        assert command in helped


def test_metrics_answer_within_a_second_and_wait_for_no_server(tmp_path: Path) -> None:
    """Ready, with a server that is not there, while the first bandwidth run is on."""

    def seconds_to_answer() -> float:
        began = time.monotonic()
        with exporter(NOBODY, tmp_path) as started:
            started.get("/metrics")
            return time.monotonic() - began

    # The bar is 1 s; a loaded machine gets some leave here, benchmarks hold it to the figure.
    assert any(seconds_to_answer() < 5 for _ in range(3))
    with exporter(NOBODY, tmp_path) as running_exporter:
        text = running_exporter.get("/metrics")
        assert 'roofline_server_up{server="local"} 0.0' in text
        assert running_exporter.get("/-/ready") == "Ready\n"
        assert running_exporter.get("/-/healthy") == "Healthy\n"
        wait_for("a reason", 240, lambda: running_exporter.logged("no probe"))


def test_the_daemon_loads_nothing_for_pages_that_nobody_looks_at() -> None:
    """They are 5 MiB."""
    listing = "import sys, exporter.cli, exporter.service.logs, exporter.service.daemon; print(*sys.modules)"
    done = subprocess.run((sys.executable, "-c", listing), capture_output=True, text=True, check=True, timeout=60)
    assert "exporter.service.daemon" in done.stdout.split()
    assert not {"rich", "pygments", "jinja2", "exporter.present.sentences"} & set(done.stdout.split())


def test_two_addresses_and_ipv6(tmp_path: Path) -> None:
    needs_ipv6()
    file = tmp_path / "c.yaml"
    file.write_text(NOBODY)
    arguments = ("--config.file", str(file), "--log.format", "json")
    addresses = ("--web.listen-address", "127.0.0.1:0", "--web.listen-address", "[::1]:0")
    with running((*COMMAND, *arguments, *addresses, "serve"), stderr=subprocess.PIPE) as process:
        urls = Exporter(process).logged("listening")[0]["urls"]
        assert [u.rsplit(":", 1)[0] for u in urls] == ["http://127.0.0.1", "http://[::1]"]


def test_a_taken_address_is_a_clear_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("--web.listen-address", address, "serve", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"Error: cannot listen on {address}: address already in use; choose another --web.listen-address,"
        " or stop what listens there"
    )
    assert "Traceback" not in done.stderr


async def test_a_name_of_several_addresses_with_a_free_port_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a port of its own: a URL with the name could mean only one of them."""
    needs_ipv6()
    both = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    told: list[str] = []

    async def look(_: Scheduler, urls: Sequence[str]) -> None:
        told.extend(urls)
        os.kill(os.getpid(), signal.SIGTERM)

    async with asyncio.timeout(30):
        await serve(parse(NOBODY, "test"), [("localhost", 0)], beside=look)
    # asyncio binds them in no order.
    assert {url.rsplit(":", 1)[0] for url in told} == {"http://127.0.0.1", "http://[::1]"}
    assert len(told) == 2
    assert "0" not in {url.rsplit(":", 1)[1] for url in told}


def test_check_config_prints_what_is_in_force(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("servers: [{name: a, url: http://h:1}]")
    done = run("--config.file", str(file), "check-config")
    assert done.returncode == 0
    assert "health_interval: 15s" in done.stdout


@pytest.mark.parametrize("command", sorted(main.commands))
def test_what_may_be_said_before_a_command_may_be_said_after_it(command: str) -> None:
    helped = run(command, "--help").stdout
    for option in ("--config.file", "--web.listen-address", "--log.level", "--log.format"):
        assert option in helped


def test_what_is_said_after_the_command_wins(tmp_path: Path) -> None:
    first, last = tmp_path / "first.yaml", tmp_path / "last.yaml"
    first.write_text("servers: [{name: first, url: 'http://127.0.0.1:1'}]")
    last.write_text("servers: [{name: last, url: 'http://127.0.0.1:1/v1'}]")
    both = ("--config.file", str(first), "check-config", "--config.file", str(last))
    done = run("--log.level", "error", *both, "--log.level", "warning", "--log.format", "json")
    assert yaml.safe_load(done.stdout)["servers"][0]["name"] == "last"
    assert json.loads(done.stderr)["level"] == "warning"
    assert run("--log.level", "warning", *both, "--log.level", "error").stderr == ""
    assert "name: first" in run("--config.file", str(first), "check-config", "--log.level", "error").stdout
    addresses = ("--web.listen-address", "127.0.0.1:1", "healthcheck", "--web.listen-address", "127.0.0.1:2")
    assert "http://127.0.0.1:2/" in run(*addresses).stderr


def test_the_daemon_is_told_after_its_command(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(NOBODY)
    said = ("--web.listen-address", "127.0.0.1:0", "--config.file", str(file), "--log.format", "json")
    with running((*COMMAND, "serve", *said), stderr=subprocess.PIPE) as process:
        started = Exporter(process)
        assert "http://127.0.0.1:1\n" in started.get("/config")


def test_check_config_names_every_error(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("probe:\n  interval: fast\nservers:\n  - name: A B\n    url: ftp://x\n    colour: red\n")
    done = run("--config.file", str(file), "check-config")
    assert done.returncode == 1
    for place in ("probe.interval", "servers[0].name", "servers[0].url", "servers[0].colour"):
        assert place in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_configuration_that_was_named_is_an_error(tmp_path: Path) -> None:
    done = run("--config.file", str(tmp_path / "none.yaml"), "serve")
    assert done.returncode == 1
    assert "none.yaml" in done.stderr


def test_a_configuration_that_may_not_be_read_names_the_user(tmp_path: Path) -> None:
    """A container's user is another one than the file's owner."""
    file = tmp_path / "c.yaml"
    file.touch(0)
    owner = os.geteuid()
    user = owner or 65532
    # Root has a way around permissions.
    os.seteuid(user)
    try:
        with pytest.raises(ConfigError, match=f"cannot be read: permission denied for user {user}; name a readable"):
            load(file)
    finally:
        os.seteuid(owner)


def test_without_a_configuration_one_local_server_is_watched(tmp_path: Path) -> None:
    done = run("check-config", cwd=tmp_path)
    assert done.returncode == 0
    assert "url: http://127.0.0.1:8080" in done.stdout


def test_healthcheck(tmp_path: Path) -> None:
    with exporter(NOBODY, tmp_path) as running_exporter:
        address = running_exporter.url.removeprefix("http://")
        assert run("--web.listen-address", address, "healthcheck").returncode == 0
    done = run("--web.listen-address", address, "healthcheck")
    assert done.returncode == 1
    assert done.stderr == (
        f"Error: http://{address}/-/healthy: connection refused; start an exporter there,"
        " or name another with --web.listen-address\n"
    )


def test_report_that_could_not_measure_exits_with_3(tmp_path: Path) -> None:
    """No server answers: the table says why, and stdout is one JSON document."""
    file = tmp_path / "c.yaml"
    file.write_text("bandwidth: {max_memory: 64MiB}\n" + NOBODY)
    done = run("--config.file", str(file), "report", "--format", "json")
    assert done.returncode == 3
    (server,) = json.loads(done.stdout)["servers"]
    assert server["state"] == "unreachable"


@pytest.mark.parametrize(("command", "status"), [("report", 3), ("bandwidth", 3), ("check-config", 1), ("serve", 1)])
def test_a_gpu_whose_bandwidth_cannot_be_looked_up(
    command: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text("class NVMLError(Exception): ...\ndef nvmlInit(): raise NVMLError('no driver')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file = tmp_path / "c.yaml"
    file.write_text("servers: [{name: g, url: 'http://127.0.0.1:8080', device: gpu}]")
    done = run("--config.file", str(file), command)
    assert done.returncode == status
    assert done.stdout == ""
    assert re.fullmatch(
        r"Error: the configuration cannot be used:\nserver g: .*\(no driver\); write peak_bandwidth .*\n", done.stderr
    )


def test_check_config_prints_the_bandwidth_that_was_looked_up_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file = tmp_path / "c.yaml"
    file.write_text("servers: [{name: g, url: 'http://127.0.0.1:8080', device: gpu}]")
    looked_up = "import exporter.service.peaks as peaks; peaks.gpu_peak_bandwidth = lambda _: 1008e9"
    done = run_after(looked_up, "--config.file", str(file), "check-config")
    assert done.returncode == 0
    (server,) = yaml.safe_load(done.stdout)["servers"]
    assert server["peak_bandwidth"] == "1.008TB/s"


@pytest.mark.parametrize("command", ["report", "bandwidth"])
def test_a_bug_is_not_mistaken_for_a_batch_below_its_threshold(command: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(NOBODY)
    done = run_after(
        "import exporter.service.once as once; once.measure_once = None", "--config.file", str(file), command
    )
    assert done.returncode == 3
    assert "TypeError" in done.stderr


@pytest.mark.parametrize(("lost", "status"), [("single", 0), ("all", 3), ("", 0)])
def test_bandwidth_without_its_reference_could_not_measure(lost: str, status: int, tmp_path: Path) -> None:
    """Ceilings of other kernels and of one thread do not make up for it."""
    file = tmp_path / "c.yaml"
    file.write_text(NOBODY)
    code = f"""
from dataclasses import replace
import exporter.service.once as once, snapshots
async def measured(*_, **__):
    seen = snapshots.rich_view()
    kept = tuple(b for b in seen.in_force if (b.kernel, b.threads) != ("read", {lost!r}))
    assert kept
    return replace(seen, in_force=kept)
once.measure_once = measured"""
    assert run_after(code, "--config.file", str(file), "bandwidth").returncode == status


def test_a_report_that_has_no_configuration_could_not_measure(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("probe: {interval: nonsense}")
    assert run("--config.file", str(file), "report").returncode == 3
    assert run("--config.file", str(tmp_path), "report").returncode == 3


def test_python_dash_m_is_the_command() -> None:
    assert COMMAND[0] == sys.executable
    assert run("--version").returncode == 0
