"""The command line: commands and their output."""

import os
import signal
import sys

from ..control.first_process import go_on_below


def main() -> int:
    """The console script. ^C while the commands are still imported is one line, as it is later."""
    if os.getpid() == 1:
        go_on_below()
    if sys.argv[1:2] == ["serve"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # until a reload is possible: it would end the start
    try:
        from .__main__ import main as command

        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
