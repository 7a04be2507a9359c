"""A model's file that is no use now may be one later, and must not end the daemon meanwhile."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_files import STRING, Raw, key, shard, tensor, text
from structlog.testing import capture_logs
from test_model import PROPS

from exporter.measure.listing import ModelSize
from exporter.measure.model import RETRY_SECONDS, ModelHints, ModelReader
from exporter.measure.sleep import SleepReader
from exporter.roofline.footprint import BytesSource
from exporter.roofline.snapshot import Model

UNTOLD = ModelSize(None, None, None, "")
LLAMA = [key("general.architecture", STRING, text("llama"))]


def weights(path: Path, *names: str) -> Path:
    """A file with these tensors, 4 x 4 in 32 bits each."""
    return Raw(LLAMA, [tensor(n, (4, 4), 0, 64 * i) for i, n in enumerate(names)], 64 * len(names)).write(path)


class Patient:
    """A reader with a clock of its own."""

    def __init__(self, path: Path) -> None:
        self.now = 0.0
        self._reader = ModelReader(ModelHints(gguf=path), "local", lambda: self.now)

    async def model(self, after: float = 0.0) -> Model:
        self.now += after
        return await self._reader.describe(PROPS, UNTOLD)


async def test_a_shard_that_comes_later_is_found(tmp_path: Path) -> None:
    first = shard(tmp_path, (0, 2, 2), [tensor("blk.0.attn_q.weight", (4, 4))], 64, more=LLAMA)
    reader = Patient(first)
    assert "shard 2 of 2, is missing" in (await reader.model()).unused
    shard(tmp_path, (1, 2, 2), [tensor("blk.1.attn_q.weight", (4, 4))], 64)
    assert (await reader.model(RETRY_SECONDS - 1)).unused, "reading may be dear: not at every check"
    model = await reader.model(1)
    assert model.unused == ""
    assert model.footprint
    assert model.footprint.weight_bytes == 128


async def test_a_right_that_is_given_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may read anything, so the system's refusal is played."""
    path = weights(tmp_path / "m.gguf", "blk.0.attn_q.weight")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    reader = Patient(path)
    with monkeypatch.context() as patched:
        patched.setattr("os.open", refuse)
        assert str(path) in (await reader.model()).unused
    assert (await reader.model(RETRY_SECONDS)).footprint


async def test_a_header_that_was_read_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Patient(weights(tmp_path / "m.gguf", "blk.0.attn_q.weight"))
    known = await reader.model()
    monkeypatch.setattr("exporter.measure.model.read_gguf", None)
    assert await reader.model(1e6) == known


@pytest.mark.parametrize("name", ["v.blk.0.attn_q.weight", "mm.0.weight", "enc.blk.0.attn_q.weight"])
async def test_a_file_without_weights_that_decoding_reads_gives_way(name: str, tmp_path: Path) -> None:
    path = weights(tmp_path / "mmproj.gguf", name)
    reader = ModelReader(ModelHints(gguf=path))
    model = await reader.describe(PROPS, UNTOLD)
    assert model.footprint is None
    assert model.unused.startswith(f"{path} has no weights that decoding reads")
    model = await reader.describe(PROPS, ModelSize(16, 64, None, ""))
    assert model.footprint
    assert model.footprint.source is BytesSource.SERVER
    assert model.unused


async def test_a_bare_vocabulary_gives_way(tmp_path: Path) -> None:
    path = Raw(LLAMA).write(tmp_path / "vocabulary.gguf")
    assert "no weights that decoding reads" in (await ModelReader(ModelHints(gguf=path)).describe(PROPS, UNTOLD)).unused
    seen = await ModelReader(ModelHints()).describe(replace(PROPS, path=str(path)), UNTOLD)
    assert (seen.footprint, seen.unused) == (None, ""), "the configuration says nothing of it"


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


async def test_without_a_thread_a_file_is_not_read_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = weights(tmp_path / "m.gguf", "blk.0.attn_q.weight")
    reader = Patient(path)
    with monkeypatch.context() as patched, capture_logs() as logs:
        refuse_threads(patched)
        models = [await reader.model() for _ in range(3)]
    assert {m.unused for m in models} == {
        f"{path} could not be read, can't start new thread: raise the process limit (pids.max, ulimit -u)"
    }
    assert [line["event"] for line in logs] == [
        "no thread to read the model's file in",
        "the model's file cannot be used: its bytes come from elsewhere",
    ]
    assert (await reader.model()).footprint


async def test_without_a_thread_a_header_that_was_read_stays(tmp_path: Path) -> None:
    """Another model would drop every sample."""
    reader = Patient(weights(tmp_path / "m.gguf", "blk.0.attn_q.weight"))
    known = await reader.model()

    async def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("asyncio.to_thread", no_thread)
        assert await reader.model() == known


async def test_without_a_thread_a_process_is_looked_at_later(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = SleepReader("http://a", lambda _: 60.0)
    props = replace(PROPS, marker="x")
    with monkeypatch.context() as patched, capture_logs() as logs:
        refuse_threads(patched)
        assert [await reader.read(props) for _ in range(3)] == [None] * 3
    assert [line["error"] for line in logs] == ["can't start new thread"], "told once"
    assert await reader.read(props) == 60
