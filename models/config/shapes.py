"""Checks whether a model splits over tp ranks: heads and FFN must divide, KV heads divide or are replicated evenly, the
vocabulary is padded. No torch.
"""

from __future__ import annotations

from typing import NamedTuple

from .json_fields import Refusal
from .model_config import ModelConfig

Shape = tuple[int, int]
"""Decodes and prompt rows of a recorded step: a step without prompts has 0 rows, and one of sequences with drafts 0
decodes, since each of these is one prompt, of its last token and its drafts."""
REPLICATED_LIMIT = 64 << 20
"""Bytes of an embedding table beyond which no rank holds a whole copy unasked."""


LEAVES = 16
"""Equal shares of the vocabulary, and of a row-parallel product's inputs under `deterministic: everywhere`: the most
ranks it serves."""


class Sharing(NamedTuple):
    """How a model with experts is divided. spread: whole experts are dealt out to the ranks in turn, else each is cut
    over all of them. per_node: attention, dense MLPs and embedding are cut over so many ranks of a node and held once a
    node; 0: over all ranks. Head and shared experts are cut over all ranks in any case."""

    spread: bool = False
    per_node: int = 0


WHOLE = Sharing()


class ShapeError(Refusal, ValueError):
    """A model that does not split over so many ranks: the arithmetic, and sizes that would do."""


def why_not(config: ModelConfig, ranks: int, sharing: Sharing = WHOLE) -> str:
    """The arithmetic of what does not split over the ranks: heads % tp = 0, FFN % tp = 0, and kv_heads % tp = 0 or
    tp % kv_heads = 0 (KV heads replicated), where tp is what the dense path is cut over; "" where all does."""
    if ranks < 1:
        return f"{ranks} ranks are none"
    reasons, tp = [], sharing.per_node or ranks
    if (lanes := config.lanes) is not None and lanes.count % tp:
        return f"{lanes.count} lanes % {tp} = {lanes.count % tp}, and a lane is not divided"
    if config.num_heads % tp:
        reasons.append(f"{config.num_heads} heads % {tp} = {config.num_heads % tp}")
    e = config.experts
    if config.ffn_size % tp and not (e and all(e.layers) and not e.beside):
        reasons.append(f"FFN {config.ffn_size} % {tp} = {config.ffn_size % tp}")
    for what, size in (("an expert's", e.ffn_size), ("the shared experts'", e.shared_ffn_size)) if e else ():
        if size % ranks and not (sharing.spread and what == "an expert's"):
            reasons.append(f"{what} FFN {size} % {ranks} = {size % ranks}")
    kv = config.num_kv_heads
    if kv % tp and tp % kv:
        reasons.append(
            f"{kv} KV heads % {tp} = {kv % tp} and {tp} % {kv} = {tp % kv}, so they neither split nor replicate"
        )
    return "; ".join(reasons)


def splits(config: ModelConfig, tp: int) -> bool:
    return not why_not(config, tp)


def valid_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Every tensor-parallel size that the model splits over, ascending."""
    return tuple(tp for tp in range(1, config.num_heads + 1) if splits(config, tp))


def replicates_embedding(config: ModelConfig, itemsize: int, spans_nodes: bool) -> bool:
    """`parallel.embedding: auto`, at `itemsize` bytes an element: a whole table on every rank saves one exposed
    all-reduce a step; taken where that crosses nodes, the table is within REPLICATED_LIMIT and at most a quarter of all
    weights."""
    table = config.vocab_size * config.hidden_size
    return spans_nodes and itemsize * table <= REPLICATED_LIMIT and 4 * table <= config.num_parameters


def check_shapes(config: ModelConfig, tp: int, sharing: Sharing = WHOLE) -> None:
    """Raises ShapeError unless the model splits over tp ranks with its weights' wiring intact."""
    if reasons := why_not(config, tp, sharing):
        sizes = _either(valid_sizes(config), tp)
        raise ShapeError(f"tensor_parallel_size={tp} does not split this model: {reasons}: use {sizes}")
    trained = config.wiring.trained_tp
    if trained is not None and trained != tp:
        raise ShapeError(
            f"tensor_parallel_size={tp}, but these {config.wiring.name} weights were trained for {trained} ranks, "
            f"whose residuals drift apart: use {trained}"
        )


