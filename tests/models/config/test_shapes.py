"""Which tensor-parallel sizes a model splits over, and what is said where it does not."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from laddertron.models.config.experts import Experts, Router
from laddertron.models.config.model_config import ModelConfig, Rope, Wiring
from laddertron.models.config.shapes import (
    ShapeError,
    Sharing,
    check_everywhere,
    check_shapes,
    replicates_embedding,
    share,
    splits,
    valid_sizes,
)
from laddertron.models.stages import RankShard


def model(heads: int, kv_heads: int, ffn: int, wiring: Wiring | None = None) -> ModelConfig:
    return ModelConfig(
        family="llama",
        num_layers=2,
        hidden_size=heads * 8,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=8,
        ffn_size=ffn,
        vocab_size=101,
        max_position_embeddings=64,
        norm_eps=1e-5,
        rope=Rope(),
        wiring=wiring or Wiring(("standard", "standard")),
        dtype="float32",
    )


LLAMA_405B = model(128, 8, 53248)
LLAMA_8B = model(32, 8, 14336)


def test_405b_goes_over_sixteen_ranks_with_each_kv_head_twice() -> None:
    """8 KV heads on 16 ranks: replicated, not refused; on 4 they are split."""
    for size in (16, 4):
        check_shapes(LLAMA_405B, size)
    held = [RankShard(LLAMA_405B, 16, rank).first_kv_head for rank in range(16)]
    assert held == [head for head in range(8) for _ in range(2)]


@pytest.mark.parametrize("tp", [3, 6])
def test_refused_with_the_arithmetic_and_sizes_that_suit_the_model(tp: int) -> None:
    """tp 3 and 6 with 8 KV heads: what does not divide, and only sizes that would do."""
    with pytest.raises(ShapeError) as caught:
        check_shapes(LLAMA_8B, tp)
    text = str(caught.value)
    assert f"tensor_parallel_size={tp}" in text
    assert f"32 heads % {tp} = {32 % tp}" in text
    assert f"FFN 14336 % {tp} = {14336 % tp}" in text
    assert f"8 KV heads % {tp} = {8 % tp} and {tp} % 8 = {tp % 8}" in text
    assert text.endswith("use 1, 2, 4, 8, 16 or 32")


def test_suggestions_hold_and_are_all() -> None:
    """Every size that is suggested passes, and every one that is not is refused; odd shapes too."""
    for heads, kv_heads, ffn in ((12, 4, 36), (9, 3, 27), (14, 2, 4864), (1, 1, 7), (40, 10, 100)):
        config = model(heads, kv_heads, ffn)
        for tp in range(1, 2 * heads + 1):
            if tp in valid_sizes(config):
                check_shapes(config, tp)
                assert heads % tp == 0
                assert ffn % tp == 0
            else:
                assert not splits(config, tp)
                with pytest.raises(ShapeError):
                    check_shapes(config, tp)


def test_ffn_alone_may_refuse() -> None:
    """4864 = 2^8 x 19 divides by 14 heads' 2 but not by 7 or 14."""
    assert valid_sizes(model(14, 2, 4864)) == (1, 2)


def test_many_sizes_are_shown_around_the_one_asked_for() -> None:
    """A model with 14 valid sizes names at most 8 of them, on both sides."""
    config = model(360, 360, 720)
    with pytest.raises(ShapeError, match=r"use 3, 4, 5, 6, 8, 9, 10 or 12$"):
        check_shapes(config, 7)
    with pytest.raises(ShapeError, match="none"):
        check_shapes(config, 0)


def test_desync_weights_belong_to_their_tensor_parallel_size() -> None:
    """Each rank's residual drifted on its own: another number of ranks is another model."""
    config = dataclasses.replace(LLAMA_8B, wiring=Wiring(("desync",) * 2, desync_every=2, trained_tp=4))
    check_shapes(config, 4)
    with pytest.raises(ShapeError, match="desync-2 weights were trained for 4 ranks"):
        check_shapes(config, 2)


