"""Verdicts on step times, for the tests of the rule and of its words."""

from collections.abc import Mapping

from exporter.roofline.ceiling import Kernel, Roof, RoofPolicy
from exporter.roofline.decode import DecodePoint, DecodeSample, place
from exporter.roofline.footprint import BytesSource, Footprint
from exporter.roofline.verdict import Verdict, judge_server

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
