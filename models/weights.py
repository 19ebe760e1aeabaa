"""What a model folder holds, checked against the model before anything is allocated: a Source, which
models/weights_load.py reads a rank's parameters from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import DTYPES, HARMLESS, CheckpointError, Stored, read_folder, shown
from .config import ModelConfig
from .manifest import weights_digest
from .quantisation import Quantisation, read_quantisation
from .shard import Shard
from .weights_plan import PRODUCTS, expected_shapes, head_of, scale_of, sources_of
from .weights_shards import open_shards

_PLAIN = ("F32", "BF16", "F16")
_CALIBRATION = re.compile(r".*(\.input_scale|\.input_scale_ub|\.output_scale|\.[qkv]_scale|_proj\.weight_scale_ub)")
"""What fp8 checkpoints carry beside: activations are scaled per token here, and keys and values by the cache."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checked folder: every tensor that this rank may read, by name."""

    folder: Path
    tensors: Mapping[str, Stored]
    digest: str
    """Of names, types, shapes and places (and of the bytes, where there is a manifest): ranks must agree on it."""
    quantisation: Quantisation | None = None
    sharded_over: int = 0
    """Ranks that per-rank files were written for; 0: the checkpoint itself."""
    replicate_embedding: bool = False
    """What per-rank files hold."""

    def kept_fp8(self, config: ModelConfig) -> frozenset[str]:
        """Products whose weights are fp8 in full, and may stay so: "layers.3.gate_up", …"""
        if self.quantisation is None:
            return frozenset()
        return frozenset(
            f"layers.{layer}.{product}"
            for layer in range(config.num_layers)
            for product in PRODUCTS
            if all(self._is_fp8(name) for name in self._names(config, layer, product))
        )

    def _names(self, config: ModelConfig, layer: int, product: str) -> tuple[str, ...]:
        return (f"layers.{layer}.{product}.weight",) if self.sharded_over else sources_of(config, layer, product)

    def _is_fp8(self, name: str) -> bool:
        return name in self.tensors and self.tensors[name].dtype == "F8_E4M3"

    def rank_bytes(self, itemsize: int, size: int, keeps_fp8: bool, products: int | None = None) -> int:
        """About what one of `size` ranks holds with `itemsize` bytes an element, `products` in the layers' matrices."""
        total = 0
        for stored in self.tensors.values():
            width = DTYPES[stored.dtype].itemsize
            if keeps_fp8 and stored.dtype == "F8_E4M3":
                held = width
            else:
                held = products if products and len(stored.shape) == 2 and "layers." in stored.name else itemsize
            total += (stored.end - stored.begin) // width * held
        return total if self.sharded_over else total // size


def check_folder(folder: Path, config: ModelConfig) -> dict[str, Stored]:
    """The checkpoint's tensors, once all that the model needs are there in the right shape and nothing unknown is.

    Raises CheckpointError naming file and tensor.
    """
    return _check(folder, config, _quantisation(folder))


def open_source(folder: Path, shard: Shard) -> Source:
    """What this rank loads from: files of its own where `laddertron shard` has written them for as many ranks, else the
    checkpoint. Raises CheckpointError."""
    own = open_shards(folder, shard)
    if own is None:
        return open_checkpoint(folder, shard.config)
    return Source(folder, own.tensors, own.digest, _quantisation(folder), shard.size, own.replicate_embedding)


def open_checkpoint(folder: Path, config: ModelConfig) -> Source:
    """The checkpoint itself, checked as check_folder does. Raises CheckpointError."""
    quantisation = _quantisation(folder)
    tensors = _check(folder, config, quantisation)
    return Source(folder, tensors, weights_digest(folder, tensors), quantisation)


def _quantisation(folder: Path) -> Quantisation | None:
    try:
        return read_quantisation(folder)
    except (OSError, ValueError) as fault:
        raise CheckpointError(str(fault)) from fault


def _check(folder: Path, config: ModelConfig, quantisation: Quantisation | None) -> dict[str, Stored]:
    tensors = read_folder(folder)
    expected = expected_shapes(config)
    scales = set()
    for name, shape in expected.items():
        stored = tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{folder}: tensor {name} {shape} is missing; config.json promises it")
        if stored.shape != shape:
            raise CheckpointError(f"{stored.file}: tensor {name} has shape {stored.shape}, config.json says {shape}")
        if stored.dtype == "F8_E4M3" and quantisation is not None and len(shape) == 2:
            scales.add(_check_scale(stored, tensors.get(scale_of(name))))
        elif stored.dtype not in _PLAIN:
            raise CheckpointError(
                f"{stored.file}: tensor {name} is stored as {stored.dtype}; readable are {', '.join(_PLAIN)}, and "
                "F8_E4M3 matrices where config.json has a quantization_config"
            )
    known = scales | ({head_of(config)} if config.tied_embeddings else set())
    for name, stored in tensors.items():
        if name in expected or name in known or HARMLESS.fullmatch(name):
            continue
        if quantisation is None or not _CALIBRATION.fullmatch(name):
            raise CheckpointError(
                f"{stored.file}: tensor {shown(name)} {stored.shape} belongs to nothing in config.json "
                f"({config.family}, {config.num_layers} layers): wrong config.json, or an architecture not supported"
            )
    return tensors


def _check_scale(stored: Stored, scale: Stored | None) -> str:
    """The scale's name, once it fits its tensor: one number, or one a row."""
    if scale is None:
        raise CheckpointError(
            f"{stored.file}: tensor {stored.name} is fp8 without {scale_of(stored.name)}: its scale is missing"
        )
    rows = stored.shape[0]
    if scale.shape not in ((), (1,), (rows,), (rows, 1)) or scale.dtype not in _PLAIN:
        raise CheckpointError(
            f"{scale.file}: tensor {scale.name} is {scale.dtype} {scale.shape}; one number or ({rows}, 1) is read"
        )
    return scale.name
