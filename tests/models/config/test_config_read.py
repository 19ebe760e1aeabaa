"""config.json and generation_config.json as a ModelConfig: every family's own spelling, and every refusal by name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from laddertron.engine.step.kv_capacity import CapacityError
from laddertron.engine.step.share import model_length
from laddertron.models.config.experts import MISSING, Experts, Router
from laddertron.models.config.json_fields import MAX_JSON_BYTES, read_json
from laddertron.models.config.latent import Latent
from laddertron.models.config.model_config import Rope, from_folder, make_wiring
from laddertron.models.config.quantisation import read_quantisation
from laddertron.models.config.wiring import WiringError, choose_wiring, missing_record
from model_configs import DEEPSEEK, DOLOMITE, GLM, LLAMA, LLAMA3, LONGCAT, MIXER, MLP, MOE, REFUSED, YARN, read


def test_a_llama_is_read_field_by_field(tmp_path: Path) -> None:
    c = read(tmp_path, LLAMA)
    assert (c.family, c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads) == ("llama", 4, 64, 8, 2)
    assert (c.head_dim, c.ffn_size, c.vocab_size, c.max_position_embeddings) == (8, 96, 300, 128)
    assert (c.norm_eps, c.dtype, c.tied_embeddings, c.rope) == (1e-5, "bfloat16", False, Rope())
    assert (c.wiring.name, c.declares_wiring, c.layout, c.sliding_window) == ("standard", False, "huggingface", ())
    assert (c.eos_token_ids, c.bos_token_id) == ((2,), 1)
    assert (c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm) == (False,) * 4


def test_old_llama_configurations_default_what_they_do_not_say(tmp_path: Path) -> None:
    """Llama 2 names no key/value heads, head size, activation, rope_theta or dtype."""
    c = read(tmp_path, LLAMA, num_key_value_heads=None, torch_dtype=None)
    assert (c.num_kv_heads, c.head_dim, c.rope.theta, c.dtype) == (8, 8, 10000.0, "float32")


@pytest.mark.parametrize(
    "words",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
    ],
)
def test_both_spellings_of_rope_scaling_mean_the_same(words: dict[str, Any], tmp_path: Path) -> None:
    rope = read(tmp_path, LLAMA, **words).rope
    assert rope == Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 128),
        ({"type": "linear", "factor": 2}, 256),
        ({"type": "yarn", "factor": 4}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),  # stretched already
        ({"rope_type": "dynamic", "factor": 4.0}, 128),
        ({"rope_type": "llama3", **LLAMA3}, 128),
    ],
)
def test_a_declared_scaling_lengthens_what_may_be_asked_for(
    tmp_path: Path, scaling: dict[str, Any] | None, longest: int
) -> None:
    config = read(tmp_path, LLAMA, **({} if scaling is None else {"rope_scaling": scaling}))
    assert config.longest_context == longest
    assert (config.max_position_embeddings, model_length(config, longest)) == (128, longest)
    assert model_length(config, None) == 128
    with pytest.raises(CapacityError, match=f"knows {longest} positions; use at most {longest}, or declare a scaling"):
        model_length(config, longest + 1)


def test_the_other_rope_kinds(tmp_path: Path) -> None:
    """linear and dynamic stretch the model's own length; yarn's attention factor is resolved when read."""
    for kind in ("linear", "dynamic"):
        rope = read(tmp_path, LLAMA, rope_scaling={"type": kind, "factor": 2}).rope
        assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == (kind, 2.0, 128)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    rope = read(tmp_path, LLAMA, rope_scaling=yarn).rope
    assert rope.kind == "yarn"
    assert rope.attention_factor == pytest.approx(1.1386294)  # 0.1 ln 4 + 1
    rope = read(tmp_path, LLAMA, rope_scaling={**yarn, "mscale": 1.0, "mscale_all_dim": 2.0}).rope
    assert rope.attention_factor == pytest.approx(1.1386294 / 1.2772589)
    rope = read(tmp_path, LLAMA, rope_scaling={**yarn, "attention_factor": 0.5, "beta_fast": 16}).rope
    assert (rope.attention_factor, rope.beta_fast) == (0.5, 16.0)


def test_mistral_and_its_window(tmp_path: Path) -> None:
    mistral = {**LLAMA, "model_type": "mistral"}
    assert read(tmp_path, mistral, sliding_window=16).sliding_window == (16,) * 4
    assert read(tmp_path, mistral, sliding_window="null").sliding_window == ()
    assert read(tmp_path, mistral).sliding_window == (4096,) * 4, "what transformers computes when nothing is said"
    assert read(tmp_path, mistral, head_dim=16, sliding_window="null").head_dim == 16


def test_qwen2_biases_and_windows(tmp_path: Path) -> None:
    qwen = {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True, "sliding_window": 16}
    c = read(tmp_path, qwen, max_window_layers=4, use_sliding_window=False)
    assert (c.qkv_bias, c.o_bias, c.tied_embeddings, c.sliding_window) == (True, False, True, ())
    c = read(tmp_path, qwen, max_window_layers=3, use_sliding_window=True)
    assert c.sliding_window == (None, None, None, 16)
    null = read(tmp_path, qwen, max_window_layers=3, use_sliding_window=True, sliding_window="null")
    assert null.sliding_window == ()
    types = ["sliding_attention", "full_attention"] * 2
    assert read(tmp_path, qwen, use_sliding_window=True, layer_types=types).sliding_window == (16, None, 16, None)
    assert read(tmp_path, qwen, layer_types=["full_attention"] * 4).sliding_window == ()


def test_qwen3_norms_its_heads(tmp_path: Path) -> None:
    c = read(tmp_path, LLAMA, model_type="qwen3", head_dim=16, attention_bias=True, sliding_window="null")
    assert (c.qk_norm, c.head_dim, c.qkv_bias, c.o_bias) == (True, 16, True, True)


def test_dtype_is_read_in_both_spellings(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA, torch_dtype=None, dtype="float16").dtype == "float16"
    assert read(tmp_path, LLAMA, torch_dtype="float32").dtype == "float32"


def test_llama_ladder_by_number_and_by_list(tmp_path: Path) -> None:
    """ladder_layers: an integer means the last N, a list means those; all of them is ladder, none is standard."""
    ladder = {**LLAMA, "model_type": "llamaLadder"}
    assert read(tmp_path, ladder, ladder_layers=1).wiring.kinds == ("standard",) * 3 + ("ladder",)
    c = read(tmp_path, ladder, ladder_layers=[0, 2])
    assert c.wiring.kinds == ("ladder", "standard", "ladder", "standard")
    assert (c.wiring.name, c.declares_wiring, c.family) == ("hybrid", True, "llamaLadder")
    assert read(tmp_path, ladder, ladder_layers=4).wiring.name == "ladder"
    assert read(tmp_path, ladder, ladder_layers=0).wiring.name == "standard"
    assert read(tmp_path, ladder, ladder_layers=[]).wiring.name == "standard"


@pytest.mark.parametrize(
    ("declared", "name"),
    [
        ({"kind": "standard"}, "standard"),
        ({"kind": "parallel"}, "parallel"),
        ({"kind": "ladder"}, "ladder"),
        ({"kind": "ladder", "ladder_layers": [3]}, "hybrid"),
        ({"kind": "hybrid", "ladder_layers": [2, 3]}, "hybrid"),
        ({"kind": "desync", "every": 3, "tensor_parallel_size": 2}, "desync-3"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_declared_wirings(declared: dict[str, Any], name: str, family: str, tmp_path: Path) -> None:
    c = read(tmp_path, LLAMA, model_type=family, sliding_window="null", laddertron_wiring=declared)
    assert (c.wiring.name, c.declares_wiring) == (name, True)
    if name == "desync-3":
        assert (c.wiring.desync_every, c.wiring.trained_tp) == (3, 2)
    if declared.get("ladder_layers") == [2, 3]:
        assert c.wiring.kinds == ("standard", "standard", "ladder", "ladder")


def test_dolomite_is_read_with_its_multipliers(tmp_path: Path) -> None:
    c = read(tmp_path, DOLOMITE, m_residual=0.22, m_emb=12, m_width=8)
    assert (c.layout, c.wiring.name, c.declares_wiring) == ("dolomite", "ladder", True)
    assert (c.residual_multiplier, c.embedding_multiplier, c.logits_divisor) == (0.22, 12.0, 8.0)
    assert (c.tied_embeddings, c.norm_eps, c.head_dim, c.attention_scale) == (True, 1e-6, 8, None)
    assert (c.qkv_bias, c.o_bias, c.mlp_bias) == (False,) * 3
    mixer = {**MIXER, "add_bias": True, "attention_multiplier": 0.125, "sliding_window": 32}
    c = read(tmp_path, DOLOMITE, sequence_mixer_blocks=[MIXER | mixer] * 4, mlp_blocks=[{**MLP, "add_bias": True}] * 4)
    assert (c.qkv_bias, c.o_bias, c.mlp_bias, c.attention_scale) == (True, True, True, 0.125)
    assert c.sliding_window == (32,) * 4
    c = read(tmp_path, DOLOMITE, rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32})
    assert (c.rope.kind, c.rope.factor) == ("yarn", 4.0)


def test_stop_ids_come_from_both_files(tmp_path: Path) -> None:
    """generation_config.json first, then what only config.json names; each once."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert read(tmp_path, LLAMA, eos_token_id=[2, 9]).eos_token_ids == (7, 2, 9)
    (tmp_path / "generation_config.json").unlink()
    assert read(tmp_path, LLAMA, eos_token_id="null").eos_token_ids == ()


