"""What holds decode back: every branch of the rule by example, its promises by property, its words and its page."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import snapshots
from hypothesis import given
from hypothesis import strategies as st

from exporter.present.page import landing_page
from exporter.present.report import Format, report_text
from exporter.present.verdict_sentences import verdict_lines
from exporter.present.words import BOUNDS, DOUBTS, PREDICTIONS, REMEDIES
from exporter.roofline import decode, verdict
from exporter.roofline.ceiling import CeilingSource, Device, Kernel, Roof, RoofPolicy
from exporter.roofline.decode import DecodePoint, DecodeSample, place
from exporter.roofline.footprint import Attention, BytesSource, Footprint
from exporter.roofline.snapshot import BatchRecord, ServerView, Snapshot, view
from exporter.roofline.verdict import Bound, Check, Doubt, Prediction, Remedy, Verdict, judge_server

DOCUMENT = Path(__file__).parent.parent / "docs" / "verdict.md"
ROOF = RoofPolicy().roof({Kernel.TRIAD: 40e9, Kernel.READ: 50e9}, 400e9)
MODEL = Footprint(1e9, 500e6, BytesSource.FILE, head_bytes=100e6)
"""Its floor is 10 ms; computing takes 5 ms for each stream."""


def judged(
    seconds: Mapping[int, float], model: Footprint | None = MODEL, roof: Roof = ROOF, *, contended: bool = False
) -> Verdict:
    """The verdict on these step times by batch."""
    return judge_server(points(seconds, model, roof, contended=contended), roof)


def points(
    seconds: Mapping[int, float], model: Footprint | None = MODEL, roof: Roof = ROOF, *, contended: bool = False
) -> dict[int, DecodePoint]:
    return {
        batch: place(DecodeSample(batch, time, 0.0, 32, 0.0, contended, 0.0), model, roof)
        for batch, time in seconds.items()
    }


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


# --- words ---------------------------------------------------------------------------------------------------------


def test_everything_has_words_of_its_own() -> None:
    for words, things in (
        (BOUNDS, Bound),
        (REMEDIES, Remedy),
        (PREDICTIONS, Prediction),
        (DOUBTS, Doubt),
    ):
        assert set(words) == set(things)
        assert len(set(words.values())) == len(words)


def seen(seconds: Mapping[int, float], source: BytesSource = BytesSource.FILE) -> Snapshot:
    """The sample server with these step times; its step at batch B reads 600 MB + B x 2 MB."""
    model = snapshots.MODEL
    assert model.footprint is not None
    model = replace(model, footprint=replace(model.footprint, source=source))
    batches = {b: BatchRecord(sample=snapshots.sample(b, t)) for b, t in seconds.items()}
    return Snapshot(snapshots.host(), (replace(snapshots.cpu_server(model=model), batches=batches),))


def lines(seconds: Mapping[int, float], source: BytesSource = BytesSource.FILE) -> list[str]:
    return list(verdict_lines(view(seen(seconds, source), snapshots.NOW).servers[0]))


def test_the_verdict_is_a_sentence_with_its_numbers() -> None:
    verdict_line, *predictions, crossing, remedies = lines({1: 0.030, 4: 0.033})
    assert verdict_line == (
        "Overhead-bound, for neither reading nor computing fills the step: batch 1's floor ratio is 0.401 of read"
        " (0.65 or more is bandwidth-bound); each stream more, up to batch 4, costs 0.0333 of batch 1's step (0.5 or"
        " more is compute-bound, 0.2 or less overhead-bound); computing at its peak would take 0.606 of batch 4's step"
        " (0.1 or less is overhead-bound)."
    )
    below, single, batching = predictions
    assert below == (
        "Prediction holds, one token's intensity is below the ridge: 3.32 FLOP/byte at batch 1, the ridge is 8.00."
    )
    assert single == (
        "Prediction holds by less than 3 %, a single stream's steps reach more than 40 % of the reference:"
        " batch 1's floor ratio is 0.401 of read; falsified if 0.4 or less."
    )
    assert batching == (
        "Prediction holds, batching raises the tokens/s of all streams: batch 4 has 3.64 x the tokens/s of batch 1;"
        " falsified if 1 x or less."
    )
    assert crossing == "At batch 4 the step's own intensity crosses the ridge, 13.2 > 8.00 FLOP/byte."
    assert remedies == (
        "What would help: more streams together, each costing less than half a step of its own (--parallel);"
        " fewer and larger kernels (--flash-attn on, a newer llama.cpp)."
    )


def test_a_prediction_that_fails_says_so() -> None:
    assert (
        "Prediction FAILS, batching raises the tokens/s of all streams: batch 2 has 0.800 x"
        in lines({1: 0.030, 2: 0.075})[3]
    )


INTENSITY, SINGLE, BATCHING = PREDICTIONS.values()


def not_judged(server: ServerView) -> list[str]:
    return [line for line in verdict_lines(server) if "not judged" in line]


@pytest.mark.parametrize(
    ("batches", "told"),
    [
        ({1: 0.030, 4: 0.033}, []),
        ({1: 0.030}, [f"Prediction not judged, {BATCHING}: needs a larger batch."]),
        ({4: 0.030}, [f"Predictions not judged, {INTENSITY}; {SINGLE}; {BATCHING}: need batch 1."]),
        (
            {1: 0.030, 4: 0.020},
            [f"Prediction not judged, {BATCHING}: needs undisturbed samples of batch 1 and batch 4."],
        ),
        ({1: 0.008, 2: 0.030}, [f"Prediction not judged, {SINGLE}: needs a plausible sample of batch 1."]),
    ],
)
def test_only_what_a_prediction_lacks_is_named(batches: Mapping[int, float], told: list[str]) -> None:
    assert not_judged(view(seen(batches), snapshots.NOW).servers[0]) == told


def test_a_prediction_lacks_what_host_and_model_do_not_tell() -> None:
    known = seen({1: 0.030, 4: 0.033})
    sizeless = replace(known, servers=(snapshots.cpu_server(model=replace(snapshots.MODEL, footprint=None)),))
    sizeless = replace(sizeless, servers=(replace(sizeless.servers[0], batches=known.servers[0].batches),))
    both = f"Predictions not judged, {INTENSITY}; {SINGLE}: need"
    assert not_judged(view(sizeless, snapshots.NOW).servers[0]) == [f"{both} the model's size."]
    nothing = replace(snapshots.MODEL, footprint=Footprint(parameters=0.0, weight_bytes=0.0, source=BytesSource.SERVER))
    empty = replace(known, servers=(replace(known.servers[0], model=nothing),))
    assert not_judged(view(empty, snapshots.NOW).servers[0]) == [f"{both} the model's size."]
    no_peak = replace(known, host=replace(known.host, compute=None))
    assert not_judged(view(no_peak, snapshots.NOW).servers[0]) == [
        f"Prediction not judged, {INTENSITY}: needs the compute peak (compute_peak)."
    ]
    no_ceiling = replace(known, host=replace(known.host, tracks={}))
    assert not_judged(view(no_ceiling, snapshots.NOW).servers[0]) == [f"{both} a ceiling (read)."]
    uneven = {1: BatchRecord(sample=snapshots.sample(1, 0.1, contended=True))}
    slow = replace(known, servers=(replace(known.servers[0], batches=uneven),))
    assert not_judged(view(slow, snapshots.NOW).servers[0]) == [
        f"Prediction not judged, {SINGLE}: needs an undisturbed sample of batch 1.",
        f"Prediction not judged, {BATCHING}: needs a larger batch.",
    ]


def test_what_is_an_upper_bound_is_told_as_one() -> None:
    assert "floor ratio is at most 0.860 of read" in lines({1: 0.014}, BytesSource.SERVER)[0]
    assert "at most" not in lines({1: 0.014}, BytesSource.CONFIGURED)[0]


def test_an_implausible_sample_is_told_with_its_excess() -> None:
    assert lines({1: 0.008})[0] == (
        "Above the ceiling, so the ceiling or the model's bytes are wrong: a step reads 1.50 x what the memory can at"
        " most, and more than 1.05 x is implausible."
    )


def test_nothing_measured_says_nothing() -> None:
    assert lines({}) == []
    assert "What would help" not in report_text(view(snapshots.unreachable(), snapshots.NOW), Format.TABLE)


def test_the_verdict_is_in_every_view() -> None:
    snapshot = seen({1: 0.030, 4: 0.033})
    now = view(snapshot, snapshots.NOW)
    first, *rest = lines({1: 0.030, 4: 0.033})
    assert first in report_text(now, Format.TABLE, 2000)
    assert first in report_text(now, Format.MARKDOWN)
    html = landing_page(now, "0.1.0", snapshots.WALL_NOW)
    assert "Overhead-bound, for neither" in html
    assert all(line in report_text(now, Format.TABLE, 2000) for line in rest)
    assert "What would help: more streams" in html


def test_the_json_has_the_bound_its_evidence_and_the_predictions() -> None:
    document = json.loads(report_text(view(seen({1: 0.030, 4: 0.033}), snapshots.NOW), Format.JSON))
    (found,) = document["servers"]
    assert found["verdict"] == {
        "bound": "overhead-bound",
        "evidence": {
            "largest_batch": 4,
            "floor_ratio": pytest.approx(0.4013, abs=1e-4),
            "growth_ratio": pytest.approx(1 / 30),
            "compute_ratio": pytest.approx(8e9 / 400e9 / 0.033),
            "ridge_crossed_at_batch": 4,
        },
        "predictions": [
            {
                "prediction": "intensity_below_ridge",
                "holds": True,
                "narrow": False,
                "intensity_flops_per_byte": pytest.approx(2e9 / 602e6),
                "limit_intensity_flops_per_byte": 8,
            },
            {
                "prediction": "single_stream_above_40_percent",
                "holds": True,
                "narrow": True,
                "floor_ratio": pytest.approx(0.4013, abs=1e-4),
                "limit_floor_ratio": 0.4,
            },
            {
                "prediction": "batching_raises_throughput",
                "holds": True,
                "narrow": False,
                "tokens_per_second_ratio": pytest.approx(4 * 30 / 33),
                "limit_tokens_per_second_ratio": 1,
            },
        ],
        "remedies": ["more_streams", "fewer_kernels"],
    }


# --- the document --------------------------------------------------------------------------------------------------


def constants() -> dict[str, float]:
    found = {name: value for name, value in vars(verdict).items() if name.isupper() and isinstance(value, float)}
    return {**found, "IMPLAUSIBLE_RATIO": decode.IMPLAUSIBLE_RATIO}


@pytest.mark.parametrize("name", constants())
def test_the_document_has_every_threshold(name: str) -> None:
    value = constants()[name]
    told = f"{value * 100:g} %" if name == "NARROW_MARGIN" else f"{value:g}"
    assert re.search(rf"(?<![\d.]){re.escape(told)}(?![\d.]*\d)", DOCUMENT.read_text(encoding="utf-8")), told


def test_the_document_has_the_rule_line_by_line() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for condition, bound in (
        (f"more than {decode.IMPLAUSIBLE_RATIO:g} x what the memory can at most", Bound.ABOVE_CEILING),
        (f"r >= {verdict.BANDWIDTH_BOUND_FLOOR_RATIO:g}", Bound.BANDWIDTH),
        (f"g >= {verdict.COMPUTE_BOUND_GROWTH:g}", Bound.COMPUTE),
        (
            f"g <= {verdict.OVERHEAD_BOUND_GROWTH:g}, or c <= {verdict.OVERHEAD_BOUND_COMPUTE_SHARE:g}",
            Bound.OVERHEAD,
        ),
        ("else", Bound.UNKNOWN),
    ):
        assert re.search(rf"^\| .*{re.escape(condition)} \| {bound} \|", text, re.MULTILINE), condition
    for prediction in PREDICTIONS.values():
        assert prediction in text
