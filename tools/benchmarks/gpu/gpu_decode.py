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
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench_model import Size, make_model, make_runner
from common import say, table, versions
from laddertron.engine.request import Request, SamplingParams
from laddertron.engine.schedule.scheduler import Scheduler
from laddertron.engine.step.engine import Engine, StepProgress, drain
from laddertron.models.config.known_models import known
from laddertron.models.config.model_config import ModelConfig, make_wiring
from laddertron.models.llama import LlamaModel
from laddertron.tools.bench.bench import Case, random_prompt, run_case
from laddertron.tools.bench.bench_rank import expert_bytes, matmul_bytes
from laddertron.tools.plan.roofline import Load, SimulatedGroup, gpu_rates, links
from laddertron.topology.comm.bootstrap import StoreBootstrap, open_store
from laddertron.topology.comm.groups import CommOptions, Communicator
from laddertron.topology.connect import connect
from laddertron.topology.cost.cost import Shape
from laddertron.topology.hardware.presets import GPU_BY_NAME
from laddertron.topology.placement.layout import GroupLayout
from peers.worker import run

LLAMA_8B = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
TOY = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 256}
STEP_TOKENS = 8192
ALONE = Shape(1, 1, "nvlink", "ib", 1)

Line = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a toy model, for the code and not for figures")
    parser.add_argument("--batch", default=None, help="default 1,16,64,256 (1,4 with --tiny)")
    parser.add_argument("--prompt", type=int, default=None, help="default 512 (16 with --tiny)")
    parser.add_argument("--gen", type=int, default=None, help="default 64 (12 with --tiny)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--model", default="", help="a known model in place of the 8B-shaped Llama: qwen3-30b-a3b")
    parser.add_argument("--attention", default="auto", choices=["auto", "torch", "flashinfer"])
    parser.add_argument("--layers", type=int, default=0, help="0: all of the model's")
    parser.add_argument("--fp8", action="store_true", help="laddertron's products in fp8")
    parser.add_argument("--top-p", type=float, default=1.0, help="below 1: draw so, at temperature 0.8")
    parser.add_argument("--engines", default="ours,transformers", help="ours, transformers or both")
    args = parser.parse_args()
    args.batch = args.batch or ("1,4" if args.tiny else "1,16,64,256")
    args.prompt = args.prompt or (16 if args.tiny else 512)
    args.gen = args.gen or (12 if args.tiny else 64)
    return args


def main() -> int:
    args = parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: --device cpu --tiny runs the same code with a toy model", file=sys.stderr)
        return 2
    torch.set_grad_enabled(False)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    batches = [int(batch) for batch in args.batch.split(",")]
    shape = TOY if args.tiny else LLAMA_8B
    name, positions = "toy" if args.tiny else "8B-shaped", args.prompt + args.gen + 1
    if args.model:
        c = known(args.model)
        widths = {"hidden": c.hidden_size, "heads": c.num_heads, "kv_heads": c.num_kv_heads, "ffn": c.ffn_size}
        name, shape = args.model, widths | {"layers": c.num_layers, "vocab": c.vocab_size}
    shape = shape | {"layers": args.layers or shape["layers"]}
    size = Size(name, **shape, dtype="bfloat16", tied=False, positions=positions, known=args.model)
    floor = copy_bandwidth(device, (16 if args.tiny else 1024) << 20)
    there = {"CUDA": torch.version.cuda, **versions("torch", "triton", "flashinfer-python", "transformers")}
    said = ", ".join(f"{name} {number}" for name, number in there.items() if number)
    say(machine=machine(device), versions=said, copy_gb_s=round(floor / 1e9, 1))
    lines: list[Line] = []
    engines = {"ours": ours, "transformers": theirs}
    for line in (line for name in args.engines.split(",") for line in engines[name](size, batches, args, device)):
        say(**line, share=float(f"{line['gb_s'] * 1e9 / floor:.4g}"))
        lines.append(line)
    print(speed_table(lines, floor))
    return 0


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second of a large copy within the device's memory, read and written ones together: the best round."""
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(12):
        best = min(best, timed(device, lambda: target.copy_(source)))
    return 2 * size / best


