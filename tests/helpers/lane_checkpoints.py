"""Small random checkpoints of lanes in the published form, in both dialects of the config.

    folder = lane_checkpoints.save(tmp_path / "m", lanes=4, delay=2, head="lane")

16 heads of 8 on 8 key/value heads, FFN 96, 7 layers, 328 tokens: all divide by 8 lanes, and with a delay of 3 some
layers are early ones, some silent, one neither. Norms are random too: what is one or zero hides mistakes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoints
import torch
from laddertron.models.config.model_config import from_folder
from lane_reference import LaneReference
from safetensors.torch import load_file, save_file

VOCAB = 328
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
PUBLISHED: dict[str, Any] = SMALL | {
    "hidden_size": 3072,
    "num_hidden_layers": 15,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "intermediate_size": 12288,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "num_lanes": 8,
    "broadcast_delay": 2,
    "sliding_window": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}
"""The shape of the public model. Its own config.json was never seen."""


def config_json(
    second: bool = False,
    *,
    lanes: int = 4,
    delay: int = 2,
    early: bool = True,
    comm: tuple[bool, bool] = (True, True),
    head: str = "replicate",
    norm_each: bool = False,
    sum_first: bool = False,
    windows: tuple[int, ...] = (),
    dtype: str = "float32",
    **overrides: Any,
) -> dict[str, Any]:
    """config.json in dialect (a), or (b) if `second`. comm: of attention and MLP (which differ in (b) alone); windows:
    the layers with a sliding window of 6."""
    data = SMALL | {
        "num_lanes": lanes,
        "broadcast_delay": delay,
        "use_early_comm": early,
        "lm_head_type": head,
        "replicated_rmsn_scale": not norm_each,
        "pre_norm_lane_agg": sum_first,
        "torch_dtype": dtype,
    }
    if windows:
        data["sliding_window"] = 6
    if second:
        data |= {"model_type": "laneformer", "architectures": ["LaneformerForCausalLM"]}
        data |= {"use_attention_comm": comm[0], "use_mlp_comm": comm[1], "swa_layers": list(windows)}
    else:
        assert comm[0] == comm[1], "dialect (a) has one word for both"
        data |= {"model_type": "laneformer_tp", "architectures": ["LaneformerTPForCausalLM"], "use_comm": comm[0]}
        if windows:  # the first n layers, but for those that are not wanted
            count = max(windows) + 1
            data |= {"sliding_window_n_layers": count, "unclamped_layers": sorted(set(range(count)) - set(windows))}
    return data | overrides


def save(folder: Path, second: bool = False, *, seed: int = 0, tokenizer: bool = True, **how: Any) -> Path:
    """Writes a checkpoint and returns its folder; `how`: of `config_json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(second, **how)))
    config = from_folder(folder)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, parameter in LaneReference(config).state_dict().items():
        drawn = torch.randn(parameter.shape, generator=generator)
        is_norm = "norm" in name
        tensors[name] = (1 + 0.3 * drawn if is_norm else 0.15 * drawn).to(getattr(torch, config.dtype))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        checkpoints.save_tokenizer(folder)
    return folder


def oracle(folder: Path) -> LaneReference:
    """What the engine must compute, in fp32."""
    model = LaneReference(from_folder(folder))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()
