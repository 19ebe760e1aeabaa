"""How fast weights load, beside a plain read of the same bytes and transformers' loader: one JSON line a case.

    python tools/benchmarks/loading.py [--gigabytes 2] [--folder DIR] [--tensor-parallel-size 2] [--cold]
    [--transformers]

Makes a random bf16 Llama (removed afterwards unless it was there), then measures in this process, rounds interleaved:
plain (every byte of the files into fresh memory by 16 MiB reads, one thread), load at tp 1, load with a manifest, load
of per-rank files, rank 0 of tp, and all ranks of tp at once as processes (ready before the clock starts; together they
want each byte once, as the plain read does). Medians of --rounds; `of_plain` is the rate against the plain read's.
--cold drops the files from the page cache before each (POSIX_FADV_DONTNEED).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path

import torch
from common import say
from laddertron.models.config.model_config import from_folder
from laddertron.models.stages import RankShard
from laddertron.models.weights.load import load
from laddertron.models.weights.manifest import NAME, make_manifest, write_manifest
from laddertron.models.weights.mapping import open_checkpoint, open_source
from laddertron.models.weights.rank_files import shards_folder
from laddertron.models.weights.shard_writer import write_shards
from laddertron.models.weights.slices import expected_shapes, plan_fills
from peers.model import write

CHUNK = 16 << 20
Case = AbstractContextManager[Callable[[], int]]
"""What is timed, between what is done before and afterwards."""


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
    aside = folder / "aside"
    shutil.rmtree(aside, ignore_errors=True)
    for ranks in (1, size):
        write_shards(open_checkpoint(folder, config), [RankShard(config, ranks, r) for r in range(ranks)], aside)

    @contextmanager
    def per_rank_file(ranks: int) -> Iterator[Callable[[], int]]:
        home = shards_folder(folder, ranks)
        (aside / home.name).rename(home)
        try:
            yield lambda: load_rank(folder, ranks, 0)
        finally:
            home.rename(aside / home.name)

    @contextmanager
    def verified() -> Iterator[Callable[[], int]]:
        write_manifest(folder, manifest)
        try:
            yield lambda: load_rank(folder, 1, 0)
        finally:
            (folder / NAME).unlink()

    @contextmanager
    def by_ranks() -> Iterator[Callable[[], int]]:
        context = get_context("spawn")
        ready = context.Barrier(size + 1)
        with context.Pool(size, ready.wait) as pool:
            ready.wait()
            yield lambda: sum(pool.starmap(load_rank, [(folder, size, rank) for rank in range(size)], 1))

    cases: dict[str, Callable[[], Case]] = {
        "plain": lambda: nullcontext(lambda: plain_read(folder)),
        "load tp1": lambda: nullcontext(lambda: load_rank(folder, 1, 0)),
        "load tp1, verified": verified,
        "load tp1, per-rank file": lambda: per_rank_file(1),
        f"load tp{size} rank 0": lambda: nullcontext(lambda: load_rank(folder, size, 0)),
        f"load tp{size} rank 0, per-rank file": lambda: per_rank_file(size),
        f"load tp{size}, all ranks": by_ranks,
    }
    if transformers:
        cases["transformers"] = lambda: nullcontext(lambda: with_transformers(folder))
    times: dict[str, list[float]] = {name: [] for name in cases}
    read: dict[str, int] = {}
    for _ in range(rounds):
        for name, prepare in cases.items():
            with prepare() as call:
                if cold:
                    drop_caches(folder)
                start = time.perf_counter()
                read[name] = call()
                times[name].append(time.perf_counter() - start)
    shutil.rmtree(aside)
    seconds = {name: statistics.median(took) for name, took in times.items()}
    rate = {name: read[name] / 1e9 / seconds[name] for name in cases}
    for name, value in rate.items():
        say(
            case=name, cache="cold" if cold else "warm", gb=round(read[name] / 1e9, 2), seconds=round(seconds[name], 3),
            gb_s=round(value, 2), of_plain=round(value / rate["plain"], 2),
        )  # fmt: skip


if __name__ == "__main__":
    main()
