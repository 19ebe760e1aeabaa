"""Located values into the dataclasses of engine/config_schema.py: types, units, bounds and choices, all faults at once.

Knows types, not keys: what a key may hold is its annotation. A faulty key keeps its default so that reading goes on;
`Binder.bad` remembers it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os.path
import re
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .config_reader import Items, Scalar, Table, Tree
from .config_schema import PathKind, Range, Unit, Word

_T = TypeVar("_T")
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_QUANTITY = re.compile(r"([-+]?[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ]*)")
_BYTES = {"": 1, "B": 1} | {f"{p}B": 10 ** (3 * i) for i, p in enumerate("kMGT", 1)} | {"KB": 1000}
_BYTES |= {f"{p}iB": 2 ** (10 * i) for i, p in enumerate("KMGT", 1)}
_SECONDS = {"": 1.0, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class Mismatch(Exception):
    """A value that its key cannot hold; the text says why."""


def hints(section: Any) -> dict[str, Any]:
    """Key -> annotation of a section's class, in order, with the marks of `Annotated`."""
    return _hints(section)


@cache
def _hints(section: Any) -> dict[str, Any]:
    found = get_type_hints(section, include_extras=True)
    return {f.name: found[f.name] for f in dataclasses.fields(section)}


def fault(where: str, path: str, text: str) -> str:
    """One line: `file:line: key: text`, or `--set key: text`."""
    return f"{where}: {text}" if where == f"--set {path}" or not path else f"{where}: {path}: {text}"


def _split(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(annotation) is Annotated:
        base, *marks = get_args(annotation)
        return base, tuple(marks)
    return annotation, ()


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:g}"


def allowed(annotation: Any) -> str:
    """What a key may hold, in words."""
    base, marks = _split(annotation)
    origin, args = get_origin(base), get_args(base)
    if base is type(None):
        return "null"
    if origin is Literal:
        return ", ".join(args)
    if origin in (Union, types.UnionType):
        # the marks of the type that is not null stand inside it
        return " or ".join(allowed(arg) for arg in args)
    if origin is tuple:
        return f"a list of {allowed(args[0])}"
    if origin in (dict, Mapping) or origin is not None:
        return "a table of NAME: text"
    bounds = next((m for m in marks if isinstance(m, Range)), None)
    units = {m.kind for m in marks if isinstance(m, Unit)}
    span = f" from {_number(bounds.low)} to {_number(bounds.high)}" if bounds else ""
    if "bytes" in units:
        return f"a size in bytes such as 512MiB or 200MB,{span}" if span else "a size in bytes such as 512MiB"
    if "seconds" in units:
        return f"a time such as 1ms, 30s or 24h,{span} seconds"
    if base is bool:
        return "true or false"
    if base is int:
        return f"an integer{span}"
    if base is float:
        return f"a number{span}"
    if any(isinstance(m, PathKind) for m in marks):
        return "a path"
    return next((m.name for m in marks if isinstance(m, Word)), "text")


def _shown(tree: Tree) -> str:
    if isinstance(tree, Table):
        return "a table"
    if isinstance(tree, Items):
        return "a list"
    if tree.tag == "null":
        return "nothing (null)"
    return repr(tree.text) if tree.tag == "str" else tree.text


