"""A Hugging Face folder of random weights, which every peer and laddertron load alike."""

from __future__ import annotations

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
    """A copy of the folder next to it whose products have 4-bit weights with a scale for 32 columns, as
    compressed-tensors stores them; written unless it is there. form: int4 or mxfp4."""
    import torch
    from packing import FORMS, quantise

    to = folder.with_name(f"{folder.name}-{form}")
    if not to.exists():
        part = to.with_name(f".{to.name}.part")
        shutil.copytree(folder, part, dirs_exist_ok=True)
        chosen = FORMS["int4_32" if form == "int4" else form]
        quantise(part, chosen, lambda name: name.endswith("_proj.weight"), torch.bfloat16)
        part.rename(to)
    return to
