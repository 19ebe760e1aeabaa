"""The oracle's own oracles: transformers for what transformers computes, and the wirings' definitions, written here a
second time as sums over sub-blocks, for what it does not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import checkpoints
import loaded_reference as reference
import pytest
import torch
from laddertron.models.config.model_config import ModelConfig, from_folder, make_wiring
from laddertron.models.reference import Reference
from safetensors.torch import load_file, save_file
from torch import Tensor


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def ids(batch: int = 2, length: int = 40, seed: int = 7) -> Tensor:
    return torch.randint(6, checkpoints.VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


SERVED_ONLY = ("gpt_oss", "deepseek_v32", "glm_moe_dsa")


@pytest.mark.parametrize("recipe", [recipe for recipe in checkpoints.STOCK if recipe not in SERVED_ONLY])
def test_stock_families_agree_with_transformers(recipe: str, tmp_path: Path) -> None:
    """Each family and rotary kind, 40 positions (beyond every small window and trained length): logits to 1e-4."""
    folder = checkpoints.save(tmp_path, recipe, tokenizer=False)
    theirs, ours = checkpoints.oracle(folder), reference.load(folder)
    with torch.inference_mode():
        expected = theirs(ids(), use_cache=False).logits
    assert_close(reference.logits(ours, ids()), expected)


def by_definition(model: Reference, ids_BT: Tensor) -> Tensor:
    """Standard, ladder, hybrid and delay-d from their definition: a standard sub-block sees everything before it, a
    ladder one everything but the output of the sub-block just before it, a delayed one but those of the last d."""
    c, t = model.config, ids_BT.shape[1]
    frequency, factor = reference.inverse_frequencies(c, t)
    angle = torch.outer(torch.arange(t, dtype=torch.float32), torch.cat((frequency, frequency)))
    turn = (angle.cos() * factor, angle.sin() * factor)
    seen = [model.model.embed_tokens(ids_BT) * c.embedding_multiplier]
    for index, layer in enumerate(model.model.layers):
        lag = {"ladder": 1, "delay": c.wiring.delay}.get(c.wiring.kinds[index], 0)
        seen.append(layer.attention_of(torch.stack(seen[: max(1, len(seen) - lag)]).sum(0), turn))  # type: ignore[operator]
        seen.append(layer.mlp_of(torch.stack(seen[: max(1, len(seen) - lag)]).sum(0)))  # type: ignore[operator]
    normed = model.model.norm(torch.stack(seen).sum(0))
    head = model.model.embed_tokens.weight if c.tied_embeddings else model.lm_head.weight
    return torch.nn.functional.linear(normed, head) / c.logits_divisor


@pytest.mark.parametrize(
    "recipe",
    [
        *("llama", "ladder", "hybrid", "hybrid_early", "delay2", "delay3"),
        *("llamaLadder_last", "llamaLadder_list", "dolomite"),
    ],
)
def test_wirings_agree_with_their_definition(recipe: str, tmp_path: Path) -> None:
    """Every mix of standard and ladder layers, both boundaries included, against sums over what has arrived."""
    model = reference.load(checkpoints.save(tmp_path, recipe, tokenizer=False))
    with torch.inference_mode():
        assert_close(model(ids()), by_definition(model, ids()))


def rewired(folder: Path, **wiring: object) -> Reference:
    config = from_folder(folder)
    changed = make_wiring(num_layers=config.num_layers, **wiring)  # type: ignore[arg-type]
    return reference.load(folder, config=dataclasses.replace(config, wiring=changed))


def test_wirings_differ_and_meet_where_they_must(tmp_path: Path) -> None:
    """One set of weights: every wiring gives other logits (so a mix-up cannot pass), but a hybrid of all layers is
    ladder, one of none is standard, and desync with a reduce after every sub-block is standard at any tp."""
    folder = checkpoints.save(tmp_path, "llama", tokenizer=False)
    config = from_folder(folder)
    standard, ladder = rewired(folder, kind="standard")(ids()), rewired(folder, kind="ladder")(ids())
    assert (standard - ladder).abs().max() > 0.1
    half = rewired(folder, kind="hybrid", ladder_layers=[1])(ids())
    assert min((half - standard).abs().max(), (half - ladder).abs().max()) > 0.1
    every_layer = rewired(folder, kind="hybrid", ladder_layers=range(config.num_layers))(ids())
    assert_close(every_layer, ladder)
    assert_close(rewired(folder, kind="hybrid", ladder_layers=[])(ids()), standard)
    for tp in (1, 2, 4, 8):
        in_step = rewired(folder, kind="desync", every=1, tensor_parallel_size=tp)(ids())
        assert_close(in_step, standard)
    assert_close(rewired(folder, kind="desync", every=3, tensor_parallel_size=1)(ids()), standard)
    drifted = rewired(folder, kind="desync", every=2, tensor_parallel_size=2)(ids())
    assert (drifted - standard).abs().max() > 0.1


def test_recomputing_activations_changes_no_gradient(tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path, "ladder", tokenizer=False)
    gradients = []
    for recomputes in (False, True):
        model = reference.load(folder)
        for layer in model.model.layers:
            layer.recomputes = recomputes  # type: ignore[assignment]
        model(ids()).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", ["desync2_tp2", "desync3_tp4", "desync4_tp2", "desync4_tp4", "desync5_tp2"])
def test_desync_agrees_with_masked_copies(recipe: str, tmp_path: Path) -> None:
    """Each rank is a whole copy of the model with the other ranks' heads and inner channels zeroed in its output
    projections, so that no slice is taken; the copies' residuals drift and are summed after every n-th sub-block and
    after the last."""
    folder = checkpoints.save(tmp_path, recipe, tokenizer=False)
    wiring = from_folder(folder).wiring
    n, tp = wiring.desync_every, wiring.trained_tp
    assert tp is not None
    ranks = []
    for rank in range(tp):
        copy = rewired(folder, kind="standard")
        for name, parameter in copy.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                share = parameter.shape[1] // tp
                keep = torch.zeros_like(parameter)
                keep[:, rank * share : (rank + 1) * share] = 1
                parameter.data *= keep
        ranks.append(copy)
    model = reference.load(folder)
    with torch.inference_mode():
        frequency, _ = reference.inverse_frequencies(model.config, 40)
        angle = torch.outer(torch.arange(40.0), torch.cat((frequency, frequency)))
        x = [copy.model.embed_tokens(ids()) for copy in ranks]
        for index in range(2 * checkpoints.LAYERS):
            reduces = (index + 1) % n == 0 or index + 1 == 2 * checkpoints.LAYERS
            for rank, copy in enumerate(ranks):
                layer = copy.model.layers[index // 2]
                turn = (angle.cos(), angle.sin())
                f = layer.mlp_of(x[rank]) if index % 2 else layer.attention_of(x[rank], turn)  # type: ignore[operator]
                x[rank] = f + (x[rank] / tp if reduces else x[rank])
            if reduces:
                total = torch.stack(x).sum(0)
                x = [total for _ in ranks]
        expected = model.lm_head(model.model.norm(x[0]))
        assert_close(model(ids()), expected)


def test_parallel_has_one_norm_and_one_sum(tmp_path: Path) -> None:
    """x += A(n(x)) + M(n(x)), spelled out."""
    model = reference.load(checkpoints.save(tmp_path, "parallel", tokenizer=False))
    assert not any("post_attention" in name for name in model.state_dict())
    with torch.inference_mode():
        frequency, _ = reference.inverse_frequencies(model.config, 40)
        angle = torch.outer(torch.arange(40.0), torch.cat((frequency, frequency)))
        x = model.model.embed_tokens(ids())
        for layer in model.model.layers:
            n = layer.input_layernorm(x)  # type: ignore[operator]
            x = x + layer.self_attn(n, angle.cos(), angle.sin(), 0, 1) + layer.mlp(n, 0, 1)  # type: ignore[operator]
        assert_close(model(ids()), model.lm_head(model.model.norm(x)))


@pytest.mark.parametrize("recipe", ["dolomite", "dolomite_bias"])
def test_dolomite_is_a_ladder_llama_with_its_multipliers_folded_in(recipe: str, tmp_path: Path) -> None:
    """The same random Llama twice: once fused by dolomite with multipliers in its config, once under stock names with
    the multipliers multiplied into the weights."""
    fused = reference.load(checkpoints.save(tmp_path / "fused", recipe, tokenizer=False))
    stock = "llama_bias" if recipe == "dolomite_bias" else "llama"
    folder = checkpoints.save(tmp_path / "stock", stock, tokenizer=False)
    checkpoints.edit_config(folder, laddertron_wiring={"kind": "ladder"})
    m, scale = (
        checkpoints.MULTIPLIERS,
        checkpoints.ATTENTION_MULTIPLIER * (checkpoints.HIDDEN / checkpoints.HEADS) ** 0.5,
    )

    def fold(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        factors = {"embed": m["m_emb"], "o_proj": m["m_residual"], "down_proj": m["m_residual"]}
        factors |= {"q_proj": scale, "lm_head": 1 / m["m_width"]}
        return {
            name: tensor * next((f for part, f in factors.items() if part in name), 1.0)
            for name, tensor in tensors.items()
        }

    checkpoints.edit_tensors(folder, fold)
    assert_close(reference.logits(fused, ids()), reference.logits(reference.load(folder), ids()))


def test_no_communication_is_standard_on_one_rank_and_nonsense_on_two(tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path, "llama", tokenizer=False)
    config = dataclasses.replace(from_folder(folder), wiring=make_wiring("none", checkpoints.LAYERS))
    standard = reference.load(folder)
    alone, apart = Reference(config), Reference(config, tp=2)
    for model in (alone, apart):
        model.load_state_dict(standard.state_dict())
    assert_close(alone(ids()), standard(ids()))
    assert (apart(ids()) - standard(ids())).abs().max() > 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_transformers(dtype: str, tmp_path: Path) -> None:
    """Same dtype on both sides: within a few units of its last place, and nearly always the same best token."""
    folder = checkpoints.save(tmp_path, "llama", dtype=dtype, tokenizer=False)
    theirs, ours = checkpoints.oracle(folder, getattr(torch, dtype)), reference.load(folder)
    assert ours.model.norm.weight.dtype == getattr(torch, dtype)
    with torch.inference_mode():
        expected = theirs(ids(), use_cache=False).logits.float()
    got = reference.logits(ours, ids())
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    one = reference.load(checkpoints.save(tmp_path / "one", "qwen2", tokenizer=False))
    many = checkpoints.save(tmp_path / "many", "qwen2", tokenizer=False, max_shard_size="60KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    assert json.loads((many / "model.safetensors.index.json").read_text())["weight_map"]
    assert torch.equal(reference.logits(one, ids()), reference.logits(reference.load(many), ids()))


@pytest.mark.parametrize(
    ("change", "blame"),
    [
        (lambda t: {k: v for k, v in t.items() if "layers.1.mlp.up_proj" not in k}, "layers.1.mlp.up_proj"),
        (lambda t: {**t, "model.extra.weight": torch.zeros(2)}, "model.extra.weight"),
        (lambda t: {**t, "model.norm.weight": torch.zeros(3)}, "model.norm.weight"),
    ],
)
def test_missing_extra_and_misshapen_tensors_are_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], blame: str, tmp_path: Path
) -> None:
    folder = checkpoints.save(tmp_path, "llama", tokenizer=False)
    checkpoints.edit_tensors(folder, change)
    with pytest.raises(RuntimeError, match=blame):
        reference.load(folder)


def test_a_size_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    config: ModelConfig = from_folder(checkpoints.save(tmp_path, "llama", tokenizer=False))
    with pytest.raises(ValueError, match="heads 8 % tensor_parallel_size 3 = 2"):
        Reference(config, tp=3)


def test_state_dict_is_a_checkpoint(tmp_path: Path) -> None:
    """What a Reference saves, transformers reads."""
    folder = checkpoints.save(tmp_path, "llama_tied", tokenizer=False)
    model = reference.load(folder)
    assert set(model.state_dict()) == set(load_file(folder / "model.safetensors"))
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    with torch.inference_mode():
        assert_close(checkpoints.oracle(folder)(ids(), use_cache=False).logits, reference.logits(model, ids()))


@pytest.mark.parametrize("recipe", SERVED_ONLY)
def test_families_with_sinks_or_sparse_attention_are_refused_and_counted(recipe: str, tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path, recipe, tokenizer=False)
    with pytest.raises(ValueError, match=recipe):
        reference.load(folder)
    stored = load_file(folder / "model.safetensors").values()
    assert sum(tensor.numel() for tensor in stored) == from_folder(folder).num_parameters


@pytest.mark.parametrize("recipe", [recipe for recipe in checkpoints.RECIPES if recipe not in SERVED_ONLY])
def test_parameters_are_counted(recipe: str, tmp_path: Path) -> None:
    """`ModelConfig.num_parameters`, which plans and memory checks rest on, against the tensors themselves."""
    model = reference.load(checkpoints.save(tmp_path, recipe, tokenizer=False))
    assert sum(tensor.numel() for tensor in model.state_dict().values()) == model.config.num_parameters
