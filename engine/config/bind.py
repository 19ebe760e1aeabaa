"""Binds located values to the dataclasses of schema.py by pydantic: all errors at once, each with its place."""

from __future__ import annotations

import builtins
import dataclasses
import difflib
import json
import os.path
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ...topology.json_codec import reader
from .schema import REMOVED, Deployment, PathKind, Range, Unit, Word
from .yaml_tree import Items, Scalar, Table, Tree

_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")


def hints(section: Any) -> dict[str, Any]:
    """Key -> annotation of a section's class, in order, with the marks of `Annotated`."""
    resolved = get_type_hints(section, include_extras=True)
    return {f.name: resolved[f.name] for f in dataclasses.fields(section)}


def located(where: str, path: str, text: str) -> str:
    """One line: `file:line: key: text`, or `--set key: text`."""
    return f"{where}: {text}" if where == f"--set {path}" or not path else f"{where}: {path}: {text}"


def bind(tree: Table, base: Path, cwd: Path) -> tuple[Deployment, dict[str, str], list[str], frozenset[str]]:
    """The deployment as far as readable, the place of each key, the errors, and the keys that hold defaults instead.
    Paths start at `base`, of `--set` at `cwd`."""
    nothing = (tree.where, Table(tree.where, {}))
    tree = Table(tree.where, {"model": nothing} | tree.entries)
    places: dict[str, str] = {}
    data = _plain(tree, Deployment, "", places)
    try:
        (deployment,) = reader(Deployment).validate_json(json.dumps([data]))
        problems = []
    except ValidationError as error:
        order = {path: number for number, path in enumerate(places)}
        problems = [_located(problem, tree) for problem in error.errors(include_url=False)]
        problems.sort(key=lambda item: order.get(".".join(item[1]), len(order)))
        for _, keys, _ in problems:  # read again without them: the rules between the others are still checked
            _drop(data, keys)
        data.setdefault("model", {}).setdefault("path", "/")
        (deployment,) = reader(Deployment).validate_json(json.dumps([data]))
    deepest = {keys: depth for depth, keys, _ in sorted(problems)}
    # of a union, what the variant says that went furthest
    lines = dict.fromkeys(line for depth, keys, line in problems if depth == deepest[keys])
    return _absolute(deployment, "", places, base, cwd), places, list(lines), frozenset(map(".".join, deepest))


def _plain(tree: Tree, hint: Any, path: str, places: dict[str, str]) -> Any:
    """Plain values for pydantic: numbers in YAML's other notations stay text."""
    if isinstance(tree, Items):
        return [_plain(item, None, path, places) for item in tree.items]
    if isinstance(tree, Table):
        key_hints = hints(hint) if dataclasses.is_dataclass(hint) else {}
        names = get_origin(hint) is Mapping
        data = {}
        for key, (where, value) in tree.entries.items():
            child = f"{path}.{key}" if path else key
            places[child] = where
            # 1 and 0.5 are what they look like; YAML's on, no, ~ are not
            if names and isinstance(value, Scalar) and value.tag in ("int", "float"):
                data[key] = value.text
            else:
                data[key] = _plain(value, key_hints.get(key), child, places)
        return data
    number = tree.text.replace("_", "")
    match tree.tag:
        case "null":
            return {} if dataclasses.is_dataclass(hint) else None
        case "bool":
            return tree.text.lower() in ("yes", "true", "on")
        case "int" if _INT.fullmatch(number) and len(number) < 30:
            return int(number)
        case "float" if _FLOAT.fullmatch(number) and len(number) < 60:
            return float(number)
    return tree.text


def _drop(data: dict[str, Any], keys: tuple[str, ...]) -> None:
    *sections, last = keys
    for key in sections:
        data = data.get(key, {})
    data.pop(last, None)


def _absolute(section: Any, path: str, places: Mapping[str, str], base: Path, cwd: Path) -> Any:
    changed = {}
    for key, annotation in hints(type(section)).items():
        value, child = getattr(section, key), f"{path}.{key}" if path else key
        kind = next((m.kind for m in _split(_variants(annotation)[0])[1] if isinstance(m, PathKind)), None)
        if dataclasses.is_dataclass(value):
            changed[key] = _absolute(value, child, places, base, cwd)
        elif value and (kind == "path" or (kind == "program" and "/" in value)):
            # not resolve(): a symlinked model folder keeps the name that it is served under
            changed[key] = os.path.normpath((cwd if places.get(child, "").startswith("--set") else base) / value)
    return dataclasses.replace(section, **changed) if changed else section


