"""How near decoding comes to a GPU's memory: an 8B-shaped Llama of random bf16 weights on one GPU through the whole
engine, CUDA graphs on and off, against transformers. Prints a JSON line a case, then a table.

    python tools/benchmarks/gpu_day.py --only decode              with what else a GPU is measured by
    PYTHONPATH=tools/benchmarks python tools/benchmarks/gpu/gpu_decode.py --device cpu --tiny     a toy model

share: bytes that a decode step must read (weights multiplied by, keys and values of the mean context) over its median
time, of the copy bandwidth measured here. Medians of --repeat runs with new prompts after a warm-up, with the least and
the most. transformers generates greedily, the same lengths, afterwards in the same process. mixed_ms: a step of so many
decodes and one whole prompt. predicted_ms: by `plan`.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from common import numbers, say, table, versions
from gpu_model import TINY, device_of, machine, make_model, make_runner, of_layers, predicted_ms
from laddertron.engine.request import Request, SamplingParams
from laddertron.engine.schedule.scheduler import Scheduler
from laddertron.engine.step.engine import Engine, StepProgress, drain
from laddertron.models.config.known_models import known
from laddertron.models.config.model_config import ModelConfig
from laddertron.models.llama import LlamaModel
from laddertron.tools.bench.bench import Case, random_prompt, run_case
from laddertron.tools.bench.bench_rank import copy_bandwidth, expert_bytes, matmul_bytes
from laddertron.tools.plan.roofline import Load
from laddertron.topology.comm.bootstrap import StoreBootstrap, open_store
from laddertron.topology.comm.groups import CommOptions, Communicator
from laddertron.topology.connect import connect
from laddertron.topology.cost.cost import Shape
from laddertron.topology.placement.layout import GroupLayout
from peers.worker import run

LLAMA_8B = "llama-3.1-8b"
STEP_TOKENS = 8192
ALONE = Shape(1, 1, "nvlink", "ib", 1)
Line = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a toy model, for the code and not for figures")
    parser.add_argument("--batch", type=numbers, help="default 1,16,64,256 (1,4 with --tiny)")
    parser.add_argument("--prompt", type=int, help="default 512 (16 with --tiny)")
    parser.add_argument("--gen", type=int, help="default 64 (12 with --tiny)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--model", default=LLAMA_8B, help="a known model: qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=0, help="0: all of the model's")
    parser.add_argument("--fp8", action="store_true", help="laddertron's products in fp8")
    parser.add_argument("--top-p", type=float, default=1.0, help="below 1: draw so, at temperature 0.8")
    parser.add_argument(
        "--drafts", type=int, default=0, help="verify so many wrong drafts of each sequence in each step"
    )
    parser.add_argument("--engines", default="ours,transformers", help="ours, transformers or both")
    args = parser.parse_args()
    args.batch = args.batch or ([1, 4] if args.tiny else [1, 16, 64, 256])
    args.prompt = args.prompt or (16 if args.tiny else 512)
    args.gen = args.gen or (12 if args.tiny else 64)
    return args


def main() -> None:
    args = parse()
    device = device_of(args.device)
    torch.set_grad_enabled(False)
    args.name = "toy" if args.tiny else "8B-shaped" if args.model == LLAMA_8B else args.model
    config = of_layers(TINY if args.tiny else known(args.model), args.layers, args.prompt + args.gen + 1)
    floor = copy_bandwidth(device, (16 if args.tiny else 1024) << 20)
    there = {"CUDA": torch.version.cuda, **versions("torch", "triton", "flashinfer-python", "transformers")}
    installed = ", ".join(f"{name} {number}" for name, number in there.items() if number)
    say(machine=machine(device), versions=installed, copy_gb_s=round(floor / 1e9, 1))
    lines: list[Line] = []
    engines = {"ours": ours, "transformers": theirs}
    for line in (line for name in args.engines.split(",") for line in engines[name](config, args, device)):
        say(**line, share=float(f"{line['gb_s'] * 1e9 / floor:.4g}"))
        lines.append(line)
    print(speed_table(lines, floor))


def read_bytes(config: ModelConfig, batch: int, context: float, fp8: bool = False) -> float:
    """Bytes that a decode step reads at least; of experts those that rows choose if every choice is as likely."""
    item = 2  # bfloat16
    a_position = 2 * config.num_layers * config.num_kv_heads * config.head_dim * item
    layers = matmul_bytes(config, item) - config.vocab_size * config.hidden_size * item
    spared = 0.0
    if (experts := expert_bytes(config, item)) is not None:
        every, count, chosen = experts
        spared = every * (1 - chosen / count) ** batch
    return matmul_bytes(config, item) - layers * fp8 / 2 - spared + batch * context * a_position


def case_line(
    what: dict[str, Any], config: ModelConfig, args: argparse.Namespace, batch: int, runs: list[tuple[float, float]]
) -> Line:
    """runs: seconds of the prompts and, median, of a step, of each repetition after the first, which warms up."""
    prefill, step = zip(*runs[1:], strict=True)
    median, context, fp8 = statistics.median(step), args.prompt + args.gen / 2, what["weights"] == "fp8"
    load, device = Load(decodes=batch, context=context), torch.device(args.device)
    return what | {
        "model": args.name, "batch": batch, "prompt": args.prompt, "gen": args.gen,
        "predicted_ms": predicted_ms(config, ALONE, device, load, "standard", fp8),
        "prefill_tok_s": round(batch * args.prompt / statistics.median(prefill), 1),
        "step_ms": round(median * 1e3, 4),
        "step_ms_least_most": [round(min(step) * 1e3, 4), round(max(step) * 1e3, 4)],
        "decode_tok_s": round(batch / median, 1),
        "gb_s": float(f"{read_bytes(config, batch, context, fp8) / median / 1e9:.5g}"),
    }  # fmt: skip


def ours(config: ModelConfig, args: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    """laddertron, without and, on a GPU, with CUDA graphs."""
    bootstrap = StoreBootstrap(open_store("127.0.0.1", 0, master=True), 0, 1)
    with connect(bootstrap, GroupLayout(((0,),)), CommOptions()) as communicator:
        model = make_model(config, communicator.tp, communicator.all_reduce, device, args.fp8)
        for graphs in (False, True) if device.type == "cuda" else (False,):
            yield from run_engine(model, communicator, args, graphs)
            release(device)
        del model
    release(device)


def run_engine(model: LlamaModel, communicator: Communicator, args: argparse.Namespace, graphs: bool) -> Iterator[Line]:
    seats, device, config = max(args.batch), model.norm.weight.device, model.config
    tokens = max(seats * (1 + args.drafts), min(STEP_TOKENS, seats * args.prompt))
    # auto: where attention cannot be recorded, the line says off
    runner, limits = make_runner(model, communicator, seats, tokens, "auto" if graphs else False, args.drafts)
    engine = Engine(Scheduler(limits), runner, communicator.plans, StepProgress())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    draw = "greedy" if args.top_p == 1.0 else f"top_p {args.top_p:g}"
    what = {
        "engine": "laddertron", "attention": runner.attention.name, "ops": model.ops.name,
        "cuda_graphs": runner.graphed, "weights": "fp8" if args.fp8 else "bf16",
        "draw": f"{draw}, {args.drafts} wrong drafts" if args.drafts else draw,
    }  # fmt: skip
    seed = 0
    for batch in args.batch:
        runs = []
        for _ in range(args.repeat + 1):
            seed += 1
            timing = run_case(engine, Case(batch, args.prompt, args.gen), config.vocab_size, seed, args.top_p)
            runs.append((timing.prefill_s, timing.step_s))
        more: Line = {}
        if batch < seats and not args.drafts:
            prompt_steps = -(-batch * args.prompt // tokens)
            more["mixed_ms"] = round(mixed_step_s(engine, config.vocab_size, batch, prompt_steps, args) * 1e3, 4)
        if device.type == "cuda":
            more["gpu_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        yield case_line(what | more, config, args, batch, runs)


def mixed_step_s(engine: Engine, vocab: int, batch: int, prompt_steps: int, args: argparse.Namespace) -> float:
    """A step of `batch` decodes and one whole prompt: four steps in which a newcomer comes and goes, less
    three without. The median of --repeat newcomers. prompt_steps: what the prompts of the others take."""
    dice, differences = random.Random(batch), []

    def add(name: str, generate: int) -> None:
        prompt = random_prompt(dice, vocab, args.prompt)
        engine.add(Request(name, prompt, SamplingParams(max_tokens=generate, seed=0, temperature=0.0)))

    def steps(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            engine.step()
        return time.perf_counter() - began

    for repetition in range(args.repeat):
        for number in range(batch):
            add(f"mixed-{batch}-{repetition}-{number}", args.gen)
        steps(prompt_steps + 2)
        alone = steps(2) / 2
        add(f"mixed-{batch}-{repetition}-newcomer", 1)
        differences.append(steps(4) - 3 * alone)
        for _ in drain(engine):
            pass
    return statistics.median(differences)


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def theirs(config: ModelConfig, args: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    """transformers as its users call it. Waiting for each token costs it a synchronisation, which it makes anyway to
    look for the end."""
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaConfig(
        hidden_size=config.hidden_size, num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads, intermediate_size=config.ffn_size, vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings, tie_word_embeddings=False,
    )  # fmt: skip
    llama._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model: Any = LlamaForCausalLM(llama).eval()
    finally:
        torch.set_default_dtype(before)
    what = {"engine": "transformers", "attention": "sdpa", "cuda_graphs": False, "weights": "bf16", "draw": "greedy"}
    for batch in args.batch:
        runs = []
        for _ in range(args.repeat + 1):
            timing = run(model, torch.randint(3, config.vocab_size, (batch, args.prompt), device=device), args.gen)
            runs.append((timing["prefill_s"], timing["step_s"]))
        yield case_line(what, config, args, batch, runs)


def speed_table(lines: list[Line], floor: float) -> str:
    """With each case's speed over transformers' at the same batch."""
    peer = {(line["model"], line["batch"]): line["step_ms"] for line in lines if line["engine"] == "transformers"}
    rows = []
    for line in lines:
        graphs = "on" if line["cuda_graphs"] else "off"
        same = line["model"], line["batch"]
        ratio = f"{peer[same] / line['step_ms']:.2f}x" if same in peer else ""
        plan = f"{line['predicted_ms']:.2f}" if line["predicted_ms"] and line["engine"] != "transformers" else ""
        speeds = (f"{line['prefill_tok_s']:,.0f}", f"{line['step_ms']:.2f}", plan, f"{line['decode_tok_s']:,.0f}")
        share = f"{line['gb_s'] * 1e9 / floor:.0%}"
        what = (line["model"], line["engine"], line["attention"], graphs, line["weights"], line["draw"], line["batch"])
        rows.append((*what, *speeds, share, ratio))
    head = "model | engine | attention | graphs | weights | draw | batch | prefill tokens/s | step ms | predicted"
    return "\n".join(table(f"{head} | decode tokens/s | of the copy bandwidth | as fast as transformers", rows))


if __name__ == "__main__":
    main()
