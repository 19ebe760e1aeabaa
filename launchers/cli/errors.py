"""The form of errors and the exit codes of all commands: `error: what is wrong, what is allowed` on stderr, after
`file:line: key: ` for a deployment file. docs/operating.md lists the exit codes.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from ...engine.config.yaml_tree import ConfigError
from ...topology.hardware.cpu_tier import TierError
from ...topology.transport.native import StaleLibraryError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
ENGINE = ("torch", "megatron", "mpi4py", "numpy", "prometheus_client", "safetensors", "fastapi", "starlette", "uvicorn")
"""Modules of the extra `engine`, which planner and client do not need."""
_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}
"""Errors of the machine or of permissions, also on standard output: never a defect."""


class UsageError(click.ClickException):
    exit_code = USAGE

    def show(self, file: object = None) -> None:
        show_error(self.format_message())


def show_error(text: str) -> None:
    for line in text.splitlines():
        click.echo(f"error: {line}", err=True)


def show_warning(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


def report(error: BaseException) -> int | None:
    """Shows the error that ended a command; returns its exit code, or None for a defect, which needs a traceback."""
    match error:
        case ConfigError():
            show_error("\n".join(error.faults))
            return USAGE
        case TierError() | StaleLibraryError():
            show_error(str(error))
            return USAGE
        case ModuleNotFoundError() if (module := (error.name or "").partition(".")[0]) in ENGINE:
            show_error(f"this needs {module}: pip install 'laddertron[engine]' (or [cuda])")
            return USAGE
        case click.exceptions.NoArgsIsHelpError():
            click.echo(error.format_message(), err=True)
            return USAGE
        case click.UsageError():
            help_of = f" ({error.ctx.command_path} --help)" if error.ctx is not None else ""
            show_error(" ".join(error.format_message().split()) + _key_of(error) + help_of)
            return USAGE
        case click.ClickException():
            show_error(error.format_message())
            return error.exit_code
        case click.Abort():
            click.echo("interrupted", err=True)
            return INTERRUPTED
        case FileNotFoundError(errno=errno.ENOENT, filename=None):  # os.getcwd
            show_error("the current folder was removed: change to one that exists")
            return USAGE
        case OSError() if error.errno in _MACHINE:
            where = error.filename2 or error.filename or "the output, or a file that it needs"
            show_error(f"{where} cannot be written or read: {error.strerror}")
            return FAILED
    return None


def open_streams() -> None:
    """Opens /dev/null for closed standard streams: the next file, such as the store, would get their number and with it
    what libraries print."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def show_any_text() -> None:
    """Makes output escape characters that the terminal's encoding lacks, and file names that are no text."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_unwritten() -> None:
    """Discards output that stdout and stderr could not write: Python would retry at exit, and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # disk full or reader gone; closed; none
            with suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _key_of(error: click.UsageError) -> str:
    """A hint for an unknown option that is a key of the deployment file: how to set it."""
    takes_keys = error.ctx is not None and any(p.name == "overrides" for p in error.ctx.command.params)
    if not isinstance(error, click.NoSuchOption) or not takes_keys:
        return ""
    from ...engine.config.bind import hints  # with pydantic: slow, and not for every --help
    from ...engine.config.schema import Deployment

    key = error.option_name.lstrip("-").replace("-", "_")
    key = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}.get(key, key)
    section = next((name for name, cls in hints(Deployment).items() if key in hints(cls)), None)
    return "" if section is None else f" Use --set {section}.{key}=VALUE"


def check_output(path: Path, option: str) -> None:
    """Raises UsageError if the result cannot be written; called before long work."""
    folder = path.absolute().parent
    there = path if path.exists() else folder
    if path.is_dir() or not folder.is_dir() or not os.access(there, os.W_OK):
        raise UsageError(f"{option} {path}: cannot write there: name a file in a folder that exists")


@contextmanager
def ended_by(*kinds: type[Exception], end: type[click.ClickException] = UsageError) -> Iterator[None]:
    """A context or decorator: these errors end the command as `end` does; missing input always as a UsageError."""
    try:
        yield
    except BrokenPipeError:  # the output's reader exited: click handles this
        raise
    except kinds as error:
        if isinstance(error, OSError) and error.errno in _MACHINE and error.filename is None:
            raise  # such as a full disk under standard output: `report` says so
        raise (UsageError if isinstance(error, (FileNotFoundError, NotADirectoryError)) else end)(str(error)) from error
