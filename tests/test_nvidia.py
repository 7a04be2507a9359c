"""A GPU's bandwidth from NVML, with a fake of its library: there is no GPU here."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import pytest

from exporter.config import ServerSettings, Settings
from exporter.measure.nvidia import GpuProblem, gpu_peak_bandwidth
from exporter.service.peaks import PeakError, with_peaks
from exporter.service.policy import policy_of
from exporter.service.wiring import measuring


class NvmlError(Exception):
    """As the library names it, with a word for the cause."""


@dataclass
class FakeNvml:
    """The library on a machine whose GPUs are (memory clock MHz, bus width bit).

    Attributes:
        failing: Functions that raise.
        open: Calls of `nvmlInit` that `nvmlShutdown` has not undone.
    """

    gpus: list[tuple[int, int]]
    failing: set[str] = field(default_factory=lambda: {"nvmlDeviceGetMigMode"})
    split: bool = False
    open: int = 0

    def module(self) -> ModuleType:
        module = ModuleType("pynvml")
        functions: dict[str, Callable[..., object]] = {
            "nvmlInit": lambda: self._opened(1),
            "nvmlShutdown": lambda: self._opened(-1),
            "nvmlDeviceGetCount": lambda: len(self.gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: self.gpus[index],
            "nvmlDeviceGetMaxClockInfo": lambda gpu, clock: gpu[0] if clock == 2 else 99_999,
            "nvmlDeviceGetMemoryBusWidth": lambda gpu: gpu[1],
            "nvmlDeviceGetMigMode": lambda _: (int(self.split), 0),
        }
        guarded = {name: self._guarded(name, function) for name, function in functions.items()}
        vars(module).update(guarded, NVMLError=NvmlError, NVML_CLOCK_MEM=2, NVML_DEVICE_MIG_ENABLE=1)
        return module

    def _opened(self, by: int) -> None:
        self.open += by

    def _guarded(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            if name in self.failing:
                raise NvmlError("Not Supported")
            return function(*arguments)

        return call


@pytest.mark.parametrize(
    ("gpus", "gigabytes_per_second"),
    [
        ([(1215, 5120)], 1555.2),  # A100 40 GB
        ([(10_501, 384)], 1008.096),  # RTX 4090
        ([(14_001, 128)], 448.032),  # RTX 5060
        ([(10_501, 384), (10_501, 384)], 1008.096),
    ],
)
def test_spec_sheet_figures(gpus: list[tuple[int, int]], gigabytes_per_second: float) -> None:
    fake = FakeNvml(gpus)
    assert gpu_peak_bandwidth(fake.module()) == pytest.approx(gigabytes_per_second * 1e9)
    assert fake.open == 0


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        (FakeNvml([(1215, 5120)], failing={"nvmlInit"}), "no NVIDIA driver answers (Not Supported)"),
        (FakeNvml([]), "no GPU tells"),
        (FakeNvml([(0, 0)]), "no GPU tells"),
        (FakeNvml([(1215, 5120), (10_501, 384)]), "this machine's GPUs differ"),
        (FakeNvml([(1215, 5120)], failing=set(), split=True), "split into instances"),
        (FakeNvml([(1215, 5120)], failing={"nvmlDeviceGetMemoryBusWidth"}), "does not tell its memory's clock"),
    ],
)
def test_what_cannot_be_looked_up_says_why(fake: FakeNvml, words: str) -> None:
    found = gpu_peak_bandwidth(fake.module())
    assert isinstance(found, GpuProblem)
    assert words in found.message
    assert fake.open == 0


def test_a_gpu_that_could_be_split_and_is_not_counts_whole() -> None:
    assert gpu_peak_bandwidth(FakeNvml([(1215, 5120)], failing=set()).module()) == pytest.approx(1555.2e9)


# --- settings ----------------------------------------------------------------------------------------------------


def gpu(url: str = "http://127.0.0.1:8080", peak: float | None = None) -> ServerSettings:
    """A GPU server as the configuration leaves it where the library is installed."""
    server = ServerSettings.model_validate({"name": "g", "url": url, "device": "gpu", "peak_bandwidth": 1e12})
    return server.model_copy(update={"peak_bandwidth": peak})


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080", "http://localhost:1", "unix:/run/llama.sock"])
def test_a_local_gpu_server_gets_its_peak_and_from_it_its_roof(url: str) -> None:
    (server,) = with_peaks(Settings(servers=(gpu(url),)), lambda: 1008e9).servers
    assert server.peak_bandwidth == 1008e9
    assert policy_of(server).roof({}, None).ceilings == {"peak": 1008e9, "sustained": pytest.approx(0.8 * 1008e9)}


def test_what_is_configured_is_not_looked_up() -> None:
    cpu = ServerSettings.model_validate({"name": "c", "url": "http://127.0.0.1:1"})
    settings = Settings(servers=(gpu(peak=5e11), cpu))
    assert with_peaks(settings, lambda: pytest.fail("nobody asked")) == settings


def test_another_machines_gpu_is_not_this_ones() -> None:
    with pytest.raises(PeakError, match=r"server g: .* another machine .*; write peak_bandwidth"):
        with_peaks(Settings(servers=(gpu("http://192.0.2.1:8080"),)), lambda: 1008e9)


@pytest.mark.parametrize("installed", [True, False])
def test_there_is_no_beginning_without_a_peak(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([]).module() if installed else None)
    words = "no GPU tells" if installed else r"pip install 'roofline-exporter\[nvidia\]'"
    with pytest.raises(PeakError, match=f"{words}.*; write peak_bandwidth"):
        with_peaks(Settings(servers=(gpu(),)))


async def test_measuring_begins_with_the_peak_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([(1215, 5120)]).module())
    async with measuring(with_peaks(Settings(servers=(gpu(),)))) as scheduler:
        (server,) = scheduler.snapshot.servers
        assert server.policy.peak_bytes_per_second == pytest.approx(1555.2e9)
