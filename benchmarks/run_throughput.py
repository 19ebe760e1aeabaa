"""`laddertron run` over a file of mixed lengths, beside pure prefill and pure decode of full batches of the same model.

    python benchmarks/run_throughput.py --requests 500 --tp 2

The share is what the same tokens would take at those two rates, divided by what the run took (from ready to the last
answer): scheduling, mixed steps, text, JSON and files are what is missing from 1. The bar is 0.85.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from laddertron.engine.config import load
from laddertron.launchers.bench_job import BenchJob

HERE = Path(__file__).resolve().parent
CONFIG = """\
model: {{path: {folder}, served_model_name: llama}}
parallel: {{tensor_parallel_size: {tp}}}
engine: {{device: cpu, max_num_seqs: {seats}, kv_cache_memory: 512MiB, enable_prefix_caching: false}}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--prompt", default="16:256", help="tokens, a range")
    parser.add_argument("--generate", default="16:128", help="tokens, a range")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--seats", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    prompt, generate = (tuple(map(int, text.split(":"))) for text in (args.prompt, args.generate))
    with tempfile.TemporaryDirectory(prefix="laddertron-throughput-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, str(HERE / "peers" / "model.py"), str(folder / "model")], check=True)
        config = folder / "deploy.yaml"
        config.write_text(CONFIG.format(folder=folder / "model", tp=args.tp, seats=args.seats))
        dice, prompts, tokens = random.Random(0), 0, 0
        with (folder / "in.jsonl").open("w") as lines:
            for number in range(args.requests):
                ids = [dice.randrange(3, 8192) for _ in range(dice.randint(*prompt))]
                count = dice.randint(*generate)
                prompts, tokens = prompts + len(ids), tokens + count
                body = {"model": "llama", "prompt": ids, "max_tokens": count, "ignore_eos": True, "temperature": 0}
                line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}
                lines.write(json.dumps(line) + "\n")
        mean = {"prompt": max(1, prompts // args.requests), "generate": max(2, tokens // args.requests)}
        shares = []
        with BenchJob(load(config), "pure") as job:
            job.ask("case", batch=args.seats, prompt=mean["prompt"], generate=8)
            for repeat in range(args.repeats):
                pure = [job.ask("case", batch=args.seats, **mean)]
                seconds = _run(config, folder, repeat, tokens)
                pure.append(job.ask("case", batch=args.seats, **mean))
                prefill = statistics.mean(p["prompt_tokens"] / p["prefill_s"] for p in pure)
                decode = statistics.mean(p["decode_tokens"] / p["decode_s"] for p in pure)
                shares.append((prompts / prefill + tokens / decode) / seconds)
                print(
                    f"run {repeat + 1}: {args.requests} requests, {prompts} + {tokens} tokens in {seconds:.1f} s; "
                    f"pure: {prefill:.0f} prefilled, {decode:.0f} decoded a second; share {shares[-1]:.0%}",
                    flush=True,
                )
        print(f"median share {statistics.median(shares):.0%} (bar 85%)")
    return 0


def _run(config: Path, folder: Path, repeat: int, tokens: int) -> float:
    """Seconds that `laddertron run` says it took once its ranks were ready."""
    command = [sys.executable, "-m", "laddertron.launchers.cli", "run", str(config), "-i", str(folder / "in.jsonl")]
    done = subprocess.run(
        [*command, "-o", str(folder / f"out{repeat}.jsonl")], capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    found = re.search(r"tokens/s over ([\d,.]+) s", said)
    counted = re.search(r"([\d,]+) generated", said)
    if done.returncode or not found or not counted or int(counted[1].replace(",", "")) != tokens:
        raise SystemExit(f"laddertron run ended with status {done.returncode}:\n{said[-3000:]}")
    return float(found[1].replace(",", ""))


if __name__ == "__main__":
    sys.exit(main())
