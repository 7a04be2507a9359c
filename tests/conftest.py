"""Fixtures for every test: the fake llama-server, and the real parts (see real.py)."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import structlog
from fake_llama import FakeLlama
from gguf_files import Shape, write_model
from hypothesis import settings
from real import missing, require

from exporter.service.demo_model import DemoModelError, assemble_model
from exporter.service.llama_child import LlamaChild

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# Speed is measured in benchmarks: a busy machine fails no test.
# Examples are the same in every run, so that a change shows what it broke and nothing else.
settings.register_profile("untimed", deadline=None, derandomize=True, database=None)
settings.load_profile("untimed")
# What libraries read to tell a terminal from a pipe: here everything is a pipe.
for variable in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
    os.environ.pop(variable, None)


@pytest.fixture(autouse=True)
def logs_as_they_come() -> None:
    """A command that ran within the tests' own process leaves its level and its stream to no other test."""
    structlog.reset_defaults()


@pytest_asyncio.fixture
async def fake_llama() -> AsyncIterator[FakeLlama]:
    """A healthy fake llama-server; change its `behaviour` as the test goes."""
    async with FakeLlama() as fake:
        yield fake


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file of a small real model. Do not write to it."""
    try:
        return assemble_model(tmp_path_factory.mktemp("model"))
    except DemoModelError as error:
        missing(str(error))


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that no machine decodes as fast as memory allows: 2-bit weights take far longer to unpack than to read.

    The real one may stay in a large cache, and then its decode has no floor ratio: it is implausible.
    """
    shape = Shape(
        layers=8,
        embedding=1024,
        heads=16,
        kv_heads=4,
        feed_forward=4096,
        vocabulary=4096,
        context=4096,
        quantization="IQ2_XXS",
    )
    (path,) = write_model(tmp_path_factory.mktemp("slow") / "slow.gguf", shape)
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def real_llama(real_model: Path) -> AsyncIterator[LlamaChild]:
    """A real server with 4 slots of 1024 tokens, metrics and slots on; shared by all tests: use its `url` and `pid`."""
    require(importlib.util.find_spec("xllamacpp"), "xllamacpp is not installed")
    child = await LlamaChild.start(model=real_model, parallel=4, ctx_size=4096, metrics=True, alias="tiny")
    try:
        await child.wait_ready(120)
        yield child
    finally:
        await child.stop()


@pytest.fixture(scope="session")
def promtool() -> str:
    """The path of Prometheus' own checker."""
    return _program("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    """The path of a Prometheus server."""
    return _program("prometheus")


def _program(name: str) -> str:
    path = shutil.which(name)
    return path if path is not None else missing(f"{name} is not on the PATH")
