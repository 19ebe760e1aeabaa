"""Pipeline stages (the layers of each, where a wiring allows one to end) and a rank's share of a stage: heads, KV
heads, rows of the vocabulary. Pure; no torch. `Stage.config` describes a stage as a model whose layers are numbered
from 0; `first_layer` is the checkpoint's number of the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from .config.json_fields import Refusal
from .config.model_config import ModelConfig, Wiring
from .config.predictor import predictor_of
from .config.shapes import LEAVES, WHOLE, Sharing
from .residual import pending_at


class StageError(Refusal, ValueError):
    """The layers cannot be divided like this; the message has the arithmetic and the fix."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `index` of `count`. `pending`: the number of outputs in flight at its start; `left`: at its end.
    lends: the next stage begins with a layer that uses the positions which this one chose; any_lends: one of the
    pipeline's stages does."""

    config: ModelConfig
    index: int = 0
    count: int = 1
    first_layer: int = 0
    pending: int = 0
    left: int = 0
    lends: bool = False
    any_lends: bool = False

    @property
    def borrows(self) -> bool:
        """Whether it begins with a layer that uses the positions which an earlier stage chose."""
        return not _chooses(self.config, 0)

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


def make_stages(config: ModelConfig, layers: Sequence[int]) -> tuple[Stage, ...]:
    ends = (0, *accumulate(layers))
    pending = [pending_at(config.wiring, end) for end in ends]
    lends = [not _chooses(config, end) for end in ends]
    return tuple(
        Stage(_layers(config, a, b), i, len(layers), a, pending[i], pending[i + 1], lends[i + 1], any(lends))
        for i, (a, b) in enumerate(pairwise(ends))
    )


def predictor_stage(config: ModelConfig, embeds: bool, samples: bool = False) -> Stage:
    """The predicting layer of a model as a stage. embeds: it has rows of the embedding, because the model's last stage
    has none. samples: of embedding and head, because its ranks are not the model's. Raises ShapeError if the model has
    none."""
    first = 0 if config.layout == "shortcut" else config.num_layers
    return Stage(predictor_of(config), 0 if embeds or samples else 1, 1 if samples else 3, first)


def predictor_shard(config: ModelConfig, model: RankShard, node_size: int = 0) -> RankShard:
    """A rank's share of the predicting layer. model: the rank's share of the last stage; node_size: the number of ranks
    of a node, if each node has the whole layer. Raises ShapeError as predictor_stage."""
    stage = predictor_stage(config, not model.embeds, node_size > 0)
    if node_size:
        return RankShard(stage.config, node_size, model.rank % node_size, stage)
    return RankShard(stage.config, model.size, model.rank, stage, model.spread, model.per_node)


def _chooses(config: ModelConfig, layer: int) -> bool:
    """Whether a layer, or the end, needs no positions that an earlier layer chose."""
    index = None if config.latent is None else config.latent.index
    return index is None or layer == len(index.full) or index.full[layer]


def _layers(config: ModelConfig, begin: int, end: int) -> ModelConfig:
    if (begin, end) == (0, config.num_layers):
        return config
    lanes = config.lanes if config.lanes is None else replace(config.lanes, first=begin)
    wiring = replace(config.wiring, kinds=config.wiring.kinds[begin:end], lanes=lanes)
    windows, experts = config.sliding_window[begin:end], config.experts
    if experts is not None:
        experts = replace(experts, layers=experts.layers[begin:end])
    latent = config.latent
    if latent is not None and latent.index is not None:
        latent = replace(latent, index=replace(latent.index, full=latent.index.full[begin:end]))
    layers = end - begin
    return replace(config, num_layers=layers, wiring=wiring, sliding_window=windows, experts=experts, latent=latent)


def choose_layers(config: ModelConfig, count: int, requested: Sequence[int] = ()) -> tuple[int, ...]:
    """The number of layers of each of `count` stages: `requested` if given, else the division whose slowest stage is
    fastest, with layers and head weighted by the bytes that a step reads. Raises StageError."""
    unit = _unit(config.wiring)
    layers = config.num_layers
    places = layers // unit + (layers % unit > 0)
    if requested:
        _check(config, count, requested, unit)
        return tuple(requested)
    if count > places:
        every = f" in steps of {unit} ({config.wiring.name} ends a stage after a reduce alone)" if unit > 1 else ""
        raise StageError(
            f"pipeline_parallel_size={count}: {layers} layers{every} make at most {places} stages: use {places} or less"
        )
    return _balanced(layers, unit, count, head_in_layers(config))


