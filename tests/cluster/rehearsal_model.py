"""Llama 3.1 405B scaled down to what two cores compute, with what can go wrong at its size: 126 layers, 128 heads on 8
key/value heads, 191 files, the rotary scaling, bf16, and the form of the tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYERS, HEADS, KV_HEADS, FILES = 126, 128, 8, 191
HIDDEN, HEAD_DIM, FFN = 128, 2, 208
SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
)
RESERVED = 256
"""Special tokens, behind all others."""
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def write(folder: Path) -> None:
    """The whole folder, the same each time."""
    folder.mkdir()
    vocabulary = write_tokenizer(folder)
    ids = {name: vocabulary - RESERVED + place for place, name in enumerate(SPECIAL)}
    ends = [ids[name] for name in ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "hidden_size": HIDDEN, "head_dim": HEAD_DIM, "intermediate_size": FFN, "vocab_size": vocabulary,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "initializer_range": 0.02,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "bos_token_id": ids["<|begin_of_text|>"], "eos_token_id": ends,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": ids["<|begin_of_text|>"], "eos_token_id": ends, "do_sample": True, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps({**generation, "top_p": 0.9}))
    write_weights(folder, vocabulary)


def write_tokenizer(folder: Path) -> int:
    """A byte-level BPE of Llama 3.1's form, of 256 bytes and a few merges; the size of its vocabulary."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = [Path(__file__).read_text()]
    tokenizer.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=768, initial_alphabet=alphabet, show_progress=False)
    )
    ordinary = tokenizer.get_vocab_size()
    names = [*SPECIAL, *(f"<|reserved_special_token_{n}|>" for n in range(RESERVED - len(SPECIAL)))]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    begin = SPECIAL[0]
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(f"{begin} $A", f"{begin} $A {begin}:1 $B:1", [(begin, ordinary)]),
    ])  # fmt: skip
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": begin, "eos_token": "<|eot_id|>", "chat_template": TEMPLATE, "clean_up_tokenization_spaces": True,
        "model_input_names": ["input_ids", "attention_mask"], "model_max_length": 131072,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ordinary + RESERVED


def write_weights(folder: Path, vocabulary: int) -> None:
    """Random bf16 tensors in the checkpoint's order, dealt evenly to the files: most layers lie in two of them."""
    import torch
    from safetensors.torch import save_file

    wide, narrow = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, HIDDEN)}
    for layer in range(LAYERS):
        parts = {
            "self_attn.q_proj": (wide, HIDDEN), "self_attn.k_proj": (narrow, HIDDEN),
            "self_attn.v_proj": (narrow, HIDDEN), "self_attn.o_proj": (HIDDEN, wide), "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN), "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (vocabulary, HIDDEN)}
    torch.manual_seed(0)
    names, placed, size = list(shapes), dict[str, str](), 0
    for number in range(FILES):
        file = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        tensors: dict[str, Any] = {}
        for name in names[number * len(names) // FILES : (number + 1) * len(names) // FILES]:
            shape = shapes[name]
            values = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) / shape[-1] ** 0.5
            tensors[name], placed[name] = values.to(torch.bfloat16), file
            size += tensors[name].nbytes
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": size}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
