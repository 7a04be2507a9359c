"""Commands on a terminal, as a person sees them."""

import os
import pty
import re
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest
from processes import COMMAND, NOBODY, running, wait_for


class Terminal:
    """A command on a terminal of its own, and what a person would see of it."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        self._text = ""
        command, options = (*COMMAND, *arguments), {**os.environ, "COLUMNS": "120", "LINES": "50", **environment}
        self._stack = ExitStack()
        self.process = self._stack.enter_context(
            running(command, stdin=theirs, stdout=theirs, stderr=theirs, env=options, start_new_session=True)
        )
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        os.close(self._ours)

    @property
    def text(self) -> str:
        """Everything printed so far, without colours and cursor movements."""
        try:
            while chunk := os.read(self._ours, 65536):
                self._text += chunk.decode(errors="replace")
        except OSError:  # nothing more yet, or the other side is closed
            pass
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._text)

    def wait_for(self, pattern: str, seconds: float) -> re.Match[str]:
        found = wait_for(pattern, seconds, lambda: re.search(pattern, self.text))
        assert found
        return found


@pytest.mark.parametrize(
    ("command", "status", "word"),
    [("bandwidth", {0, 3}, "GB/s|no ceiling"), ("report", {3}, "unreachable|Unreachable")],
)
def test_commands_that_end_on_a_terminal(command: str, status: set[int], word: str, tmp_path: Path) -> None:
    """A progress bar, then the result, and no log line between them."""
    file = tmp_path / "c.yaml"
    file.write_text("bandwidth: {max_memory: 64MiB}\n" + NOBODY)
    with Terminal("--config.file", str(file), command) as terminal:
        wait_for("the end", 240, lambda: bool(terminal.text) and terminal.process.poll() is not None)
        assert "Traceback" not in terminal.text
        assert terminal.process.returncode in status
        assert re.search(word, terminal.text)
        assert "event" not in terminal.text


@pytest.mark.real
@pytest.mark.usefixtures("real_model")
@pytest.mark.timeout(600)
def test_demo_on_a_terminal(tmp_path: Path) -> None:
    """What a newcomer sees: progress, the address, the table; Ctrl-C ends both processes."""
    with Terminal("--web.listen-address", "127.0.0.1:0", "demo", XDG_CACHE_HOME=str(tmp_path)) as terminal:
        child = int(terminal.wait_for(r"\(pid\s+(\d+)\)", 120)[1])
        terminal.wait_for(r"http://127\.0\.0\.1:\d+/metrics", 120)
        terminal.wait_for("Ctrl-C ends both", 200)
        for word in ("FLOP/byte", "tokens/s", "GFLOP/s", "floor", "gemma-3-270m"):
            assert word in terminal.text
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(60) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