def head_in_layers(config: ModelConfig) -> float:
    """The bytes of the head that a step reads, as a number of layers."""
    head = config.vocab_size * config.hidden_size
    rest = config.num_parameters - head * (1 if config.tied_embeddings else 2)
    return head / max(1.0, rest / config.num_layers)


def _balanced(layers: int, unit: int, count: int, head: float) -> tuple[int, ...]:
    """The most even of the divisions whose largest stage, including the head, is smallest."""
    if count == 1:
        return (layers,)
    # Try each number of layers for the last stage, and divide the rest evenly, in units, among the others.
    best: tuple[float, tuple[int, ...]] | None = None
    for last in range(layers % unit or unit, layers - (count - 1) * unit + 1, unit):
        even, over = divmod((layers - last) // unit, count - 1)
        others = [unit * (even + (i < over)) for i in range(count - 1)]
        cost = max(others[0], last + head)
        if best is None or cost < best[0]:
            best = cost, (*others, last)
    assert best is not None
    return best[1]


def _unit(wiring: Wiring) -> int:
    """Stages must end after a multiple of so many layers."""
    if wiring.name == "shortcut":
        return 2
    every = wiring.desync_every
    return every // 2 if every % 2 == 0 and every else every or 1


def _check(config: ModelConfig, count: int, layers: Sequence[int], unit: int) -> None:
    shown = f"pipeline_layers={list(layers)}"
    if len(layers) != count:
        raise StageError(f"{shown} names {len(layers)} stages, pipeline_parallel_size={count}: name one number a stage")
    if sum(layers) != config.num_layers or min(layers) < 1:
        total = f"{' + '.join(map(str, layers))} = {sum(layers)}"
        raise StageError(f"{shown}: {total}, the model has {config.num_layers} layers, at least 1 a stage: change them")
    for i, end in enumerate(accumulate(layers[:-1])):
        if end % unit and config.wiring.name == "shortcut":
            raise StageError(
                f"{shown}: stage {i + 1} would begin at layer {end}, before the experts of layer {end - 1} have joined "
                "the residual: let stages end after an even number of layers (attention and MLP are one)"
            )
        if end % unit:
            every = config.wiring.desync_every
            raise StageError(
                f"{shown}: stage {i + 1} would begin after {2 * end} sub-blocks, {2 * end} % {every} = "
                f"{2 * end % every}, and {config.wiring.name} reduces after every {every}: let stages end after a "
                f"multiple of {unit} layers"
            )


@dataclass(frozen=True, slots=True)
class RankShard:
    """Rank `rank` of `size`. Assumes shapes that models/config/shapes.py has accepted."""

    config: ModelConfig
    size: int
    rank: int
    stage: Stage | None = None
    """The pipeline stage; None without a pipeline. `config` is then the stage's."""
    spread: bool = False
    per_node: int = 0
    """Ranks of a node if the dense path is split inside nodes, else 0 (see Sharing)."""

    @staticmethod
    def of(stage: Stage, size: int, rank: int, sharing: Sharing = WHOLE) -> RankShard:
        apart = stage.count > 1 or stage.first_layer > 0
        return RankShard(stage.config, size, rank, stage if apart else None, *sharing)

    @property
    def dense_size(self) -> int:
        """The number of ranks over which attention, dense MLPs and embedding are split."""
        return self.per_node or self.size

    @property
    def dense_rank(self) -> int:
        return self.rank % self.dense_size

    @property
    def embeds(self) -> bool:
        """True if this stage has rows of the embedding: the first stage."""
        return self.stage is None or self.stage.first

    @property
    def samples(self) -> bool:
        """True if this stage has the final norm and rows of the head: the last stage."""
        return self.stage is None or self.stage.last

    def has_head(self, replicate_embedding: bool) -> bool:
        """Whether the head is a separate parameter here; a tied head is the embedding, if that is on this rank."""
        apart = replicate_embedding or not self.embeds or self.dense_size != self.size
        return self.samples and (not self.config.tied_embeddings or apart)

    @property
    def num_heads(self) -> int:
        return self.config.num_heads // self.dense_size

    @property
    def first_head(self) -> int:
        return self.dense_rank * self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """At least one: with more ranks than KV heads, several ranks hold the same one."""
        return max(1, self.config.num_kv_heads // self.dense_size)

    @property
    def first_kv_head(self) -> int:
        return self.dense_rank * self.config.num_kv_heads // self.dense_size

    @property
    def attention_elements(self) -> dict[str, int]:
        """Elements of a layer's attention weights on this rank, by product. "kv_b": what is kept in the compute type:
        the up-projection of latent attention, absorbed into queries and outputs, and the indexer. The first product of
        latent attention is whole on each rank."""
        c, heads = self.config, self.num_heads
        d = c.hidden_size
        if (latent := c.latent) is None:
            return {"qkv": d * (heads + 2 * self.num_kv_heads) * c.head_dim, "o": heads * c.head_dim * d}
        queries = heads * (latent.plain + latent.rotated) * (latent.query_rank or d)
        expanded = heads * (latent.plain + latent.value) * latent.rank
        if latent.index is not None:  # of a layer on average
            of_index = latent.index.parameters(d, latent.query_rank) * sum(latent.index.full)
            expanded += of_index // c.num_layers
        return {"qkv": d * latent.shared + queries, "o": heads * latent.value * d, "kv_b": expanded}

    @property
    def attention_outputs(self) -> int:
        """Elements per token of the activations between attention's first and last product."""
        c, heads = self.config, self.num_heads
        if (latent := c.latent) is None:
            return (heads + 2 * self.num_kv_heads) * c.head_dim
        made = heads * (latent.plain + latent.rotated)
        return latent.shared + made + (heads + 1) * latent.width + heads * latent.rank

    @property
    def kv_elements(self) -> int:
        """Elements per position in a layer's KV cache, without index keys."""
        latent = self.config.latent
        return 2 * self.num_kv_heads * self.config.head_dim if latent is None else latent.width

    @property
    def cached_elements(self) -> int:
        """Elements per position in the KV cache of all layers."""
        index = None if self.config.latent is None else self.config.latent.index
        keys = 0 if index is None else sum(index.full) * index.dim
        return self.config.num_layers * self.kv_elements + keys

    @property
    def num_lanes(self) -> int:
        """Residuals (lanes) of this rank."""
        return 1 if self.config.lanes is None else self.config.lanes.count // self.size

    @property
    def first_lane(self) -> int:
        return self.rank * self.num_lanes

    @property
    def ffn_size(self) -> int:
        return self.config.ffn_size // self.dense_size

    @property
    def first_ffn(self) -> int:
        return self.dense_rank * self.ffn_size

    @property
    def padded_vocab(self) -> int:
        return len(self.vocab) * self.size

    @property
    def vocab(self) -> range:
        """Global ids of this rank's rows of the head; ids from vocab_size on are padding."""
        return _vocabulary(self.config, self.size, self.rank)

    @property
    def embedded(self) -> range:
        """Global ids of this rank's rows of the embedding."""
        return _vocabulary(self.config, self.dense_size, self.dense_rank)

    @property
    def expert_ids(self) -> range:
        """The experts of which this rank holds all or a share."""
        count = 0 if self.config.experts is None else self.config.experts.count
        return range(self.rank, count, self.size) if self.spread else range(count)

    @property
    def expert_ffn(self) -> range:
        """Its share of each expert's inner dimension."""
        total = 0 if self.config.experts is None else self.config.experts.ffn_size
        return range(total) if self.spread else _part(total, self.size, self.rank)

    @property
    def shared_ffn(self) -> range:
        """Its share of the shared experts' inner dimension."""
        return _part(0 if self.config.experts is None else self.config.experts.shared_ffn_size, self.size, self.rank)


def _part(total: int, parts: int, index: int) -> range:
    """Part `index` of `parts` equal parts; if they do not divide `total`, the last ones extend beyond it."""
    size = -(-total // parts)
    return range(index * size, (index + 1) * size)


def _vocabulary(config: ModelConfig, size: int, rank: int) -> range:
    """A rank's rows: an equal number of LEAVES shares, so that a rank has the rows of two ranks of a group twice as
    large. Models with lanes divide the vocabulary without these shares."""
    if size == 1 or LEAVES % size or config.lanes is not None:
        return _part(config.vocab_size, size, rank)
    rows = -(-config.vocab_size // LEAVES) * (LEAVES // size)
    return range(rank * rows, (rank + 1) * rows)