def test_a_table_is_replicated_only_across_nodes_where_it_is_small() -> None:
    """101 x 64 elements across nodes: yes; inside a node, beyond 64 MiB or beyond a quarter of the weights: no."""
    small, large = model(8, 8, 256), dataclasses.replace(model(8, 8, 256), vocab_size=200_000)
    assert replicates_embedding(small, 2, spans_nodes=True)
    assert not replicates_embedding(small, 2, spans_nodes=False)
    assert not replicates_embedding(large, 2, spans_nodes=True)  # nearly all of its weights
    wide = dataclasses.replace(LLAMA_8B, hidden_size=4096, num_layers=32, vocab_size=8192)
    assert replicates_embedding(wide, 2, spans_nodes=True)  # 64 MiB in bf16
    assert not replicates_embedding(wide, 4, spans_nodes=True)


def test_everywhere_is_refused_with_the_arithmetic() -> None:
    check_everywhere(LLAMA_8B, 8)
    with pytest.raises(ShapeError, match=r"tensor_parallel_size 1, 2, 4, 8 or 16, not 32"):
        check_everywhere(LLAMA_8B, 32)
    odd = replace(LLAMA_8B, ffn_size=14344)
    with pytest.raises(ShapeError, match=r"FFN: 14344 inputs % 32 = 8, not 16 shares of pairs"):
        check_everywhere(odd, 2)
    with pytest.raises(ShapeError, match="the desync-2 wiring adds other numbers at other sizes"):
        check_everywhere(replace(LLAMA_8B, wiring=Wiring(("desync",) * 32, 2, 2)), 2)


EXPERTS = replace(LLAMA_8B, experts=Experts(8, 2, 64, (True, True), Router("softmax")))


@pytest.mark.parametrize(
    ("layout", "dense", "nodes", "per_node", "want"),
    [
        ("auto", "whole", 1, 4, (False, 0)),
        ("auto", "whole", 2, 2, (False, 0)),
        ("auto", "node", 2, 2, (True, 2)),
        ("auto", "node", 2, 8, (False, 8)),
        ("auto", "node", 1, 4, (False, 0)),
        ("tensor", "node", 2, 2, (False, 2)),
        ("spread", "node", 4, 2, (True, 2)),
        ("spread", "whole", 1, 8, (True, 0)),
    ],
)
def test_what_the_layouts_of_experts_mean(
    layout: str, dense: str, nodes: int, per_node: int, want: tuple[bool, int]
) -> None:
    """On one node its dense path is the whole; `auto` deals experts out where each rank of several nodes gets one."""
    sharing = share(EXPERTS, layout, dense, nodes, per_node)
    assert sharing == want
    check_shapes(EXPERTS, nodes * per_node, sharing)


@pytest.mark.parametrize(
    ("config", "keys", "said"),
    [
        (LLAMA_8B, ("spread", "whole", 1, 2), "expert_layout=spread: this model has no experts: use auto"),
        (LLAMA_8B, ("auto", "node", 2, 2), "dense_path=node: this model has no experts: use whole"),
        (EXPERTS, ("spread", "node", 2, 8), "8 experts < 16 ranks, which leaves 8 without one: use tensor"),
        (EXPERTS, ("spread", "whole", 2, 2), "every all-reduce would cross 2 nodes"),
        (replace(EXPERTS, wiring=Wiring(("parallel",) * 2)), ("auto", "node", 2, 2), "the parallel wiring adds"),
        (replace(EXPERTS, wiring=Wiring(("desync",) * 2, 2, 4)), ("auto", "node", 2, 2), "the desync-2 wiring adds"),
        (replace(EXPERTS, wiring=Wiring(("desync",) * 2, 2, 4)), ("spread", "whole", 1, 4), "residual of its own"),
    ],
)
def test_layouts_that_cannot_be_are_refused_with_the_arithmetic(
    config: ModelConfig, keys: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(ShapeError, match=said):
        share(config, *keys)


def test_what_is_cut_by_whom_is_named() -> None:
    """Heads by the ranks of a node, an expert by all of them, unless it is whole."""
    check_shapes(replace(EXPERTS, num_heads=2, num_kv_heads=2), 8, Sharing(True, 2))
    with pytest.raises(ShapeError, match="an expert's FFN 64 % 3 = 1"):
        check_shapes(replace(EXPERTS, num_heads=3, num_kv_heads=3), 3)
    check_shapes(replace(EXPERTS, num_heads=3, num_kv_heads=3), 3, Sharing(True))
