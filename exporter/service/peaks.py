"""The bandwidth of GPU servers whose configuration leaves it to be looked up."""

import importlib
from collections.abc import Callable
from typing import Final

import structlog

from exporter.config import ServerSettings, Settings
from exporter.measure.nvidia import GpuProblem, gpu_peak_bandwidth
from exporter.measure.whose import on_this_machine

log = structlog.get_logger()

_REMEDY: Final = "write peak_bandwidth from the spec sheet, e.g. 640GB/s"


class PeakError(Exception):
    """A GPU server's bandwidth is neither configured nor to be found out."""


def _look_up() -> float | GpuProblem:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return GpuProblem("nvidia-ml-py is not installed: pip install 'roofline-exporter[nvidia]'")
    return gpu_peak_bandwidth(nvml)


def with_peaks(settings: Settings, look_up: Callable[[], float | GpuProblem] = _look_up) -> Settings:
    """The settings with a bandwidth for every GPU server.

    Raises:
        PeakError: One has none; the message names the server and the remedies.
    """
    return settings.model_copy(update={"servers": tuple(_with_peak(s, look_up) for s in settings.servers)})


def _with_peak(server: ServerSettings, look_up: Callable[[], float | GpuProblem]) -> ServerSettings:
    if server.device != "gpu" or server.peak_bandwidth is not None:
        return server
    elsewhere = GpuProblem("the server runs on another machine than the exporter")
    found = look_up() if on_this_machine(server.url) else elsewhere
    if isinstance(found, GpuProblem):
        raise PeakError(f"server {server.name}: cannot look up its GPU's bandwidth: {found.message}; {_REMEDY}")
    log.info("peak_bandwidth looked up", server=server.name, gb_per_second=round(found / 1e9, 1))
    return server.model_copy(update={"peak_bandwidth": found})
