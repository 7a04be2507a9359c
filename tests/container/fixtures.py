"""Fixtures: `docker`, the client of a daemon that works, and `image`, the image built from this tree."""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from real import missing, require

from container.engine import Docker, EngineError, daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/container/base-image.sh"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
IMAGE = "roofline-exporter:test"


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    """A docker daemon: this machine's, or one started for the session."""
    require(os.geteuid() == 0, "docker's daemon and debootstrap need root")
    with ExitStack() as stack:
        try:
            client = stack.enter_context(daemon())
        except EngineError as error:
            missing(str(error))
        yield client


@pytest.fixture(scope="session")
def base(docker: Docker) -> str:
    """The base image's name; made when it is new, or when its script or this machine's certificates changed."""
    certificates = CERTIFICATES.read_bytes() if CERTIFICATES.exists() else b""
    tag = f"roofline-exporter-base:{hashlib.sha256(SCRIPT.read_bytes() + certificates).hexdigest()[:12]}"
    if not docker.run("images", "--quiet", tag).strip():
        require(shutil.which("debootstrap"), "debootstrap is not on the PATH")
        try:
            docker.run(tag, command=str(SCRIPT), seconds=900)
        except EngineError as error:
            missing(f"the base image cannot be made here: {error}")
    return tag


@pytest.fixture(scope="session")
def image(docker: Docker, base: str) -> str:
    """The image's name, built from this tree."""
    # Layers of older trees would fill the cache; a day's are kept for the next build.
    docker.run("image", "prune", "--force", "--filter", "until=24h")
    proxies = [f"--build-arg={name}" for name in ("http_proxy", "https_proxy", "no_proxy") if os.environ.get(name)]
    docker.run(
        *("build", "--network=host", f"--build-arg=BASE={base}", *proxies, f"--tag={IMAGE}", str(ROOT)), seconds=900
    )
    return IMAGE
