"""`python -m exporter` is the command `roofline-exporter`."""

import signal
import sys
from typing import Final

_SHELL_SIGNAL: Final = 128
"""What a shell adds to the number of the signal that ended a program."""


def main() -> None:
    """The command; from here on a signal ends it in order, until it has its own way."""
    # Before the first slow import: the first process of a container is deaf to signals that it does not handle.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: sys.exit(_SHELL_SIGNAL + received))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # The daemon's word for "read the configuration again", which it is about to read; `nohup` has its own way.
        signal.signal(signal.SIGHUP, lambda *_: None)
    from exporter.cli import main as commands

    commands(prog_name="roofline-exporter")


if __name__ == "__main__":
    main()
