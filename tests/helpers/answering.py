"""`laddertron run` on a stock checkpoint, and how far what it says is from transformers. For tests that change the
machine or the installation below it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import checkpoints
import torch
from waiting import HANG_S

CONFIG = """\
model: {path: ./model}
engine: {device: cpu, threads: 1, max_num_seqs: 4, max_num_batched_tokens: 64, kv_cache_memory: 8MiB}
daemon: {data_dir: ./data}
"""


def run_says(folder: Path, environ: Mapping[str, str] | None = None, python: str = sys.executable) -> tuple[float, str]:
    """Runs prompts through the checkpoint folder/model: the largest distance of a prompt token's log-probability from
    what transformers has for it in fp32, and what the run wrote to the terminal."""
    prompts = checkpoints.prompts(4)
    (folder / "deploy.yaml").write_text(CONFIG, encoding="utf-8")
    body = {"model": "model", "max_tokens": 4, "prompt_logprobs": 0}
    envelope = {"method": "POST", "url": "/v1/completions"}
    lines = [{"custom_id": str(i), **envelope, "body": {**body, "prompt": p}} for i, p in enumerate(prompts)]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    done = subprocess.run(
        [python, "-m", "laddertron.launchers.cli", "run", "deploy.yaml", "-i", "in.jsonl", "-o", "out.jsonl"],
        cwd=folder,
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=2 * HANG_S,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    answers = {}
    for line in (folder / "out.jsonl").read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        answers[int(answer["custom_id"])] = answer["response"]["body"]["choices"][0]
    assert sorted(answers) == list(range(len(prompts)))
    oracle = checkpoints.oracle(folder / "model")
    furthest = 0.0
    for number, prompt in enumerate(prompts):
        with torch.inference_mode():
            want = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for position, scored in enumerate(answers[number]["prompt_logprobs"][1:]):
            token = prompt[position + 1]
            furthest = max(furthest, abs(scored[str(token)]["logprob"] - float(want[position, token])))
    return furthest, said
