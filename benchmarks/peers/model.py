"""A Hugging Face folder with random weights, which every peer and laddertron load alike. Needs numpy and safetensors.

python benchmarks/peers/model.py build/peers/llama --hidden 1024 --layers 12
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    for name, value in (
        ("hidden", 1024),
        ("layers", 12),
        ("heads", 16),
        ("kv-heads", 8),
        ("ffn", 2816),
        ("vocab", 8192),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--positions", type=int, default=2048)
    return parser.parse_args()


def write(folder: Path, a: argparse.Namespace) -> None:
    """bf16, untied, every matrix normal with the deviation that trained ones have."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": a.hidden,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.hidden // a.heads,
        "intermediate_size": a.ffn,
        "vocab_size": a.vocab,
        "max_position_embeddings": a.positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    dice = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        # bf16 is the upper half of fp32; safetensors' numpy side has no name for it, so fp32 is written and cut below.
        return (dice.standard_normal((rows, columns), np.float32) * 0.02).view(np.uint32)

    kv = a.hidden // a.heads * a.kv_heads
    shapes = {
        "self_attn.q_proj": (a.hidden, a.hidden),
        "self_attn.k_proj": (kv, a.hidden),
        "self_attn.v_proj": (kv, a.hidden),
        "self_attn.o_proj": (a.hidden, a.hidden),
        "mlp.gate_proj": (a.ffn, a.hidden),
        "mlp.up_proj": (a.ffn, a.hidden),
        "mlp.down_proj": (a.hidden, a.ffn),
    }
    one = np.full(a.hidden, 0x3F80, np.uint16)
    tensors = {"model.norm.weight": one}
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = (matrix(a.vocab, a.hidden) >> 16).astype(np.uint16)
    for layer in range(a.layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = one
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = (matrix(*shape) >> 16).astype(np.uint16)
    path = folder / "model.safetensors"
    save_file(tensors, path, {"format": "pt"})
    _call_bf16(path)
    words = {f"t{number}": number for number in range(a.vocab)}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "t2"}
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def _call_bf16(path: Path) -> None:
    """The header's U16 becomes BF16, in place: a character more each, so blanks make up the length."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].replace(b'"U16"', b'"BF16"').rstrip()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


if __name__ == "__main__":
    arguments = parse()
    write(arguments.folder, arguments)
