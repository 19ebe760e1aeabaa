"""`python -m laddertron.tools.bench.bench_rank DEPLOYMENT.json`: a rank that measures on demand, for
launchers/measure/rank_job.py. Rank 0 reads orders from its standard input and prints answers, one JSON object a line;
"end" or the end of its input, which not every mpirun passes on, ends the job. Ranks sleep between orders, so that
several such jobs can take turns.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ...engine.schedule.scheduler import Scheduler
from ...engine.step.engine import Engine, StepProgress, follow
from ...launchers.measure.answers import say
from ...launchers.measure.rank_work import main
from ...topology.comm.groups import Communicator
from ...topology.comm.ledger import Entry, without_carriers
from ...topology.hardware.cpu_quota import usable_cpus
from ...topology.hardware.sysfs import Sysfs, resident_bytes
from .bench import Case, Item, random_mix, run_case, run_mix

LEAST_READ, MOST_READ = 256 << 20, 1 << 30
"""Bytes that a reading of the floor goes through."""
COPIES = 16


_DRAFTS = {"drafted": "draft", "accepted": "accepted"}


class Bench:
    """Rank 0's answers to orders."""

    def __init__(self, built: Any, communicator: Communicator, in_use: list[int]) -> None:
        """in_use: bytes of each rank's memory in use after loading."""
        self.built, self.communicator, self.in_use = built, communicator, in_use
        self.engine = Engine(Scheduler(built.scheduler_limits), built.runner, communicator.plans, StepProgress())
        self.seed = 0
        self.about = self._describe()

    def _describe(self) -> dict[str, Any]:
        """The job's description for the parent, with the bytes that a step must read on all ranks together."""
        model, cache, config = self.built.runner.model, self.built.runner.cache, self.built.config
        shard, item = model.shard, cache.keys[0].element_size()
        per_token = shard.cached_elements * item * shard.size
        return {
            "ready": True,
            "weights": self._weights,
            "experts": expert_bytes(config, model.dtype.itemsize),
            "kv_per_token": per_token,
            "rank_bytes": self.in_use,
            "wiring": config.wiring.name,
            "tp": self.communicator.size,
            "nodes": len(self.communicator.layout.nodes),
            "microbatches": self.built.scheduler_limits.microbatches,
            "backend": self.communicator.backend,
            "ops": model.ops.name,
            "speculation": self.built.scheduler_limits.speculation is not None,
            "max_num_seqs": self.built.limits.max_num_seqs,
            "max_model_len": self.built.limits.max_model_len,
        }

    def ask(self, kind: str, **order: Any) -> dict[str, Any]:
        self.seed += 1
        before = communication(self.communicator.ledger.entries())
        match kind:
            case "floor":
                device, per_node = self.built.runner.device, self.communicator.size // order["nodes"]
                if device.type == "cuda":
                    return {"floor": per_node * copy_bandwidth(device, LEAST_READ)}
                return {"floor": read_floor(self._weights // order["nodes"])}
            case "case":
                case = Case(order["batch"], order["prompt"], order["generate"])
                timing = dataclasses.asdict(run_case(self.engine, case, self._vocab, self.seed))
            case "mix":
                drafts_before = self._drafts()
                timing = dataclasses.asdict(run_mix(self.engine, self._items(order), str(self.seed)))
                timing |= {name: count - drafts_before[name] for name, count in self._drafts().items()}
            case other:
                raise ValueError(f"unknown order {other!r}")
        after = communication(self.communicator.ledger.entries())
        hidden, exposed = (now - then for now, then in zip(after, before, strict=True))
        return timing | {"hidden_s": hidden, "exposed_s": exposed}

    def _drafts(self) -> dict[str, float]:
        counted = self.engine.scheduler.snapshot()
        return {name: counted[f"spec_decode_num_{kind}_tokens_total"] for name, kind in _DRAFTS.items()}

    def _items(self, order: dict[str, Any]) -> list[Item]:
        if "items" in order:
            return [Item(tuple(prompt), generate, at) for prompt, generate, at in order["items"]]
        low_high = tuple(order["prompt"]), tuple(order["generate"])
        return random_mix(order["count"], *low_high, order["rate"], self._vocab, order["seed"])

    @property
    def _weights(self) -> int:
        return matmul_bytes(self.built.config, self.built.runner.model.dtype.itemsize)

    @property
    def _vocab(self) -> int:
        return int(self.built.config.vocab_size)


def communication(entries: Iterable[Entry]) -> tuple[float, float]:
    """Seconds of all-reduces hidden and exposed."""
    listed = [e for e in without_carriers(entries) if e.op == "all_reduce"]
    return sum(e.hidden_s for e in listed), sum(e.waited_s for e in listed)


def matmul_bytes(config: Any, item: int) -> int:
    """Bytes of the weights that a decode step multiplies by: all but the embedding table that is only looked up in."""
    table = config.vocab_size * config.hidden_size
    looked_up = 0 if config.tied_embeddings else table
    return int((config.num_parameters - looked_up) * item)


def expert_bytes(config: Any, item: int) -> tuple[int, int, float] | None:
    """Bytes of all experts, how many a layer has, and how many of them a token goes through; None without any."""
    if (e := config.experts) is None:
        return None
    return sum(e.layers) * e.count * 3 * config.hidden_size * e.ffn_size * item, e.count, e.chosen * e.count / e.routed


def read_floor(size: int) -> float | None:
    """Bytes a second that all of this node's cores together read, even if a rank has fewer: of about `size` bytes, its
    weights', since a last-level cache may hold a share of those."""
    import torch

    from ...models.cpu.kernels import read_bandwidth

    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cpus())
    try:
        return read_bandwidth(min(max(size, LEAST_READ), MOST_READ))
    finally:
        torch.set_num_threads(threads)


def copy_bandwidth(device: Any, size: int) -> float:
    """Bytes a second of copies of `size` bytes within a device's memory, read and written ones together: the best of
    twelve rounds."""
    import torch

    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(12):
        wait_for(device)
        began = time.perf_counter()
        for _ in range(COPIES):
            target.copy_(source)
        wait_for(device)
        best = min(best, time.perf_counter() - began)
    return 2 * COPIES * size / best


def wait_for(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _lead(bench: Bench) -> None:
    say(bench.about)
    for order in map(json.loads, sys.stdin):
        if order["kind"] == "end":
            break
        say(bench.ask(**order))


def held_bytes(device: Any) -> int:
    """Bytes in use on a rank's GPU, or the resident memory of its process on a CPU."""
    import torch

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return resident_bytes(Sysfs())


def bench(built: Any, communicator: Communicator, lead: Callable[[Bench], None]) -> None:
    """Every rank of a loaded group calls it: rank 0 leads, the others follow until it returns."""
    in_use = communicator.collect(str(held_bytes(built.runner.cache.keys[0].device)).encode())
    if not communicator.leads:
        follow(built.runner, communicator.plans, StepProgress())
        return
    leader = Bench(built, communicator, [int(size) for size in in_use])
    try:
        lead(leader)
    finally:
        leader.engine.close()


if __name__ == "__main__":
    sys.exit(main(partial(bench, lead=_lead)))
