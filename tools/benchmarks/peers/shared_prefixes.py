"""A batch job whose lines share prefixes: `laddertron run` against vLLM with its prefix cache, in turns, in seconds.

    python tools/benchmarks/peers/shared_prefixes.py --repeats 5                 # docs/performance.md has one run of it
    python tools/benchmarks/peers/shared_prefixes.py --kv-tokens 6400 --orders shuffled --repeats 3
    python tools/benchmarks/peers/shared_prefixes.py --peer ""                   # laddertron alone

240 lines, 24 prefixes of 512 tokens, ten lines each with 16 to 64 tokens of their own, 32 new tokens, greedy, 16
sequences at once, the 150M Llama of model.py. Both engines get the same token ids and the same room for keys and
values; neither time holds the engine's start. laddertron's is from the first line to the last answer, with lines read,
checked and written; vLLM's is one call of `LLM.generate` after a warm-up, its cache emptied before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import UNFIT, LineProcess, environment, in_turns, numbers, spread, table

BUILD = Path(__file__).resolve().parents[3] / "build" / "peers"
ORDERS = ("shuffled", "by prefix")
PREFIXES, LINES_EACH, PREFIX_TOKENS, OWN_TOKENS = 24, 10, 512, (16, 64)
NEW_TOKENS, SEQUENCES = 32, 16
VLLM_BLOCK = 128
Engine = Callable[[list[list[int]]], float]
"""Seconds for the prompts of a job."""
KV_BYTES = {name: 12 * 8 * 64 * 2 * size for name, size in {"bfloat16": 2, "float32": 4}.items()}
"""Of a token: layers, KV heads, their dimension, keys and values, by dtype. Without bf16 instructions (AVX2) torch's
products in bf16 take several times as long as in float32."""


def job(order: str, seed: int) -> list[list[int]]:
    """The prompts of a job."""
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, 8000) for _ in range(count)]

    prefixes = [ids(PREFIX_TOKENS) for _ in range(PREFIXES)]
    prompts = [prefix + ids(draw.randint(*OWN_TOKENS)) for prefix in prefixes for _ in range(LINES_EACH)]
    if order == "shuffled":
        draw.shuffle(prompts)
    return prompts


def laddertron(folder: Path, dtype: str, kv_tokens: int, threads: int, prompts: list[list[int]]) -> float:
    """Seconds of the job. Raises CalledProcessError, or RuntimeError for a line that failed."""
    engine = {
        "device": "cpu", "threads": threads, "max_num_seqs": SEQUENCES, "kv_cache_memory": KV_BYTES[dtype] * kv_tokens,
    }  # fmt: skip
    deployment = {"model": {"path": str(folder), "served_model_name": "m", "dtype": dtype}, "engine": engine}
    body = {"model": "m", "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body | {"prompt": prompt}}
        for i, prompt in enumerate(prompts)
    ]
    with TemporaryDirectory() as scratch:
        config, source = Path(scratch, "deploy.yaml"), Path(scratch, "in.jsonl")
        config.write_text(json.dumps(deployment))
        source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        command = [sys.executable, "-m", "laddertron.launchers.cli", "run", str(config), "-i", str(source)]
        command += ["-o", str(Path(scratch, "out.jsonl")), "--strict"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = re.search(r"tokens/s over ([\d.,]+) s", done.stdout + done.stderr)
    if seconds is None:
        raise RuntimeError(f"no time in what run said: {done.stdout}{done.stderr}")
    return float(seconds[1].replace(",", ""))


def start_vllm(folder: Path, dtype: str, kv_tokens: int, threads: int) -> LineProcess:
    """vLLM's engine in a process and an environment of its own, which runs `serve`."""
    from peers.compare import NEEDS

    python = environment(BUILD / "vllm", NEEDS["vllm"], UNFIT) / "python"
    environ = {
        **os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip
    command = [str(python), __file__, "--serve", str(folder), "--kv-tokens", str(kv_tokens), "--dtype", dtype]
    return LineProcess(command, environ, BUILD / "vllm.log")


def run_in(process: LineProcess, prompts: list[list[int]]) -> float:
    return float(process.ask(prompts)["seconds"])


def serve(folder: str, dtype: str, kv_tokens: int) -> None:
    """Runs in vLLM's environment: answers a line of prompts with the seconds that they took."""
    import vllm

    engine = vllm.LLM(
        folder, dtype=dtype, enable_prefix_caching=True, max_model_len=2048, max_num_seqs=SEQUENCES,
        block_size=VLLM_BLOCK, num_gpu_blocks_override=kv_tokens // VLLM_BLOCK, disable_log_stats=True,
    )  # fmt: skip
    params = vllm.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    engine.generate([{"prompt_token_ids": job("shuffled", 0)[0]}], params, use_tqdm=False)
    print(json.dumps({"version": vllm.__version__}), flush=True)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": prompt} for prompt in json.loads(line)]
        engine.reset_prefix_cache()
        began = time.perf_counter()
        answers = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert all(len(answer.outputs[0].token_ids) == NEW_TOKENS for answer in answers)
        print(json.dumps({"seconds": seconds}), flush=True)


def _seconds(jobs: dict[str, partial[float]], name: str) -> float:
    return jobs[name]()


def compared(folder: Path, kv_tokens: int, args: argparse.Namespace) -> Iterator[tuple[object, ...]]:
    """Rows of the table, for a KV cache of so many tokens."""
    with ExitStack() as stack:
        engines: dict[str, Engine] = {"laddertron": partial(laddertron, folder, args.dtype, kv_tokens, args.threads)}
        if args.peer:
            peer = stack.enter_context(closing(start_vllm(folder, args.dtype, kv_tokens, args.threads)))
            engines[f"vLLM {peer.answer()['version']}"] = partial(run_in, peer)
        for order in args.orders.split(","):
            jobs = {name: partial(engine, job(order, kv_tokens)) for name, engine in engines.items()}
            seconds = in_turns(jobs, args.repeats, partial(_seconds, jobs))
            ours = median(seconds["laddertron"])
            for name, taken in seconds.items():
                yield f"{kv_tokens:,}", order, name, spread(taken, ".1f"), f"{ours / median(taken):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kv-tokens", default="6400,43008")
    parser.add_argument("--orders", default=",".join(ORDERS))
    parser.add_argument("--dtype", choices=KV_BYTES, default="bfloat16")
    parser.add_argument("--peer", choices=("vllm", ""), default="vllm")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.dtype, int(args.kv_tokens))
        return
    from peers.model import written

    folder = written(BUILD / "llama")
    rows = [row for kv_tokens in numbers(args.kv_tokens) for row in compared(folder, kv_tokens, args)]
    print("\n".join(table("KV cache, tokens | order of the file | engine | seconds | laddertron / this", rows)))


if __name__ == "__main__":
    main()
