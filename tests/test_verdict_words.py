"""A verdict in words, and the page that explains its rule."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import snapshots

from exporter.present.page import landing_page
from exporter.present.report import Format, report_text
from exporter.present.verdict_sentences import verdict_lines
from exporter.present.words import BOUNDS, DOUBTS, PREDICTIONS, REMEDIES
from exporter.roofline import decode, verdict
from exporter.roofline.footprint import BytesSource, Footprint
from exporter.roofline.snapshot import BatchRecord, ServerView, Snapshot, view
from exporter.roofline.verdict import Bound, Doubt, Prediction, Remedy

DOCUMENT = Path(__file__).parent.parent / "docs" / "verdict.md"


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
