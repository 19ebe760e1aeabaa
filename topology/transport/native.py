"""Loads the project's optional C libraries, built next to the Python files, through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any


def load(module: str) -> ctypes.CDLL | None:
    """The built extension `module` (dotted, e.g. "laddertron.engine.sampling._noise") as a ctypes library, or None if
    it was not built or cannot be loaded here. The module itself is not imported: its C symbols alone are of
    interest."""
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
    """The file of the built extension `module`, or None. Raises ModuleNotFoundError if its package is unknown."""
    package, _, leaf = module.rpartition(".")
    for folder in import_module(package).__path__:
        for suffix in EXTENSION_SUFFIXES:
            path = Path(folder) / f"{leaf}{suffix}"
            if path.is_file():
                return path
    return None
