"""Ranks that load weights, for loading.py: in this process, or each in one of its own, ready before the clock starts.

python loading_ranks.py FOLDER SIZE RANK PORT      what Ranks starts; PORT 0: every rank reads for itself
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import torch
from laddertron.models.config import from_folder
from laddertron.models.shard import Shard
from laddertron.models.weights import open_source
from laddertron.models.weights_exchange import Exchange
from laddertron.models.weights_load import load
from laddertron.models.weights_plan import expected_shapes, plan_fills
from laddertron.models.weights_shared import Spread
from laddertron.topology.bootstrap import StoreBootstrap, open_store
from laddertron.topology.groups import CommOptions, connect
from laddertron.topology.layout import GroupLayout
from laddertron.topology.point_to_point import across_nodes


def parameters_of(shard: Shard) -> dict[str, torch.Tensor]:
    """Empty ones, shaped as the fills say."""
    wanted = expected_shapes(shard.config)
    shapes: dict[str, tuple[int, ...]] = {}
    for fill in plan_fills(shard):
        if fill.tensor is not None:
            shape = wanted[fill.tensor]
            rows = max(fill.row + fill.count, shapes.get(fill.parameter, (0,))[0])
            shapes[fill.parameter] = (rows, fill.columns or shape[1]) if len(shape) == 2 else (rows,)
    return {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def load_rank(folder: Path, size: int, rank: int, exchange: Exchange | None = None) -> int:
    shard = Shard(from_folder(folder), size, rank)
    parameters = parameters_of(shard)
    load(open_source(folder, shard), shard, parameters, verify=(0, 1), exchange=exchange)
    return sum(p.numel() * 2 for p in parameters.values())


class Ranks:
    """Processes that are ready to load a rank each from its folder, all at once when told. port: in shares, meeting
    there."""

    def __init__(self, folders: list[Path], port: int = 0) -> None:
        words = [sys.executable, "-W", "ignore", __file__]
        size, pipe = str(len(folders)), subprocess.PIPE
        self.running = [
            subprocess.Popen([*words, str(folder), size, str(rank), str(port)], stdin=pipe, stdout=pipe, text=True)
            for rank, folder in enumerate(folders)
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


def be_a_rank(folder: Path, size: int, rank: int, port: int) -> None:
    def when_told(exchange: Exchange | None = None) -> None:
        print("ready", flush=True)
        if sys.stdin.readline():
            print(load_rank(folder, size, rank, exchange), flush=True)

    if not port:
        when_told()
        return
    bootstrap = StoreBootstrap(open_store("127.0.0.1", port, rank == 0), rank, size)
    layout = GroupLayout(tuple((r,) for r in range(size)))
    with connect(bootstrap, layout, CommOptions(timeout_s=600)) as communicator:
        link = across_nodes(communicator, 600.0)
        assert link is not None
        when_told(Exchange(link, Spread(size, 1), lambda sharing: sharing.columns))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


if __name__ == "__main__":
    be_a_rank(Path(sys.argv[1]), *map(int, sys.argv[2:]))
