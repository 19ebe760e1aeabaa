"""What runs on ranks that load as if on several nodes, in shares: beside a load that each does alone, with faults, and
through the whole engine. Arguments and results are JSON (tests/rank_pool.py)."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engine_cases import build_on, deployment, forward_all
from laddertron.engine import loading
from laddertron.models import weights_shared
from laddertron.models.config import from_folder
from laddertron.models.readers import FP8, Reader
from laddertron.models.shard import Shard
from laddertron.models.weights import Source, open_source
from laddertron.models.weights_exchange import Exchange
from laddertron.models.weights_load import load
from laddertron.models.weights_once import Rates
from laddertron.models.weights_shared import Spread
from laddertron.topology import filesystem
from laddertron.topology.filesystem import Seen
from laddertron.topology.groups import CommOptions, Communicator
from laddertron.topology.point_to_point import across_nodes
from rank_pool import Rank
from waiting import FOR_EVER_S
from weights_cases import shapes

FAULTS = ("cut", "flip", "module", "end")


def parameters_of(
    source: Source, shard: Shard, dtype: str | None, replicate: bool, kept: frozenset[str]
) -> dict[str, torch.Tensor]:
    """A rank's parameters with every bit set, as no weight here has it."""
    chosen = getattr(torch, dtype or shard.config.dtype)
    made: dict[str, torch.Tensor] = {}
    for name, shape in shapes(shard, replicate).items():
        whole = name.removesuffix(".weight") in kept
        made[name] = torch.empty(shape, dtype=FP8 if whole else chosen)
        if whole:
            made[f"{name}_scale"] = torch.empty(shape[0])
    for parameter in made.values():
        parameter.view(-1).view(torch.uint8).fill_(255)
    return made


def exchange_over(communicator: Communicator) -> Exchange:
    """Everything that can be is read in shares."""
    link = across_nodes(communicator, FOR_EVER_S)
    assert link is not None
    layout = communicator.layout
    return Exchange(link, Spread(len(layout.nodes), layout.per_node), lambda sharing: True)


@contextmanager
def rounds_of(size: int) -> Iterator[None]:
    """Rounds of about so many bytes: several even of small tensors."""
    before, weights_shared.ROUND_BYTES = weights_shared.ROUND_BYTES, size
    try:
        yield
    finally:
        weights_shared.ROUND_BYTES = before


@contextmanager
def watched() -> Iterator[list[tuple[str, int, int, int, int]]]:
    """What Readers take out of files: tensor, rows and columns, both as [begin, end). Scales, read whole, are not
    listed."""
    seen: list[tuple[str, int, int, int, int]] = []
    read, columns = Reader.read, Reader.columns

    def noted_read(self: Reader, stored: Any, row: int, column: int, target: torch.Tensor, scale: Any = None) -> None:
        seen.append((stored.name, row, row + len(target), column, column + (target.shape[1] if target.ndim > 1 else 1)))
        read(self, stored, row, column, target, scale)

    def noted_columns(self: Reader, stored: Any, row: int, count: int, wanted: Any) -> list[torch.Tensor]:
        seen.extend((stored.name, row, row + count, at, at + n) for at, n in set(wanted))
        return columns(self, stored, row, count, wanted)

    Reader.read, Reader.columns = noted_read, noted_columns  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Reader.read, Reader.columns = read, columns  # type: ignore[method-assign]


