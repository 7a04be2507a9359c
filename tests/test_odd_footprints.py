"""Whatever footprint a file or a server can give, placing a sample never raises and gives finite numbers or nothing."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from hypothesis import given
from hypothesis import strategies as st
from test_architecture import T, meta

from exporter.roofline.architecture import footprint_of
from exporter.roofline.ceiling import CeilingSource, Kernel, Roof, RoofPolicy
from exporter.roofline.decode import DecodeSample, marginal_stream_seconds, place
from exporter.roofline.footprint import BytesSource, Footprint
from exporter.roofline.live import LiveSample, LiveShare, LiveSource, place_live
from exporter.roofline.prefill import PrefillSample, place_prefill
from exporter.roofline.verdict import judge_server

NAMES = st.sampled_from(
    ["token_embd.weight", "output.weight", "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight", "v.x", "blk.9.x"]
)
NUMBERS = st.integers(0, 64) | st.sampled_from([2**53 - 1, 2**64 - 1, -5, 1.7e308])
KEYS = [
    *("block_count", "embedding_length", "attention__head_count", "attention__key_length", "ssm__state_size"),
    *("expert_count", "expert_used_count", "attention__sliding_window", "ssm__inner_size", "ssm__conv_kernel"),
]
FROM_FILE = st.builds(
    lambda keys, tensors: footprint_of(meta(**keys), [T(n, e) for n, e in tensors.items()]),
    st.dictionaries(st.sampled_from(KEYS), NUMBERS),
    st.dictionaries(NAMES, st.integers(1, 2**62)),
)
FROM_SERVER = st.builds(lambda p, w: Footprint(p, w, BytesSource.SERVER), st.integers(0, 2**53), st.integers(0, 2**53))
RATE = st.floats(1e6, 1e15)
ROOFS = st.builds(
    lambda read, flops, reference: RoofPolicy(reference=reference).roof(
        {} if read is None else {Kernel.READ: read, Kernel.TRIAD: read / 2}, flops
    ),
    st.none() | RATE,
    st.none() | RATE,
    st.sampled_from([None, CeilingSource.TRIAD]),
)
# The shortest step that is proven: a microsecond for all steps of a generation; the longest: days.
SECONDS = st.floats(1e-9, 1e6)


def numbers(value: object) -> Iterator[float]:
    if isinstance(value, bool | str) or value is None:
        return
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from numbers(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from numbers(getattr(value, field.name))


@given(
    FROM_FILE | FROM_SERVER | st.none(),
    ROOFS,
    st.dictionaries(st.integers(1, 64), SECONDS, min_size=1, max_size=4),
    st.floats(0, 1e6),
)
def test_placing_never_raises(footprint: Footprint | None, roof: Roof, times: dict[int, float], depth: float) -> None:
    points = {
        b: place(DecodeSample(b, t, 0.0, 16, depth, contended=False, measured_at=0.0), footprint, roof)
        for b, t in times.items()
    }
    for point in points.values():
        if point.budget_seconds:
            assert min(point.budget_seconds.values()) >= 0
            assert math.isclose(sum(point.budget_seconds.values()), point.sample.step_seconds, rel_tol=1e-9)
    seconds = next(iter(times.values()))
    share = LiveShare(2, seconds, 64, 32.0, depth)
    live = LiveSample(LiveSource.SLOTS, 2.0, 1.0, seconds, 0.0, (share,))
    verdict = judge_server(points, roof)
    shown = [c.narrow for c in verdict.checks]
    prefill = place_prefill(PrefillSample(512, seconds, contended=False), footprint, roof)
    found = (points, marginal_stream_seconds(points), verdict, prefill, place_live(live, footprint, roof))
    assert all(math.isfinite(n) for n in numbers(found)), (found, shown)