def _located(problem: ErrorDetails, tree: Tree) -> tuple[int, tuple[str, ...], str]:
    """(depth in the tree, keys, line) of an error that pydantic found."""
    hint: Any = Deployment
    above, where, keys, depth = hint, tree.where, [], 0
    for step in problem["loc"][1:]:
        if isinstance(tree, Table) and step in tree.entries:
            keys.append(str(step))
            where, tree = tree.entries[keys[-1]]
            above, hint = hint, hints(hint).get(keys[-1]) if dataclasses.is_dataclass(hint) else get_args(hint)[-1]
        elif isinstance(tree, Items) and isinstance(step, int):
            tree = tree.items[step]
            where, hint = tree.where, next(get_args(v)[0] for v in _variants(hint) if get_origin(v) is tuple)
        else:
            break  # a missing key, or pydantic's name of a variant
        depth += 1
    if problem["type"] == "missing":
        keys.append(str(problem["loc"][-1]))
        text = f"missing: {allowed(hints(hint)[keys[-1]])} must be given"
    elif problem["type"] == "unexpected_keyword_argument":
        text = _unknown(keys, list(hints(above)))
    elif problem["loc"][-1] == "[key]":
        text = f"{keys[-1]!r} is not {allowed(get_args(above)[0])}"
    elif get_origin(above) is Mapping:
        text = f"{_shown(tree)} is not text: put it in quotes"
    else:
        text = _removed_value(keys, tree) or _refused(problem["type"], tree, hint)
    return depth, tuple(keys), located(where, ".".join(keys), text)


def _unknown(keys: list[str], valid_keys: list[str]) -> str:
    *section, key = keys
    if advice := REMOVED.get(".".join(keys)):
        return f"removed: {advice}"
    elsewhere = (name for name, cls in hints(Deployment).items() if [name] != section and key in hints(cls))
    hint = next((f" (did you mean {name}.{key}?)" for name in elsewhere), did_you_mean(key, valid_keys))
    return f"unknown key, allowed: {', '.join(valid_keys)}{hint}"


def _removed_value(keys: list[str], tree: Tree) -> str | None:
    advice = REMOVED.get(f"{'.'.join(keys)}={tree.text}") if isinstance(tree, Scalar) else None
    return advice and f"{_shown(tree)} was removed: {advice}"


def _refused(kind: str, tree: Tree, hint: Any) -> str:
    shown, (first, *others) = _shown(tree), _variants(hint)
    base, marks = _split(first)
    origins = {get_origin(variant) for variant in (first, *others)}
    if kind == "dataclass_type":
        return f"{shown} is not a section: write its keys below it, indented"
    if not isinstance(tree, Scalar) and origins.isdisjoint((tuple, Mapping)):
        return f"{shown} is not allowed here: {allowed(hint)}"
    if not isinstance(tree, Scalar) or others:
        return f"{shown} is not {allowed(hint)}"
    if kind in ("greater_than_equal", "less_than_equal"):
        return f"{tree.text} is out of range, allowed: {allowed(hint)}"
    if origins == {Literal}:
        return f"{shown} is not one of {allowed(hint)}{did_you_mean(tree.text, list(get_args(base)))}"
    if origins == {tuple}:
        return f"{shown} is not {allowed(hint)}: write [a, b]"
    if base is str and tree.tag in ("int", "float", "bool"):
        return f'{tree.text} is not {allowed(hint)} in YAML: write "{tree.text}", with quotes'
    if tree.text.startswith("~") and any(isinstance(m, PathKind) for m in marks):
        return f"{shown}: ~ is not expanded: write the folder in full"
    return f"{shown} is not {allowed(hint)}"


def allowed(hint: Any) -> str:
    """Describes the values that a key allows."""
    variants = _variants(hint)
    if len(variants) > 1:
        return " or ".join(map(allowed, variants))
    base, marks = _split(variants[0])
    match get_origin(base):
        case None:
            pass
        case builtins.tuple:
            return f"a list of {allowed(get_args(base)[0])}"
        case typing.Literal:
            return ", ".join(get_args(base))
        case _:
            return "a table of NAME: text"
    span = next((f" from {_number(m.low)} to {_number(m.high)}" for m in marks if isinstance(m, Range)), "")
    unit = next((m.kind for m in marks if isinstance(m, Unit)), "")
    if unit == "bytes":
        return f"a size in bytes such as 512MiB or 200MB,{span}"
    if unit == "seconds":
        return f"a time such as 1ms, 30s or 24h,{span} seconds"
    names = {bool: "true or false", int: f"an integer{span}", float: f"a number{span}"}
    return names.get(base) or next(m.name for m in marks if isinstance(m, Word))


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:g}"


_SYNONYMS = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
}


def did_you_mean(word: str, choices: list[str]) -> str:
    if (meant := _SYNONYMS.get(word.lower())) in choices:
        return f" (did you mean {meant}?)"
    near = difflib.get_close_matches(word.lower().replace("-", "_")[:64], choices, n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def _shown(tree: Tree) -> str:
    if isinstance(tree, Scalar):
        return "nothing (null)" if tree.tag == "null" else repr(tree.text) if tree.tag == "str" else tree.text
    return "a table" if isinstance(tree, Table) else "a list"


def _split(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(annotation) is Annotated:
        base, *marks = get_args(annotation)
        return base, tuple(marks)
    return annotation, ()


def _variants(hint: Any) -> tuple[Any, ...]:
    """The variants of a hint without null."""
    union = get_origin(hint) in (Union, types.UnionType)
    return tuple(v for v in get_args(hint) if v is not type(None)) if union else (hint,)
