"""Which source a model's bytes come from: its file, the configuration, or the server's own figures."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_files import DENSE, EXPERTS, write_model
from structlog.testing import capture_logs

from exporter.measure.answers import Props
from exporter.measure.gguf import read_gguf
from exporter.measure.gguf_types import GgufHeader
from exporter.measure.listing import ModelSize
from exporter.measure.model import ModelHints, ModelReader
from exporter.roofline.footprint import BytesSource

PROPS = Props(4, 1024, "tiny", "", "Q4_K - Medium", "b1", sleeping=False, has_slots_endpoint=True)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "dense.gguf"
    write_model(path, DENSE)
    return path


def size_of(path: Path) -> ModelSize:
    """What a server that loaded this file says."""
    header = read_gguf(path)
    assert isinstance(header, GgufHeader)
    return ModelSize(header.parameters, header.weight_bytes, 1024, "F16")


async def test_the_configured_file_counts(dense: Path) -> None:
    model = await ModelReader(ModelHints(gguf=dense)).describe(PROPS, size_of(dense))
    assert model.footprint
    assert model.footprint.source is BytesSource.FILE
    assert model.footprint.kv_bytes_per_token
    assert model.file_mismatch is False


async def test_the_servers_own_path_counts_where_it_can_be_read(dense: Path, tmp_path: Path) -> None:
    reader = ModelReader(ModelHints())
    seen = await reader.describe(replace(PROPS, path=str(dense)), size_of(dense))
    assert seen.footprint
    assert seen.footprint.source is BytesSource.FILE
    for path in ("", "none", "model.gguf", str(tmp_path / "gone.gguf"), str(tmp_path), "\0"):
        unseen = await reader.describe(replace(PROPS, path=path), size_of(dense))
        assert unseen.footprint
        assert unseen.footprint.source is BytesSource.SERVER


async def test_a_file_of_another_model_gives_way_to_the_servers_figures(dense: Path) -> None:
    size = size_of(dense)
    for other in (replace(size, parameters=1), replace(size, weight_bytes=1)):
        model = await ModelReader(ModelHints(gguf=dense)).describe(PROPS, other)
        assert model.file_mismatch is True
        assert model.footprint
        assert model.footprint.source is BytesSource.SERVER
        assert model.footprint.weight_bytes == other.weight_bytes


async def test_a_server_that_tells_nothing_leaves_the_file(dense: Path) -> None:
    model = await ModelReader(ModelHints(gguf=dense)).describe(PROPS, ModelSize(None, None, None, ""))
    assert model.footprint
    assert model.footprint.source is BytesSource.FILE
    assert model.weight_bytes == size_of(dense).weight_bytes


async def test_active_bytes_from_the_configuration() -> None:
    """Of a mixture of experts whose file cannot be mounted; active parameters follow in proportion."""
    model = await ModelReader(ModelHints(active_weight_bytes=250)).describe(PROPS, ModelSize(4000, 1000, None, ""))
    assert model.footprint
    assert model.footprint.source is BytesSource.CONFIGURED
    assert (model.footprint.weight_bytes, model.footprint.parameters) == (250, 1000)


async def test_active_bytes_beyond_the_whole_model_are_a_mistake() -> None:
    model = await ModelReader(ModelHints(active_weight_bytes=1001)).describe(PROPS, ModelSize(4000, 1000, None, ""))
    assert model.footprint
    assert model.footprint.source is BytesSource.SERVER


async def test_a_broken_file_is_no_obstacle(tmp_path: Path) -> None:
    broken = tmp_path / "page.gguf"
    broken.write_text("<html>404</html>")
    model = await ModelReader(ModelHints(gguf=broken)).describe(PROPS, ModelSize(4000, 1000, None, ""))
    assert model.footprint
    assert model.footprint.source is BytesSource.SERVER


async def test_what_cannot_be_used_is_told_once_for_each_change(tmp_path: Path) -> None:
    """A model is described at every health check and probe, thousands of times a day."""
    path, size = tmp_path / "page.gguf", ModelSize(4000, 1000, None, "")
    reader = ModelReader(ModelHints(gguf=path, active_weight_bytes=1001), "local")

    async def told() -> list[str]:
        with capture_logs() as logs:
            for _ in range(3):
                await reader.describe(PROPS, size)
        assert all((line["log_level"], line["server"]) == ("warning", "local") for line in logs)
        return [str(line.get("problem", line.get("whole"))) for line in logs]

    missing, whole = await told()
    assert str(path) in missing
    assert whole == "1000"
    path.write_text("<html>404</html>")
    (broken,) = await told()
    assert broken != missing
    size = replace(size, weight_bytes=900)
    assert await told() == ["900"]
    path.unlink()
    assert await told() == [missing]
    model = await reader.describe(PROPS, size)
    assert model.unused == f"{missing}; active_weight_bytes is more than the whole model's 900 bytes"


async def test_cache_types_reach_the_footprint(dense: Path) -> None:
    size = size_of(dense)
    plain = await ModelReader(ModelHints(gguf=dense)).describe(PROPS, size)
    quantized = await ModelReader(ModelHints(dense, None, "q8_0", "q8_0")).describe(PROPS, size)
    assert plain.footprint
    assert quantized.footprint
    ratio = (quantized.footprint.kv_bytes_per_token or 0) / (plain.footprint.kv_bytes_per_token or 1)
    assert ratio == pytest.approx(34 / 64)


async def test_a_file_is_read_again_when_it_changed(dense: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(dense, path)
    reader = ModelReader(ModelHints(gguf=path))
    assert (await reader.describe(PROPS, size_of(dense))).file_mismatch is False
    write_model(path, EXPERTS)
    os.utime(path, ns=(1, 1))
    assert (await reader.describe(PROPS, size_of(dense))).file_mismatch is True
