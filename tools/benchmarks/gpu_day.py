"""Measures one GPU with one command (`make gpu`): its environment, NCCL between ranks that share it and their jobs
compared with one rank's, each kind of launch, the tests that need it, decoding (compared with transformers, in fp8,
with top_p), prompts and mixed steps, one rank's shard compared with the published speeds, and the prediction of `plan`
for each. Kernels are compiled before, outside the measurements.

    python tools/benchmarks/gpu_day.py                         under nine minutes on an H100; no network
    python tools/benchmarks/gpu_day.py --only shard --again    these parts again
    python tools/benchmarks/gpu_day.py --device cpu --tiny     the same code with toy models, in seconds

Each part runs in a process of its own with a time limit. Results of finished parts are in --out (JSON), and a later
call resumes with the rest; next to it is the Markdown that docs/performance.md includes unchanged. Parts whose packages
are not installed are reported and skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from common import table, versions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = ("torch", "triton", "flashinfer-python", "flashinfer-jit-cache", "megatron-core", "transformers")
DECODE_BAR, SHARD_BAR = 0.85, 0.95
Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One process: `argv` behind the interpreter, limited to so many seconds. Its JSON lines are its result. `apart`:
    it compiles what a later one measures, and its time is not of the day's minutes."""

    name: str
    argv: tuple[str, ...]
    limit_s: float
    apart: bool = False


