"""Checks the contents of a model folder against the config before anything is allocated, and makes the Source from
which models/weights/load.py reads a rank's parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path

from ...topology.hardware.fabric import counted
from ..config.model_config import ModelConfig
from ..config.quantisation import Quantisation, ScaleType, read_quantisation
from ..stages import RankShard, Stage
from .checkpoint import HARMLESS, ITEMSIZES, CheckpointError, StoredTensor, read_folder, same_values, shown
from .identity import Sample, Weights, read_sample, tables_of
from .quantised import (
    CALIBRATION,
    DEPTH,
    PLAIN,
    READABLE,
    check_scale,
    describe_blocks,
    describe_packed,
    divided,
    is_quantised,
    is_scale,
    kept_bytes,
    may_stay,
    scale_of,
    scaled_by,
)
from .rank_files import PREDICTOR, WITH_PREDICTOR, OwnFile, open_shards
from .slices import (
    Fill,
    embedding_of,
    expected_shapes,
    fused_experts,
    head_of,
    plan_fills,
    product_columns,
    sources_of,
)

log = logging.getLogger(__name__)

BUFFERS = frozenset(("BOOL", "U8", "I16", "U16", "I32", "U32", "I64", "U64"))
"""Types of no weight that is read here."""
MAX_LISTED = 8
_TEXT, _VISION = "language_model.", ("vision_tower.", "mm_projector.", "multi_modal_projector.")
"""Prefixes of the tensors of a model that sees: those of its language model, and those that are not read."""
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class Source:
    """A checked model folder: every tensor that this rank may read, by name."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    listed: tuple[StoredTensor, ...] = ()
    """All tensors of the checkpoint's files, as their headers describe them."""
    own: OwnFile | None = None
    """This rank's own file, in place of the checkpoint."""
    predicting: Mapping[str, StoredTensor] = field(default_factory=dict)
    """The tensors of the predicting layer in the rank's own file."""
    quantisation: Quantisation | None = None
    sharded_over: int = 0
    """Number of ranks of the per-rank files; 0: the checkpoint itself."""
    replicate_embedding: bool = False
    """Whether per-rank files have the whole embedding."""
    seed: int | None = None
    """The seed of random weights (DummyReader); None: weights are read from files."""

    def of_predictor(self, shard: RankShard) -> Source:
        """The source of a rank's share of the predicting layer."""
        if self.own is None:
            return self
        whole_in_node = shard.samples
        sizes = self.own.sizes + f" --set launch.ranks_per_node={shard.size}" * whole_in_node
        replicate = self.replicate_embedding and not whole_in_node
        own = replace(self.own, sizes=sizes)
        return replace(self, tensors=self.predicting, own=own, replicate_embedding=replicate)

    @property
    def block(self) -> tuple[int, int] | None:
        return None if self.quantisation is None else self.quantisation.block

    def quantised_products(self, shard: RankShard, step: int | None = DEPTH) -> frozenset[str]:
        """Products ("layers.3.gate_up", …, "layers.3.experts.down") whose weights are all stored quantised and may stay
        quantised for a kernel that multiplies `step` columns at once; None: all that are stored quantised."""
        q = self.quantisation
        if q is None:
            return frozenset()
        columns = product_columns(shard)
        return frozenset(
            f"layers.{layer}.{product}"
            for layer in range(shard.config.num_layers)
            for product in columns
            if step is None or may_stay(columns[product], q, step)
            if (names := self._names(shard, layer, product))
            and all(name in self.tensors and is_quantised(self.tensors[name]) for name in names)
        )

    def _names(self, shard: RankShard, layer: int, product: str) -> tuple[str, ...]:
        if self.sharded_over:
            return (f"layers.{layer}.{product}.weight",)
        return sources_of(shard, layer, product)

    @property
    def digest(self) -> str:
        """The identity of the weights (Weights.digest). Reads samples of all tensors. Raises OSError."""
        if self.seed is not None:
            return f"dummy of seed {self.seed}"
        if self.own is not None:
            return self.own.digest
        tables = tables_of(self.listed)
        return Weights(tables, read_sample(tables).fixed).digest

    def sample(self, salt: bytes, part: int, parts: int) -> Sample:
        """Reads this rank's share of the samples, part `part` of `parts` (see Sample); of its own file, if it has one,
        all, and checks them. Raises CheckpointError or OSError."""
        if self.own is not None:
            self.own.check(salt)
            return Sample(origin=self.own.digest)
        return read_sample(tables_of(self.listed), salt, part, parts)

    def rank_bytes(
        self, shard: RankShard, itemsize: int, quantised: Set[str] = frozenset(), products: int | None = None
    ) -> int:
        """Approximate bytes of a rank's weights, at `itemsize` per element; quantised: products that stay quantised;
        products: bytes per element of other matrices in layers, if different."""
        fills = [Fill(n, 0, (s.shape or (1,))[0], n) for n, s in self.tensors.items() if not is_scale(n)]
        total = 0
        for fill in fills if self.sharded_over else plan_fills(shard):
            if fill.tensor is None:
                continue
            stored, product = self.tensors[fill.tensor], fill.parameter.removesuffix(".weight")
            turned = fill.transposed and stored.code is None
            columns = fill.columns or prod(stored.shape[:1] if turned else stored.shape[1:]) * stored.per_byte
            if product in quantised and self.quantisation is not None:
                total += kept_bytes((fill.count, columns), self.quantisation)
                continue
            width = products if products and len(stored.shape) == 2 and "layers." in stored.name else itemsize
            total += fill.count * columns * width
        return total


