"""A Hugging Face folder of random weights, which every peer and laddertron load alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

LLAMA_150M: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3-moe": {
        "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 352,
        "norm_topk_prob": True,
    },
}  # fmt: skip
"""In place of LLAMA_150M's; with experts, of Qwen3-MoE's form."""


def write(folder: Path, **other: Any) -> None:
    """bf16, untied, in files of a gigabyte at most, the same each time. other: sizes in place of LLAMA_150M's."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    kind = transformers.Qwen3MoeConfig if "num_experts" in other else transformers.LlamaConfig
    config = kind(**LLAMA_150M | other, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, dtype=torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="1GB")
    words = {f"t{number}": number for number in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def written(folder: Path) -> Path:
    """The folder, with the model of SIZES that it is called after; written unless it is there."""
    if not (folder / "tokenizer.json").exists():  # written last
        write(folder, **SIZES[folder.name])
    return folder


def packed(folder: Path, form: str) -> Path:
    """A copy of the folder beside it whose products' weights have 4-bit codes with a scale for 32 columns, as
    compressed-tensors stores them; written unless it is there. form: int4 or mxfp4."""
    import torch
    from safetensors.torch import load_file, save_file

    to = folder.with_name(f"{folder.name}-{form}")
    if (to / "config.json").exists():  # written last
        return to
    to.mkdir(exist_ok=True)
    levels = torch.tensor([*range(-7, 8)] if form == "int4" else [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    borders = (levels[1:] + levels[:-1]) / 2
    for file in folder.glob("*.safetensors"):
        stored = dict[str, torch.Tensor]()
        for name, weight in load_file(file).items():
            if not name.endswith("_proj.weight"):
                stored[name] = weight
                continue
            grouped = weight.float().view(len(weight), -1, 32)
            largest = grouped.abs().amax(-1, keepdim=True)
            if form == "int4":
                scale = (largest / 7).bfloat16()
                codes = torch.bucketize(grouped / scale.float(), borders) + 1
            else:
                exponent = (largest / 4).log2().floor()
                scale = (exponent + 127).to(torch.uint8)
                codes = torch.bucketize(grouped.abs() / exponent.exp2(), borders) + 8 * (grouped < 0)
            codes = codes.view(len(weight), -1, 2).to(torch.uint8)
            pairs = codes[..., 0] | codes[..., 1] << 4
            stored[f"{name}_packed"] = pairs.view(torch.int32) if form == "int4" else pairs
            stored[f"{name}_scale"] = scale.squeeze(-1)
            stored[f"{name}_shape"] = torch.tensor(weight.shape)
        save_file(stored, to / file.name)
    for file in folder.glob("token*.json"):
        shutil.copy(file, to)
    kind = {"num_bits": 4, "type": "int" if form == "int4" else "float", "strategy": "group", "group_size": 32}
    layout = {"int4": "pack-quantized", "mxfp4": "mxfp4-pack-quantized"}[form]
    groups = {"all": {"weights": {**kind, "symmetric": True}}}
    words = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": words}
    (to / "config.json").write_text(json.dumps(config))
    return to
