"""`python -m exporter` is the command `roofline-exporter`."""

from __future__ import annotations

import io
import os
import signal
import sys

TYPE_CHECKING = False  # typing's own would take as long to load as all of this
if TYPE_CHECKING:
    from typing import Final

    from _typeshed import ReadableBuffer

_SHELL_SIGNAL: Final = 128
"""What a shell adds to the number of the signal that ended a program."""
_NOT_WRITTEN: Final = 3
"""The exit status when the output cannot be written; `report` keeps 1 for a batch below its threshold."""

_ANSWER: Final = frozenset({"demo", "report", "bandwidth", "inspect", "check-config", "healthcheck"})
"""Commands that a signal leaves without their answer; what is said to them is not read yet when it comes early."""


class _Output(io.FileIO):
    """Standard output: when its reader has left, the program ends without a word, as if of SIGPIPE.

    Not SIGPIPE itself: it would also end what writes to a server that hangs up. And not where lines are printed: click
    and rich, each in its own way, end with 1.
    """

    def write(self, data: ReadableBuffer, /) -> int:
        """Writes, or ends the program: with 3, never 1, where the words do not fit on a disk."""
        try:
            return super().write(data)
        except OSError as error:
            # Whatever else is written on the way out goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(error, BrokenPipeError):
                sys.exit(_SHELL_SIGNAL + signal.SIGPIPE)
            sys.stderr.write(f"Error: cannot write the output: {error.strerror}\n")
            sys.exit(_NOT_WRITTEN)


class _Log(io.FileIO):
    """Standard error: words that no disk or reader takes are lost, and the program goes on, for it measures still."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Writes what can be written; the next line may be taken again."""
        try:
            taken = super().write(data)
        except OSError:
            taken = None
        # None also of a pipe that is full and shall not be waited for.
        return memoryview(data).nbytes if taken is None else taken


def _outlive_the_reader(name: str, kind: type[io.FileIO]) -> None:
    """Replaces `sys.stdout` or `sys.stderr`; one that was closed from the start goes nowhere."""
    stream = getattr(sys, name)
    if stream is None:
        setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    else:
        raw = kind(stream.fileno(), "wb", closefd=False)
        text = io.TextIOWrapper(
            io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=stream.line_buffering
        )
        setattr(sys, name, text)


def _end(number: int, _: object) -> None:
    """Ends the daemon with 0, as once it runs; any command that answers ends as its signal would end it."""
    if _ANSWER.isdisjoint(sys.argv):
        os._exit(0)
    sys.exit(_SHELL_SIGNAL + number)


def main() -> None:
    """The command; from here on a signal ends it in order, until it has its own way."""
    # Before the first slow import: the first process of a container is deaf to signals that it does not handle.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # The daemon's word for "read the configuration again", which it is about to read; `nohup` has its own way.
        signal.signal(signal.SIGHUP, lambda *_: None)
    _outlive_the_reader("stdout", _Output)
    _outlive_the_reader("stderr", _Log)
    from exporter.cli import main as commands

    commands(prog_name="roofline-exporter")


if __name__ == "__main__":
    main()
