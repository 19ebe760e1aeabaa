"""A key that config.json leaves out: transformers' default of the family, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from laddertron.models.config.model_config import ModelConfig, from_folder

FAMILIES = (
    "llama",
    "mistral",
    "qwen2_window",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "gpt_oss",
    "longcat_flash",
)
DERIVED = {"head_dim", "indexer_types", "mlp_layer_types", "layer_types", "num_key_value_heads", "sliding_window"}
"""transformers derives them from other keys, as from_folder does."""
ABSENT = {"bos_token_id", "eos_token_id", "num_nextn_predict_layers"}
"""Stop ids come from the tokenizer, and no layers are skipped that the file does not name."""
NAMES = {"architectures", "model_type", "transformers_version", "dtype"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_left_out_is_the_familys_default_or_refused(family: str, tmp_path: Path) -> None:
    kind, quirks = checkpoints.STOCK[family]
    written, defaults = (
        json.loads(config.to_json_string(use_diff=False)) for config in (kind(**checkpoints.SMALL | quirks), kind())
    )

    def read(**changed: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in changed.items() if v != "left out"}))
        return from_folder(tmp_path)

    read(**written)
    compared = 0
    for key in sorted(written.keys() & defaults.keys() - DERIVED - ABSENT - NAMES):
        try:
            without = read(**written | {key: "left out"})
        except ValueError:
            continue
        assert without == read(**written | {key: defaults[key]}), key
        compared += 1
    assert compared > 5