def both_ways(
    rank: Rank,
    folder: str,
    per_node: int,
    dtype: str | None = None,
    replicate: bool = False,
    keeps_fp8: bool = False,
) -> dict[str, Any]:
    """Loads alone and in shares: the parameters that differ in a bit, who took what out of the files, how many bytes
    that were, and the modules in the order in which they were ready."""
    torch.set_num_threads(1)
    c = from_folder(Path(folder))
    shard = Shard(c, rank.size, rank.rank)
    source = open_source(Path(folder), shard)
    kept = source.kept_fp8(c) if keeps_fp8 else frozenset()
    alone, shared = (parameters_of(source, shard, dtype, replicate, kept) for _ in range(2))
    how: dict[str, Any] = {"replicate_embedding": replicate, "kept": kept}
    once = load(source, shard, alone, verify=(0, 1), **how)
    modules: list[str] = []
    with rank.connect(per_node) as communicator, rounds_of(600), watched() as seen:
        took = load(source, shard, shared, exchange=exchange_over(communicator), on_module=modules.append, **how)
    bits = {name: (alone[name].view(-1).view(torch.uint8), p.view(-1).view(torch.uint8)) for name, p in shared.items()}
    return {
        "differ": [name for name, (a, b) in bits.items() if not torch.equal(a, b)],
        "seen": seen,
        "modules": modules,
        "alone": once.read,
        "read": took.read,
        "sent": took.sent,
        "received": took.received,
    }


def with_fault(rank: Rank, folders: list[str], per_node: int, fault: str) -> dict[str, Any]:
    """Each rank loads in shares from a folder of its own, and the last one meets a fault (of FAULTS; "flip" is in its
    folder). What each ends with, a collective behind the load included, and how long that took."""
    torch.set_num_threads(1)
    folder, last = Path(folders[rank.rank]), rank.rank == rank.size - 1
    shard = Shard(from_folder(folder), rank.size, rank.rank)
    source = open_source(folder, shard)
    parameters = parameters_of(source, shard, None, False, frozenset())

    def on_module(module: str) -> None:
        if last and module == "layers.1" and fault == "module":
            raise MemoryError("no room for layers.1")
        if last and module == "layers.1" and fault == "end":
            os._exit(1)

    if last and fault == "cut":
        stored = source.tensors["model.layers.1.self_attn.o_proj.weight"]
        with stored.file.open("r+b") as stream:
            stream.truncate(stored.begin + 100)
    began, error = time.monotonic(), None
    try:
        with rank.connect(per_node, CommOptions(timeout_s=FOR_EVER_S)) as communicator, rounds_of(600):
            load(source, shard, parameters, exchange=exchange_over(communicator), on_module=on_module)
            communicator.gather(torch.zeros(1, dtype=torch.uint8).numpy())
    except Exception as fault_:
        if fault == "end":
            raise
        error = fault_
    took = time.monotonic() - began
    return {"error": type(error).__name__, "said": str(error), "seconds": took}


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def built(
    rank: Rank,
    folders: list[str],
    per_node: int,
    model: dict[str, Any],
    prompts: list[list[int]],
    rates: list[float] | None = None,
) -> dict[str, Any]:
    """A whole engine on nodes: a digest of its logits, and what rank 0 logs of its weights. rates: as if the nodes were
    machines of their own with one file server, and this were measured."""
    listener, log = _Listener(), logging.getLogger("laddertron.engine.build")
    level, look, measure = log.level, filesystem.look, loading.measure
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    if rates is not None:
        node = bytes([rank.rank // per_node]) * 16
        filesystem.look = lambda files, sysfs: Seen(node, bytes(16), True)
        loading.measure = lambda *arguments: Rates(*rates)
    try:
        with rank.connect(per_node, CommOptions(timeout_s=20)) as communicator, rounds_of(600):
            engine = build_on(rank, deployment(folders[rank.rank], rank.size, model), communicator)
            bits = forward_all(engine, prompts).contiguous().numpy().tobytes()
    finally:
        log.removeHandler(listener)
        log.setLevel(level)
        filesystem.look, loading.measure = look, measure
    lines = [line for line in listener.lines if line.startswith("weights")]
    return {"logits": hashlib.sha256(bits).hexdigest(), "lines": lines}


def measured(rank: Rank, folder: str, per_node: int) -> list[float]:
    """What engine/loading.py finds out about storage and links."""
    source = open_source(Path(folder), Shard(from_folder(Path(folder)), rank.size, rank.rank))
    with rank.connect(per_node) as communicator:
        exchange = exchange_over(communicator)
        rates = loading.measure(source, communicator, exchange.link, exchange.spread)
    return [rates.storage_bytes_per_s, rates.link_bytes_per_s, rates.latency_s]
