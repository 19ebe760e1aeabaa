"""The command line: commands, and what they print."""

import sys


def main() -> int:
    """The console script. ^C while the commands are still imported is one line, as it is later."""
    try:
        from .__main__ import main as command

        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
