"""Finds the per-rank files of `laddertron shard` in a checkpoint's folder, and refuses stale ones.
`MODEL/laddertron-tp16/rank-0003.safetensors` has rank 3's parameters in the order of loading, and its origin in the
metadata. `laddertron-tp8-pp2`: with stages, over which ranks are numbered; `laddertron-tp16-spread-node8`: with whole
experts, and the dense path divided among the 8 ranks of a node. With a config.json, MODEL is a model folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...topology.json_codec import build
from ..config.shapes import WHOLE, Sharing
from ..stages import RankShard
from .checkpoint import CheckpointError, StoredTensor, inside, read_annotated
from .own_sums import check_own

METADATA = "laddertron"
PREDICTOR = "predictor."
"""Begins the names of the parameters of a layer that predicts further tokens."""
WITH_PREDICTOR = "--set engine.speculation=mtp"
"""The option of `laddertron shard` that writes that layer."""


@dataclass(frozen=True, slots=True)
class ShardOrigin:
    """The origin of per-rank files. `files`: size in bytes and modification time (ns) of each file of weights."""

    source: str
    config: str
    size: int
    replicate_embedding: bool
    files: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class OwnFile:
    """A rank's own file. `digest`: of the weights it was written from (Weights.digest)."""

    file: Path
    tensors: Mapping[str, StoredTensor]
    digest: str
    replicate_embedding: bool
    metadata: Mapping[str, Any]
    sizes: str
    """The options of `laddertron shard` that write it."""
    again: str

    def check(self, salt: bytes) -> None:
        """See check_own."""
        check_own(self.file, [*self.tensors.values()], self.metadata, salt, self.again)


def shards_folder(folder: Path, size: int, stages: int = 1, sharing: Sharing = WHOLE) -> Path:
    """The folder of the files for `stages` stages of `size` ranks each."""
    names = [f"laddertron-tp{size}", *[f"pp{stages}"] * (stages > 1), *["spread"] * sharing.spread]
    return folder / "-".join((*names, *[f"node{sharing.per_node}"] * (sharing.per_node > 0)))


def folder_of(folder: Path, shard: RankShard) -> Path:
    sharing = Sharing(shard.spread, shard.per_node)
    return shards_folder(folder, shard.size, 1 if shard.stage is None else shard.stage.count, sharing)


def file_name(shard: RankShard) -> str:
    rank = shard.rank + (0 if shard.stage is None else shard.stage.index * shard.size)
    return f"rank-{rank:04d}.safetensors"


def layers_of(shard: RankShard) -> dict[str, str]:
    """The metadata about a stage's layers, with the checkpoint's numbers."""
    if shard.stage is None:
        return {}
    first = shard.stage.first_layer
    return {"layers": f"{first} to {first + shard.config.num_layers - 1}"}


def sizes_of(shard: RankShard) -> str:
    """The options of `laddertron shard` that write this shard."""
    keys: dict[str, int | str] = {"parallel.tensor_parallel_size": shard.size}
    keys |= {} if shard.stage is None else {"parallel.pipeline_parallel_size": shard.stage.count}
    keys |= {"parallel.expert_layout": "spread" if shard.spread else "tensor"} if shard.spread or shard.per_node else {}
    keys |= {"parallel.dense_path": "node", "launch.ranks_per_node": shard.per_node} if shard.per_node else {}
    return " ".join(f"--set {key}={value}" for key, value in keys.items())


def config_digest(folder: Path) -> str:
    """Digest of config.json, which determines wiring, family and type."""
    return hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16).hexdigest()


def stamps(folder: Path, names: list[str]) -> dict[str, tuple[int, int]]:
    """Size and modification time of the files that exist."""
    files = ((name, folder / name) for name in sorted(names))
    return {name: ((s := file.stat()).st_size, s.st_mtime_ns) for name, file in files if file.is_file()}


def open_shards(folder: Path, shard: RankShard) -> OwnFile | None:
    """Opens this rank's file; None if there are no per-rank files. Raises CheckpointError if they are stale or
    incomplete."""
    home = folder_of(folder, shard)
    if not home.is_dir():
        return None
    file = inside(home, file_name(shard))
    metadata, tensors = read_annotated(file)
    sizes = sizes_of(shard) + f" {WITH_PREDICTOR}" * any(t.name.startswith(PREDICTOR) for t in tensors)
    again = f"write them again with `laddertron shard {folder} {sizes} --overwrite`, or remove {home}"
    origin = _origin(metadata, file, again)
    if origin.size != shard.size or metadata.get("rank") != str(shard.rank):
        raise CheckpointError(f"{file}: was written for another rank (rank {metadata.get('rank')}): {again}")
    for key, layers in layers_of(shard).items():
        if metadata.get(key) != layers:
            raise CheckpointError(f"{file}: holds layers {metadata.get(key)}, this stage has {layers}: {again}")
    if origin.config != config_digest(folder):
        raise CheckpointError(f"{file}: stale: {folder / 'config.json'} has changed since: {again}")
    current = stamps(folder, list(origin.files))
    changed = sorted(name for name, stamp in origin.files.items() if current.get(name) != stamp)
    if current and changed:  # if none of the checkpoint's files exists, the folder was moved without them: valid
        raise CheckpointError(f"{file}: stale: {folder / changed[0]} has changed since: {again}")
    own = {t.name: t for t in tensors}
    return OwnFile(file, own, origin.source, origin.replicate_embedding, metadata, sizes, again)


def origins_in(folder: Path) -> tuple[str, ...]:
    """The digests of the weights from which a folder's per-rank files were written. Raises CheckpointError."""
    first = [min(home.glob("rank-*.safetensors"), default=None) for home in folder.glob("laddertron-tp*")]
    again = "write them again with `laddertron shard`"
    files = [file for file in first if file is not None]
    return tuple(sorted({_origin(read_annotated(file)[0], file, again).source for file in files}))


def _origin(metadata: Mapping[str, Any], file: Path, again: str) -> ShardOrigin:
    try:
        return build(ShardOrigin, json.loads(metadata[METADATA]))
    except (ValueError, TypeError, KeyError) as fault:
        raise CheckpointError(f"{file}: was not written by `laddertron shard`: {again}") from fault