def test_experts_are_read_under_either_name(tmp_path: Path) -> None:
    """As published and as transformers writes it since version 5; dense layers by list and by step."""
    router, everywhere = Router("softmax", rounds=True), (True,) * 4
    assert read(tmp_path, MOE).experts == Experts(8, 2, 40, everywhere, router)
    assert read(tmp_path, MOE, num_experts=None, num_local_experts=8) == read(tmp_path, MOE)
    assert read(tmp_path, MOE, num_local_experts=8) == read(tmp_path, MOE)
    assert read(tmp_path, MOE, mlp_only_layers=[0]).experts == Experts(8, 2, 40, (False, True, True, True), router)
    assert read(tmp_path, MOE, decoder_sparse_step=2).experts == Experts(8, 2, 40, (False, True) * 2, router)
    assert read(tmp_path, MOE, decoder_sparse_step=9).experts is None
    plain = read(tmp_path, MOE, norm_topk_prob=None).experts
    assert plain is not None
    assert not plain.router.normalises
    mixtral = read(tmp_path, LLAMA, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2, sliding_window=9)
    assert mixtral.experts == Experts(8, 2, 96, everywhere, Router("softmax"))
    assert (mixtral.sliding_window, mixtral.qk_norm, mixtral.layout) == ((9,) * 4, False, "mixtral")
    assert read(tmp_path, MOE, sliding_window=9).sliding_window == ()
    assert read(tmp_path, MOE, sliding_window=9, use_sliding_window=True).sliding_window == (9,) * 4
    assert read(tmp_path, MOE, use_sliding_window=True).sliding_window == (4096,) * 4, "transformers' default"
    assert read(tmp_path, MOE, sliding_window="null", use_sliding_window=True).sliding_window == ()


