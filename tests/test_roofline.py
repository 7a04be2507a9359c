"""The arithmetic of ceilings, footprints and placed samples."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.roofline.ceiling import (
    CEILING_LIFETIME_SECONDS,
    Bandwidth,
    BandwidthTrack,
    CeilingSource,
    Device,
    Kernel,
    Roof,
    RoofPolicy,
    ThreadScope,
    summarize_passes,
)
from exporter.roofline.decode import IMPLAUSIBLE_RATIO, DecodeSample, marginal_stream_seconds, place
from exporter.roofline.footprint import Attention, BytesSource, Experts, Footprint, Part
from exporter.roofline.reason import Outcome, Reason

positive = st.floats(1e-3, 1e15)
seconds = st.floats(1e-6, 1e3)


def sample(step_seconds: float, batch: int = 1, depth: float = 0.0) -> DecodeSample:
    return DecodeSample(batch, step_seconds, 0.0, 16, depth, contended=False, measured_at=0.0)


def bandwidth(rate: float, at: float) -> Bandwidth:
    return Bandwidth(
        kernel=Kernel.READ,
        threads=ThreadScope.ALL,
        thread_count=2,
        best_bytes_per_second=rate,
        median_bytes_per_second=rate,
        spread_ratio=0.0,
        passes=5,
        array_bytes=1 << 20,
        store="plain",
        isa="avx2",
        pages="4KiB",
        method="stream",
        scope="exporter",
        measured_at=at,
    )


models = st.builds(
    lambda p, w, head, kv: Footprint(p, w, BytesSource.FILE, head_bytes=w * head, attention=(Attention(kv, 4 * kv),)),
    positive,
    st.floats(1e3, 1e12),
    st.floats(0, 1),
    st.floats(0, 1e6),
)
roofs = st.builds(
    lambda read, triad, flops: RoofPolicy().roof({Kernel.READ: read, Kernel.TRIAD: triad}, flops),
    st.floats(1e9, 1e13),
    st.floats(1e9, 1e13),
    st.none() | st.floats(1e9, 1e15),
)


@given(models, roofs, seconds, st.integers(1, 8), st.floats(0, 1e5))
def test_identities(model: Footprint, roof: Roof, step: float, batch: int, depth: float) -> None:
    """What the metrics promise of each other holds for any model, roof and time."""
    point = place(sample(step, batch, depth), model, roof)
    assert point.step_bytes is not None
    assert point.step_bytes_per_second is not None
    assert point.step_bytes_per_second * step == pytest.approx(point.step_bytes)
    assert point.token_read_bytes_per_second == pytest.approx(model.step(1).bytes * batch / step)
    if point.implausible:
        assert point.step_bytes_per_second > IMPLAUSIBLE_RATIO * roof.ceilings[CeilingSource.READ]
        assert (point.floor_ratio, point.floor_seconds) == (None, None)
        assert not point.ceiling_ratio
        assert not point.token_read_ratio
        assert not point.attainable_tokens_per_second
        assert not point.budget_seconds
    else:
        assert point.floor_seconds == pytest.approx(point.step_bytes / (roof.reference_bytes_per_second or math.nan))
        assert point.floor_ratio == pytest.approx(point.ceiling_ratio[CeilingSource.READ])
        assert point.attainable_tokens_per_second.keys() == roof.ceilings.keys()
        for source, ratio in point.ceiling_ratio.items():
            assert ratio * roof.ceilings[source] == pytest.approx(point.step_bytes_per_second)
        assert sum(point.budget_seconds.values()) == pytest.approx(step)
        assert min(point.budget_seconds.values()) >= 0


@given(models, st.floats(1e-3, 1e2), st.floats(1.01, 10))
def test_a_slower_step_has_a_smaller_floor_ratio(model: Footprint, step: float, factor: float) -> None:
    roof = RoofPolicy().roof({Kernel.READ: 1e15}, None)
    fast, slow = (place(sample(t), model, roof).floor_ratio for t in (step, step * factor))
    assert fast is not None
    assert slow is not None
    assert slow < fast


def test_without_a_footprint_only_the_measured_rates_are_known() -> None:
    point = place(sample(0.02, batch=4), None, RoofPolicy().roof({Kernel.READ: 30e9}, 1e12))
    assert point.sample.tokens_per_second == pytest.approx(200)
    assert point.step_bytes is None
    assert point.floor_ratio is None
    assert not point.ceiling_ratio


def test_a_known_compute_peak_bounds_what_is_attainable() -> None:
    model = Footprint(1e9, 1e9, BytesSource.SERVER)
    roof = RoofPolicy().roof({Kernel.READ: 100e9}, 100e9)
    point = place(sample(1.0, batch=4), model, roof)
    # Memory alone would allow 400 tokens/s; 4 x 2e9 FLOP at 100 GFLOP/s allow 50.
    assert point.attainable_tokens_per_second[CeilingSource.READ] == pytest.approx(50)


def test_a_step_shorter_than_its_floor_is_all_reading() -> None:
    """A GPU at 0.9 of its peak: the reference is 0.8 of it, and may be exceeded."""
    model = Footprint(1e9, 6e9, BytesSource.FILE, head_bytes=1e9, attention=(Attention(1e6, 4e6),))
    roof = RoofPolicy(device=Device.GPU, peak_bytes_per_second=1000e9).roof({}, None)
    point = place(sample(8e9 / 900e9, depth=2000.0), model, roof)
    assert point.implausible is False
    assert point.floor_ratio == pytest.approx(1.125)
    assert dict(point.budget_seconds) == pytest.approx(
        {
            Part.WEIGHTS: 5e9 / 900e9,
            Part.OUTPUT_HEAD: 1e9 / 900e9,
            Part.KV_CACHE: 2e9 / 900e9,
            Part.OVERHEAD: 0.0,
        }
    )


@given(models, st.floats(0.01, 10), st.floats(0.1, 1), st.integers(1, 8), st.floats(0, 1e5))
def test_a_plausible_step_always_has_a_budget(
    model: Footprint, floor_ratio: float, fraction: float, batch: int, depth: float
) -> None:
    """Its parts are never negative and add up to the step, on either side of the reference."""
    policy = RoofPolicy(device=Device.GPU, peak_bytes_per_second=1e12, sustained_fraction=fraction)
    step = model.step(batch, depth).bytes / (1e12 * fraction) / floor_ratio
    point = place(sample(step, batch, depth), model, policy.roof({}, None))
    if point.implausible:
        assert not point.budget_seconds
        return
    assert point.budget_seconds.keys() == {*Part}
    assert min(point.budget_seconds.values()) >= 0
    assert sum(point.budget_seconds.values()) == pytest.approx(step)
    idle = step * max(0.0, 1 - floor_ratio)
    assert point.budget_seconds[Part.OVERHEAD] == pytest.approx(idle, abs=1e-9 * step)


def test_nobody_knows_what_is_implausible_without_bytes_or_a_hard_ceiling() -> None:
    model = Footprint(1e9, 1e9, BytesSource.SERVER)
    read, triad = ({kernel: 100e9} for kernel in (Kernel.READ, Kernel.TRIAD))
    assert place(sample(0.001), None, RoofPolicy().roof(read, None)).implausible is None
    assert place(sample(0.001), model, RoofPolicy().roof({}, None)).implausible is None
    assert place(sample(0.001), model, RoofPolicy().roof(triad, None)).implausible is None
    assert place(sample(0.001), model, RoofPolicy().roof(read, None)).implausible is True


def test_triad_may_be_exceeded_but_not_read() -> None:
    model = Footprint(1e9, 1e9, BytesSource.SERVER)
    roof = RoofPolicy(reference=CeilingSource.TRIAD).roof({Kernel.READ: 100e9, Kernel.TRIAD: 70e9}, None)
    assert place(sample(0.011), model, roof).floor_ratio == pytest.approx(1e9 / 0.011 / 70e9)
    assert place(sample(0.009), model, roof).implausible


def test_marginal_stream_seconds_are_between_successive_batches() -> None:
    roof = RoofPolicy().roof({}, None)
    points = {b: place(sample(t, b), None, roof) for b, t in ((1, 0.010), (2, 0.012), (4, 0.020))}
    assert marginal_stream_seconds(points) == pytest.approx({2: 0.002, 4: 0.004})


@pytest.mark.parametrize(
    ("policy", "expected", "reference"),
    [
        (RoofPolicy(), {CeilingSource.READ: 30e9, CeilingSource.TRIAD: 40e9}, CeilingSource.READ),
        (
            RoofPolicy(device=Device.GPU, peak_bytes_per_second=640e9),
            {CeilingSource.PEAK: 640e9, CeilingSource.SUSTAINED: 512e9},
            CeilingSource.SUSTAINED,
        ),
    ],
)
def test_roof_of_a_device(policy: RoofPolicy, expected: dict[CeilingSource, float], reference: CeilingSource) -> None:
    """A GPU's roof never holds this machine's CPU figures, nor its compute peak."""
    roof = policy.roof({Kernel.READ: 30e9, Kernel.TRIAD: 40e9, Kernel.COPY: 1e9}, 1e12)
    assert dict(roof.ceilings) == expected
    assert roof.reference is reference
    assert (roof.compute_flops_per_second is None) == (policy.device is Device.GPU)


def test_a_configured_compute_peak_overrides_the_measured_one() -> None:
    roof = RoofPolicy(compute_flops_per_second=2e12).roof({Kernel.READ: 1e9}, 1e12)
    assert (roof.compute_flops_per_second, roof.compute_source) == (2e12, "configured")


@given(st.lists(seconds, min_size=1, max_size=20))
def test_pass_summary_is_ordered(times: list[float]) -> None:
    summary = summarize_passes(times)
    assert summary.best_seconds == min(times)
    assert summary.best_seconds <= summary.median_seconds <= max(times)
    assert summary.spread_ratio >= 0


@pytest.mark.parametrize("times", [[], [0.0], [1.0, -1.0]])
def test_pass_summary_refuses_what_are_no_times(times: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        summarize_passes(times)


@given(st.lists(st.tuples(st.floats(1, 1e12), st.floats(0, 3600)), min_size=1, max_size=60))
def test_track_knows_the_windows_best_and_the_last(steps: list[tuple[float, float]]) -> None:
    """The track forgets samples, but never one that would still matter."""
    track, now, seen = BandwidthTrack(), 0.0, []
    for rate, gap in steps:
        now += gap
        seen.append(bandwidth(rate, now))
        track = track.add(seen[-1])
        alive = [b for b in seen if now - b.measured_at <= CEILING_LIFETIME_SECONDS]
        best = track.in_force(now)
        assert best is not None
        assert best.best_bytes_per_second == max(b.best_bytes_per_second for b in alive)
        assert track.last(now) == seen[-1]


def test_ceilings_expire_after_a_day() -> None:
    track = BandwidthTrack().add(bandwidth(2e9, 0.0)).add(bandwidth(1e9, 1000.0))
    assert (track.in_force(1000.0) or bandwidth(0, 0)).best_bytes_per_second == 2e9
    assert (track.in_force(CEILING_LIFETIME_SECONDS + 1) or bandwidth(0, 0)).best_bytes_per_second == 1e9
    assert track.in_force(CEILING_LIFETIME_SECONDS + 1001) is None
    assert track.last(CEILING_LIFETIME_SECONDS + 1001) is None


def test_step_work_by_part() -> None:
    work = Footprint(10, 100, BytesSource.FILE, head_bytes=30, attention=(Attention(2, 8),)).step(4, depth=5)
    assert dict(work.bytes_by_part) == {Part.WEIGHTS: 70, Part.OUTPUT_HEAD: 30, Part.KV_CACHE: 40}
    assert (work.bytes, work.flops) == (140, 4 * (2 * 10 + 8 * 5))


def test_a_window_bounds_what_a_layer_reads() -> None:
    model = Footprint(1, 1, BytesSource.FILE, attention=(Attention(10, 40), Attention(10, 40, window=100)))
    assert model.step(2, depth=50).bytes_by_part[Part.KV_CACHE] == 2 * (500 + 500)
    assert model.step(2, depth=1000).bytes_by_part[Part.KV_CACHE] == 2 * (10_000 + 1000)
    assert model.kv_bytes_per_token == 20


def test_recurrent_state_counts_with_the_cache_and_not_with_depth() -> None:
    model = Footprint(1, 1, BytesSource.FILE, attention=(), state_bytes=64)
    assert model.step(3, depth=1000).bytes_by_part[Part.KV_CACHE] == 192


def test_experts_are_read_as_far_as_tokens_touch_them() -> None:
    """One token reads the used share; many tokens read all; FLOPs follow the used share only."""
    model = Footprint(100, 200, BytesSource.FILE, experts=(Experts(bytes=800, parameters=1600, count=8, used=2),))
    assert model.step(1).bytes == pytest.approx(200 + 200)
    assert model.step(2).bytes == pytest.approx(200 + 800 * (1 - 0.75**2))
    assert model.step(64).bytes == pytest.approx(1000, rel=1e-6)
    assert model.step(1).flops == pytest.approx(2 * (100 + 400))
    assert model.step(4).flops == pytest.approx(8 * (100 + 400))


@pytest.mark.parametrize(("batch", "depth"), [(0, 0), (1, -1)])
def test_step_refuses_impossible_arguments(batch: int, depth: float) -> None:
    with pytest.raises(ValueError, match="at least"):
        Footprint(1, 1, BytesSource.FILE).step(batch, depth)


def test_every_reason_has_an_outcome_and_every_outcome_a_reason() -> None:
    assert {reason.outcome for reason in Reason} == set(Outcome)
