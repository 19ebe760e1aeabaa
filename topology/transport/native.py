"""Loads the project's optional C libraries, built next to the Python files, through ctypes. setup.py builds into each a
digest of its sources; where these are present, as in a working tree, a library built from others is refused.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any


class StaleLibraryError(RuntimeError):
    """A library that was built from other sources than those next to it: results would be wrong."""


def load(module: str) -> ctypes.CDLL | None:
    """The built extension `module` (dotted, e.g. "laddertron.engine.sampling._noise") as a ctypes library, or None if
    it was not built or cannot be loaded here. The module itself is not imported: its C symbols alone are of
    interest. Raises StaleLibraryError."""
    path = locate(module)
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def bind(function: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
    function.restype, function.argtypes = result, arguments
    call: Callable[..., Any] = function
    return call


def locate(module: str) -> Path | None:
    """The file of the built extension `module`, or None. Raises ModuleNotFoundError if its package is unknown, and
    StaleLibraryError."""
    package, _, leaf = module.rpartition(".")
    for folder in map(Path, import_module(package).__path__):
        for suffix in EXTENSION_SUFFIXES:
            if (path := folder / f"{leaf}{suffix}").is_file():
                _check_sources(path)
                return path
    return None


def mark_of(folder: Path) -> str:
    """What the library in `folder` contains if it was built from the C sources there, all of which belong to it; empty
    if there are none."""
    digest, files = hashlib.sha256(), sorted(folder.glob("*.[ch]"))
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"laddertron sources {digest.hexdigest()}" if files else ""


def _check_sources(library: Path) -> None:
    if (mark := mark_of(library.parent).encode()) and mark not in library.read_bytes():
        raise StaleLibraryError(
            f"{library} was built from other C sources than those next to it, and would compute something else: build "
            "it again (make env, or python -m pip install --no-deps --no-build-isolation -e .)"
        )
