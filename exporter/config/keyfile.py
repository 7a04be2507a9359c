"""The file of an API key: one key alone, on one line, fit for an HTTP header."""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_LARGEST_FILE = 8192  # bytes; llama-server takes no longer header


def read_key(path: Path) -> str:
    """Return the key that the file holds.

    Raises:
        ValueError: The file cannot be read, or holds no key, or more than one. The message names the file and the
            remedy, and shows nothing of what is in it.
    """
    try:
        # A pipe is not waited for: it may have taken the file's place while the daemon runs.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"'{path}' is not a regular file; write the path of a file")
            raw = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise ValueError(unreadable(f"'{path}'", error)) from None
    if len(raw) > _LARGEST_FILE:
        raise ValueError(f"'{path}' is larger than an API key; write the path of the file that holds the key")
    keys = [line.strip(b" \t") for line in re.split(rb"[\r\n]+", raw)]
    keys = [key for key in keys if key]
    if any(re.search(rb"[^ -~]", key) for key in keys):
        raise ValueError(f"'{path}' holds characters that no API key has; save the key as plain ASCII text")
    if not keys:
        raise ValueError(f"'{path}' holds no key; write the key into it")
    if len(keys) > 1:
        raise ValueError(
            f"'{path}' holds {len(keys)} lines; leave the one key in it that is to be sent (llama-server's own"
            " --api-key-file may hold several)"
        )
    if re.match(rb"(?i:authorization:\s*)?(?i:bearer)(\s|$)", keys[0]):
        raise ValueError(f"'{path}' holds a whole header, with 'Bearer' before the key; write the key alone")
    return keys[0].decode("ascii")


def unreadable(seen: str, error: OSError) -> str:
    """Return what to say of a file that cannot be read."""
    why = (error.strerror or "unknown error").lower()
    return f"{seen} cannot be read: {why}; write the path of a file that this user may read"
