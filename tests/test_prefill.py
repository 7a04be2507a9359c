"""One long prompt: its arithmetic by hand, its proof against the fake server, its rate on a real one."""

import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import snapshots
import verify
from fake_llama import Behaviour, FakeLlama
from hypothesis import given
from hypothesis import strategies as st
from processes import COMMAND

from exporter.measure.gguf import read_gguf
from exporter.measure.gguf_types import GgufHeader
from exporter.measure.host import ContentionMeter
from exporter.measure.llama import LlamaClient, open_session
from exporter.measure.probe import DecodeProbe, Identity, identify
from exporter.measure.prompts import prefill_prompt
from exporter.present.report import Format, report_text
from exporter.roofline.architecture import footprint_of
from exporter.roofline.ceiling import CeilingSource, Roof
from exporter.roofline.footprint import Attention, BytesSource, Experts, Footprint
from exporter.roofline.prefill import (
    PREFILL_TOKENS,
    PrefillPoint,
    PrefillSample,
    place_prefill,
    prefill_flops,
    prove_prefill,
)
from exporter.roofline.proof import Stream
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import Snapshot, View, view
from exporter.service.llama_child import LlamaChild

MODEL = Footprint(
    parameters=1.1e9,
    weight_bytes=600e6,
    source=BytesSource.FILE,
    head_bytes=100e6,
    experts=(Experts(bytes=400e6, parameters=8e8, count=8, used=2),),
    attention=(Attention(1000, 4000), Attention(1000, 4000, window=100)),
    head_parameters=0.1e9,
)
FLOPS = 2 * (512 * (1.0e9 + 0.2e9) + 0.1e9) + 4000 * (512 * 513 / 2) + 4000 * (100 * 101 / 2 + 412 * 100)
"""By hand: the head once, a quarter of the experts; a full layer and one whose window is 100 tokens."""
ROOF = Roof({CeilingSource.READ: 50e9}, CeilingSource.READ, 2000e9, "measured")
SAMPLE = PrefillSample(512, 2.0, contended=False)


def test_golden_operating_point() -> None:
    point = place_prefill(SAMPLE, MODEL, ROOF)
    assert SAMPLE.tokens_per_second == 256
    assert point.flops == pytest.approx(FLOPS, rel=1e-12)
    # 512 tokens meet all experts; the cache and the activations are not counted.
    assert point.bytes == pytest.approx(1.0e9, rel=1e-9)
    assert point.intensity_flops_per_byte == pytest.approx(FLOPS / 1e9)
    assert point.flops_per_second == pytest.approx(FLOPS / 2)
    assert point.bytes_per_second == pytest.approx(0.5e9)
    assert point.compute_ratio == pytest.approx(FLOPS / 2 / 2000e9)
    assert point.above_ridge is True


@pytest.mark.parametrize(
    "footprint", [None, Footprint(1e9, 1e9, BytesSource.SERVER), replace(MODEL, head_parameters=None)]
)
def test_without_the_heads_share_there_is_a_rate_and_no_point(footprint: Footprint | None) -> None:
    """The head is most of a small model: a guess would be wrong by a factor."""
    assert place_prefill(SAMPLE, footprint, ROOF) == PrefillPoint(SAMPLE)


def test_without_a_roof_there_is_no_ridge_and_no_share() -> None:
    point = place_prefill(SAMPLE, MODEL, Roof({}, CeilingSource.READ))
    assert point.flops == pytest.approx(FLOPS)
    assert (point.above_ridge, point.compute_ratio) == (None, None)


@given(tokens=st.integers(1, 700), window=st.none() | st.integers(1, 700))
def test_a_prompts_flops_are_the_sum_over_its_tokens(tokens: int, window: int | None) -> None:
    model = replace(MODEL, attention=(Attention(1000, 4000, window),))
    each = (model.step(1, place).flops for place in range(1, tokens + 1))
    assert prefill_flops(model, tokens) == pytest.approx(sum(each) - 2 * 0.1e9 * (tokens - 1))


