"""A batch through the daemon beside the same file through `laddertron run`, with a model too big to measure HTTP by.

    python benchmarks/daemon_throughput.py --requests 160 --pairs 3

Llama 150M, random bf16 weights, made on the spot. The daemon (`laddertron serve`, a process of its own with real ranks)
stays up but idle while `run` has its own ranks; both take turns. Of `run` counts what it says from ready to its last
answer, of the daemon the time from creating the batch (the file is uploaded) until its status is `completed`. The bar:
0.95 of run's tokens a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from laddertron.launchers.batch_client import BatchClient, Server

HERE = Path(__file__).resolve().parent
PORT = 18537
CONFIG = """\
model: {{path: {folder}/model, served_model_name: llama}}
parallel: {{tensor_parallel_size: {tp}}}
engine: {{device: cpu, max_num_seqs: {seats}, kv_cache_memory: 512MiB, enable_prefix_caching: false}}
daemon: {{data_dir: {folder}/data, port: {port}}}
"""
CLI = [sys.executable, "-m", "laddertron.launchers.cli"]


def write_lines(path: Path, requests: int, prompt: int, generate: int) -> None:
    """Completions of random ids, all of one length in and out."""
    dice = random.Random(0)
    with path.open("w") as lines:
        for number in range(requests):
            ids = [dice.randrange(3, 8192) for _ in range(prompt)]
            body = {"model": "llama", "prompt": ids, "max_tokens": generate, "ignore_eos": True, "temperature": 0}
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}
            lines.write(json.dumps(line) + "\n")


def through_run(config: Path, lines: Path, out: Path, tokens: int) -> float:
    """Tokens/s that `laddertron run` says."""
    words = [*CLI, "run", str(config), "-i", str(lines), "-o", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    found = re.search(r"tokens/s over ([\d,.]+) s", said)
    if done.returncode or not found:
        raise SystemExit(f"laddertron run ended with status {done.returncode}:\n{said[-3000:]}")
    return tokens / float(found[1].replace(",", ""))


@contextlib.contextmanager
def daemon(config: Path, log: Path) -> Iterator[BatchClient]:
    """A daemon that is ready; ended by SIGTERM."""
    with log.open("w") as told:
        process = subprocess.Popen([*CLI, "serve", str(config)], stdout=told, stderr=told)
        try:
            until = time.monotonic() + 120
            while not _ready():
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"the daemon did not become ready:\n{log.read_text()[-3000:]}")
                time.sleep(0.1)
            yield BatchClient(Server(f"http://127.0.0.1:{PORT}/v1"))
        finally:
            process.terminate()
            process.wait(60)


def _ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def through_daemon(client: BatchClient, lines: Path, requests: int, tokens: int) -> float:
    """Tokens/s from the batch's creation to its end."""
    file = client.upload(lines)
    began = time.monotonic()
    batch = client.create(file["id"], "/v1/completions", "24h", None, str(began))
    while batch["status"] in ("validating", "in_progress", "finalizing"):
        time.sleep(0.05)
        batch = client.batch(batch["id"])
    seconds = time.monotonic() - began
    if batch["status"] != "completed" or batch["request_counts"]["completed"] != requests:
        raise SystemExit(f"the batch did not complete: {batch}")
    return tokens / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--generate", type=int, default=64, help="tokens")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--seats", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    tokens = args.requests * args.generate
    with tempfile.TemporaryDirectory(prefix="laddertron-throughput-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, str(HERE / "peers" / "model.py"), str(folder / "model")], check=True)
        config, lines = folder / "deploy.yaml", folder / "in.jsonl"
        config.write_text(CONFIG.format(folder=folder, tp=args.tp, seats=args.seats, port=PORT))
        write_lines(lines, args.requests, args.prompt, args.generate)
        ratios = []
        with daemon(config, folder / "daemon.log") as client:
            warm = folder / "warm.jsonl"
            write_lines(warm, args.seats, args.prompt, 4)
            through_daemon(client, warm, args.seats, 4 * args.seats)
            for pair in range(args.pairs):
                plain = through_run(config, lines, folder / f"out{pair}.jsonl", tokens)
                served = through_daemon(client, lines, args.requests, tokens)
                ratios.append(served / plain)
                told = {"pair": pair + 1, "run_tok_s": round(plain, 1), "daemon_tok_s": round(served, 1)}
                print(json.dumps({**told, "ratio": round(ratios[-1], 3)}), flush=True)
        print(json.dumps({"median_ratio": round(statistics.median(ratios), 3), "bar": 0.95}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
