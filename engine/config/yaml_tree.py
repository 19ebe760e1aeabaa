"""A deployment file as a tree of values with `file:line`: SafeLoader's YAML without tags and merge keys, bounded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MAX_BYTES, MAX_VALUES, MAX_DEPTH = 256 * 1024, 5000, 8

Tag = Literal["str", "int", "float", "bool", "null"]
_TAGS: dict[str, Tag] = {f"tag:yaml.org,2002:{name}": name for name in get_args(Tag)}
_STAMP = "tag:yaml.org,2002:timestamp"


@dataclass(frozen=True, slots=True)
class Scalar:
    """`text` as written; `tag` as YAML 1.1 resolves it."""

    where: str
    tag: Tag
    text: str


@dataclass(frozen=True, slots=True)
class Items:
    where: str
    items: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """`entries[key]` = (place of the key, its value)."""

    where: str
    entries: dict[str, tuple[str, Tree]]


Tree: TypeAlias = Scalar | Items | Table


class ConfigError(Exception):
    """An invalid deployment: `faults`, one line each, `file:line: key: what is wrong, what is allowed`. Exit code 2."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


class _Builder:
    def __init__(self, name: str, fixed: str | None = None) -> None:
        self.name, self.fixed = name, fixed
        self.faults: list[str] = []
        self.values = 0

    def where(self, node: Node) -> str:
        return self.fixed if self.fixed is not None else f"{self.name}:{node.start_mark.line + 1}"

    def tree(self, node: Node, path: str, depth: int = 0) -> Tree:
        where, label = self.where(node), f"{path}: " if path and self.fixed is None else ""
        self.values += 1
        if self.values > MAX_VALUES:
            raise ConfigError([f"{where}: {label}more than {MAX_VALUES} values once aliases are followed: write fewer"])
        if depth > MAX_DEPTH:
            raise ConfigError([f"{where}: {label}nested more than {MAX_DEPTH} deep: sections and keys need 4"])
        if isinstance(node, MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._table(node, path, depth)
        if isinstance(node, SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return Items(where, tuple(self.tree(n, f"{path}[{i}]", depth + 1) for i, n in enumerate(node.value)))
        if isinstance(node, ScalarNode):
            if node.tag in _TAGS:
                return Scalar(where, _TAGS[node.tag], node.value)
            if node.tag == _STAMP:
                return Scalar(where, "str", node.value)
        self.faults.append(f"{where}: {label}the tag {node.tag} is not allowed: text, numbers, lists and tables only")
        return Scalar(where, "null", "")

    def _table(self, node: MappingNode, path: str, depth: int) -> Table:
        entries: dict[str, tuple[str, Tree]] = {}
        for key_node, value_node in node.value:
            where = self.where(key_node)
            head = f"{where}: {path}: " if path else f"{where}: "
            if key_node.tag == "tag:yaml.org,2002:merge":
                self.faults.append(f"{head}merge keys (<<) are not allowed: write the keys out")
                continue
            if not isinstance(key_node, ScalarNode):
                self.faults.append(f"{head}a key must be a word")
                continue
            key = key_node.value
            child = f"{path}.{key}" if path else key
            if key in entries:
                self.faults.append(f"{where}: {child}: duplicate key, first at {entries[key][0]}: keep one")
                continue
            entries[key] = (where, self.tree(value_node, child, depth + 1))
        return Table(self.where(node), entries)


class _Loader(yaml.SafeLoader):
    """Refuses half of a surrogate pair, which YAML can escape and no UTF-8 can say."""

    def compose_scalar_node(self, anchor: Any) -> ScalarNode:
        node = super().compose_scalar_node(anchor)
        try:
            node.value.encode()
        except UnicodeEncodeError as error:
            half = ord(node.value[error.start])
            raise yaml.MarkedYAMLError(None, None, f"\\u{half:04x} is half of a character", node.start_mark) from None
        return node


def _compose(text: str, name: str) -> Node | None:
    if len(text) > MAX_BYTES:
        raise ConfigError([f"{name}:1: {len(text)} characters, at most {MAX_BYTES}: is this a deployment file?"])
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        reason = " ".join(filter(None, (error.context, error.problem)))
        raise ConfigError([f"{name}:{line}: not YAML: {reason}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{name}:1: not YAML: {' '.join(str(error).split())}"]) from None
    except RecursionError:
        raise ConfigError([f"{name}:1: nested more than {MAX_DEPTH} deep: sections and keys need 4"]) from None


def read_text(text: str, name: str, fixed: str | None = None) -> tuple[Table, list[str]]:
    """The file's table, and errors for duplicate keys and tags. Raises ConfigError for other faults. `fixed` replaces
    `file:line`."""
    node = _compose(text, name)
    if node is None:
        return Table(f"{name}:1", {}), []
    builder = _Builder(name, fixed)
    tree = builder.tree(node, "")
    if not isinstance(tree, Table):
        raise ConfigError([f"{name}:1: a deployment file is a table of sections: model, parallel, launch, …"])
    return tree, builder.faults


def read_file(path: Path, name: str) -> tuple[Table, list[str]]:
    """As `read_text`. Raises ConfigError where the file cannot be read, is not UTF-8 or is too big."""
    if path.name == "config.json":
        raise ConfigError([f"{name}: a model's config.json: give its folder, {path.parent}, or a deployment file"])
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError([f"{name}: {_unreadable(path, name, error)}"]) from None
    if len(data) > MAX_BYTES:
        raise ConfigError([f"{name}:1: more than {MAX_BYTES} bytes: is this a deployment file?"])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{name}:{line}: byte {error.start} is not UTF-8"]) from None
    return read_text(text, name)


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def _unreadable(path: Path, name: str, error: OSError) -> str:
    if path.is_dir():
        return (
            "a folder without config.json: give a deployment file (laddertron config > deploy.yaml) or a model's folder"
        )
    if isinstance(error, FileNotFoundError) and _HUB_NAME.fullmatch(name) and not path.parent.is_dir():
        return (
            "no such file; models are not downloaded by name: hf download NAME --local-dir FOLDER, then give the folder"
        )
    return f"cannot be read: {error.strerror}"


_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+")


def graft(table: Table, override: str) -> tuple[Table, list[str]]:
    """The table with one `section.key=value` put in, and errors; the value is YAML, located as `--set section.key`."""
    path, sign, text = override.partition("=")
    if not sign or not _PATH.fullmatch(path):
        return table, [f"--set {override}: not of the form section.key=value, such as engine.max_num_seqs=8"]
    where = f"--set {path}"
    try:
        node = _compose(text, where)
        builder = _Builder(where, fixed=where)
        value: Tree = Scalar(where, "null", "") if node is None else builder.tree(node, path)
    except ConfigError as error:
        return table, [fault.replace(f"{where}:1:", f"{where}:") for fault in error.faults]
    return _put(table, path.split("."), where, value), builder.faults


def _put(table: Table, keys: list[str], where: str, value: Tree) -> Table:
    head, *rest = keys
    if rest:
        below = table.entries.get(head)
        inner = below[1] if below is not None and isinstance(below[1], Table) else Table(where, {})
        value = _put(inner, rest, where, value)
    previous = table.entries.get(head)
    # a section keeps its own place in the file: only the key that was set is blamed on --set
    return Table(table.where, {**table.entries, head: (previous[0] if rest and previous else where, value)})
