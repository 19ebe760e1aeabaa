"""Reads the deployment file strictly and reports all errors at once. `laddertron check` also checks its folders."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...topology.json_codec import ReadError, build
from .bind import bind, located
from .rules import broken_rules
from .rules import is_loopback as is_loopback
from .schema import Deployment as Deployment
from .yaml_tree import ConfigError as ConfigError
from .yaml_tree import graft, read_file, read_text


@dataclass(frozen=True, slots=True)
class LoadedDeployment:
    """A deployment, with the place of each of its keys for later errors."""

    deployment: Deployment
    name: str
    places: Mapping[str, str]

    def fault(self, key: str, text: str) -> str:
        """`file:line: key: text`, at the key's line, or else its section's, or else the file's first."""
        place = key
        while place and place not in self.places:
            place = place.rpartition(".")[0]
        return located(self.places.get(place, f"{self.name}:1"), key, text)


@dataclass(frozen=True, slots=True)
class PartialDeployment:
    """The readable part of a deployment; `bad`: keys that have defaults instead of the file's values."""

    loaded: LoadedDeployment
    faults: tuple[str, ...]
    bad: frozenset[str]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Deployment:
    """Loads the deployment of a file, or of a model folder, with the overrides (`engine.max_num_seqs=8`). Relative
    paths of overrides, and all of a model folder's, start at the working directory, those of the file at its folder.
    Raises ConfigError."""
    return read(path, overrides).deployment


def read(path: str | Path | None, overrides: Sequence[str] = (), working: Path | None = None) -> LoadedDeployment:
    """Like `load`, with the places of the keys; None: the overrides alone. `working`: the working directory, if not the
    process's."""
    drafted = draft(path, overrides, working)
    if drafted.faults:
        raise ConfigError(drafted.faults)
    return drafted.loaded


def draft(path: str | Path | None, overrides: Sequence[str] = (), working: Path | None = None) -> PartialDeployment:
    """Like `read`, but lists the errors for further checks. Raises ConfigError only if nothing is readable."""
    working = working or Path.cwd()
    file = working / (path or "")
    folder = Path(os.path.abspath(file)).parent
    if path is None:
        tree, faults = read_text("", "--set")
    elif (file / "config.json").is_file():
        folder = working
        tree, faults = read_text(f"model: {{path: {json.dumps(str(file), ensure_ascii=False)}}}", str(path), str(path))
    else:
        tree, faults = read_file(file, str(path))
    for override in overrides:
        tree, more = graft(tree, override)
        faults += more
    deployment, places, errors, bad = bind(tree, folder, working)
    loaded, faults = LoadedDeployment(deployment, str(path), {"": tree.where} | places), [*faults, *errors]
    for keys, text in broken_rules(deployment):
        if bad.isdisjoint(part for key in keys for part in (key, key.partition(".")[0])):
            faults.append(loaded.fault(next((key for key in keys if key in places), keys[0]), text))
    return PartialDeployment(loaded, tuple(sorted(faults, key=by_line)), bad)


def to_json(deployment: Deployment) -> dict[str, Any]:
    """Converts a deployment to JSON values; `from_json` is the inverse."""
    data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(deployment)))
    return data


def from_json(data: Mapping[str, Any]) -> Deployment:
    """Makes a deployment of JSON values. Raises ConfigError for anything that `to_json` does not write."""
    try:
        deployment = build(Deployment, data)
    except ReadError as error:
        raise ConfigError([f"config: {error}"]) from None
    if broken := [f"config: {keys[0]}: {text}" for keys, text in broken_rules(deployment)]:
        raise ConfigError(broken)
    return deployment


def digest(deployment: Deployment) -> str:
    """BLAKE2b of the deployment's canonical JSON, 32 hex digits: equal exactly if all keys are."""
    text = json.dumps(to_json(deployment), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def by_line(line: str) -> tuple[int, int]:
    """A key that sorts errors by their position in the file."""
    parts = line.split(":", 2)
    return (0, int(parts[1])) if len(parts) > 1 and parts[1].isdigit() else (1, 0)
