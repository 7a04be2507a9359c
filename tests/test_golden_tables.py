"""Two published roofline tables, reproduced by the package's arithmetic."""

import pytest

from exporter.roofline.ceiling import CeilingSource, Device, Kernel, Roof, RoofPolicy
from exporter.roofline.decode import DecodePoint, DecodeSample, place
from exporter.roofline.footprint import Attention, BytesSource, Footprint, Part

# Table A prints neither parameters nor bytes: they are inferred from its intensity and GB/s columns.
A1 = Footprint(1.5437e9, 0.9895e9, BytesSource.CONFIGURED)
A2 = Footprint(0.49e9, 0.4914e9, BytesSource.CONFIGURED)
TABLE_A_ROOF = RoofPolicy(reference=CeilingSource.TRIAD).roof({Kernel.TRIAD: 221e9}, 2000e9)

# model, intensity, batch, tokens/s of all streams, GFLOP/s, per-token read GB/s, per-token read % of triad
TABLE_A = [
    (A1, 3.12, 1, 151, 466, 149, 67),
    (A1, 3.12, 2, 143, 442, 141, 64),
    (A1, 3.12, 4, 207, 639, 205, 92),
    (A2, 1.99, 1, 245, 240, 120, 54),
    (A2, 1.99, 2, 403, 395, 198, 90),
    (A2, 1.99, 4, 554, 542, 272, 123),
]


def sample(batch: int, tokens_per_second: float, depth: float = 0.0) -> DecodeSample:
    return DecodeSample(batch, batch / tokens_per_second, 0.0, 100, depth, contended=False, measured_at=0.0)


def printed(value: float | None, digits: int = 0) -> float:
    """The value in units of the last printed digit, so that `within one unit` is a difference of 1."""
    assert value is not None
    return value * 10.0**digits


@pytest.mark.parametrize(("model", "intensity", "batch", "tokens", "gflops", "gbytes", "percent"), TABLE_A)
def test_table_a(  # noqa: PLR0917
    model: Footprint, intensity: float, batch: int, tokens: float, gflops: float, gbytes: float, percent: float
) -> None:
    """Every printed figure is met within one unit of its last digit."""
    point = place(sample(batch, tokens), model, TABLE_A_ROOF)
    assert printed(model.step(1).intensity_flops_per_byte, 2) == pytest.approx(intensity * 100, abs=1)
    assert printed((point.flops_per_second or 0) / 1e9) == pytest.approx(gflops, abs=1)
    assert printed((point.token_read_bytes_per_second or 0) / 1e9) == pytest.approx(gbytes, abs=1)
    assert printed(point.token_read_ratio[CeilingSource.TRIAD] * 100) == pytest.approx(percent, abs=1)


def test_table_a_ridge() -> None:
    assert printed(TABLE_A_ROOF.ridge_flops_per_byte, 1) == pytest.approx(90, abs=1)


def test_table_a_step_accounting_is_physical() -> None:
    """A2 reads 123 % of triad by per-token accounting at batch 4, and a quarter of that in fact."""
    point = place(sample(4, 554), A2, TABLE_A_ROOF)
    assert point.ceiling_ratio[CeilingSource.TRIAD] == pytest.approx(1.23 / 4, abs=0.005)
    assert point.implausible is False


def test_table_a_step_intensity_crosses_the_ridge_at_batch_4() -> None:
    point = place(sample(4, 207), A1, TABLE_A_ROOF)
    assert printed(point.intensity_flops_per_byte, 1) == pytest.approx(125, abs=1)
    assert (point.intensity_flops_per_byte or 0) > (TABLE_A_ROOF.ridge_flops_per_byte or 0)


TABLE_B_ROOF = RoofPolicy(device=Device.GPU, peak_bytes_per_second=640e9, sustained_fraction=0.8).roof({}, None)


def table_b(kv_bytes_per_token: float | None = None, depth: float = 0.0, roof: Roof = TABLE_B_ROOF) -> DecodePoint:
    attention = None if kv_bytes_per_token is None else (Attention(kv_bytes_per_token, 0.0),)
    model = Footprint(8e9, 5.5e9, BytesSource.CONFIGURED, attention=attention)
    return place(sample(1, 39.6, depth), model, roof)


def test_table_b() -> None:
    point = table_b()
    step_bytes = point.step_bytes or 0.0
    assert printed(step_bytes / TABLE_B_ROOF.ceilings[CeilingSource.PEAK] * 1e3, 1) == pytest.approx(86, abs=1)
    assert printed(point.attainable_tokens_per_second[CeilingSource.PEAK]) == pytest.approx(116, abs=1)
    assert printed((point.floor_seconds or 0) * 1e3, 1) == pytest.approx(107, abs=1)
    assert printed(point.attainable_tokens_per_second[CeilingSource.SUSTAINED]) == pytest.approx(93, abs=1)
    assert printed(point.sample.step_seconds * 1e3, 1) == pytest.approx(252, abs=1)
    assert printed(point.ceiling_ratio[CeilingSource.PEAK] * 100) == pytest.approx(34, abs=1)
    assert printed((point.floor_ratio or 0) * 100) == pytest.approx(43, abs=1)
    assert printed(point.budget_seconds[Part.OVERHEAD] * 1e3, 1) == pytest.approx(145, abs=1)


def test_table_b_kv_cache() -> None:
    """0.6 ms of the 14.5 ms that are not weight streaming read the KV cache."""
    kv_bytes = 0.6e-3 * 512e9
    budget = table_b(kv_bytes_per_token=kv_bytes / 4096, depth=4096).budget_seconds
    assert printed(budget[Part.KV_CACHE] * 1e3, 1) == pytest.approx(6, abs=1)
    assert printed((budget[Part.KV_CACHE] + budget[Part.OVERHEAD]) * 1e3, 1) == pytest.approx(145, abs=1)


def test_table_b_has_no_ridge_without_a_compute_peak() -> None:
    assert TABLE_B_ROOF.ridge_flops_per_byte is None
