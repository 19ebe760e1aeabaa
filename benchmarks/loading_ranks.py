"""Ranks that load weights, for loading.py: in this process, or each in one of its own, ready before the clock starts.

python loading_ranks.py FOLDER SIZE RANK      what Ranks starts
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from laddertron.models.config.model_config import from_folder
from laddertron.models.rank_shard import RankShard
from laddertron.models.weights.load import load
from laddertron.models.weights.mapping import open_source
from laddertron.models.weights.slices import expected_shapes, plan_fills


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
    shard = RankShard(from_folder(folder), size, rank)
    parameters = parameters_of(shard)
    load(open_source(folder, shard), shard, parameters, verify=(0, 1))
    return sum(p.numel() * 2 for p in parameters.values())


class Ranks:
    """Processes that are ready to load a rank each, all at once on `load`."""

    def __init__(self, folder: Path, size: int) -> None:
        words, pipe = [sys.executable, "-W", "ignore", __file__, str(folder), str(size)], subprocess.PIPE
        self.running = [
            subprocess.Popen([*words, str(rank)], stdin=pipe, stdout=pipe, text=True) for rank in range(size)
        ]
        self._said()

    def _said(self) -> list[str]:
        """The next line of each."""
        return [process.stdout.readline() for process in self.running if process.stdout is not None]

    def load(self) -> int:
        """Until each is through; returns the bytes of all their parameters."""
        for process in self.running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return sum(map(int, self._said()))

    def end(self) -> None:
        for process in self.running:
            process.communicate()


def be_a_rank(folder: Path, size: int, rank: int) -> None:
    print("ready", flush=True)
    if sys.stdin.readline():
        print(load_rank(folder, size, rank), flush=True)


if __name__ == "__main__":
    be_a_rank(Path(sys.argv[1]), *map(int, sys.argv[2:]))
