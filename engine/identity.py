"""The identity of a deployment's model: its small files by their bytes, its weights by samples (models/weights/
identity.py). The owner of a job computes it before the first launch; each rank and text worker that starts reports what
it read, and the owner refuses a difference. Its digest is stored with answers. No torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..models.config.model_config import ModelConfig
from ..models.weights.identity import Sample, Weights, headers_in, odd_one, read_weights
from ..models.weights.manifest import NAME as MANIFEST
from ..models.weights.rank_files import origins_in
from .config.schema import Deployment
from .text.text_files import text_files

log = logging.getLogger(__name__)

MODEL, DRAFT = "model", "draft model"
"""Folders of weights, by their part in the deployment."""
_BYTES = 5


@dataclass(frozen=True)
class ModelIdentity:
    """`digest`: 10 hex digits, stored with batches and answers. `files`: see small_files. `weights`: by part."""

    digest: str
    files: Mapping[str, str]
    weights: Mapping[str, Weights]


def folders_of(deployment: Deployment) -> dict[str, Path]:
    """The folders of weights, by part."""
    folders = {} if deployment.dummy_seed is not None else {MODEL: Path(deployment.model.path)}
    draft = deployment.engine.draft_model
    return folders if draft is None else folders | {DRAFT: Path(draft)}


def small_files(deployment: Deployment) -> dict[str, str]:
    """A digest of each file that is read whole, by name; "" for a missing one."""
    model, text = Path(deployment.model.path), Path(deployment.text_folder)
    files = {name: _digest(model / name) for name in ("config.json", "generation_config.json", MANIFEST)}
    own = "" if text == model else "tokenizer: "
    files |= {f"{own}{name}": digest for name, digest in text_files(text).items()}
    draft = deployment.engine.draft_model
    return files if draft is None else files | {f"{DRAFT}: config.json": _digest(Path(draft) / "config.json")}


def config_digest(config: ModelConfig) -> str:
    """A digest of the config that a rank computes with."""
    return hashlib.blake2b(repr(config).encode(), digest_size=16).hexdigest()


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() if file.is_file() else ""


def headers_of(deployment: Deployment) -> dict[str, Sample]:
    """The sizes and headers of the files of weights, without samples; of a folder of per-rank files, nothing."""
    return {part: Sample(headers_in(folder)) for part, folder in folders_of(deployment).items()}


def identity_of(deployment: Deployment) -> ModelIdentity:
    """Reads the identity of the model. The digest also covers the settings that determine sampled tokens; neither the
    layout, so that a run may resume on other ranks, nor the draft model. Raises OSError or CheckpointError."""
    model, engine = deployment.model, deployment.engine
    weights = {part: _weights(folder) for part, folder in folders_of(deployment).items()}
    files = small_files(deployment)
    settings = model.dtype, model.weights, model.wiring, model.ladder_layers, engine.kv_cache_dtype, engine.seed
    made = () if deployment.dummy_seed is None else (model.load_format,)
    text = sorted(file for file in files.items() if not file[0].startswith(DRAFT))
    digest = "" if MODEL not in weights else weights[MODEL].digest
    serialised = json.dumps([settings, digest, text, *made]).encode()
    return ModelIdentity(hashlib.blake2b(serialised, digest_size=_BYTES).hexdigest(), files, weights)


def _weights(folder: Path) -> Weights:
    weights = read_weights(folder)
    if not weights.tables and not (weights := Weights(origins=origins_in(folder))).origins:
        log.warning("%s: no weights on this host: answers are stored without their identity", folder)
    return weights


class Difference(NamedTuple):
    """`rank` read another model; `text` names the file and tensor. `other`: the rank that it was compared with; None:
    the owner of the job."""

    rank: int
    text: str
    other: int | None = None


def from_owner(
    identity: ModelIdentity, rank: int, digests: Mapping[str, str], samples: Mapping[str, Sample]
) -> Difference | None:
    """Compares what a rank has read so far with the owner's identity: digests of small files, samples by part."""
    for name in sorted(identity.files):
        there, here = digests.get(name, ""), identity.files[name]
        if there != here:
            how = (
                "is missing there, which differs" if not there else "differs" if here else "is not expected: it differs"
            )
            return Difference(rank, f"{name} {how}")
    for part, sample in sorted(samples.items()):
        weights = identity.weights.get(part, Weights())
        if text := weights.difference(sample):
            return Difference(rank, f"{_named(part)}{text} differs")
    return None


def between_ranks(identity: ModelIdentity | None, samples: Mapping[int, Mapping[str, Sample]]) -> Difference | None:
    """Compares the samples of ranks that read the same files, once all have reported them."""
    weights = {} if identity is None else identity.weights
    for part in sorted({*weights, *(part for parts in samples.values() for part in parts)}):
        of_part = {rank: parts.get(part, Sample()) for rank, parts in samples.items()}
        silent = [rank for rank, sample in of_part.items() if not sample.parts and not sample.origin]
        if silent:
            return Difference(silent[0], f"{_named(part)}it reported no samples of its weights")
        if (odd := odd_one(of_part)) is not None:
            return Difference(
                odd.rank, f"{_named(part)}{weights.get(part, Weights()).tensor(odd.tensor)} differs", odd.usual
            )
    return None


def _named(part: str) -> str:
    return "" if part == MODEL else f"{part}: "
