"""What holds decode back: every branch of the rule by example, its promises by property."""

from dataclasses import replace

import pytest
import snapshots
from hypothesis import given
from hypothesis import strategies as st
from verdicts import MODEL, ROOF, judged, points

from exporter.present.verdict_sentences import verdict_lines
from exporter.present.words import DOUBTS
from exporter.roofline.ceiling import CeilingSource, Device, Kernel, Roof, RoofPolicy
from exporter.roofline.decode import DecodeSample, place
from exporter.roofline.footprint import Attention, BytesSource, Footprint
from exporter.roofline.snapshot import ServerView
from exporter.roofline.verdict import Bound, Check, Doubt, Prediction, Remedy, Verdict, judge_server


def check(found: Verdict, prediction: Prediction) -> Check:
    return next(c for c in found.checks if c.prediction is prediction)


# --- the rule ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 0.010 / 0.65}, Bound.BANDWIDTH),
        ({1: 0.0154}, Bound.UNKNOWN),
        ({1: 0.012, 4: 0.0481}, Bound.BANDWIDTH),
        ({1: 1 / 32, 2: 3 / 64}, Bound.COMPUTE),
        ({1: 0.020, 2: 0.0299}, Bound.UNKNOWN),
        ({1: 0.020, 4: 0.050}, Bound.COMPUTE),
        ({1: 0.020, 2: 0.040, 4: 0.044}, Bound.UNKNOWN),
        ({1: 0.020, 2: 0.024}, Bound.OVERHEAD),
        ({1: 0.020, 2: 0.0241}, Bound.UNKNOWN),
        ({1: 0.020, 4: 0.020}, Bound.OVERHEAD),
        ({1: 0.020, 4: 0.0195}, Bound.OVERHEAD),
        ({1: 0.020, 4: 0.018}, Bound.UNKNOWN),
        ({1: 0.080, 2: 0.104}, Bound.OVERHEAD),
        ({1: 0.080, 2: 0.100}, Bound.OVERHEAD),
        ({1: 0.070, 2: 0.091}, Bound.UNKNOWN),
        ({1: 0.009}, Bound.ABOVE_CEILING),
        ({1: 0.0096}, Bound.BANDWIDTH),
        ({1: 0.020, 2: 0.009}, Bound.ABOVE_CEILING),
        ({4: 0.020}, Bound.UNKNOWN),
        ({2: 0.020, 4: 0.030}, Bound.UNKNOWN),
        ({}, Bound.UNKNOWN),
    ],
    ids=[
        "floor ratio at the threshold",
        "floor ratio below it, one batch",
        "bandwidth comes before compute",
        "growth at the upper threshold",
        "growth below the upper threshold",
        "growth is for each stream",
        "growth is that of the largest batch",
        "growth at the lower threshold",
        "growth above the lower threshold",
        "no growth",
        "growth that is as good as none",
        "negative growth",
        "computing is less than a tenth",
        "computing is a tenth",
        "computing is more than a tenth",
        "implausible",
        "just plausible",
        "one implausible batch",
        "one batch that is not batch 1",
        "no batch 1",
        "nothing measured",
    ],
)
def test_the_rule(seconds: dict[int, float], expected: Bound) -> None:
    assert judged(seconds).bound is expected


def test_what_is_not_known_gives_no_verdict() -> None:
    steps = {1: 0.020, 2: 0.040}
    assert judged(steps, model=None).bound is Bound.UNKNOWN
    assert judged(steps, roof=RoofPolicy().roof({}, None)).bound is Bound.UNKNOWN
    no_peak = RoofPolicy().roof({Kernel.READ: 50e9}, None)
    assert judged({1: 0.080, 2: 0.104}, roof=no_peak).bound is Bound.UNKNOWN, "a tenth of what?"
    assert judged(steps, roof=no_peak).bound is Bound.COMPUTE