STREAM = Stream(
    0, 1, 0.001, 512, 0, None, "limit", truncated=False, token_ms=(), first_event=1, last_event=1, prompt_ms=300
)


def test_the_proof_takes_the_servers_own_time() -> None:
    assert prove_prefill(STREAM, 512) == pytest.approx(0.3)
    # Builds before b6399 do not tell what came from the cache, but leave it out of the prompt.
    assert prove_prefill(replace(STREAM, cached=None), 512) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": 511}, Reason.CACHED_PROMPT),
        ({"cached": 1}, Reason.CACHED_PROMPT),
        ({"prompt": None}, Reason.BAD_TIMINGS),
        ({"prompt_ms": None}, Reason.BAD_TIMINGS),
        ({"prompt_ms": 0.0}, Reason.BAD_TIMINGS),
        ({"prompt_ms": -1.0}, Reason.BAD_TIMINGS),
        ({"predicted": 2}, Reason.WRONG_LENGTH),
        ({"truncated": True}, Reason.WRONG_LENGTH),
    ],
)
def test_what_proves_nothing(change: dict[str, object], reason: Reason) -> None:
    assert prove_prefill(replace(STREAM, **change), 512) is reason  # type: ignore[arg-type]


async def prefilled(url: str, directory: Path) -> PrefillSample | Reason:
    """What one long prompt to that server gives."""
    async with open_session(url, None) as session:
        meter = ContentionMeter(directory, directory, time.monotonic)
        probe = DecodeProbe(LlamaClient(session, url, None), meter, time.monotonic, seconds=1.0, timeout=60)
        identity = await identify(probe.client)
        assert isinstance(identity, Identity)
        return await probe.ready(identity, 1) or await probe.prefill(identity)


async def test_what_is_asked_of_the_server(fake_llama: FakeLlama, tmp_path: Path) -> None:
    sample = await prefilled(fake_llama.url, tmp_path)
    assert isinstance(sample, PrefillSample)
    assert sample.tokens == 512
    assert sample.seconds == pytest.approx(0.03)
    (body,) = [r.body for r in fake_llama.requests if r.path == "/completion"]
    assert isinstance(body, dict)
    assert (body["n_predict"], body["cache_prompt"], body["prompt"]) == (1, False, [prefill_prompt(262_144)])


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Behaviour(cache_n=4), Reason.CACHED_PROMPT),
        (Behaviour(drop_timings=True), Reason.BAD_TIMINGS),
        (Behaviour(timing_values={"prompt_ms": "300"}), Reason.BAD_TIMINGS),
        (Behaviour(foreign=frozenset({"after"})), Reason.FOREIGN_REQUEST),
        (Behaviour(cut_after=0), Reason.STREAM_CUT),
        (Behaviour(n_ctx=PREFILL_TOKENS), Reason.CONTEXT_TOO_SMALL),
    ],
)
async def test_faults_of_the_server(behaviour: Behaviour, reason: Reason, tmp_path: Path) -> None:
    async with FakeLlama(behaviour) as fake:
        assert await prefilled(fake.url, tmp_path) is reason


@pytest.mark.parametrize("vocabulary", [None, 300, 512, 32_000, 262_144])
def test_the_prompts_ids_are_valid_and_as_different_as_can_be(vocabulary: int | None) -> None:
    prompt = prefill_prompt(vocabulary)
    assert len(prompt) == PREFILL_TOKENS
    assert 0 <= min(prompt) <= max(prompt) < (vocabulary or 256)
    assert len(set(prompt)) == min(PREFILL_TOKENS, vocabulary or 256)


# --- the report --------------------------------------------------------------------------------------------------


def seen(prefill: PrefillSample | Reason | None, footprint: Footprint = MODEL) -> View:
    server = snapshots.cpu_server(model=replace(snapshots.MODEL, footprint=footprint))
    return view(Snapshot(snapshots.host(), (replace(server, prefill=prefill),)), snapshots.NOW)


