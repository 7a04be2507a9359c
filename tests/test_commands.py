"""The commands as processes, as their user starts them."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import COMMAND, Exporter, exporter, running, wait_for

NOBODY = "servers: [{name: local, url: 'http://127.0.0.1:1'}]"


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run((*COMMAND, *arguments), capture_output=True, text=True, check=False, cwd=cwd, timeout=120)


def test_version_and_help() -> None:
    assert re.fullmatch(r"roofline-exporter, version \d+\.\d+\.\d+\n", run("--version").stdout)
    helped = run("--help").stdout
    for command in ("serve", "demo", "report", "bandwidth", "check-config", "healthcheck"):
        assert command in helped


def test_metrics_answer_within_a_second_and_wait_for_no_server(tmp_path: Path) -> None:
    """Ready, with a server that is not there, while the first bandwidth run is on."""
    began = time.monotonic()
    with exporter(NOBODY, tmp_path) as running_exporter:
        text = running_exporter.get("/metrics")
        # The bar is 1 s; a loaded machine gets some leave here, benchmarks hold it to the figure.
        assert time.monotonic() - began < 5
        assert 'roofline_server_up{server="local"} 0.0' in text
        assert running_exporter.get("/-/ready") == "Ready\n"
        assert running_exporter.get("/-/healthy") == "Healthy\n"
        wait_for("a reason", 60, lambda: running_exporter.logged("no answer to probe"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_within_a_second_also_during_a_measurement(number: int, tmp_path: Path) -> None:
    with exporter(NOBODY, tmp_path) as running_exporter:
        # The first bandwidth run begins at once and takes seconds.
        time.sleep(0.7)
        assert not running_exporter.logged("bandwidth")
        status, seconds = running_exporter.end(number)
        assert status == 0
        assert seconds < 1
        assert running_exporter.logged("stopping")
        assert not [line for line in running_exporter.log if line["event"] == "?"], "nothing but log lines"


def test_two_addresses_and_ipv6(tmp_path: Path) -> None:
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
    assert f"Error: cannot listen on {address}: address already in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_config_prints_what_is_in_force(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("servers: [{name: a, url: http://h:1}]")
    done = run("--config.file", str(file), "check-config")
    assert done.returncode == 0
    assert "health_interval: 15s" in done.stdout


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
    assert address in done.stderr


def test_report_that_could_not_measure_exits_with_3(tmp_path: Path) -> None:
    """No server answers: the table says why, and stdout is one JSON document."""
    file = tmp_path / "c.yaml"
    file.write_text("bandwidth: {max_memory: 64MiB}\n" + NOBODY)
    done = run("--config.file", str(file), "report", "--format", "json")
    assert done.returncode == 3
    (server,) = json.loads(done.stdout)["servers"]
    assert server["state"] == "unreachable"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1", "file:///etc/passwd"])
def test_report_from_where_no_exporter_runs(url: str) -> None:
    done = run("report", "--url", url)
    assert done.returncode == 3
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.real
@pytest.mark.usefixtures("real_model")
@pytest.mark.timeout(300)
def test_demo_on_a_terminal(tmp_path: Path) -> None:
    """What a newcomer sees: progress, the address, the table; Ctrl-C ends both processes."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "120", "LINES": "50"}
    command = (*COMMAND, "--web.listen-address", "127.0.0.1:0", "demo")
    with running(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True) as demo:
        os.close(theirs)
        os.set_blocking(ours, False)
        text = ""

        def seen(pattern: str) -> re.Match[str] | None:
            nonlocal text
            try:
                while chunk := os.read(ours, 65536):
                    text += chunk.decode(errors="replace")
            except BlockingIOError:
                pass
            return re.search(pattern, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))

        found = wait_for("llama.cpp", 60, lambda: seen(r"\(pid\s+(\d+)\)"))
        assert found
        child = found[1]
        wait_for("the address", 30, lambda: seen(r"http://127\.0\.0\.1:\d+/metrics"))
        wait_for("the table", 200, lambda: seen("Ctrl-C ends both"))
        for word in ("FLOP/byte", "tokens/s", "GFLOP/s", "floor", "gemma-3-270m"):
            assert seen(word), text
        demo.send_signal(signal.SIGINT)
        assert demo.wait(10) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(int(child), 0)
    os.close(ours)


def test_python_dash_m_is_the_command() -> None:
    assert COMMAND[0] == sys.executable
    assert run("--version").returncode == 0