def parts(device: str, tiny: bool) -> list[Part]:
    where = ("--device", device, *(("--tiny",) if tiny else ()))
    decode, shard = ((str(HERE / "gpu" / f"{name}.py"), *where) for name in ("gpu_decode", "gpu_shard"))
    one, prompts = ("--batch", "1", "--gen", "2", "--engines", "ours"), ("8", "32") if tiny else ("1024", "8192")
    few = ("--repeat", "1") if tiny else ("--repeat", "2", "--gen", "48")
    ours, two = (*few, "--engines", "ours"), ("--batch", "1,4" if tiny else "1,256")
    short = ("--steps", "2", "--rounds", "1", "--context", "64", "--batch", "1") if tiny else ("--batch", "1,16")
    marked = [str(path) for path in sorted(ROOT.glob("tests/**/test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    tests = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-rfE", *(marked[:1] if tiny else marked))
    tests += ("-n", "4") if importlib.util.find_spec("xdist") and not tiny else ()
    launches = (str(HERE / "gpu" / "gpu_launches.py"), *where, *(("--calls", "100") if tiny else ()))
    measured = [
        Part("launches", launches, 120),
        Part("tests", tests, 150),
        Part("decode", (*decode, *ours), 150),
        Part("decode fp8", (*decode, *ours, *two, "--fp8"), 80),
        Part("decode top_p", (*decode, *ours, *two, "--top-p", "0.9"), 80),
        *[Part(f"decode {k} drafts", (*decode, *ours, *two, "--drafts", k), 80) for k in ("1", "3", "7")],
        Part("decode experts", (*decode, *ours, *(() if tiny else ("--model", "qwen3-30b-a3b"))), 100),
        Part("shard 70b", (*shard, *short, "--cases", "70b"), 100),
        Part("shard 405b", (*shard, *short, "--cases", "405b"), 120),
    ]
    # Kernels depend on widths and types, not on how many layers, steps or sequences there are.
    once = ("--layers", "2", "--batch", "1")
    fewest = {
        "launches": ("--calls", "1"),
        "tests": (),
        "decode": (*once, "--gen", "2", "--repeat", "1"),
        "shard": (*once, "--steps", "2", "--rounds", "1"),
    }
    compiled = [
        Part(f"compile {p.name}", (*p.argv, *fewest[kind]), 400, apart=True)
        for p in measured
        for kind in [p.name.split()[0]]
    ]
    return [
        Part("ranks", (str(HERE / "gpu" / "gpu_ranks.py"), "--device", device), 125),
        Part("one_shot", (str(HERE / "gpu" / "gpu_one_shot.py"), *where), 90),
        Part("jobs of ranks", (str(HERE / "gpu" / "gpu_jobs.py"), *where), 280),
        *[part for part in compiled if not tiny or part.name == "compile shard 70b"],
        *measured,
        Part("transformers", (*decode, *few, "--engines", "transformers"), 100),
        *[Part(f"prompts of {n}", (*decode, *few[:2], *one, "--prompt", n), 60) for n in prompts],
    ]


def run(part: Part, limit_s: float, environment: Mapping[str, str]) -> Results:
    """Its JSON lines, and the end of what it said besides. A part that fails or is cut off has them up to there."""
    began = time.monotonic()
    try:
        command = [sys.executable, "-W", "ignore", *part.argv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environment, cwd=ROOT)
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, (out, err) = 124, ((stream or b"").decode(errors="replace") for stream in (late.stdout, late.stderr))
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    words = [line for line in (out + err).splitlines() if line and not line.startswith(("{", "|"))]
    # Of pytest, 5: no test was chosen.
    ok = code == 0 or (part.name == "tests" and code == 5)
    return {"ok": ok, "code": code, "seconds": round(time.monotonic() - began, 1), "lines": lines, "said": words[-12:]}


def markdown(results_so_far: Mapping[str, Any]) -> str:
    from gpu_decode import speed_table
    from gpu_shard_report import shard_table

    results: Mapping[str, Results] = results_so_far["parts"]
    there = {name: value for name, value in results_so_far["environment"].items() if value}
    out = [
        "## One GPU",
        "",
        f"`make gpu` on {there.pop('device')} ({', '.join(f'{name} {value}' for name, value in there.items())}).",
        *[f"Not installed: {name}." for name in PACKAGES if results_so_far["environment"].get(name) is None],
        "",
    ]
    ended: list[tuple[object, ...]] = []
    for name, result in results.items():
        last = "" if result["ok"] and name != "tests" else " ".join(result["said"][-1:])
        ended.append((name, "yes" if result["ok"] else result["code"], result["seconds"], last))
    out += table("part | ended | seconds | last words", ended)
    lines = [(name, line) for name, result in results.items() for line in result["lines"] if "compile" not in name]
    prompts = [line for name, line in lines if "engine" in line and name.startswith("prompts")]
    decodes = [line for name, line in lines if "engine" in line and not name.startswith("prompts")]
    shards = [line for _, line in lines if "wiring" in line]
    if decodes:
        floor = max(line["copy_gb_s"] for result in results.values() for line in result["lines"] if "copy_gb_s" in line)
        words = f"The copy bandwidth is {floor:,.0f} GB/s; predicted: by `plan`."
        out += ["", words, "", speed_table(decodes, floor * 1e9)]
    mixed = [line for line in decodes if "mixed_ms" in line]
    rows = [(line, f"{line['batch']} decodes and a prompt of {line['prompt']}", line["mixed_ms"]) for line in mixed]
    rows += [(line, f"a prompt of {line['prompt']}", line["prompt"] / line["prefill_tok_s"] * 1e3) for line in prompts]
    if rows:
        cells = ((line["model"], line["weights"], name, f"{ms:.2f}") for line, name, ms in rows)
        out += ["", *table("model | weights | step | ms", cells)]
    if shards:
        out += ["", shard_table(shards)]
    if launches := [line for name, line in lines if name == "launches"]:
        keys = ("host_us", "most_us", "whole_us")
        cells = ((line["kind"], *(line.get(key, line.get("skipped")) for key in keys)) for line in launches)
        out += ["", *table("launch | host, median burst [us] | slowest burst | with the device's end", cells)]
    ranks = [line for name, line in lines if name in ("ranks", "one_shot", "jobs of ranks")]
    if ranks:
        out += ["", *table("ranks that share a GPU | measured", ((line["part"], json.dumps(line)) for line in ranks))]
    return "\n".join([*out, "", *bars(decodes, shards), ""])


def bars(decodes: Sequence[Results], shards: Sequence[Results]) -> list[str]:
    """Each bar with its figure, reached or not; nothing for what was not measured."""

    def verdict(share: float, bar: float) -> str:
        return "reached" if share >= bar else "**missed**"

    plain = [line for line in decodes if (line["weights"], line["draw"]) == ("bf16", "greedy")]
    plain = [line for line in plain if line["model"] == plain[0]["model"]]
    ours = [line["share"] for line in plain if line["engine"] == "laddertron" and line["batch"] == 1]
    out = []
    if ours:
        reached = verdict(max(ours), DECODE_BAR)
        out.append(f"- Decoding at batch 1: {max(ours):.0%} of the copy bandwidth (bar {DECODE_BAR:.0%}): {reached}.")
    of = itemgetter("model", "interconnect", "batch")
    silent = {of(line): line["step_ms"] for line in shards if line["wiring"] == "no-communication"}
    for line in shards:
        if line["wiring"] == "ladder" and line["k"] == 0 and of(line) in silent:
            share = silent[of(line)] / line["step_ms"]
            out.append(
                f"- Ladder's shard of {line['model']}, {line['interconnect']}, batch {line['batch']}, no multi"
                f"processor held: {share:.2f} of no-communication (bar {SHARD_BAR}): {verdict(share, SHARD_BAR)}."
            )
    return out


def child_environment(scratch: Path) -> dict[str, str]:
    """PYTHONPATH for the parts, before the caller's: laddertron from this folder, installed or not."""
    scratch.mkdir(parents=True, exist_ok=True)
    link = scratch / "laddertron"
    if not link.is_symlink():
        link.symlink_to(ROOT)
    paths = [str(scratch), str(HERE), str(HERE / "gpu"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="toy models, for the code and not for figures")
    parser.add_argument("--only", default="", help="parts whose names begin so")
    parser.add_argument("--again", action="store_true", help="also those that have ended")
    parser.add_argument("--minutes", type=float, default=9.0, help="no part begins or goes on later; but for compiling")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_day.json")
    args, began = parser.parse_args(), time.monotonic()
    paths = child_environment(args.out.parent / "gpu_day")
    sys.path[:0] = paths["PYTHONPATH"].split(os.pathsep)
    import torch
    from gpu_model import device_of, machine
    from laddertron.topology.json_codec import write_file  # whole or not at all: this process may be cut off

    there = {"device": machine(device_of(args.device)), "cuda": torch.version.cuda, "nvcc": shutil.which("nvcc")}
    environment = {"python": sys.version.split()[0], **versions(*PACKAGES), **there}
    results: Results = {"environment": environment, "parts": {}}
    if args.out.exists():
        before = json.loads(args.out.read_text())
        if before["environment"] == environment:  # figures of another machine or library are not mixed in
            results = before
    for part in parts(args.device, args.tiny):
        left = args.minutes * 60 - (time.monotonic() - began)
        done = results["parts"].get(part.name)
        if not part.name.removeprefix("compile ").startswith(args.only) or (
            done is not None and done["ok"] and not args.again
        ):
            continue
        if left <= 0 and not part.apart:
            print(f"{part.name}: left for the next call", file=sys.stderr)
            continue
        print(f"{part.name} …", file=sys.stderr, flush=True)
        results["parts"][part.name] = run(part, part.limit_s if part.apart else min(part.limit_s, left), paths)
        began += results["parts"][part.name]["seconds"] * part.apart
        write_file(args.out, json.dumps(results, indent=1))
        write_file(args.out.with_suffix(".md"), markdown(results))
    print(markdown(results))
    return 0 if all(part["ok"] for part in results["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
