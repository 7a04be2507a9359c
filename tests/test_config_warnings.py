"""What the configuration warns of, every error at once, and the words of some."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import structlog
from gguf_files import write_model
from processes import COMMAND, exporter

from exporter.config import ConfigError, Warned, load, parse, read_key, warnings
from exporter.config.values import MOST_THREADS
from exporter.service.warn import told

ROOT = Path(__file__).parent.parent
NO_SERVERS = "no servers: only this machine's ceilings are measured; add servers:"


def one_server(keys: str) -> str:
    return f"servers: [{{name: a, {keys}}}]"


def errors_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse(text, "test")
    return [error.split(": ", 1)[1] for error in raised.value.errors]


def check(text: str, directory: Path) -> tuple[subprocess.CompletedProcess[str], list[dict[str, str]]]:
    """`check-config` of the text, and the lines of its log."""
    file = directory / "c.yaml"
    file.write_text(text)
    command = (*COMMAND, "--config.file", str(file), "--log.format", "json", "check-config")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done, [json.loads(line) for line in done.stderr.splitlines()]


# --- Warnings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "probe: {interval: 1m}", "servers: []", "servers:"])
def test_a_file_without_servers_is_warned_of(text: str) -> None:
    assert list(warnings(parse(text, "test"))) == [Warned("", NO_SERVERS)]


@pytest.mark.parametrize(
    ("url", "instead"),
    [
        ("http://127.0.0.1:8080/v1", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/v1/", "http://127.0.0.1:8080"),
        ("http://[::1]:8080/v1/chat/completions", "http://[::1]:8080"),
        ("https://host/llama/v1", "https://host/llama"),
    ],
)
def test_the_address_of_an_openai_client_is_warned_of(url: str, instead: str) -> None:
    (warned,) = warnings(parse(one_server(f"url: '{url}'"), "test"))
    assert warned.server == "a"
    assert warned.text.endswith(f"leave out /v1: write {instead}")


@pytest.mark.parametrize("url", ["http://a", "http://a/v10", "http://v1/api", "http://a/api/v2", "unix:/run/v1/llama"])
def test_other_addresses_are_not_warned_of(url: str) -> None:
    assert list(warnings(parse(one_server(f"url: '{url}'"), "test"))) == []


def test_the_shipped_file_is_not_warned_of() -> None:
    assert list(warnings(load(ROOT / "config.yaml"))) == []


def test_a_model_file_is_looked_at_where_nobody_else_does(tmp_path: Path) -> None:
    whole, page = tmp_path / "whole.gguf", tmp_path / "page.gguf"
    write_model(whole)
    page.write_text("<!doctype html>")
    servers = [f"{{name: {p.stem}, url: 'http://{p.stem}', gguf: {p}}}" for p in (whole, page, tmp_path / "none.gguf")]
    settings = parse(f"servers: [{', '.join(servers)}]", "test")
    with structlog.testing.capture_logs() as lines:
        assert told(settings) is settings
        assert lines == []
        told(settings, files=True)
    assert [line["server"] for line in lines] == ["page", "none"]
    assert "is a web page, not GGUF" in lines[0]["problem"]
    assert "does not exist" in lines[1]["problem"]


def test_check_config_warns_once_and_prints_what_is_in_force(tmp_path: Path) -> None:
    done, log = check("probe: {interval: 1m}\n", tmp_path)
    assert done.returncode == 0
    assert "servers: []" in done.stdout
    assert [(line["level"], line["event"]) for line in log] == [("warning", NO_SERVERS)]

    done, log = check(one_server("url: 'http://127.0.0.1:1/v1', gguf: /etc/passwd"), tmp_path)
    assert done.returncode == 0
    assert [(line["level"], line["server"]) for line in log] == [("warning", "a")] * 2
    assert "leave out /v1" in log[0]["event"]
    assert "/etc/passwd is not GGUF" in log[1]["problem"]


def test_the_daemon_warns_once(tmp_path: Path) -> None:
    with exporter("servers: []", tmp_path) as running:
        pass
    assert len(running.logged(NO_SERVERS)) == 1


# --- Every error at once -----------------------------------------------------------------------------------------


def test_batches_listed_twice_are_told_beside_wrong_ones() -> None:
    assert errors_of("probe: {batches: [1, 1, 0]}") == [
        "probe.batches[2]: 0 is too small: the least is 1",
        "probe.batches: 1 is listed more than once; keep one",
    ]


def test_all_batches_listed_twice_are_told_and_thresholds_compared_with_them() -> None:
    assert errors_of("probe: {batches: [1, 1, 2, 2]}\n" + one_server("url: 'http://a', floor_fraction: {3: 0.5}")) == [
        "probe.batches: 1 and 2 are listed more than once; keep one of each",
        "servers[0].floor_fraction.3: batch 3 is not in probe.batches, [1, 2]; add it there, or remove it here",
    ]


def test_a_wrong_threshold_hides_no_batch_that_is_not_probed() -> None:
    found = errors_of(one_server("url: 'http://a', floor_fraction: {1: 2, 3: 0.5, x: 0.5}"))
    assert [error.split(": ")[0].removeprefix("servers[0].floor_fraction.") for error in found] == ["1", "x", "3"]


# --- Words -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("url: ''", "servers[0].url: '' is empty; every server needs one, e.g. url: http://127.0.0.1:8080"),
        ("url: 'http://a', model: ''", "servers[0].model: '' is empty; write a text, or remove the key"),
        ("url: 'http://a', gguf: [a, b]", "the value is not the path of a file; write e.g. /models/model.gguf"),
        ("url: 'http://a', api_key_file: 5", "the value is not the path of a file; write e.g. /run/secrets/key"),
        ("url: 'http://a', sleep_idle: -1", "-1 is not more than 0; leave it empty if the server does not sleep"),
        ("url: 'http://a', sleep_idle: '-1'", "'-1' is not more than 0; leave it empty if the server does not sleep"),
        ("url: 'http://a', sleep_idle: 0s", "'0s' is not more than 0; leave it empty if the server does not sleep"),
        ("url: 'http://a', sustained_fraction: 0.9", "0.9 has no use for device cpu, whose ceiling is measured"),
    ],
)
def test_an_error_names_the_remedy_that_fits(keys: str, words: str) -> None:
    (message,) = errors_of(one_server(keys))
    assert words in message


def test_the_default_sustained_fraction_may_be_written_for_a_cpu() -> None:
    assert parse(one_server("url: 'http://a', sustained_fraction: 80%"), "test").servers[0].sustained_fraction == 0.8
    gpu = "url: 'http://a', device: gpu, peak_bandwidth: 1TB/s, sustained_fraction: 0.9"
    assert parse(one_server(gpu), "test").servers[0].sustained_fraction == 0.9


@pytest.mark.parametrize("content", ["Bearer newkey", "bearer newkey\n", "Authorization: Bearer newkey", "Bearer"])
def test_a_key_file_holds_no_header(content: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(content)
    with pytest.raises(ValueError, match="write the key alone") as raised:
        read_key(tmp_path / "key")
    assert "newkey" not in str(raised.value)


def test_a_key_may_begin_with_the_word(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("bearer-of-news")
    assert read_key(tmp_path / "key") == "bearer-of-news"


def test_no_more_threads_than_the_kernels_take() -> None:
    (most,) = re.findall(r"MEMBENCH_MAX_THREADS = (\d+)", (ROOT / "csrc" / "membench.h").read_text())
    assert int(most) == MOST_THREADS
    assert parse(f"bandwidth: {{threads: {most}}}", "test").bandwidth.threads == MOST_THREADS
    assert errors_of("bandwidth: {threads: 1025}") == ["bandwidth.threads: 1025 is too large: the most is 1024"]


def test_an_empty_name_of_a_file_is_told() -> None:
    """As an unset variable of a shell leaves it."""
    command = (*COMMAND, "--config.file", "", "check-config")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "the file's name is empty" in done.stderr
