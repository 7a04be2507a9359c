"""The settings: every key of config.yaml, its type, its default, its bounds, and what it must agree with.

The models are frozen. Settings made in code are checked as those from a file are, except that no file is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from exporter.config.units import (
    format_bandwidth,
    format_bytes,
    format_duration,
    format_flops,
    format_fraction,
    parse_bandwidth,
    parse_duration,
    parse_flops,
    parse_fraction,
    parse_size,
)
from exporter.config.values import (
    LEAST_BANDWIDTH,
    MOST_BANDWIDTH,
    MOST_THREADS,
    certificate_file,
    file_path,
    idle_time,
    in_order,
    key_file,
    listed,
    plain_text,
    readable_file,
    same_server,
    server_name,
    server_url,
    thread_count,
    whole_number,
    within,
)
from exporter.config.yamltext import Location, Problem

__all__ = ["COMPARED", "BandwidthSettings", "ProbeSettings", "Section", "ServerSettings", "Settings", "inconsistencies"]

_DAY = 86_400.0
_Interval: TypeAlias = Annotated[float, within(parse_duration, format_duration, 1.0, 7 * _DAY)]
_Bandwidth: TypeAlias = Annotated[
    float, within(parse_bandwidth, format_bandwidth, LEAST_BANDWIDTH, MOST_BANDWIDTH, "bytes per second")
]
_Flops: TypeAlias = Annotated[float, within(parse_flops, format_flops, 1e9, 1e18, "FLOP/s")]
_Fraction: TypeAlias = Annotated[float, within(parse_fraction, format_fraction, None, 1.0)]
_Batch: TypeAlias = Annotated[int, within(whole_number, str, 1, 64)]
_Text: TypeAlias = Annotated[str, BeforeValidator(plain_text)]
_Path: TypeAlias = Annotated[Path, BeforeValidator(file_path)]
_ReadableFile: TypeAlias = Annotated[_Path, AfterValidator(readable_file)]
_CacheType: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]


class Section(BaseModel):
    """What every section is: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, data: object) -> object:
        """A key without a value means its default, as in the shipped file."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}


class BandwidthSettings(Section):
    """How the ceilings of this machine are measured."""

    interval: _Interval = 300.0  # seconds
    max_memory: Annotated[int, within(parse_size, format_bytes, 16 * 1024**2, 1024**4, "bytes")] = 1024**3  # bytes
    threads: Annotated[
        Annotated[int, within(whole_number, str, 1, MOST_THREADS)] | None, BeforeValidator(thread_count)
    ] = None
    compute_peak: _Flops | None = None  # FLOP/s


class ProbeSettings(Section):
    """How often and how long a server's decode is probed."""

    interval: _Interval = 300.0  # seconds
    health_interval: _Interval = Field(default=15.0, validate_default=True)  # seconds
    batches: Annotated[tuple[_Batch, ...], BeforeValidator(listed), AfterValidator(in_order)] = (1, 2, 4)
    seconds: Annotated[float, within(parse_duration, format_duration, 0.1, 60.0)] = 2.0
    max_duty_cycle: Annotated[float, within(parse_fraction, format_fraction, None, 0.5)] = 0.02
    timeout: Annotated[float, within(parse_duration, format_duration, 1.0, 3600.0)] = Field(
        default=120.0, validate_default=True
    )

    @field_validator("health_interval")
    @classmethod
    def _health_is_not_rarer(cls, value: float, info: ValidationInfo) -> float:
        interval = info.data.get("interval", value)
        if value > interval:
            raise ValueError(
                f"{format_duration(value)} is longer than probe.interval, {format_duration(interval)}; "
                f"write at most {format_duration(interval)}"
            )
        return value

    @field_validator("timeout")
    @classmethod
    def _timeout_leaves_time(cls, value: float, info: ValidationInfo) -> float:
        seconds = info.data.get("seconds", 0.0)
        if value <= seconds:
            raise ValueError(
                f"{format_duration(value)} is not longer than probe.seconds, {format_duration(seconds)}; "
                "write a multiple of it, e.g. 120s"
            )
        return value


_SUSTAINED = 0.8
_REFERENCES = {"cpu": ("auto", "read", "triad"), "gpu": ("auto", "sustained", "peak")}
_DEFAULT_FLOORS: Mapping[int, float] = MappingProxyType({1: 0.25})


