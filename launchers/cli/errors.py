"""What a command ends with where the command line, a file or a configuration is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

import click


class UsageError(click.ClickException):
    """Exit code 2, one line."""

    exit_code = 2


@contextmanager
def ended_by(*kinds: type[Exception], end: type[click.ClickException] = UsageError) -> Iterator[None]:
    """Around work, or over a command: these faults end the command with their own words, as `end` does."""
    try:
        yield
    except BrokenPipeError:  # whoever read the output has gone, which click knows
        raise
    except kinds as error:
        raise end(str(error)) from error