@pytest.mark.parametrize(
    ("prefill", "line"),
    [
        (
            PrefillSample(512, 4.0, contended=False),
            "128 tokens/s, 4000 ms, 307 GFLOP/s (76.9 % of the compute peak), 1230 FLOP/byte at most, above the ridge.",
        ),
        (Reason.CONTEXT_TOO_SMALL, "not measured; a slot's context is too small for a probe"),
        (None, None),
    ],
)
@pytest.mark.parametrize("form", [Format.TABLE, Format.MARKDOWN])
def test_the_line(prefill: PrefillSample | Reason | None, line: str | None, form: Format) -> None:
    text = " ".join(report_text(seen(prefill), form).split())
    assert ("Prefill" in text) == (line is not None)
    assert line is None or f"Prefill, 512 tokens: {line}" in text


def test_the_line_without_a_file_and_under_contention() -> None:
    text = report_text(
        seen(PrefillSample(512, 4.0, contended=True), replace(MODEL, head_parameters=None)), Format.MARKDOWN
    )
    assert "128 tokens/s, 4000 ms, its operating point needs the model's file; contended, other" in text


@pytest.mark.parametrize("footprint", [MODEL, replace(MODEL, head_parameters=None)])
def test_the_report_verifies_and_every_altered_figure_is_found(footprint: Footprint) -> None:
    document = json.loads(report_text(seen(PrefillSample(512, 4.0, contended=False), footprint), Format.JSON))
    assert verify.verify(document)[1] == []
    prefill = document["servers"][0]["prefill"]
    figures = [name for name, value in prefill.items() if isinstance(value, float) and name != "seconds"]
    assert len(figures) == (7 if footprint is MODEL else 1)
    for name in figures:
        true, prefill[name] = prefill[name], prefill[name] * 1.001
        assert verify.verify(document)[1] != [], name
        prefill[name] = true
    prefill["guess"] = 1.5
    assert "does not know" in verify.verify(document)[1][0]


def test_a_reason_stands_in_the_json() -> None:
    document = json.loads(report_text(seen(Reason.BUSY), Format.JSON))
    assert document["servers"][0]["prefill"] == {"reason": "busy"}
    assert verify.verify(document)[1] == []


def test_a_running_exporter_cannot_be_asked_for_it() -> None:
    done = subprocess.run(
        [*COMMAND, "report", "--prefill", "--url", "http://127.0.0.1:1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "use one of the two" in done.stderr


# --- a real server -----------------------------------------------------------------------------------------------

CONFIG = """
probe: {{batches: [1], seconds: 0.5}}
servers: [{{name: real, url: "{url}"}}]
"""


@pytest.mark.real
def test_a_real_report(real_llama: LlamaChild, real_model: Path, tmp_path: Path) -> None:
    """A prompt's tokens share the weights, so their rate is far above decode's; the point lies across the ridge."""
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(url=real_llama.url))
    command = [*COMMAND, "--config.file", str(file), "report", "--prefill", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    document = json.loads(done.stdout)
    assert verify.verify(document)[1] == []
    (server,) = document["servers"]
    prefill, decode = server["prefill"], server["batches"][0]
    assert (prefill["reason"], prefill["tokens"]) == (None, 512)
    header = read_gguf(real_model)
    assert isinstance(header, GgufHeader)
    head = 262_144 * 640
    assert footprint_of(header.metadata, header.tensors).head_parameters == head
    # The embedding is the head, so that the rest is what every token is multiplied with.
    assert prefill["flops"] == pytest.approx(2 * (512 * (header.parameters - head) + head), rel=0.1)
    assert prefill["bytes"] == header.weight_bytes
    assert prefill["intensity_flops_per_byte"] > 100
    # A machine that others keep busy has no ceiling, and so no ridge.
    assert prefill.get("above_ridge") is (True if "ridge_flops_per_byte" in server else None)
    assert prefill["contended"] or prefill["tokens_per_second"] > 2 * decode["decode_tokens_per_second"]
