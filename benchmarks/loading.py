"""How fast weights load, beside a plain read of the same bytes and transformers' loader: one JSON line a case.

    python benchmarks/loading.py [--gigabytes 2] [--folder DIR] [--tensor-parallel-size 2] [--cold] [--transformers]

Makes a random bf16 Llama (removed afterwards unless it was there), then measures in this process, rounds interleaved:
plain (every byte of the files into fresh memory by 16 MiB reads, one thread), load at tp 1, load with a manifest, load
of per-rank files, rank 0 of tp, and all ranks of tp at once as processes (ready before the clock starts; together they
want each byte once, as the plain read does). Medians of --rounds; `of_plain` is the rate against the plain read's.
--cold drops the files from the page cache before each (POSIX_FADV_DONTNEED).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import torch
from laddertron.models.config.model_config import from_folder
from laddertron.models.rank_shard import RankShard
from laddertron.models.weights.load import load
from laddertron.models.weights.manifest import NAME, make_manifest, write_manifest
from laddertron.models.weights.mapping import open_checkpoint, open_source
from laddertron.models.weights.rank_files import shards_folder
from laddertron.models.weights.shard_writer import write_shards
from laddertron.models.weights.slices import expected_shapes, plan_fills
from peers.model import write

CHUNK = 16 << 20
Case = tuple[Callable[[], int], Callable[[], None]]
"""What is timed, and what is done afterwards."""


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    """Layers of Llama 3.2 1B's width until the size is reached, 1 GB a file."""
    write(
        folder,
        hidden_size=2048,
        num_hidden_layers=max(1, round((gigabytes * 1e9 - 2 * 2 * 32000 * 2048) / 2 / 60.8e6)),
        num_attention_heads=32,
        intermediate_size=8192,
        vocab_size=32000,
    )


def parameters_of(shard: RankShard) -> dict[str, torch.Tensor]:
    """Empty ones, shaped as the fills say."""
    wanted = expected_shapes(shard.config)
    shapes: dict[str, tuple[int, ...]] = {}
    for fill in plan_fills(shard):
        if fill.tensor is not None:
            shape = wanted[fill.tensor]
            rows = max(fill.row + fill.count, shapes.get(fill.parameter, (0,))[0])
            shapes[fill.parameter] = (rows, fill.columns or shape[1]) if len(shape) == 2 else (rows,)
    return {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def load_rank(folder: Path, size: int, rank: int) -> int:
    """Returns the bytes of the rank's parameters."""
    shard = RankShard(from_folder(folder), size, rank)
    parameters = parameters_of(shard)
    load(open_source(folder, shard), shard, parameters, verify=(0, 1))
    return sum(p.numel() * 2 for p in parameters.values())


def drop_caches(folder: Path) -> None:
    for file in folder.rglob("*.safetensors"):
        number = os.open(file, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def plain_read(folder: Path) -> int:
    """Every byte of the weights, into memory that is new as a loader's is."""
    total = 0
    kept = []
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        target = torch.empty(size, dtype=torch.uint8)
        view = memoryview(target.numpy())  # type: ignore[arg-type]
        with file.open("rb", buffering=0) as stream:
            at = 0
            while at < size:
                at += stream.readinto(view[at : at + CHUNK]) or 0
        kept.append(target)
        total += size
    return total


def with_transformers(folder: Path) -> int:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for parameter in model.parameters():
        # It only maps the files: a value of each page is looked at, so that the bytes are there as they are elsewhere.
        parameter.detach().view(-1)[::2048].float().sum()
    return sum(p.numel() * 2 for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--transformers", action="store_true")
    options = parser.parse_args()
    made = options.folder is None
    folder: Path = options.folder or Path(tempfile.mkdtemp(prefix="laddertron-loading-"))
    try:
        if not (folder / "config.json").exists():
            make_checkpoint(folder, options.gigabytes)
        measure(folder, options.tensor_parallel_size, options.rounds, options.cold, options.transformers)
    finally:
        if made:
            shutil.rmtree(folder)


def measure(folder: Path, size: int, rounds: int, cold: bool, transformers: bool) -> None:
    manifest, config = make_manifest(folder), from_folder(folder)
    one, many = shards_folder(folder, 1), shards_folder(folder, size)
    for home, ranks in ((one, 1), (many, size)):
        shutil.rmtree(home, ignore_errors=True)
        source = open_checkpoint(folder, config)
        write_shards(source, [RankShard(config, ranks, r) for r in range(ranks)], folder)
        home.rename(home.with_name(f"{home.name}-aside"))

    def beside(home: Path, call: Callable[[], int]) -> Callable[[], int]:
        def run() -> int:
            home.with_name(f"{home.name}-aside").rename(home)
            try:
                return call()
            finally:
                home.rename(home.with_name(f"{home.name}-aside"))

        return run

    def verified() -> int:
        write_manifest(folder, manifest)
        try:
            return load_rank(folder, 1, 0)
        finally:
            (folder / NAME).unlink()

    def at_once(call: Callable[[], int]) -> Callable[[], Case]:
        return lambda: (call, lambda: None)

    def by_ranks() -> Case:
        context = get_context("spawn")
        ready = context.Barrier(size + 1)
        pool = context.Pool(size, ready.wait)
        ready.wait()
        everyone = [(folder, size, rank) for rank in range(size)]
        return lambda: sum(pool.starmap(load_rank, everyone, 1)), pool.terminate

    cases: dict[str, Callable[[], Case]] = {
        "plain": at_once(lambda: plain_read(folder)),
        "load tp1": at_once(lambda: load_rank(folder, 1, 0)),
        "load tp1, verified": at_once(verified),
        "load tp1, per-rank file": at_once(beside(one, lambda: load_rank(folder, 1, 0))),
        f"load tp{size} rank 0": at_once(lambda: load_rank(folder, size, 0)),
        f"load tp{size} rank 0, per-rank file": at_once(beside(many, lambda: load_rank(folder, size, 0))),
        f"load tp{size}, all ranks": by_ranks,
    }
    if transformers:
        cases["transformers"] = at_once(lambda: with_transformers(folder))
    times: dict[str, list[float]] = {name: [] for name in cases}
    read: dict[str, int] = {}
    for _ in range(rounds):
        for name, prepare in cases.items():
            call, end = prepare()
            if cold:
                drop_caches(folder)
            start = time.perf_counter()
            read[name] = call()
            times[name].append(time.perf_counter() - start)
            end()
    for home in (one, many):
        shutil.rmtree(home.with_name(f"{home.name}-aside"), ignore_errors=True)
    rate = {name: read[name] / 1e9 / statistics.median(took) for name, took in times.items()}
    for name, value in rate.items():
        line = {
            "case": name,
            "cache": "cold" if cold else "warm",
            "gb": round(read[name] / 1e9, 2),
            "seconds": round(statistics.median(times[name]), 3),
            "gb_s": round(value, 2),
            "of_plain": round(value / rate["plain"], 2),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
