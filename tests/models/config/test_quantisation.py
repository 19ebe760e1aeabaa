"""quantization_config: what is read, what is refused by name, and what has no effect on weights. compressed-tensors
checks that the forms that are read are its own."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from laddertron.models.config.json_fields import ConfigFields
from laddertron.models.config.model_config import from_folder
from laddertron.models.config.quantisation import GPT_OSS, Quantisation, quantisation_in, read_quantisation
from packing import FORMS

Words = dict[str, Any]
INT4, MXFP4, NVFP4 = (FORMS[name].words for name in ("int4_32", "mxfp4", "nvfp4"))
ZEROS = FORMS["int4_16_zeros"].words
FP8: Words = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "a": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}
DEEPSEEK: Words = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}  # fmt: skip
TOKENS: Words = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
CACHE: Words = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
NO_CACHE = "kv_cache_scheme (engine.kv_cache_dtype determines the cache)"
CALIBRATED = "calibrated scales of activations (each token is scaled by its largest value)"


def changed(words: Words, **keys: Any) -> Words:
    return copy.deepcopy(words) | keys


def in_group(words: Words, **keys: Any) -> Words:
    """With other keys in each of config_groups."""
    return changed(words, config_groups={name: group | keys for name, group in words["config_groups"].items()})


def in_weights(words: Words, **keys: Any) -> Words:
    groups = words["config_groups"].items()
    return changed(words, config_groups={n: group | {"weights": group["weights"] | keys} for n, group in groups})


def beside(words: Words, **weights: Any) -> Words:
    """With a second group, whose weights differ in these keys."""
    (group,) = words["config_groups"].values()
    other = group | {"weights": group["weights"] | weights, "targets": ["re:.*down_proj", "re:.*proj"]}
    return changed(words, config_groups={"a": group, "b": other})


def read(words: Words) -> Quantisation | None:
    return quantisation_in(ConfigFields("config.json", {"quantization_config": words}))


MIXED = in_group(changed(MXFP4, format="mixed-precision"), format=MXFP4["format"])
SERVED: dict[str, tuple[Words, Words, tuple[str, ...]]] = {
    # words, words with the same meaning of weights, what is not computed
    "a group's format": (in_group(changed(INT4, format=None), format="pack-quantized"), INT4, ()),
    "mixed precision of one format": (MIXED, MXFP4, ()),
    "a group's format is nearer": (changed(MIXED, format="float-quantized"), MXFP4, ()),
    "frozen": (changed(INT4, quantization_status="frozen"), INT4, ()),
    "compressed": (changed(INT4, quantization_status="compressed", version="0.12"), INT4, ()),
    "ratio": (changed(INT4, global_compression_ratio=1.5), INT4, ()),
    "ignore": (changed(INT4, ignore=["re:.*experts.3.*", "lm_head", "nothing"]), INT4, ()),
    "targets that overlap": (beside(INT4), INT4, ()),
    "no transforms": (changed(INT4, transform_config={"config_groups": {}}), INT4, ()),
    "stored dense": (changed(INT4, sparsity_config={"format": "dense", "global_sparsity": 0.5}), INT4, ()),
    "types": (in_weights(ZEROS, zp_dtype="torch.int8", scale_dtype="torch.bfloat16"), ZEROS, ()),
    "static order": (in_weights(INT4, actorder="static", observer="mse", observer_kwargs={"norm": 2.4}), INT4, ()),
    "not dynamic": (in_weights(INT4, dynamic=False, block_structure=None), INT4, ()),
    "int8 activations": (in_group(INT4, input_activations=TOKENS), INT4, ("input_activations (8-bit int)",)),
    "fp4 activations": (
        in_group(NVFP4, input_activations=NVFP4["config_groups"]["a"]["weights"] | {"dynamic": "local"}),
        NVFP4,
        ("input_activations (4-bit float)",),
    ),
    "output activations": (in_group(FP8, output_activations=CACHE), FP8, ("output_activations (8-bit float)",)),
    "int8 activations of fp8": (
        in_group(FP8, input_activations=TOKENS),
        in_group(FP8, input_activations=None),
        ("input_activations (8-bit int)",),
    ),
    "static activations": (in_group(FP8, input_activations=CACHE), FP8, (CALIBRATED,)),
    "fp8 cache": (changed(INT4, kv_cache_scheme=CACHE), INT4, (NO_CACHE,)),
    "int8 cache": (changed(FP8, kv_cache_scheme=CACHE | {"type": "int"}), FP8, (NO_CACHE,)),
    "both": (
        changed(in_group(INT4, input_activations=TOKENS), kv_cache_scheme=CACHE),
        INT4,
        ("input_activations (8-bit int)", NO_CACHE),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_parts_that_do_not_change_weights_are_read_past_and_said(name: str) -> None:
    words, same, unused = SERVED[name]
    quantisation, plain = read(words), read(same)
    assert quantisation is not None
    assert plain is not None
    assert quantisation.unused == unused
    assert replace(quantisation, unused=()) == plain
    library = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    library.QuantizationConfig.model_validate({key: value for key, value in words.items() if value is not None})


def test_fp8_forms() -> None:
    assert read(DEEPSEEK) == Quantisation("fp8", block=(128, 128))
    static = changed(DEEPSEEK, activation_scheme="static", kv_cache_scheme="static", weight_block_size=None)
    assert read(static) == Quantisation("fp8", unused=(CALIBRATED, NO_CACHE))
    assert read({"quant_method": "fbgemm_fp8"}) == Quantisation("fbgemm_fp8", activation_bound=1200.0)
    bound = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 900, "modules_to_not_convert": ["lm_head"]}
    assert read(bound) == Quantisation("fbgemm_fp8", activation_bound=900.0)
    assert read({"quant_method": "mxfp4", "modules_to_not_convert": ["re:.*experts.0"]}) == GPT_OSS
    assert read(in_group(FP8, input_activations=None)) == Quantisation("compressed-tensors", False, math.inf)


REFUSED: list[tuple[Words, str]] = [
    *[({"quant_method": method}, f"quant_method '{method}' is not read; fbgemm_fp8, fp8") for method in (
        "awq", "gptq", "bitsandbytes", "modelopt", "quark", "torchao", "hqq", "aqlm", "auto-round", "eetq", "nvfp4",
    )],
    ({"load_in_4bit": True}, "'bitsandbytes'"),
    ({}, "quant_method ''"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": INT4["config_groups"]}, "'modelopt'"),
    (changed(INT4, format="marlin-24"), "nvfp4-pack-quantized"),
    (changed(INT4, format="dense"), "format='dense' is not read"),
    (changed(INT4, format="mixed-precision"), "4-bit int by group is not read; symmetric 8-bit float"),
    (in_group(INT4, format="int-quantized"), "config_groups: a: format='int-quantized'"),
    (in_group(INT4, format="mxfp4-pack-quantized"), "4-bit int by group is not read; symmetric 4-bit float"),
    (in_group(INT4, format="mixed-precision"), "config_groups: a: format='mixed-precision'"),
    (changed(INT4, config_groups={}), "config_groups: no weights: one kind for all weights"),
    (changed(INT4, config_groups=None), "config_groups is missing"),
    (changed(INT4, config_groups={"W4A16": ["Linear"]}), "W4A16=['Linear'] must be an object"),
    (in_group(INT4, weights=None), "weights=null"),
    (in_group(INT4, rotation="hadamard"), "config_groups: a: rotation is not read"),
    (in_group(INT4, input_activations={"num_bits": "8"}), "input_activations: num_bits='8'"),
    (beside(INT4, group_size=64), "INT4 with (1, 32) scales, INT4 with (1, 64) scales: one kind"),
    (beside(ZEROS, symmetric=True), "one kind for all weights is read"),
    (in_weights(INT4, dynamic=True), "weights: dynamic is not read"),
    (in_weights(INT4, dynamic="local"), "weights: dynamic is not read"),
    (in_weights(INT4, permutation=[1]), "weights: permutation is not read"),
    (in_weights(ZEROS, zp_dtype="torch.float8_e4m3fn"), "zp_dtype='torch.float8_e4m3fn' is not read; torch.int8 is"),
    (in_weights(INT4, num_bits=8), "8-bit int by group"),
    (in_weights(INT4, group_size=24), "group_size=24"),
    (in_weights(NVFP4, group_size=32), "group_size=32 is not read; 16 is"),
    (in_weights(MXFP4, symmetric=False), "asymmetric 4-bit float"),
    (in_weights(INT4, strategy="tensor"), "by tensor"),
    (in_weights(INT4, type="float"), "4-bit float"),
    *[(in_weights(INT4, actorder=order), "weight_g_idx") for order in ("group", "GROUP", "dynamic", True)],
    (in_weights(FP8, num_bits=4), "4-bit float"),
    (in_weights(FP8, strategy="group"), "by group"),
    (in_weights(FP8, type="int"), "8-bit int"),
    (in_weights(FP8, symmetric=False), "symmetric"),
    *[(changed(INT4, quantization_status=status), f"quantization_status='{status}' is not read")
      for status in ("initialized", "calibration", "decompressed")],
    (changed(INT4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is not computed"),
    (changed(INT4, sparsity_config={"sparsity_structure": "2:4"}), "sparsity_config: format is missing"),
    (changed(INT4, transform_config={"format": "dense", "config_groups": {"u": {}}}), "transform_config"),
    (changed(INT4, transform_config={"R1": True}), "transform_config is not computed here: use a checkpoint whose"),
    (changed(INT4, moe_sparsity_config={"method": "prune", "num_experts": [4]}), "moe_sparsity_config is not read"),
    (changed(INT4, kv_cache_scheme=[8]), "kv_cache_scheme=[8] must be an object"),
    (changed(DEEPSEEK, weight_block_size=[128]), "two numbers above 0"),
    (changed(DEEPSEEK, weight_block_size=[0, 128]), "two numbers above 0"),
    (changed(DEEPSEEK, activation_scheme="block"), "activation_scheme='block' is not read; dynamic and static are"),
    (changed(DEEPSEEK, fmt="e5m2"), "fmt='e5m2' is not read"),
    (changed(DEEPSEEK, scale_fmt="e5m3"), "scale_fmt='e5m3' is not read"),
    (changed(DEEPSEEK, expert_dtype="fp4"), "expert_dtype='fp4' is not read; fp8 is"),
    (changed(DEEPSEEK, hadamard=True), "hadamard is not read: use an engine that does, or remove the key"),
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": -1}, "activation_scale_ub"),
    ({"quant_method": "fbgemm_fp8", "weight_block_size": [128, 128]}, "weight_block_size is not read"),
    ({"quant_method": "mxfp4", "group_size": 16}, "group_size is not read"),
]  # fmt: skip


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_other_forms_are_refused_by_name(key: str, words: Words, said: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {key}") as caught:
        quantisation_in(ConfigFields("config.json", {key: words}))
    assert said in str(caught.value)


def test_two_configs_that_differ_are_refused() -> None:
    def read_both(outer: Words, inner: Words) -> Quantisation | None:
        text = {"quantization_config": outer, "text_config": {"quantization_config": inner}}
        return quantisation_in(ConfigFields("config.json", text))

    assert read_both(INT4, copy.deepcopy(INT4)) == read(INT4)
    with pytest.raises(ValueError, match=r"text_config: quantization_config: contradicts config\.json: quant"):
        read_both(INT4, in_weights(INT4, group_size=64))


@pytest.mark.parametrize(
    ("name", "method"),
    [("hf_quant_config.json", "ModelOpt"), ("quantize_config.json", "GPTQ"), ("quant_config.json", "AWQ")],
)
def test_methods_with_a_file_of_their_own_are_refused_by_name(tmp_path: Path, name: str, method: str) -> None:
    """Unless config.json has a quantization_config, which is then what describes the weights."""
    folder = checkpoints.save(tmp_path / "m", "llama", tokenizer=False)
    from_folder(folder)
    (folder / name).write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}))
    with pytest.raises(ValueError, match=rf"{name}: weights quantised by {method} are not read; .* remove this file"):
        from_folder(folder)
    checkpoints.edit_config(folder, quantization_config=FP8)
    assert read_quantisation(folder) == read(FP8)
