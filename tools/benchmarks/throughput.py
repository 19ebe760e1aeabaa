"""How much of the engine's speed `laddertron run` keeps, and how much of that the daemon keeps.

    python tools/benchmarks/throughput.py run --requests 500 --repeats 3
    python tools/benchmarks/throughput.py daemon --requests 160 --prompt 64 --generate 64 --repeats 3

Llama 150M, random bf16 weights, made on the spot: too big to measure JSON or HTTP by. What is compared takes turns.
run: a file of mixed lengths; the share is what the same tokens would take in pure prefill and pure decode of full
batches, over what the run took from ready to its last answer (bar 0.85). daemon: the same file through a daemon with
real ranks, from the batch's creation (the file is uploaded) to `completed`, against `run` (bar 0.95 of its tokens/s);
the daemon is idle while `run` has its own ranks.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import say
from laddertron.engine import child
from laddertron.engine.config.load import load
from laddertron.launchers.measure.rank_job import BenchJob
from laddertron.tools.demos.serving import batch_seconds, serving
from peers.model import written

CONFIG = """\
model: {{path: {folder}/llama, served_model_name: llama}}
parallel: {{tensor_parallel_size: {tp}}}
engine: {{device: cpu, max_num_seqs: {seats}, kv_cache_memory: 512MiB, enable_prefix_caching: false}}
"""
CLI = child.laddertron()
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Lines:
    """A batch file of completions of random ids, and its tokens."""

    path: Path
    requests: int
    prompts: int
    generated: int


def write_lines(path: Path, requests: int, prompt: Range, generate: Range) -> Lines:
    dice, prompts, tokens = random.Random(0), 0, 0
    with path.open("w") as lines:
        for number in range(requests):
            ids = [dice.randrange(3, 8192) for _ in range(dice.randint(*prompt))]
            count = dice.randint(*generate)
            prompts, tokens = prompts + len(ids), tokens + count
            body = {"model": "llama", "prompt": ids, "max_tokens": count, "ignore_eos": True, "temperature": 0}
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}
            lines.write(json.dumps(line) + "\n")
    return Lines(path, requests, prompts, tokens)


def run_seconds(config: Path, lines: Lines, out: Path) -> float:
    """Seconds that `laddertron run` reports, from ready to the last answer."""
    command = [*CLI, "run", str(config), "-i", str(lines.path), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    found = re.search(r"tokens/s over ([\d,.]+) s", text)
    counted = re.search(r"([\d,]+) generated", text)
    if done.returncode or not found or not counted or int(counted[1].replace(",", "")) != lines.generated:
        raise SystemExit(f"laddertron run ended with status {done.returncode}:\n{text[-3000:]}")
    return float(found[1].replace(",", ""))


def run_beside_pure(config: Path, folder: Path, args: argparse.Namespace) -> None:
    lines = write_lines(folder / "in.jsonl", args.requests, args.prompt, args.generate)
    mean = {
        "prompt": max(1, lines.prompts // args.requests),
        "generate": max(2, lines.generated // args.requests),
    }
    shares = []
    with BenchJob(load(config), "pure") as job:
        job.ask("case", batch=args.seats, prompt=mean["prompt"], generate=8)
        for repeat in range(args.repeats):
            pure = [job.ask("case", batch=args.seats, **mean)]
            seconds = run_seconds(config, lines, folder / f"out{repeat}.jsonl")
            pure.append(job.ask("case", batch=args.seats, **mean))
            prefill = statistics.mean(p["prompt_tokens"] / p["prefill_s"] for p in pure)
            decode = statistics.mean(p["decode_tokens"] / p["decode_s"] for p in pure)
            shares.append((lines.prompts / prefill + lines.generated / decode) / seconds)
            found = rounded(seconds=seconds, pure_prefill_tok_s=prefill, pure_decode_tok_s=decode, share=shares[-1])
            say(repeat=repeat + 1, **found)
    say(median_share=round(statistics.median(shares), 3), bar=0.85)


def daemon_beside_run(config: Path, folder: Path, args: argparse.Namespace) -> None:
    lines = write_lines(folder / "in.jsonl", args.requests, args.prompt, args.generate)
    ratios = []
    with serving(config, folder / "daemon.log", {"daemon.data_dir": folder / "data"}) as daemon:
        warm = write_lines(folder / "warm.jsonl", args.seats, args.prompt, (4, 4))
        batch_seconds(daemon, warm.path, warm.requests)
        for repeat in range(args.repeats):
            plain = lines.generated / run_seconds(config, lines, folder / f"out{repeat}.jsonl")
            served = lines.generated / batch_seconds(daemon, lines.path, lines.requests)
            ratios.append(served / plain)
            say(repeat=repeat + 1, **rounded(run_tok_s=plain, daemon_tok_s=served, ratio=ratios[-1]))
    say(median_ratio=round(statistics.median(ratios), 3), bar=0.95)


def rounded(**figures: float) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def _range(text: str) -> Range:
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["run", "daemon"])
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--prompt", type=_range, default="16:256", help="tokens, or a range")
    parser.add_argument("--generate", type=_range, default="16:128", help="tokens, or a range")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--seats", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="laddertron-throughput-") as name:
        folder = Path(name)
        written(folder / "llama")
        config = folder / "deploy.yaml"
        config.write_text(CONFIG.format(folder=folder, tp=args.tp, seats=args.seats))
        {"run": run_beside_pure, "daemon": daemon_beside_run}[args.what](config, folder, args)


if __name__ == "__main__":
    main()