def open_source(
    folder: Path,
    shard: RankShard,
    config: ModelConfig | None = None,
    seed: int | None = None,
    predictor: Stage | None = None,
) -> Source:
    """Opens the source of this rank's weights: its own files if `laddertron shard` wrote them for this number of ranks,
    else the checkpoint. config: the whole model's, if the shard is a stage's. seed: draws random weights; only
    config.json is read. predictor: the predicting layer, if it is used. Raises CheckpointError."""
    if seed is not None:
        return _open_dummy(folder, config or shard.config, seed, predictor)
    own = open_shards(folder, shard)
    if own is None:
        return open_checkpoint(folder, config or shard.config, predictor)
    tensors, quantisation = dict(own.tensors), _quantisation(folder)
    for name, stored in own.tensors.items():
        if stored.dtype == "U8" and quantisation is not None:
            tensors[name] = replace(stored, code=quantisation.code)
    for name, stored in own.tensors.items():
        if is_scale(name):
            weight = tensors[scaled_by(name)]
            tensors[name] = replace(stored, block=(1, weight.shape[1] * weight.per_byte // stored.shape[1]))
    scales = _scaled_as_stored(quantisation, tensors)
    predicting = {name.removeprefix(PREDICTOR): tensors.pop(name) for name in own.tensors if name.startswith(PREDICTOR)}
    if predictor is not None and shard.samples and not predicting:
        raise CheckpointError(
            f"{own.file}: has no layer that predicts further tokens: write the files again with `laddertron shard "
            f"{folder} {own.sizes} {WITH_PREDICTOR} --overwrite`, or use another engine.speculation than mtp"
        )
    return Source(folder, tensors, (), own, predicting, scales, shard.size, own.replicate_embedding)


def open_checkpoint(folder: Path, config: ModelConfig, predictor: Stage | None = None) -> Source:
    """Opens a checkpoint after checking that it is complete and has the model's shapes; also those of the predicting
    layer, if it is used. Raises CheckpointError, which names file and tensor."""
    quantisation = _quantisation(folder)
    tensors = read_folder(folder)
    listed = (*tensors.values(),)
    tensors = _without_vision(tensors)
    _check(folder, tensors, config, quantisation, predictor)
    return Source(folder, tensors, listed, quantisation=_scaled_as_stored(quantisation, tensors))


def _without_vision(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of the language model of a model that sees, without their prefix."""
    if not any(name.startswith(_TEXT) for name in tensors):
        return tensors
    names = {name: name.removeprefix(_TEXT) for name in tensors if not name.startswith(_VISION)}
    return {short: replace(tensors[name], name=short) for name, short in names.items()}


def _scaled_as_stored(q: Quantisation | None, tensors: Mapping[str, StoredTensor]) -> Quantisation | None:
    """With the type of INT4's scales, which config.json does not name; of several, the one that represents all."""
    if q is None or q.code != "int4":
        return q
    types = {tensors[scale_of(name)].dtype for name, stored in tensors.items() if stored.code == "int4"}
    names: dict[str, ScaleType] = {"BF16": "bfloat16", "F16": "float16"}
    return replace(q, scale=names.get(types.pop(), "float32") if len(types) == 1 else "float32")


def _open_dummy(folder: Path, config: ModelConfig, seed: int, predictor: Stage | None) -> Source:
    quantisation = _quantisation(folder)
    if quantisation is not None and quantisation.block is None:  # scales by block: widened while loading
        raise CheckpointError(
            f"{folder}/config.json: {quantisation.method} weights: load_format dummy draws none that stay quantised: "
            "remove quantization_config to measure them in the model's own type"
        )
    code, tensors = _CODES[config.dtype], dict[str, StoredTensor]()
    for name, shape in expected_shapes(config, predictor).items():
        flat = shape if len(shape) < 3 else (prod(shape[:-1]), shape[-1])
        tensors[name] = StoredTensor(name, folder / "config.json", code, flat, 0, prod(shape) * ITEMSIZES[code])
    return Source(folder, tensors, seed=seed)


def _quantisation(folder: Path) -> Quantisation | None:
    try:
        return read_quantisation(folder)
    except (OSError, ValueError) as fault:
        raise CheckpointError(str(fault)) from fault


def _check(
    folder: Path,
    tensors: dict[str, StoredTensor],
    config: ModelConfig,
    quantisation: Quantisation | None,
    predictor: Stage | None,
) -> None:
    """Checks that the tensors are those of the model; renames and divides some."""
    _divide_fused(tensors, config, quantisation, predictor)
    expected = expected_shapes(config, predictor)
    scales = set[str]()
    for name, shape in expected.items():
        packed = set() if quantisation is None else describe_packed(tensors, name, shape, quantisation)
        if packed:
            scales |= packed
            continue
        stored = tensors.get(name)
        if stored is None:
            unused = name.startswith(config.ignored)
            fix = ": use another engine.speculation than mtp, or a folder that has it" if unused else ""
            raise CheckpointError(f"{folder}: tensor {name} {shape} is missing; config.json promises it{fix}")
        if stored.shape != shape:
            raise CheckpointError(f"{stored.file}: tensor {name} has shape {stored.shape}, config.json says {shape}")
        if is_quantised(stored) and quantisation is not None and len(shape) == 2:
            _name_scale(tensors, name, quantisation.block)
            scales.add(check_scale(stored, tensors.get(scale_of(name)), quantisation.block))
        elif stored.dtype not in PLAIN:
            raise CheckpointError(f"{stored.file}: tensor {name} is stored as {stored.dtype}; readable are {READABLE}")
        if len(shape) > 2:  # lanes: rows are numbered over all lanes
            tensors[name] = replace(stored, shape=(prod(shape[:-1]), shape[-1]))
    if config.tied_embeddings:
        _check_tied(tensors, head_of(config), embedding_of(config))
    idle = _idle(config)
    others = scales | ({head_of(config)} if config.tied_embeddings else set())
    modules, surplus = {name.rpartition(".")[0] for name in expected}, []
    for name, stored in tensors.items():
        if 0 in stored.shape:  # transformers stores shared experts so where there are none
            continue
        if name in expected or name in others or HARMLESS.fullmatch(name) or name.startswith(config.ignored + idle):
            continue
        if quantisation is not None and CALIBRATION.fullmatch(name):
            continue
        if _is_buffer(stored, modules):
            surplus.append(name)
        else:
            raise CheckpointError(
                f"{stored.file}: tensor {shown(name)} {stored.shape} belongs to nothing in config.json "
                f"({config.family}, {config.num_layers} layers): wrong config.json, or an architecture not supported"
            )

    if surplus:
        text = "%s: %s that config.json does not need, not read: %s%s"
        more = " …" if len(surplus) > MAX_LISTED else ""
        log.warning(text, folder, counted(len(surplus), "tensor"), ", ".join(map(shown, surplus[:MAX_LISTED])), more)


def _is_buffer(stored: StoredTensor, modules: Set[str]) -> bool:
    """Whether a tensor that the model does not need cannot be a parameter: it is no floating-point vector or matrix,
    and belongs to no product or norm of the model, whose scale or bias it could be."""
    module, _, leaf = stored.name.rpartition(".")
    if "weight" in leaf or (leaf == "bias" and module in modules):
        return False
    return prod(stored.shape) == 1 or stored.dtype in BUFFERS


def _check_tied(tensors: dict[str, StoredTensor], head: str, embedding: str) -> None:
    """Checks that a stored head equals the embedding to which config.json ties it: transformers would use a different
    one."""
    if head in tensors and not same_values(tensors[head], tensors[embedding]):
        raise CheckpointError(
            f"{tensors[head].file}: tensor {head} is not {embedding}, which tie_word_embeddings in config.json says it "
            "is: set that to false, or remove the tensor"
        )


def _idle(config: ModelConfig) -> tuple[str, ...]:
    """Prefixes of unused tensors that transformers writes for identity experts."""
    e = config.experts
    if e is None or not e.identities:
        return ()
    places = product(range(config.num_layers // 2), range(e.count, e.routed))
    return tuple(f"model.layers.{layer}.mlp.experts.{number}." for layer, number in places)


def _name_scale(tensors: dict[str, StoredTensor], name: str, block: tuple[int, int] | None) -> None:
    """Renames a matrix's scale to `scale_of`: some checkpoints append _inv, although it is a factor, too."""
    usual, other = scale_of(name), f"{scale_of(name)}_inv"
    if usual not in tensors and other in tensors:
        tensors[usual] = replace(tensors.pop(other), name=usual)
    if usual in tensors and block is not None:
        tensors[usual] = replace(tensors[usual], block=block)


def _divide_fused(
    tensors: dict[str, StoredTensor], config: ModelConfig, quantisation: Quantisation | None, predictor: Stage | None
) -> None:
    """Replaces each tensor [E, rows, columns] of all experts by one for each expert. Raises CheckpointError."""
    for fused, names, shape in fused_experts(config, predictor):
        parts = [name for names_of_parts in names for name in names_of_parts]
        if describe_blocks(tensors, fused, parts, shape, quantisation) or fused not in tensors:
            continue
        stored = tensors.pop(fused)
        promised = (len(names), len(names[0]) * shape[0], *shape[1:])
        if stored.shape != promised or stored.dtype not in PLAIN:
            raise CheckpointError(
                f"{stored.file}: tensor {fused} is {stored.dtype} {stored.shape}; config.json says "
                f"{promised}, and {', '.join(PLAIN)} are read of experts in one tensor"
            )
        tensors |= {part.name: part for part in divided(stored, parts, shape)}