def did_you_mean(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def _quantity(text: str, units: Mapping[str, float]) -> float | None:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in units:
        return None
    return float(match[1].replace("_", "")) * units[match[2]]


class Binder:
    """Binds one tree. `base` is the folder that relative paths stand against, `cwd` the one for `--set`."""

    def __init__(self, base: Path, cwd: Path) -> None:
        self.base, self.cwd = base, cwd
        self.faults: list[str] = []
        self.places: dict[str, str] = {}
        self.bad: set[str] = set()

    def complain(self, where: str, path: str, text: str) -> None:
        self.bad.add(path)
        self.faults.append(fault(where, path, text))

    def section(self, cls: type[_T], tree: Table, path: str, required: Mapping[str, Any]) -> _T:
        """The dataclass from the table; `required` gives stand-ins for faulty keys without a default."""
        known, values = hints(cls), {}
        for key, (where, value) in tree.entries.items():
            child = f"{path}.{key}" if path else key
            if key not in known:
                self.complain(where, child, f"unknown key, allowed: {', '.join(known)}{self.hint(key, path, known)}")
                continue
            self.places[child] = where
            inner, _ = _split(known[key])
            if dataclasses.is_dataclass(inner):
                if isinstance(value, Scalar) and value.tag == "null":
                    continue
                if not isinstance(value, Table):
                    self.complain(where, child, f"{_shown(value)} is no section: write its keys below it, indented")
                    continue
                values[key] = self.section(inner, value, child, required)  # type: ignore[arg-type]
                continue
            try:
                values[key] = self.value(value, known[key], child)
            except Mismatch as mismatch:
                self.complain(value.where, child, str(mismatch))
        for item in dataclasses.fields(cls):  # type: ignore[arg-type]
            child = f"{path}.{item.name}" if path else item.name
            if item.name in values or item.default is not dataclasses.MISSING:
                continue
            inner, _ = _split(known[item.name])
            if dataclasses.is_dataclass(inner):
                values[item.name] = self.section(inner, Table(tree.where, {}), child, required)  # type: ignore[arg-type]
            elif item.default_factory is dataclasses.MISSING:
                if child not in self.bad:
                    where = self.places.get(path, tree.where)
                    self.complain(where, child, f"missing: {allowed(known[item.name])} must be given")
                values[item.name] = required[child]
        result = cls(**values)
        return self._defaults_resolved(result)

    def hint(self, key: str, path: str, known: Mapping[str, Any]) -> str:
        """Where an unknown key may have been meant to stand; empty if nowhere."""
        return did_you_mean(key, list(known))

    def _defaults_resolved(self, section: _T) -> _T:
        changed = {}
        for key, annotation in hints(type(section)).items():
            value = getattr(section, key)
            if isinstance(value, str) and (kind := _path_kind(annotation)) is not None and value:
                changed[key] = self._path(value, kind, self.base)
        return dataclasses.replace(section, **changed) if changed else section  # type: ignore[type-var]

    def _path(self, text: str, kind: str, base: Path) -> str:
        if kind == "program" and "/" not in text:
            return text
        # not resolve(): a symlinked model folder keeps the name that it is served under
        return os.path.normpath(base / text)

    def value(self, tree: Tree, annotation: Any, path: str) -> Any:
        base, marks = _split(annotation)
        origin, args = get_origin(base), get_args(base)
        if origin in (Union, types.UnionType):
            return self._one_of(tree, annotation, args, path)
        if origin is tuple:
            if not isinstance(tree, Items):
                raise Mismatch(f"{_shown(tree)} is not {allowed(annotation)}: write [a, b]")
            return tuple(self._items(tree, args[0], path))
        if origin is not None and origin is not Literal:
            return self._mapping(tree, args[0], annotation, path)
        if not isinstance(tree, Scalar):
            raise Mismatch(f"{_shown(tree)} is not allowed here: {allowed(annotation)}")
        if origin is Literal:
            if tree.tag == "str" and tree.text in args:
                return tree.text
            raise Mismatch(f"{_shown(tree)} is not one of {', '.join(args)}{did_you_mean(tree.text, list(args))}")
        return self._scalar(tree, base, marks, annotation)

    def _one_of(self, tree: Tree, annotation: Any, args: tuple[Any, ...], path: str) -> Any:
        if isinstance(tree, Scalar) and tree.tag == "null" and type(None) in args:
            return None
        shape = tuple if isinstance(tree, Items) else None
        fitting = [a for a in args if a is not type(None) and (get_origin(_split(a)[0]) is tuple) == (shape is tuple)]
        if not fitting:
            raise Mismatch(f"{_shown(tree)} is not allowed here: {allowed(annotation)}")
        if bool in fitting:  # a switch that may also be left to the program: true, false or a word
            truth = isinstance(tree, Scalar) and tree.tag == "bool"
            try:
                return self.value(tree, next(a for a in fitting if (a is bool) == truth), path)
            except Mismatch:
                raise Mismatch(f"{_shown(tree)} is not {allowed(annotation)}") from None
        return self.value(tree, fitting[0], path)

    def _items(self, tree: Items, annotation: Any, path: str) -> Iterator[Any]:
        for item in tree.items:
            try:
                yield self.value(item, annotation, path)
            except Mismatch as mismatch:
                self.complain(item.where, path, str(mismatch))

    def _mapping(self, tree: Tree, key_type: Any, annotation: Any, path: str) -> dict[str, str]:
        if not isinstance(tree, Table):
            raise Mismatch(f"{_shown(tree)} is not {allowed(annotation)}")
        found: dict[str, str] = {}
        for key, (where, value) in tree.entries.items():
            child = f"{path}.{key}"
            self.places[child] = where
            try:
                name = self._scalar(Scalar(where, "str", key), str, _split(key_type)[1], key_type)
            except Mismatch as mismatch:
                self.complain(where, child, str(mismatch))
                continue
            # 1 and 0.5 are what they look like; YAML's on, no, ~ are not
            if not isinstance(value, Scalar) or value.tag not in ("str", "int", "float"):
                self.complain(where, child, f"{_shown(value)} is not text: put it in quotes")
            elif "\0" in value.text:
                self.complain(where, child, "a NUL byte cannot stand in an environment")
            else:
                found[name] = value.text
        return found

    def _scalar(self, tree: Scalar, base: Any, marks: tuple[Any, ...], annotation: Any) -> Any:
        wrong = Mismatch(f"{_shown(tree)} is not {allowed(annotation)}")
        if base is bool:
            if tree.tag != "bool":
                raise wrong
            return tree.truth
        if base is str:
            if tree.tag in ("int", "float", "bool"):
                raise Mismatch(f'{tree.text} is not {allowed(annotation)} as YAML reads it: write "{tree.text}"')
            if tree.tag != "str" or not tree.text or "\0" in tree.text:
                raise wrong
            if any(isinstance(m, Word) and not re.fullmatch(m.pattern, tree.text) for m in marks):
                raise wrong
            if (kind := _path_kind(annotation)) is not None:
                if tree.text.startswith("~"):
                    raise Mismatch(f"{tree.text!r}: ~ is not expanded: write the folder in full")
                return self._path(tree.text, kind, self.cwd if tree.where.startswith("--set") else self.base)
            return tree.text
        number = self._parsed(tree, base, marks)
        if number is None or not math.isfinite(number):
            raise wrong
        for mark in marks:
            if isinstance(mark, Range) and not mark.low <= number <= mark.high:
                raise Mismatch(f"{tree.text} is out of range, allowed: {allowed(annotation)}")
        return number

    @staticmethod
    def _parsed(tree: Scalar, base: Any, marks: tuple[Any, ...]) -> float | None:
        if tree.tag in ("bool", "null"):
            return None
        unit = next((m.kind for m in marks if isinstance(m, Unit)), None)
        text = tree.text.replace("_", "") if tree.tag != "str" else tree.text
        if unit is None:
            if base is int:
                return int(text) if tree.tag == "int" and _INT.fullmatch(text) and len(text) < 30 else None
            return float(text) if _FLOAT.fullmatch(text) and len(text) < 60 else None
        amount = _quantity(text, _BYTES if unit == "bytes" else _SECONDS) if len(text) < 60 else None
        if amount is None or base is float or not math.isfinite(amount):
            return amount
        return int(amount) if amount == int(amount) else None


def _path_kind(annotation: Any) -> str | None:
    base, marks = _split(annotation)
    if get_origin(base) in (Union, types.UnionType):
        return next((k for k in map(_path_kind, get_args(base)) if k is not None), None)
    return next((m.kind for m in marks if isinstance(m, PathKind)), None)
