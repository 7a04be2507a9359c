"""The configuration: what it accepts, what it refuses with which words, and that it can be written back."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from real import missing

from exporter.config import (
    BandwidthSettings,
    ConfigError,
    ProbeSettings,
    ServerSettings,
    Settings,
    load,
    parse,
    read_key,
    to_yaml,
)
from exporter.config import settings as settings_module

ROOT = Path(__file__).parent.parent
TESTDATA = Path(__file__).parent / "testdata" / "config"
BAD_FILES = sorted(path.name for path in TESTDATA.glob("bad_*.yaml"))


def one_server(**keys: object) -> str:
    return yaml.safe_dump({"servers": [{"name": "a", "url": "http://a", **keys}]})


def server(**keys: object) -> ServerSettings:
    return parse(one_server(**keys), "test").servers[0]


def errors_of(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        parse(text, "test")
    return raised.value.errors


# --- Bad files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_gives_exactly_the_messages_at_its_head(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TESTDATA)
    monkeypatch.setattr(settings_module, "find_spec", lambda _: None)
    lines = Path(name).read_text(encoding="utf-8").splitlines()
    expected = tuple(line.removeprefix("# ") for line in lines if line.startswith(f"# {name}:"))

    with pytest.raises(ConfigError) as raised:
        load(Path(name))

    assert expected == raised.value.errors
    assert "\n".join(expected) == str(raised.value)


@pytest.mark.parametrize("name", BAD_FILES)
def test_no_message_shows_a_secret(name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(TESTDATA / name)

    for secret in ("not-to-be-shown", "secret-", "dGhpcy", "123456789"):
        assert secret not in str(raised.value).replace("bad_secret", "")


# --- Files -------------------------------------------------------------------------------------------------------


def test_the_shipped_file_says_the_defaults() -> None:
    expected = Settings(servers=(ServerSettings(name="local", url="http://127.0.0.1:8080"),))
    assert expected == load(ROOT / "config.yaml")


def test_the_shipped_file_has_every_key_under_a_comment() -> None:
    text = (ROOT / "config.yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    for section, values in (
        (BandwidthSettings, data["bandwidth"]),
        (ProbeSettings, data["probe"]),
        (ServerSettings, data["servers"][0]),
    ):
        assert list(section.model_fields) == list(values)
    above = ""
    for line in text.splitlines():
        if ":" in line and not line.lstrip().startswith("#"):
            assert above.startswith("#") or line.lstrip().startswith("cache_type_v"), line
        above = line.lstrip()


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "bandwidth:\nprobe:\nservers:\n", "servers: []", "{}"])
def test_what_is_not_written_is_the_default(text: str) -> None:
    settings = parse(text, "test")
    assert Settings() == settings
    assert settings.servers == ()
    assert settings.probe.batches == (1, 2, 4)
    assert settings.probe.max_duty_cycle == 0.02


@pytest.mark.parametrize("raw", [b"\xef\xbb\xbfprobe: {seconds: 3s}\n", b"probe:\r\n  seconds: 3s\r\n"])
def test_a_byte_order_mark_and_windows_lines_are_read(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(raw)
    assert load(path).probe.seconds == 3.0


def test_an_unreadable_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    for path, why in ((missing, "no such file or directory"), (tmp_path, "is a directory")):
        with pytest.raises(ConfigError) as raised:
            load(path)
        assert str(raised.value) == f"{path}: cannot be read: {why}; name a readable file with --config.file"


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes("# größe\n".encode("latin-1"))
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert str(raised.value) == f"{path}: byte 5 is not UTF-8; save the file as UTF-8"


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is a pipe"):
        load(tmp_path / "pipe")


def test_a_huge_file_is_refused_before_it_is_read() -> None:
    remedy = "is larger than 1MiB; name the configuration file, which is far smaller"
    with pytest.raises(ConfigError) as raised:
        load(Path("/dev/zero"))
    assert str(raised.value) == f"/dev/zero: {remedy}"
    assert errors_of("#" * (1024**2 + 1)) == (f"test: {remedy}",)


def test_a_character_outside_yaml_is_named_with_its_line() -> None:
    assert errors_of("probe:\n  \x00") == ("test:2: the character U+0000 is not allowed in YAML; remove it",)


def test_a_key_that_cannot_be_printed_keeps_the_message_on_one_line() -> None:
    (message,) = errors_of('"a\\n\\e[31m": 1')
    assert message == r"test:1: 'a\n\x1b[31m': unknown key; known here are bandwidth, probe, servers"


def test_relative_paths_start_at_the_directory_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-1\n")
    (tmp_path / "ca.pem").write_text(authorities())
    config = tmp_path / "config.yaml"
    config.write_text(f"servers: [{{name: a, url: https://a, api_key_file: key, ca_file: {tmp_path}/ca.pem}}]")

    loaded = load(config).servers[0]

    assert loaded.api_key_file == tmp_path / "key"
    assert loaded.ca_file == tmp_path / "ca.pem"
    assert "sk-1" not in to_yaml(load(config))


def test_an_empty_or_misplaced_key_file_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.key"
    empty.touch()
    assert errors_of(one_server(api_key_file=str(empty))) == (
        f"test:2: servers[0].api_key_file: '{empty}' is an empty file; fill it, or remove the key",
    )
    inside = empty / "key"
    assert "not a directory" in errors_of(one_server(api_key_file=str(inside)))[0]
    # A pasted token may be longer than any file name, and the error must still not show it.
    (message,) = errors_of(one_server(api_key_file="eyJ" + "x" * 5000))
    assert "file name too long" in message
    assert "xxx" not in message


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b" \n\t\r\n", "holds no key; write the key into it"),
        (b"sk-1\n\nsk-2\n", "holds 2 lines; leave the one key in it that is to be sent"),
        (b"sk-1\rsk-2", "holds 2 lines"),
        (b"x" * 8193, "is larger than an API key"),
        (b"sk-\x00secret", "holds characters that no API key has; save the key as plain ASCII text"),
        (b"sk-\x1b[31m", "holds characters"),
        (b"sk-\tsecret", "holds characters"),
        ("schlüssel".encode(), "holds characters"),
        ("sk-1\n".encode("utf-16"), "holds characters"),
    ],
)
def test_a_key_file_holds_one_key(content: bytes, fault: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(content)
    (message,) = errors_of(one_server(api_key_file=str(key)))
    assert message.startswith(f"test:2: servers[0].api_key_file: '{key}' {fault}")
    assert not any(part in message for part in ("sk-", "secret", "xxx"))
    with pytest.raises(ValueError, match=fault):
        read_key(key)


@pytest.mark.parametrize("content", [b"sk-1", b"sk-1\n", b"\r\n  sk-1\t\r\n\n"])
def test_lines_and_spaces_around_a_key_are_not_its_own(content: bytes, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(content)
    assert server(api_key_file=str(key)).api_key_file == key
    assert read_key(key) == "sk-1"


def test_a_pipe_in_place_of_a_key_is_not_waited_for(tmp_path: Path) -> None:
    """A file may be replaced while the daemon runs."""
    os.mkfifo(tmp_path / "key")
    with pytest.raises(ValueError, match="is not a regular file"):
        read_key(tmp_path / "key")
    with pytest.raises(ValueError, match="cannot be read: is a directory"):
        read_key(tmp_path)


# --- Values ------------------------------------------------------------------------------------------------------


# --- Servers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/", "http://127.0.0.1:8080"),
        ("HTTPS://Llama.Example/", "https://llama.example"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("http://[2001:DB8::1]", "http://[2001:db8::1]"),
        ("http://llama_server:8080/Api/v2/", "http://llama_server:8080/Api/v2"),
        ("unix:/run/llama.sock", "unix:/run/llama.sock"),
        ("unix:///run/llama.sock", "unix:/run/llama.sock"),
    ],
)
def test_server_urls(written: str, url: str) -> None:
    assert server(url=written).url == url


def test_a_gpu_has_its_peak_from_the_configuration() -> None:
    gpu = server(device="gpu", peak_bandwidth="640GB/s", reference="peak", compute_peak="40TFLOPS")
    assert (gpu.peak_bandwidth, gpu.compute_peak, gpu.sustained_fraction) == (640e9, 40e12, 0.8)


def test_a_gpus_peak_may_be_left_to_be_looked_up_where_that_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "find_spec", {"pynvml": "found"}.get)
    assert server(device="gpu").peak_bandwidth is None
    assert yaml.safe_load(to_yaml(parse(one_server(device="gpu"), "test")))["servers"][0]["peak_bandwidth"] is None


def authorities() -> str:
    """The certificates that this machine trusts."""
    found = (Path(p) for p in (ssl.get_default_verify_paths().cafile, "/etc/ssl/certs/ca-certificates.crt") if p)
    bundle = next((p for p in found if p.is_file()), None)
    return bundle.read_text() if bundle else missing("this machine has no file of trusted certificates")


def test_a_certificate_authority_is_for_https_only(tmp_path: Path) -> None:
    here = tmp_path / "ca.pem"
    here.write_text(authorities())
    assert server(url="https://a", ca_file=str(here)).ca_file == here
    assert "only with an https URL" in errors_of(one_server(ca_file=str(here)))[0]


def test_a_certificate_authority_that_is_none_is_found_when_loading() -> None:
    """And not when the daemon makes its first connection."""
    here = str(TESTDATA / "bad_tag.yaml")
    assert "holds no certificate" in errors_of(one_server(url="https://a", ca_file=here))[0]


def test_thresholds_are_per_batch() -> None:
    assert server().floor_fraction == {1: 0.25}
    assert server(floor_fraction={4: 0.5, 1: "30%"}).floor_fraction == {1: 0.3, 4: 0.5}
    assert server(floor_fraction={}).floor_fraction == {}


def test_the_default_threshold_goes_with_its_batch() -> None:
    settings = parse("probe: {batches: [4, 2]}\n" + one_server(), "test")
    assert settings.probe.batches == (2, 4)
    assert settings.servers[0].floor_fraction == {}
    assert parse(to_yaml(settings), "test") == settings


@pytest.mark.parametrize("name", ["on", "null", "true", "1e9", "010", "1_0", "0x1f", "-", "--", "123", "1-2"])
def test_a_name_that_yaml_would_take_for_something_else_survives(name: str) -> None:
    settings = Settings(servers=(ServerSettings(name=name, url="http://a"),))
    assert parse(to_yaml(settings), "test") == settings


def test_yaml_booleans_of_old_are_text() -> None:
    assert parse("servers: [{name: on, url: http://a}]", "test").servers[0].name == "on"
    for choice in ("slots", "metrics", "off"):
        assert server(live=choice).live == choice
    assert parse("servers: [{name: a, url: http://a, live: off}]", "test").servers[0].live == "off"


# --- Settings as a value -----------------------------------------------------------------------------------------


def test_settings_cannot_be_changed() -> None:
    settings = parse(one_server(), "test")
    with pytest.raises(ValidationError, match="frozen"):
        settings.probe.seconds = 3.0  # type: ignore[misc]
    assert isinstance(settings.servers[0].floor_fraction, MappingProxyType)


def test_settings_dump_to_plain_values() -> None:
    dumped = parse(one_server(), "test").model_dump(mode="json")
    assert dumped["servers"][0]["floor_fraction"] in ({1: 0.25}, {"1": 0.25})


def test_settings_made_in_code_are_checked_and_show_no_value() -> None:
    twin = ServerSettings(name="a", url="http://a", api_key_file=Path("/nowhere"))
    with pytest.raises(ValidationError, match=r"servers.1.name: 'a' is the name of servers\[0\] too"):
        Settings(servers=(twin, twin))
    with pytest.raises(ValidationError) as raised:
        ServerSettings(name="a", url="http://user:password@a")
    assert "password@" not in str(raised.value)


def test_the_written_configuration_is_whole() -> None:
    written = yaml.safe_load(to_yaml(parse(one_server(device="gpu", peak_bandwidth=5e11), "test")))
    sections: tuple[tuple[type[BaseModel], dict[str, object]], ...] = (
        (BandwidthSettings, written["bandwidth"]),
        (ProbeSettings, written["probe"]),
        (ServerSettings, written["servers"][0]),
    )
    for section, values in sections:
        assert list(section.model_fields) == list(values)
    assert written["bandwidth"]["threads"] == "auto"
    assert written["servers"][0]["peak_bandwidth"] == "500GB/s"


@st.composite
def all_settings(draw: st.DrawFn) -> Settings:
    """Draw settings as code could make them."""
    seconds = st.floats(1.0, 604_800.0)
    interval = draw(seconds)
    length = draw(st.floats(0.1, 60.0))
    batches = draw(st.sets(st.integers(1, 64), min_size=1, max_size=5))
    fraction = st.floats(1e-6, 1.0)
    servers = []
    for name in draw(st.lists(st.from_regex(r"[a-z0-9_-]{1,40}", fullmatch=True), unique=True, max_size=4)):
        gpu = draw(st.booleans())
        keys: dict[str, object] = {
            "name": name,
            "url": draw(st.sampled_from(["http://{}:8080", "https://[::1]/{}", "unix:/{}.sock"])).format(f"h{name}"),
            "device": "gpu" if gpu else "cpu",
            "peak_bandwidth": draw(st.floats(1e9, 1e15)) if gpu else None,
            "sustained_fraction": draw(fraction) if gpu else 0.8,
            "compute_peak": draw(st.none() | st.floats(1e9, 1e18)),
            "reference": draw(st.sampled_from(["auto", "peak"] if gpu else ["auto", "triad"])),
            "live": draw(st.sampled_from(["slots", "metrics", "off"])),
        }
        if draw(st.booleans()):
            keys["floor_fraction"] = draw(st.dictionaries(st.sampled_from(sorted(batches)), fraction))
        servers.append(ServerSettings.model_validate(keys))
    return Settings(
        bandwidth=BandwidthSettings(
            interval=draw(seconds),
            max_memory=draw(st.integers(16 * 1024**2, 1024**4)),
            threads=draw(st.none() | st.integers(1, 1024)),
            compute_peak=draw(st.none() | st.floats(1e9, 1e18)),
        ),
        probe=ProbeSettings(
            interval=interval,
            health_interval=draw(st.floats(1.0, interval)),
            batches=tuple(batches),
            seconds=length,
            max_duty_cycle=draw(st.floats(1e-6, 0.5)),
            timeout=draw(st.floats(max(1.0, length), 3600.0, exclude_min=True)),
        ),
        servers=tuple(servers),
    )


@given(all_settings())
def test_the_written_configuration_reads_back_as_the_same_settings(settings: Settings) -> None:
    assert parse(to_yaml(settings), "test") == settings


WORDS = ["bandwidth", "probe", "servers", "interval", "batches", "name", "url", "floor_fraction", "api_key_file"]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(WORDS)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | SCALARS, inner, max_size=4),
    max_leaves=12,
)


@given(st.text() | ANYTHING.map(yaml.safe_dump) | st.text("[]{}:,-#&*!|>'\"%@` \nab1"))
def test_any_text_gives_settings_or_a_config_error(text: str) -> None:
    try:
        settings = parse(text, "test")
    except ConfigError as error:
        lines = error.errors
    else:
        lines = ("test:",)
        assert isinstance(settings, Settings)
    assert lines
    assert all(line.startswith("test:") and line.isprintable() for line in lines)
