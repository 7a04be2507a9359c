"""Footprints against real step times: synthetic models with random weights, served by the real llama.cpp.

Three models: `dense` with grouped heads; `experts`, whose file is several times as large, but whose token needs two of
eight experts, together as large as the dense feed-forward part; `whole`, dense and as large as the experts' file.
"""

import asyncio
import importlib.util
from collections.abc import Collection, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from statistics import median
from time import monotonic

import pytest
from gguf_files import Shape, write_model
from processes import free_port, llama
from real import require

from exporter.measure.gguf import read_gguf
from exporter.measure.gguf_types import GgufHeader
from exporter.measure.host import ContentionMeter
from exporter.measure.listing import ModelSize
from exporter.measure.llama import LlamaClient, open_session
from exporter.measure.model import ModelHints, ModelReader
from exporter.measure.probe import DecodeProbe, Identity, identify
from exporter.roofline.decode import DecodeSample
from exporter.roofline.footprint import BytesSource, Footprint
from exporter.roofline.snapshot import Model

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

INNER = 4096
DENSE = Shape(layers=8, embedding=768, heads=12, kv_heads=4, context=1024, feed_forward=INNER)
SHAPES = {
    "dense": DENSE,
    "experts": replace(DENSE, feed_forward=INNER // 2, experts=8, experts_used=2),
    "whole": replace(DENSE, feed_forward=4 * INNER),
}
ROUNDS = 3
MOST_ROUNDS = 8
"""Rounds are made until each model has enough samples that nobody disturbed, but no more than this."""


@dataclass
class Served:
    """One model behind a server, and what was measured of it."""

    path: Path
    url: str
    samples: list[DecodeSample] = field(default_factory=list)
    size: ModelSize | None = None
    model: Model | None = None

    @property
    def footprint(self) -> Footprint:
        assert self.model
        assert self.model.footprint
        return self.model.footprint

    @property
    def step_seconds(self) -> float:
        """The median of the undisturbed samples; where they are too few, the least disturbed of all."""
        quiet = [s.step_seconds for s in self.samples if not s.contended]
        return median(quiet) if len(quiet) >= ROUNDS else min(s.step_seconds for s in self.samples)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    require(importlib.util.find_spec("xllamacpp"), "xllamacpp is not installed")
    directory, found = tmp_path_factory.mktemp("models"), {}
    with ExitStack() as stack:
        for name, shape in SHAPES.items():
            path, port = directory / f"{name}.gguf", free_port()
            write_model(path, shape)
            # One thread: neighbours on a busy machine slow it down in proportion, not by a hundred.
            stack.enter_context(llama(path, port, "--parallel", "1", "--ctx-size", "1024", "--threads", "1"))
            found[name] = Served(path, f"http://127.0.0.1:{port}")
        yield found
    for served in found.values():
        # pytest keeps temporary directories, and these files are large.
        served.path.unlink()


@pytest.fixture(scope="module")
def measured(servers: dict[str, Served]) -> dict[str, Served]:
    asyncio.run(measure(servers.values()))
    return servers


async def measure(servers: Collection[Served]) -> None:
    """Probes every model at batch 1, in turn, so that a slow minute of the machine meets all of them."""
    meter = ContentionMeter(Path("/proc"), Path("/sys"), monotonic)
    async with AsyncExitStack() as stack:
        probes: list[tuple[Served, DecodeProbe, Identity]] = []
        for served in servers:
            session = await stack.enter_async_context(open_session(served.url, None))
            probe = DecodeProbe(LlamaClient(session, served.url, None), meter, monotonic, seconds=0.5, timeout=120)
            identity = await identify(probe.client)
            assert isinstance(identity, Identity)
            served.model, served.size = (
                await ModelReader(ModelHints()).describe(identity.props, identity.size),
                identity.size,
            )
            probes.append((served, probe, identity))
        for done in range(MOST_ROUNDS):
            if all(sum(not s.contended for s in served.samples) >= ROUNDS for served in servers):
                break
            for served, probe, identity in probes:
                sample = await probe.measure(identity, 1)
                assert isinstance(sample, DecodeSample), (done, sample)
                served.samples.append(sample)


@pytest.mark.parametrize("name", SHAPES)
def test_the_file_agrees_with_the_server(measured: dict[str, Served], name: str) -> None:
    served = measured[name]
    assert served.size
    assert served.model
    assert served.footprint.source is BytesSource.FILE
    assert served.model.file_mismatch is False
    header = read_gguf(served.path)
    assert isinstance(header, GgufHeader)
    assert (header.parameters, header.weight_bytes) == (served.size.parameters, served.size.weight_bytes)


@pytest.mark.parametrize("name", SHAPES)
def test_grouped_heads_share_their_cache(measured: dict[str, Served], name: str) -> None:
    """2 bytes of K and of V for each of 4 heads of 64 in 8 layers; all 12 heads attend."""
    footprint = measured[name].footprint
    assert footprint.kv_bytes_per_token == 2 * 2 * 4 * 64 * 8
    assert footprint.attention
    assert sum(layer.flops_per_token for layer in footprint.attention) == 4 * 12 * 64 * 8


def test_step_times_of_experts_follow_active_bytes_not_file_bytes(measured: dict[str, Served]) -> None:
    dense, experts, whole = (measured[name] for name in SHAPES)
    depth = experts.samples[0].depth
    active, read = experts.footprint.step(1, depth).bytes, whole.footprint.step(1, depth).bytes
    assert active == pytest.approx(dense.footprint.step(1, depth).bytes, rel=0.03)
    assert read == pytest.approx(experts.path.stat().st_size, rel=0.03)
    assert read > 3 * active
    seconds = {name: served.step_seconds for name, served in measured.items()}
    # `dense` may stay in a large cache between steps, where `experts` and `whole` may not: nearer to the one than to
    # the other, as a ratio, is what every machine must show.
    assert seconds["experts"] < sqrt(seconds["dense"] * seconds["whole"]), seconds