@pytest.mark.parametrize(
    ("one", "four", "doubt"),
    [
        ({}, {}, None),
        ({"contended": True}, {}, Doubt.CONTENDED),
        ({}, {"contended": True}, Doubt.CONTENDED),
        ({"step_spread_ratio": 0.26}, {}, Doubt.UNEVEN),
        ({}, {"step_spread_ratio": 0.26}, Doubt.UNEVEN),
        ({"step_spread_ratio": 0.25}, {"step_spread_ratio": 0.25}, None),
        ({"step_seconds": 0.051}, {}, None),
        ({"step_seconds": 0.055}, {}, Doubt.FASTER_TOGETHER),
        ({"step_seconds": 0.055}, {"step_spread_ratio": 0.08}, None),
    ],
)
def test_growth_from_disturbed_samples_is_not_trusted(
    one: dict[str, float], four: dict[str, float], doubt: Doubt | None
) -> None:
    """A neighbour that slowed batch 1 down would make batching look free; the samples themselves stay as they are."""
    placed = points({1: 0.030, 4: 0.050})
    for batch, change in ((1, one), (4, four)):
        placed[batch] = place(replace(placed[batch].sample, **change), MODEL, ROOF)  # type: ignore[arg-type]
    found = judge_server(placed, ROOF)
    assert found.doubt is doubt
    assert found.growth is not None
    judged_batching = [c for c in found.checks if c.prediction is Prediction.BATCHING_RAISES_THROUGHPUT]
    assert bool(judged_batching) == (doubt is None)
    if doubt is not None:
        assert found.bound is Bound.UNKNOWN
        assert Remedy.MORE_STREAMS not in found.remedies
        server = ServerView(snapshots.cpu_server(), ROOF, placed)
        assert DOUBTS[doubt].format(batch=4) in next(iter(verdict_lines(server)))


def test_a_disturbed_sample_may_prove_enough_but_not_too_little() -> None:
    """It was slowed down, so the model itself is at least that fast."""
    single = Prediction.SINGLE_STREAM_ABOVE_40_PERCENT
    assert check(judged({1: 0.020}, contended=True), single).holds
    assert single not in [c.prediction for c in judged({1: 0.030}, contended=True).checks]
    assert not check(judged({1: 0.030}), single).holds
    assert judged({1: 0.012, 4: 0.013}, contended=True).bound is Bound.BANDWIDTH


def test_the_evidence_is_in_the_verdict() -> None:
    found = judged({1: 0.020, 2: 0.021, 4: 0.032})
    assert found.largest_batch == 4
    assert found.floor_ratio == pytest.approx(0.5)
    assert found.growth == pytest.approx(0.2)
    assert found.compute_share == pytest.approx(0.02 / 0.032)
    assert found.above_ceiling_ratio is None
    assert judged({1: 0.008, 2: 0.0085}).above_ceiling_ratio == pytest.approx(10 / 8)


times = st.dictionaries(st.integers(1, 8), st.floats(1e-4, 10), max_size=4)
roofs = st.builds(
    lambda read, flops: RoofPolicy().roof({Kernel.READ: read}, flops), st.floats(1e9, 1e12), st.floats(1e9, 1e15)
)


@given(times, st.floats(1e3, 1e12), roofs)
def test_bandwidth_bound_is_never_said_from_intensity(seconds: dict[int, float], parameters: float, roof: Roof) -> None:
    """Whatever the intensity: only batch 1's floor ratio says it, and says nothing else."""
    placed = points(seconds, Footprint(parameters, 500e6, BytesSource.FILE), roof)
    found = judge_server(placed, roof)
    if found.bound is Bound.BANDWIDTH:
        ratio = placed[1].floor_ratio
        assert ratio is not None
        assert ratio >= 0.65
    if not any(p.implausible for p in placed.values()) and 1 in placed and (placed[1].floor_ratio or 0) >= 0.65:
        assert found.bound is Bound.BANDWIDTH


@given(st.integers(1, 8), st.floats(1e-4, 10), roofs)
def test_one_batch_is_bandwidth_bound_or_unknown(batch: int, seconds: float, roof: Roof) -> None:
    placed = points({batch: seconds}, roof=roof)
    expected = {Bound.ABOVE_CEILING} if placed[batch].implausible else {Bound.BANDWIDTH, Bound.UNKNOWN}
    assert judge_server(placed, roof).bound in expected


@given(times, roofs, st.booleans())
def test_a_verdict_always_has_words_and_no_remedy_twice(seconds: dict[int, float], roof: Roof, contended: bool) -> None:  # noqa: FBT001
    found = judged(seconds, roof=roof, contended=contended)
    assert len(set(found.remedies)) == len(found.remedies)
    server = ServerView(snapshots.cpu_server(), roof, points(seconds, roof=roof))
    lines = list(verdict_lines(server))
    assert bool(lines) == bool(seconds)
    assert not [line for line in lines if "None" in line or "nan" in line]


# --- the predictions -----------------------------------------------------------------------------------------------

A1 = Footprint(1.5437e9, 0.9895e9, BytesSource.CONFIGURED)
TABLE_A_ROOF = RoofPolicy(reference=CeilingSource.TRIAD).roof({Kernel.TRIAD: 221e9}, 2000e9)