def test_a_glm_is_read_with_its_quirks(tmp_path: Path) -> None:
    """Half of each head is rotated, no bias behind attention, one shared expert, the first layer dense."""
    c = read(tmp_path, GLM, use_qk_norm=True, first_k_dense_replace=2, num_nextn_predict_layers=1)
    router = Router("sigmoid", True, biased=True, epsilon=1e-20, scale=2.5)
    assert c.experts == Experts(8, 2, 40, (False, False, True, True), router, 40)
    assert (c.rope.rotated, c.qkv_bias, c.o_bias, c.qk_norm, c.ignored_layers) == (4, True, False, True, 1)
    assert read(tmp_path, GLM, rope_parameters={"partial_rotary_factor": 0.75}).rope.rotated == 6
    assert read(tmp_path, GLM, partial_rotary_factor=1.0).rope.rotated == 0


def test_a_deepseek_is_read_with_its_quirks(tmp_path: Path) -> None:
    """One key head of latent and rotated key for all; the scale is that of a head that is not absorbed, times the
    square of mscale; cosine and sine are multiplied by the ratio of the two."""
    c = read(tmp_path, DEEPSEEK, rope_scaling=YARN, num_nextn_predict_layers=1)
    assert c.latent == Latent(rank=32, rotated=8, plain=12, value=10, query_rank=24, interleaved=True)
    assert (c.num_kv_heads, c.head_dim, c.rope.rotated, c.layout) == (1, 40, 8, "latent")
    grown = [0.1 * m * math.log(40) + 1 for m in (1.0, 0.5)]
    assert c.attention_scale == pytest.approx(20**-0.5 * grown[1] ** 2)
    assert c.rope.attention_factor == pytest.approx(grown[0] / grown[1])
    router = Router("sigmoid", True, biased=True, groups=4, chosen_groups=2, epsilon=1e-20, scale=2.5)
    assert c.experts == Experts(8, 2, 40, (False, True, True, True), router, 40)
    assert c.ignored == ("model.layers.4.",)
    for without in ({}, {"rope_scaling": YARN | {"mscale_all_dim": 0}}):
        assert read(tmp_path, DEEPSEEK, **without).attention_scale == pytest.approx(20**-0.5)
    plain = read(tmp_path, DEEPSEEK, rope_interleave=False).latent
    assert plain is not None
    assert not plain.interleaved
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK | {"q_lora_rank": None}))
    direct = from_folder(tmp_path).latent
    assert direct is not None
    assert direct.query_rank == 0
    missing = read(tmp_path, DEEPSEEK, q_lora_rank=None, n_group=None, topk_group=None, n_routed_experts=16)
    assert missing.latent is not None
    assert (missing.latent.query_rank, missing.head_dim) == (1536, 40)


