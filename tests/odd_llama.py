"""A real llama.cpp server with switches that the demo has no use for: `odd_llama.py MODEL '{"api_prefix": "/x"}'`.

It prints its address when it listens, and runs until it is killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from processes import running

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def odd_llama(model: Path, **switches: Any) -> Iterator[str]:
    """A running server; its address, as xllamacpp tells it."""
    command = (sys.executable, Path(__file__), model, json.dumps(switches))
    with running(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


def _serve(model: str, switches: dict[str, Any]) -> None:
    import xllamacpp  # noqa: PLC0415 - an optional dependency

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.verbosity = 1
    for name, value in switches.items():
        setattr(params, name, set(value) if name == "model_alias" else value)
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    time.sleep(600)


if __name__ == "__main__":
    _serve(sys.argv[1], json.loads(sys.argv[2]))
