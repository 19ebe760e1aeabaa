"""Each type that a checkpoint is stored in, as the engine takes it by itself (`dtype: auto`), against transformers.

Part of what tests/topology/hardware/test_cpu_tiers.py plays in every CPU tier. The oracle computes in fp32 on the same
rounded weights, so what is left is the engine's own rounding: within 5 % of the logits' scale for bf16 (8 bits), 1 %
for fp16 (11).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from laddertron.models.cpu.kernels import Kernels
from laddertron.topology.hardware.cpu_tier import INT8, current
from safetensors.torch import save_file

TOLERANCE = {"float32": 1e-5, "float16": 0.01, "bfloat16": 0.05}
"""Of the logits' scale."""
LENGTH = 16


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_stored_type_answers_as_transformers_does(
    ranks: Callable[..., list[Any]], dtype: str, tmp_path: Path
) -> None:
    """Logits of whole prompts are near, and so is every greedily decoded token to the oracle's best."""
    folder = checkpoints.save(tmp_path / "model", dtype=dtype)
    prompts = checkpoints.prompts(8, longest=48)
    oracle = checkpoints.oracle(folder)
    with torch.inference_mode():
        want = torch.cat([oracle(torch.tensor([prompt])).logits[0] for prompt in prompts])
        save_file({"logits": want.contiguous()}, tmp_path / "want.safetensors")
        expected = {"expected": str(tmp_path / "want.safetensors")}
        args = {"folder": str(folder), "prompts": prompts}
        (near,) = ranks(1, "engine_cases:logits_distance", args | expected)
        allowed = TOLERANCE[dtype] * near["scale"]
        print(f"{dtype}: {near['distance']:.2e} of {near['scale']:.2e}, {allowed:.2e} allowed")
        assert near["distance"] < allowed
        (answers,) = ranks(1, "engine_cases:generate", args | {"params": {"max_tokens": LENGTH}})
        for number, prompt in enumerate(prompts):
            (answer,) = answers[f"r{number}"]
            scores = oracle(torch.tensor([prompt + answer])).logits[0][len(prompt) - 1 : -1]
            below = scores.amax(-1) - scores[torch.arange(len(answer)), torch.tensor(answer)]
            assert float(below.max()) < 2 * allowed, f"prompt {number}: {below}"


def test_int8_is_computed_where_the_table_of_tiers_has_it() -> None:
    kernels = Kernels.find()
    if kernels is None:
        pytest.skip("the C kernels were not built here")
    assert kernels.int8 == (current() in INT8)