def test_table_a_crosses_the_ridge_at_batch_4() -> None:
    placed = points({1: 1 / 151, 2: 2 / 143, 4: 4 / 207}, A1, TABLE_A_ROOF)
    found = judge_server(placed, TABLE_A_ROOF)
    assert found.crosses_ridge_at == 4
    assert placed[4].intensity_flops_per_byte == pytest.approx(12.5, abs=0.05)
    assert TABLE_A_ROOF.ridge_flops_per_byte == pytest.approx(9.05, abs=0.01)
    assert [c.holds for c in found.checks] == [True, True, True]
    assert check(found, Prediction.BATCHING_RAISES_THROUGHPUT).value == pytest.approx(207 / 151)
    assert found.bound is Bound.BANDWIDTH
    assert judge_server({b: placed[b] for b in (1, 2)}, TABLE_A_ROOF).crosses_ridge_at is None


def test_the_gemma_model_on_two_zen_4_cpus_is_compute_bound() -> None:
    """Its step doubles from batch 1 to 2, so batching hardly raises the throughput; at 4 it does."""
    model = Footprint(268e6, 246_587_904, BytesSource.FILE, head_bytes=178_257_920)
    roof = RoofPolicy().roof({Kernel.READ: 40e9}, 250e9)
    found = judged({1: 0.0127, 2: 0.0251}, model, roof)
    assert found.bound is Bound.COMPUTE
    assert found.growth == pytest.approx(0.976, abs=0.001)
    batching = check(found, Prediction.BATCHING_RAISES_THROUGHPUT)
    assert batching.value == pytest.approx(1.012, abs=0.001)
    assert (batching.holds, batching.narrow) == (True, True)
    assert found.remedies == (Remedy.MORE_THREADS,)
    assert judged({1: 0.0127, 2: 0.0251, 4: 0.0344}, model, roof).bound is Bound.COMPUTE
    slower = judged({1: 0.0127, 2: 0.0256}, model, roof)
    assert not check(slower, Prediction.BATCHING_RAISES_THROUGHPUT).holds


def test_each_prediction_can_fail() -> None:
    heavy = Footprint(4e9, 500e6, BytesSource.FILE)
    found = judged({1: 0.026, 2: 0.053}, heavy)
    assert [(c.prediction, c.holds) for c in found.checks] == [(p, False) for p in Prediction]
    assert found.crosses_ridge_at == 1


def test_a_falsifier_needs_its_measurement() -> None:
    assert judged({2: 0.02}).checks == ()
    assert [c.prediction for c in judged({1: 0.02}).checks] == list(Prediction)[:2]
    assert [c.prediction for c in judged({1: 0.02, 2: 0.03}, model=None).checks] == list(Prediction)[2:]
    at_limit = check(judged({1: 0.025}), Prediction.SINGLE_STREAM_ABOVE_40_PERCENT)
    assert (at_limit.holds, at_limit.narrow) == (False, True)


# --- what would help -----------------------------------------------------------------------------------------------


def test_what_would_help_is_tied_to_the_evidence() -> None:
    streams, weights = Remedy.MORE_STREAMS, Remedy.FEWER_WEIGHT_BYTES
    assert judged({1: 0.012}).remedies == (weights,)
    assert judged({1: 0.012, 4: 0.013}).remedies == (weights, streams)
    assert judged({1: 0.012, 4: 0.048}).remedies == (weights,), "more streams would not help"
    assert judged({1: 0.030, 4: 0.031}).remedies == (streams, Remedy.FEWER_KERNELS)
    assert judged({1: 0.018, 4: 0.019}).remedies == (weights, streams, Remedy.FEWER_KERNELS), (
        "reading is the large half"
    )
    assert judged({1: 0.030, 4: 0.031}, contended=True).remedies == (Remedy.FEWER_THREADS,)
    assert judged({1: 0.030}).remedies == (Remedy.MORE_BATCHES,)
    assert judged({1: 0.030, 2: 0.040}).remedies == (streams,)
    assert judged({1: 0.001}).remedies == (Remedy.CHECK_CEILING,)
    assert judged({}).remedies == ()


def test_a_deep_cache_asks_for_fewer_kv_bytes() -> None:
    deep = Footprint(1e9, 100e6, BytesSource.FILE, attention=(Attention(400e3, 0.0),))
    point = place(DecodeSample(1, 0.012, 0.0, 32, 1000.0, contended=False, measured_at=0.0), deep, ROOF)
    assert judge_server({1: point}, ROOF).remedies == (Remedy.FEWER_KV_BYTES,)


def test_a_gpu_is_not_told_about_threads() -> None:
    roof = RoofPolicy(Device.GPU, peak_bytes_per_second=50e9).roof({}, None)
    assert judged({1: 0.030, 2: 0.060}, roof=roof).remedies == ()
    assert Remedy.FEWER_THREADS not in judged({1: 0.030, 2: 0.031}, roof=roof, contended=True).remedies