def test_null_groups_of_a_deepseek_are_no_groups(tmp_path: Path) -> None:
    """Only missing keys get the family's eight groups: others would choose other experts without a word."""
    experts = read(tmp_path, DEEPSEEK, n_group="null", topk_group="null").experts
    assert experts is not None
    assert (experts.router.groups, experts.router.chosen_groups) == (1, 1)


def test_a_kimi_is_a_deepseek(tmp_path: Path) -> None:
    """Kimi-K2's words, also where a model that sees has them as its text, with the form of its weights at either
    place."""
    deepseek = read(tmp_path, DEEPSEEK)
    words = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "ep_size": 1}
    assert read(tmp_path, DEEPSEEK | words, model_type="kimi_k2") == deepseek
    text = DEEPSEEK | words | {"model_type": "kimi_k2"}
    assert read(tmp_path, {"model_type": "kimi_k25", "text_config": text, "vision_config": {}}) == deepseek
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    groups = {"g": {"weights": weights}}
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    form = {"quantization_config": packed}
    for folder in (text | form, {"text_config": text | form}, {"text_config": text} | form):
        assert read(tmp_path, {"model_type": "kimi_k25"} | folder) == deepseek
        quantisation = read_quantisation(tmp_path)
        assert quantisation is not None
        assert (quantisation.code, quantisation.block, quantisation.title) == ("int4", (1, 32), "INT4")


