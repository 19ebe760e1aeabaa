"""What a command ends with where the command line, a file or a configuration is wrong."""

import click


class UsageError(click.ClickException):
    """Exit code 2, one line."""

    exit_code = 2
