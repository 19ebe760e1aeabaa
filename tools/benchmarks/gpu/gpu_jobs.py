"""Jobs of two and four ranks that share one GPU (launch.share_gpu) over NCCL, the most valuable first: each answers the
demo's lines as one rank does. Prints a JSON line a job.

    python tools/benchmarks/gpu/gpu_jobs.py                   about 20 s a job on a GPU
    python tools/benchmarks/gpu/gpu_jobs.py --device cpu      the same jobs over gloo
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo"
TOKENS, TIMES = 48, 4
LIMIT_S = 90.0
JOBS: dict[str, tuple[str, dict[str, Any], int]] = {
    "ladder, tp 2": ("demo-ladder", {"tensor_parallel_size": 2}, 1),
    "standard, tp 2": ("demo-standard", {"tensor_parallel_size": 2}, 1),
    "tp 4 as 2 nodes x 2, two-level": ("demo-ladder", {"tensor_parallel_size": 4, "collective": "two_level"}, 2),
    "tp 2 x pp 2": ("demo-standard", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 2),
    "one_shot, tp 2": ("demo-standard", {"tensor_parallel_size": 2, "collective": "one_shot"}, 2),
    "one_shot, tp 4 as 2 nodes x 2": ("demo-ladder", {"tensor_parallel_size": 4, "collective": "one_shot"}, 2),
    "split steps, tp 2": ("demo-standard", {"tensor_parallel_size": 2, "split_steps": "always"}, 1),
}
"""For each job: the model, `parallel`, ranks a node."""


def deployment(model: str, parallel: Mapping[str, Any], per_node: int, device: str) -> dict[str, Any]:
    """The deployment of a job. In fp32, where sums of other orders change no greedy id of a trained model."""
    ranks = parallel.get("tensor_parallel_size", 1) * parallel.get("pipeline_parallel_size", 1)
    backend = ("nccl" if device == "cuda" else "gloo") if ranks > 1 else "auto"
    if device == "cpu":  # gloo has no one_shot
        parallel = {key: value for key, value in parallel.items() if value != "one_shot"}
    launch = {"launcher": "torchrun", "hosts": [f"localhost:{ranks}"], "share_gpu": True, "ranks_per_node": per_node}
    return {
        "model": {"path": str(DEMO / model), "served_model_name": "demo", "dtype": "float32"},
        "parallel": {**parallel, "backend": backend},
        "launch": launch if ranks > 1 else {"launcher": "torchrun"},
        "engine": {"device": device, "kv_cache_memory": "64MiB", "max_num_seqs": 8, "max_num_batched_tokens": 256},
    }


def lines() -> str:
    """The demo's completions, several times, drawn greedily and to the end."""
    written = [json.loads(text) for text in (DEMO / "prompts.jsonl").read_text().splitlines()]
    out = []
    for again in range(TIMES):
        for line in written:
            if prompt := line["body"].get("prompt"):  # lines alike would be computed once
                body = {"model": "demo", "prompt": f"{again} {prompt}", "max_tokens": TOKENS}
                body |= {"temperature": 0, "ignore_eos": True}
                out.append(json.dumps(line | {"custom_id": f"{line['custom_id']}-{again}", "body": body}))
    return "\n".join(out) + "\n"


def answers(text: str) -> dict[str, str]:
    """The text of each line by its id. Raises KeyError for a line without an answer."""
    parsed = [json.loads(line) for line in text.splitlines()]
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in parsed}


def run(folder: Path, words: Mapping[str, Any], limit_s: float) -> tuple[dict[str, str], float]:
    """Runs a job; returns its answers and its seconds. Raises RuntimeError with the end of what it said."""
    deploy, source, out = folder / "deploy.yaml", folder / "in.jsonl", folder / "out.jsonl"
    deploy.write_text(json.dumps(words))
    source.write_text(lines())
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "laddertron.launchers.cli", "run", str(deploy), "-i", str(source), "-o", str(out)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return answers(out.read_text()), time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="the first job alone")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a job")
    args = parser.parse_args()
    alone: dict[str, dict[str, str]] = {}
    failed = False
    for name, (model, parallel, per_node) in list(JOBS.items())[: 1 if args.tiny else None]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                if model not in alone:
                    alone[model], _ = run(Path(folder), deployment(model, {}, 1, args.device), args.limit)
                got, seconds = run(Path(folder), deployment(model, parallel, per_node, args.device), args.limit)
                different = sum(got.get(key) != text for key, text in alone[model].items())
                fault = ""
            except (RuntimeError, KeyError, subprocess.TimeoutExpired) as error:
                different, seconds, fault = -1, 0.0, str(error)
        failed |= different != 0
        result = {"fault": fault} if fault else {"lines": len(alone[model]), "different": different}
        tokens = TOKENS * len(alone.get(model, {}))
        print(json.dumps({"part": name, "tokens": tokens, "seconds": round(seconds, 1)} | result), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