def test_a_longcat_is_read_as_twice_as_many_layers(tmp_path: Path) -> None:
    """Every other one has experts beside its MLP; queries and latents are scaled by what they are narrower."""
    c = read(tmp_path, LONGCAT)
    router = Router("softmax", True, biased=True, normalises=False, scale=6.0)
    assert c.experts == Experts(8, 3, 40, (True, False) * 2, router, identities=4, beside=True)
    assert (c.num_layers, c.ffn_size, c.rope.theta, c.layout) == (4, 96, 1e7, "shortcut")
    assert c.wiring.kinds == ("shortcut", "standard") * 2
    assert (c.wiring.name, c.wiring.waits, c.ignored) == ("shortcut", False, ("model.mtp.",))
    assert c.latent is not None
    assert c.latent.scale == pytest.approx((64 / 32) ** 0.5)
    assert c.attention_scale == pytest.approx(20**-0.5 * (64 / 24) ** 0.5)
    assert missing_record(tmp_path, c) is None
    for wanted in ("ladder", "standard", "no-communication"):
        with pytest.raises(WiringError, match="have a shortcut of their own: use wiring auto"):
            choose_wiring(c, wanted, allow_untrained=True)


def test_parameters_of_experts_are_counted(tmp_path: Path) -> None:
    """8 experts of 3 x 64 x 40 and a router of 8 x 64 in place of an MLP of 3 x 64 x 96."""
    more = read(tmp_path, MOE).num_parameters - read(tmp_path, MOE, mlp_only_layers=[2]).num_parameters
    assert more == 8 * (3 * 64 * 40 + 64) - 3 * 64 * 96


@pytest.mark.parametrize("family", MISSING)
def test_a_family_that_is_not_served_says_what_is_missing(family: str, tmp_path: Path) -> None:
    """Before its quantisation, which is another program's."""
    for part in ("", "_text"):
        changes = {"model_type": family + part, "quantization_config": {"quant_method": "modelopt"}}
        with pytest.raises(ValueError, match=rf"'{family}{part}' is not computed here \(missing: {MISSING[family]}\)"):
            read(tmp_path, LLAMA, **changes)


@pytest.mark.parametrize(("data", "changes"), REFUSED)
def test_refusals_name_their_file(data: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path / "config.json")):
        read(tmp_path, data, **changes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model_type": "llama"', "not usable JSON"),
        (b"[1]", "must hold one JSON object, not list"),
        (b'{"hidden_size": NaN}', "NaN is not JSON"),
        (b'{"hidden_size": 1, "hidden_size": 2}', "duplicate key 'hidden_size'"),
        (b'{"a": "\xff"}', "not usable JSON"),
        (b"[" * 100_000, "nested deeper than 64 levels"),
        (b'{"rms_norm_eps": 1e999, "model_type": "llama", "vocab_size": 3}', "1e999 is too large"),
        (b" " * (MAX_JSON_BYTES + 1), "bytes is more than"),
    ],
)
def test_bad_json_is_one_error_with_the_file_in_it(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as refusal:
        from_folder(tmp_path)
    assert "config.json" in str(refusal.value)


def test_brackets_inside_strings_do_not_count_as_nesting(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"a": '[[\\"' * 500}))
    assert read_json(tmp_path / "x.json").string("a").startswith("[[")


