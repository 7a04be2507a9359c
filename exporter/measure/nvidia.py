"""The memory bandwidth of this machine's NVIDIA GPU, from its clock and bus width, through NVIDIA's own library."""

from dataclasses import dataclass
from types import ModuleType
from typing import Final

_TRANSFERS_PER_CLOCK: Final = 2
"""NVML tells the clock of double-data-rate memory. A100-40: 1215 MHz x 2 x 5120 bit / 8 = 1555 GB/s."""


@dataclass(frozen=True, slots=True)
class GpuProblem:
    """Why the bandwidth is not known; `message` completes "cannot look it up: ..."."""

    message: str


def gpu_peak_bandwidth(nvml: ModuleType) -> float | GpuProblem:
    """Bytes/s of the GPU, if there is one or all are alike: which one a server uses, NVML does not tell.

    Args:
        nvml: The module `pynvml`.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuProblem(f"no NVIDIA driver answers ({error})")
    try:
        devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        if any(_is_split(nvml, device) for device in devices):
            return GpuProblem("the GPU is split into instances (MIG), each with a part of the bandwidth")
        rates = {_rate(nvml, device) for device in devices}
    except nvml.NVMLError as error:
        return GpuProblem(f"the GPU does not tell its memory's clock and width ({error})")
    finally:
        nvml.nvmlShutdown()
    if len(rates) > 1:
        return GpuProblem("this machine's GPUs differ")
    # A driver that does not know answers 0.
    return next((rate for rate in rates if rate > 0), GpuProblem("no GPU tells its memory's clock and width"))


def _rate(nvml: ModuleType, device: object) -> float:
    """Max memory clock x transfers per clock x bus width, in bytes/s; not the present clock, which idles."""
    megahertz = nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_MEM)
    return float(megahertz * 1e6 * _TRANSFERS_PER_CLOCK * nvml.nvmlDeviceGetMemoryBusWidth(device) / 8)


def _is_split(nvml: ModuleType, device: object) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(device)
    except nvml.NVMLError:
        # Most GPUs cannot be split, and say so this way.
        return False
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)
