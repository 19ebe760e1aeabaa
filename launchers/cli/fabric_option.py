"""`--fabric FILE` of the commands that take a CONFIG: the same as `--set launch.fabric=FILE`. Knows no fabric: who uses
the key reads the file.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

Result = TypeVar("Result")

_PLAIN = re.compile(r"[A-Za-z0-9_./+@%-]+")


def with_fabric(overrides: tuple[str, ...], file: str | None) -> tuple[str, ...]:
    """`overrides` and, after them, so that it wins, launch.fabric=`file`, absolute, as ranks may start elsewhere."""
    if file is None:
        return overrides
    path = os.path.abspath(file)
    # an override's value is YAML: a path that could be read as anything but text is quoted
    return (*overrides, f"launch.fabric={path if _PLAIN.fullmatch(path) else json.dumps(path)}")


def fabric_option(function: Callable[..., Result]) -> Callable[..., Result]:
    """Gives a command `--fabric`; its function finds it in `overrides`, which it must have (`--set`)."""

    @click.option(
        "--fabric",
        metavar="FILE",
        help="A fabric of `topo --save` in place of the live machines: --set launch.fabric=FILE.",
    )
    @functools.wraps(function)
    def wrapped(*args: Any, fabric: str | None, overrides: tuple[str, ...], **options: Any) -> Result:
        return function(*args, overrides=with_fabric(overrides, fabric), **options)

    return wrapped
