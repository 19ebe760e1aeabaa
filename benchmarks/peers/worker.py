"""One peer in an environment of its own: loads the model once, then times a case for each order on its standard input.

    python worker.py transformers|deepspeed|openvino FOLDER THREADS

Orders and answers are JSON lines: {"batch", "prompt", "generate"} -> {"prefill_s", "decode_s"}; decode_s is of the
generate - 1 steps after the prompt's. Every library runs its own greedy loop over its own cache. Imports nothing of
laddertron's.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def load_transformers(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def load_deepspeed(folder: str) -> Any:
    import deepspeed
    import torch

    return deepspeed.init_inference(load_transformers(folder), dtype=torch.bfloat16, replace_with_kernel_inject=False)


def load_openvino(folder: str) -> Any:
    from optimum.intel import OVModelForCausalLM

    return OVModelForCausalLM.from_pretrained(folder, export=True, load_in_8bit=False)


LOADERS = {"transformers": load_transformers, "deepspeed": load_deepspeed, "openvino": load_openvino}
PACKAGES = {"transformers": ("transformers",), "deepspeed": ("deepspeed",), "openvino": ("openvino", "optimum-intel")}


class Clock:
    """A stopping criterion that stops nothing: it notes when each token was there."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
        import torch

        self.at.append(time.perf_counter())
        return torch.zeros(ids.shape[0], dtype=torch.bool)


def run(model: Any, batch: int, prompt: int, generate: int, seed: int) -> dict[str, float]:
    import torch
    from transformers import StoppingCriteriaList

    dice = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 8000, (batch, prompt), generator=dice)
    clock = Clock()
    started = time.perf_counter()
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=generate,
        max_new_tokens=generate,
        do_sample=False,
        pad_token_id=1,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    return {"prefill_s": clock.at[0] - started, "decode_s": clock.at[-1] - clock.at[0]}


def main() -> None:
    peer, folder, threads = sys.argv[1:]
    import torch

    torch.set_num_threads(int(threads))
    torch.set_grad_enabled(False)
    model = LOADERS[peer](folder)
    said = []
    for package in (*PACKAGES[peer], "torch"):
        try:
            said.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    print(json.dumps({"versions": ", ".join(said)}), flush=True)
    for number, line in enumerate(sys.stdin):
        order = json.loads(line)
        print(json.dumps(run(model, order["batch"], order["prompt"], order["generate"], number)), flush=True)


if __name__ == "__main__":
    main()