def test_a_folder_without_a_model_says_what_one_holds(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"a model folder holds config\.json"):
        from_folder(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = sorted({*LLAMA, *DOLOMITE, "rope_scaling", "laddertron_wiring", "ladder_layers", "sliding_window", "head_dim"})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    base=st.sampled_from([LLAMA, DOLOMITE, {**LLAMA, "model_type": "qwen3"}, {**LLAMA, "model_type": "llamaLadder"}]),
    changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4),
)
def test_whatever_a_configuration_holds_is_a_model_or_a_value_error(
    base: dict[str, Any], changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Random JSON in random fields: never a KeyError, TypeError, ZeroDivisionError or OverflowError."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "config.json").write_text(json.dumps({**base, **changes}))
    try:
        config = from_folder(folder)
    except ValueError:
        return
    assert len(config.wiring.kinds) == config.num_layers


def test_parameters_are_counted(tmp_path: Path) -> None:
    c = read(tmp_path, LLAMA, tie_word_embeddings=True)
    layer = 64 * 64 + 2 * 64 * 16 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert c.num_parameters == 300 * 64 + 4 * layer + 64


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7b": (
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
        | {"intermediate_size": 11008, "vocab_size": 32000, "rope_scaling": "null"},
        6_738_415_616,
    ),
    "Llama-3.1-8B": (
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"intermediate_size": 14336, "vocab_size": 128256},
        8_030_261_248,
    ),
    "Llama-3.1-405B": (
        {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8}
        | {"intermediate_size": 53248, "vocab_size": 128256},
        405_853_388_800,
    ),
    "Llama-3.2-1B": (
        {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"intermediate_size": 8192, "vocab_size": 128256, "head_dim": 64, "tie_word_embeddings": True},
        1_235_814_400,
    ),
    "Mistral-7B-v0.1": (
        {"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "sliding_window": 4096},
        7_241_732_096,
    ),
    "Qwen2.5-7B": (
        {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
        | {"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064},
        7_615_616_512,
    ),
    "Qwen3-8B": (
        {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936},
        8_190_735_360,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_their_published_sizes(name: str, tmp_path: Path) -> None:
    words, parameters = PUBLISHED[name]
    assert read(tmp_path, LLAMA, **words).num_parameters == parameters


def test_wirings_are_made_or_refused() -> None:
    assert make_wiring("none", 2).name == "no-communication"
    assert make_wiring("ladder", 3).kinds == ("ladder",) * 3
    with pytest.raises(ValueError, match="must be different layers of 0 to 2"):
        make_wiring("hybrid", 3, [3])
    with pytest.raises(ValueError, match="desync needs every >= 1"):
        make_wiring("desync", 3, every=2)


def test_reading_a_configuration_loads_no_torch() -> None:
    """`plan` and the daemon read configurations without it."""
    code = "import sys, laddertron.models.config.model_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "full"),
    [
        ({}, "FFFF"),
        ({"index_topk_freq": 2}, "FFSF"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, "FSSF"),
        ({"index_topk_pattern": "FSFS"}, "FSFS"),
        ({"indexer_types": ["full", "shared", "shared", "full"]}, "FSSF"),
    ],
)
def test_the_layers_that_choose_positions(tmp_path: Path, words: dict[str, Any], full: str) -> None:
    """As transformers resolves GLM's words; the last ones are V3.2's sizes of the index, which has no shared layers."""
    glm = DEEPSEEK | {"model_type": "glm_moe_dsa", "q_lora_rank": 24, "num_hidden_layers": 4}
    latent = read(tmp_path, glm, **words).latent
    assert latent is not None
    assert latent.index is not None
    assert "".join("F" if chooses else "S" for chooses in latent.index.full) == full
    assert (latent.index.heads, latent.index.dim, latent.index.topk) == (32, 128, 2048)
    other = read(tmp_path, glm | {"model_type": "deepseek_v32"}, **words).latent
    assert other is not None
    assert other.index is not None
    assert (other.index.heads, all(other.index.full), other.index.interleaved) == (64, True, False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"indexer_types": ["shared", "full", "full", "full"]}, "the first of them full"),
        ({"index_topk_pattern": "FS"}, "4 times full or shared"),
        ({"index_head_dim": 2}, "index_head_dim=2 must be at least"),
    ],
)
def test_an_index_that_is_refused(tmp_path: Path, words: dict[str, Any], said: str) -> None:
    glm = DEEPSEEK | {"model_type": "glm_moe_dsa", "q_lora_rank": 24, "num_hidden_layers": 4}
    with pytest.raises(ValueError, match=said):
        read(tmp_path, glm, **words)