class ServerSettings(Section):
    """One llama.cpp server to watch."""

    name: Annotated[_Text, AfterValidator(server_name)]
    url: Annotated[_Text, AfterValidator(server_url)]  # without a trailing slash
    api_key_file: Annotated[_ReadableFile, AfterValidator(key_file)] | None = None
    ca_file: _ReadableFile | None = None
    model: _Text | None = None
    gguf: _Path | None = None
    active_weight_bytes: Annotated[int, within(parse_size, format_bytes, 1, 10**15)] | None = None
    cache_type_k: _CacheType = "f16"
    cache_type_v: _CacheType = "f16"
    device: Literal["cpu", "gpu"] = "cpu"
    peak_bandwidth: _Bandwidth | None = Field(default=None, validate_default=True)  # bytes/s
    sustained_fraction: _Fraction = _SUSTAINED
    compute_peak: _Flops | None = None  # FLOP/s
    reference: Literal["auto", "read", "triad", "sustained", "peak"] = "auto"
    floor_fraction: Mapping[_Batch, _Fraction] = Field(default_factory=lambda: _DEFAULT_FLOORS)
    live: Literal["slots", "metrics", "off"] = "slots"
    sleep_idle: Annotated[_Interval | None, BeforeValidator(idle_time)] = None  # seconds

    @field_validator("ca_file")
    @classmethod
    def _ca_needs_tls(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and not info.data.get("url", "https:").startswith("https:"):
            raise ValueError("a certificate authority has a use only with an https URL; remove it, or write https")
        return value if value is None else certificate_file(value, info)

    @field_validator("peak_bandwidth")
    @classmethod
    def _peak_fits_device(cls, value: float | None, info: ValidationInfo) -> float | None:
        device = info.data.get("device")
        # With the library installed it is looked up when measuring begins.
        if device == "gpu" and value is None and find_spec("pynvml") is None:
            raise ValueError(
                "device gpu needs it; write it from the spec sheet, e.g. 640GB/s, or on an NVIDIA machine let it be "
                "looked up: pip install 'roofline-exporter[nvidia]'"
            )
        if device == "cpu" and value is not None:
            raise ValueError(
                f"{format_bandwidth(value)} has no use for device cpu, whose ceiling is measured; "
                "remove it, or write device: gpu"
            )
        return value

    @field_validator("sustained_fraction")
    @classmethod
    def _fraction_fits_device(cls, value: float, info: ValidationInfo) -> float:
        # The default may stand there, as in the shipped file.
        if info.data.get("device") == "cpu" and value != _SUSTAINED:
            raise ValueError(
                f"{format_fraction(value)} has no use for device cpu, whose ceiling is measured; "
                "remove it, or write device: gpu"
            )
        return value

    @field_validator("reference")
    @classmethod
    def _reference_fits_device(cls, value: str, info: ValidationInfo) -> str:
        device = info.data.get("device")
        if device is not None and value not in _REFERENCES[device]:
            raise ValueError(f"'{value}' does not fit device {device}; write one of {', '.join(_REFERENCES[device])}")
        return value

    @field_serializer("floor_fraction")
    def _plain_floors(self, value: Mapping[int, float]) -> dict[int, float]:
        return dict(value)

    @field_validator("floor_fraction")
    @classmethod
    def _frozen_floors(cls, value: Mapping[int, float]) -> Mapping[int, float]:
        return MappingProxyType(dict(sorted(value.items())))


class Settings(Section):
    """The whole configuration."""

    bandwidth: BandwidthSettings = BandwidthSettings()
    probe: ProbeSettings = ProbeSettings()
    servers: Annotated[tuple[ServerSettings, ...], BeforeValidator(listed)] = ()

    @field_validator("servers")
    @classmethod
    def _default_floors_fit_batches(
        cls, servers: tuple[ServerSettings, ...], info: ValidationInfo
    ) -> tuple[ServerSettings, ...]:
        """Drop the default threshold of a batch that is not probed; one that was written down is an error instead."""
        probe = info.data.get("probe")
        if probe is None:
            return servers
        fitting = MappingProxyType({b: f for b, f in _DEFAULT_FLOORS.items() if b in probe.batches})
        return tuple(
            server
            if "floor_fraction" in server.model_fields_set
            else server.model_copy(update={"floor_fraction": fitting})
            for server in servers
        )

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if problems := tuple(inconsistencies(self.probe.batches, enumerate(self.servers))):
            raise PydanticCustomError(
                "inconsistent",
                "the settings contradict each other: {list}",
                {"list": _joined(problems), "all": problems},
            )
        return self


COMPARED: Final = ("name", "url", "model", "floor_fraction")
"""The keys of a server that are compared with other settings, and right in themselves whatever the others say."""


def _joined(problems: Iterable[Problem]) -> str:
    return "; ".join(f"{'.'.join(map(str, problem.location))}: {problem.message}" for problem in problems)


def inconsistencies(batches: Sequence[int] | None, servers: Iterable[tuple[int, ServerSettings]]) -> Iterator[Problem]:
    """Yield what is wrong between settings that are each right.

    Args:
        batches: Those that are probed; None where they are not known.
        servers: Each with its place in the list; of `COMPARED`, a name or url that is not known is empty.
    """
    names: dict[str, int] = {}
    targets: dict[tuple[str, str | None], int] = {}
    for index, server in servers:
        here: Location = ("servers", index)
        if server.name and (first := names.setdefault(server.name, index)) != index:
            yield Problem((*here, "name"), f"'{server.name}' is the name of servers[{first}] too; write another one")
        if server.url and (first := targets.setdefault((same_server(server.url), server.model), index)) != index:
            yield Problem((*here, "url"), f"'{server.url}' is watched by servers[{first}] already; keep one of the two")
        if batches is None or "floor_fraction" not in server.model_fields_set:
            continue
        for batch in server.floor_fraction:
            if batch not in batches:
                message = f"batch {batch} is not in probe.batches, {list(batches)}; add it there, or remove it here"
                yield Problem((*here, "floor_fraction", batch), message)