def share(config: ModelConfig, layout: str, dense_path: str, nodes: int, per_node: int) -> Sharing:
    """Resolves `parallel.expert_layout` and `parallel.dense_path` for a group of `nodes` x `per_node` ranks. Raises
    ShapeError, with the arithmetic, for combinations that are not supported."""
    e, ranks, apart = config.experts, nodes * per_node, dense_path == "node" and nodes > 1
    if e is None:
        for key, value, usual in (("expert_layout", layout, "auto"), ("dense_path", dense_path, "whole")):
            if value != usual:
                raise ShapeError(f"parallel.{key}={value}: this model has no experts: use {usual}")
        return WHOLE
    if layout == "spread" and e.count < ranks:
        raise ShapeError(
            f"parallel.expert_layout=spread: {e.count} experts < {ranks} ranks, which leaves {ranks - e.count} without "
            "one: use tensor"
        )
    if layout == "spread" and nodes > 1 and not apart:
        raise ShapeError(
            f"parallel.expert_layout=spread with dense_path=whole: every all-reduce would cross {nodes} nodes, as with "
            "tensor, and the busiest rank's experts would hold up the others: use dense_path node, or tensor"
        )
    if layout == "spread" and ranks > 1 and config.wiring.desync_every:
        raise ShapeError(
            f"parallel.expert_layout=spread: the {config.wiring.name} wiring gives each rank a residual of its own, by "
            "which ranks choose other experts: use tensor"
        )
    if apart and (config.wiring.desync_every or "parallel" in config.wiring.kinds):
        raise ShapeError(
            f"parallel.dense_path=node: the {config.wiring.name} wiring adds attention and experts in one sum, which "
            "would cross the nodes: use whole"
        )
    spread = layout == "spread" or (layout == "auto" and apart and e.count >= ranks)
    return Sharing(spread, per_node if apart else 0)


def check_everywhere(config: ModelConfig, tp: int) -> None:
    """Raises ShapeError unless `deterministic: everywhere` can be had: the inputs of every row-parallel product, heads
    and FFN, are LEAVES shares of whole pairs, as many on each rank, and the wiring means the same at every size."""
    reasons = []
    if tp not in (sizes := [1 << i for i in range(LEAVES.bit_length())]):
        reasons.append(f"it serves tensor_parallel_size {_either(tuple(sizes), tp)}, not {tp}")
    heads = config.num_heads * config.head_dim
    for what, inputs in ((f"{config.num_heads} heads of {config.head_dim}", heads), ("FFN", config.ffn_size)):
        if inputs % (2 * LEAVES):
            reasons.append(
                f"{what}: {inputs} inputs % {2 * LEAVES} = {inputs % (2 * LEAVES)}, not {LEAVES} shares of pairs"
            )
    if config.experts is not None:
        reasons.append("experts are not added up in a tree")
    if config.latent is not None:
        reasons.append("latent attention's output is not added up in a tree")
    if config.lanes is not None:
        reasons.append("a rank adds its lanes' outputs before it sends them, other ones at other sizes")
    elif config.wiring.desync_every or "none" in config.wiring.kinds:
        reasons.append(f"the {config.wiring.name} wiring adds other numbers at other sizes")
    if reasons:
        raise ShapeError(f"parallel.deterministic=everywhere: {'; '.join(reasons)}: use true or false")


def _either(sizes: tuple[int, ...], tp: int) -> str:
    """The sizes as words; of many, those around tp."""
    if len(sizes) > 8:
        below = [s for s in sizes if s < tp][-4:]
        sizes = (*below, *[s for s in sizes if s > tp][: 8 - len(below)])
    return str(sizes[0]) if len(sizes) == 1 else f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"


def check_draft(draft: ModelConfig, model: ModelConfig, length: int | None) -> None:
    """Raises ShapeError unless `draft` can draft for `model`, in sequences of up to `length` (None: as the model
    has)."""
    length = length or model.max_position_embeddings
    if draft.vocab_size != model.vocab_size:
        raise ShapeError(
            f"a draft model with {draft.vocab_size} ids for a model with {model.vocab_size}: drafts are the model's "
            "ids: use one with the same tokenizer"
        )
    if draft.longest_context < length:
        raise ShapeError(
            f"a draft model that knows {draft.longest_context} positions for sequences of {length}: set "
            f"model.max_model_len to at most {draft.longest_context}, or use another one"
        )
    check_shapes(draft, 1)