def timed(device: torch.device, work: Callable[[], Any]) -> float:
    """Seconds until the device has done it."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    event: Any = torch.cuda.Event
    before, after = (event(enable_timing=True) for _ in range(2))
    before.record()
    work()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) * 1e-3


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name}, {found.multi_processor_count} multiprocessors, {found.total_memory >> 30} GiB"
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def read_bytes(size: Size, batch: int, context: float, fp8: bool = False) -> float:
    """Bytes that a decode step reads at least; of experts those that rows choose if every choice is as likely."""
    config = size.config()
    item = 2  # bfloat16
    a_position = 2 * config.num_layers * config.num_kv_heads * config.head_dim * item
    layers = matmul_bytes(config, item) - config.vocab_size * config.hidden_size * item
    spared = 0.0
    if (experts := expert_bytes(config, item)) is not None:
        every, count, chosen = experts
        spared = every * (1 - chosen / count) ** batch
    return matmul_bytes(config, item) - layers * fp8 / 2 - spared + batch * context * a_position


def predicted_ms(
    config: ModelConfig, shape: Shape, device: torch.device, load: Load, wiring: str, fp8: bool = False
) -> float | None:
    """The step of one rank of a group of this shape, by `plan`; None on a device whose rates are not known."""
    known = GPU_BY_NAME.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if known is None:
        return None
    rates = gpu_rates(known.device(0, "0000:00:00.0", 0), "fp8" if fp8 else "bfloat16")
    group = SimulatedGroup(config, shape.size, rates, links("nccl", shape), 1.0 if fp8 else 2.0)
    return round(group.step(load, make_wiring(wiring, config.num_layers)).total_s * 1e3, 4)


def case_line(
    what: dict[str, Any], size: Size, args: argparse.Namespace, batch: int, prefill: list[float], step: list[float]
) -> Line:
    """prefill, step: seconds of each repetition; of a step the median of its run."""
    median, context = statistics.median(step), args.prompt + args.gen / 2
    fp8 = what["weights"] == "fp8"
    load, device = Load(decodes=batch, context=context), torch.device(args.device)
    return what | {
        "model": size.name,
        "predicted_ms": predicted_ms(size.config(), ALONE, device, load, "standard", fp8),
        "batch": batch,
        "prompt": args.prompt,
        "gen": args.gen,
        "prefill_tok_s": round(batch * args.prompt / statistics.median(prefill), 1),
        "step_ms": round(median * 1e3, 4),
        "step_ms_least_most": [round(min(step) * 1e3, 4), round(max(step) * 1e3, 4)],
        "decode_tok_s": round(batch / median, 1),
        "gb_s": float(f"{read_bytes(size, batch, context, fp8) / median / 1e9:.5g}"),
    }


def ours(size: Size, batches: list[int], args: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    """laddertron, without and, on a GPU, with CUDA graphs."""
    bootstrap = StoreBootstrap(open_store("127.0.0.1", 0, master=True), 0, 1)
    with connect(bootstrap, GroupLayout(((0,),)), CommOptions()) as communicator:
        model = make_model(size, communicator, device, args.fp8)
        for graphs in (False, True) if device.type == "cuda" and args.attention != "torch" else (False,):
            yield from run_engine(model, communicator, size, batches, args, graphs)
            release(device)
        del model
    release(device)


def run_engine(
    model: LlamaModel,
    communicator: Communicator,
    size: Size,
    batches: list[int],
    args: argparse.Namespace,
    graphs: bool,
) -> Iterator[Line]:
    seats, device = max(batches), model.norm.weight.device
    tokens = max(seats, min(STEP_TOKENS, seats * args.prompt))
    # auto: where attention cannot be recorded, the line says off
    runner, limits = make_runner(model, communicator, seats, tokens, args.attention, "auto" if graphs else False)
    engine = Engine(Scheduler(limits), runner, communicator.plans, StepProgress())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    what = {
        "engine": "laddertron",
        "attention": runner.attention.name,
        "ops": model.ops.name,
        "cuda_graphs": runner.graphed,
        "weights": "fp8" if args.fp8 else "bf16",
        "draw": "greedy" if args.top_p == 1.0 else f"top_p {args.top_p:g}",
    }
    seed = 0
    for batch in batches:
        prefill, step = [], []
        for repetition in range(args.repeat + 1):
            seed += 1
            timing = run_case(engine, Case(batch, args.prompt, args.gen), size.vocab, seed, args.top_p)
            if repetition:  # the first one warms up
                prefill.append(timing.prefill_s)
                step.append(timing.step_s)
        mixed = {}
        if batch < seats:
            prompt_steps = -(-batch * args.prompt // tokens)
            mixed["mixed_ms"] = round(mixed_step_s(engine, size.vocab, batch, prompt_steps, args) * 1e3, 4)
        memory = {"gpu_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)} if device.type == "cuda" else {}
        yield case_line(what | mixed | memory, size, args, batch, prefill, step)


def mixed_step_s(engine: Engine, vocab: int, batch: int, prompt_steps: int, args: argparse.Namespace) -> float:
    """A step of `batch` decodes and one whole prompt: four steps in which a newcomer comes and goes, less
    three without. The median of --repeat newcomers. prompt_steps: what the prompts of the others take."""
    dice, found = random.Random(batch), []

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
        found.append(steps(4) - 3 * alone)
        for _ in drain(engine):
            pass
    return statistics.median(found)


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def theirs(size: Size, batches: list[int], args: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    """transformers as its users call it. Waiting for each token costs it a synchronisation, which it makes anyway to
    look for the end."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=size.hidden, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, intermediate_size=size.ffn, vocab_size=size.vocab,
        max_position_embeddings=size.positions, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model: Any = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    for batch in batches:
        prefill, step = [], []
        for repetition in range(args.repeat + 1):
            ids = torch.randint(3, size.vocab, (batch, args.prompt), device=device)
            found = run(model, ids, args.gen)
            if repetition:
                prefill.append(found["prefill_s"])
                step.append(found["step_s"])
        what = {"engine": "transformers", "attention": "sdpa", "cuda_graphs": False, "weights": "bf16"}
        yield case_line(what | {"draw": "greedy"}, size, args, batch, prefill, step)


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
    sys.exit(main())
