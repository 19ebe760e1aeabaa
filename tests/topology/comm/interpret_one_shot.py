"""What test_one_shot.py starts with TRITON_INTERPRET=1: ranks are processes that share memory and run the kernel on
it. Prints one JSON object. Not a test module.

    interpret_one_shot.py RANKS CALLS SEED
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from laddertron.topology.comm import one_shot, symmetric
from laddertron.topology.comm.one_shot import REGION_BYTES, OneShot
from laddertron.topology.link_cost import ONE_SHOT_BYTES, in_two_shots
from triton.runtime import interpreter

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIVE_S = 120.0


def shared(ranks: int) -> list[torch.Tensor]:
    """A zeroed region for each rank, at one address in all processes that are forked."""
    return [torch.frombuffer(mmap.mmap(-1, REGION_BYTES), dtype=torch.uint8) for _ in range(ranks)]


def parts(ranks: int, count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    values = np.random.default_rng(seed).standard_normal((ranks, count), dtype=np.float32)
    return list(torch.from_numpy(values * 10).to(dtype))


def in_rank_order(given: list[torch.Tensor]) -> torch.Tensor:
    """The oracle. The interpreter cuts where it should round to bfloat16."""
    total = given[0].float()
    for other in given[1:]:
        total = total + other.float()
    if given[0].dtype == torch.bfloat16:
        total = (total.view(torch.int32) & -0x10000).view(torch.float32)
    return total.to(given[0].dtype)


def forked(ranks: list[int], work: Callable[[int], None]) -> bool:
    """Runs `work` in a process for each rank; whether all ended well. One that fails ends the others, who wait."""
    children = set()
    for rank in ranks:
        if (child := os.fork()) == 0:
            try:
                work(rank)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.add(child)
    well = True
    while children:
        child, status = os.wait()
        children.discard(child)
        if status and well:
            well = False
            for other in children:
                os.kill(other, signal.SIGKILL)
    return well


def delayed(dice: random.Random) -> None:
    """From now on the kernel's barriers take up to milliseconds: before a rank signals, and before it reads what a
    faster one would like to overwrite. Who waits leaves the processor to the others."""
    atomic = interpreter.InterpreterBuilder.create_atomic_rmw

    def barrier(*_: Any) -> None:
        if dice.random() < 0.3:
            time.sleep(dice.random() * 4e-3)

    def waits(*arguments: Any) -> Any:
        time.sleep(1e-4)
        return atomic(*arguments)

    interpreter.InterpreterBuilder.create_barrier = barrier
    interpreter.InterpreterBuilder.create_atomic_rmw = waits


def sizes(ranks: int, dice: random.Random, count: int) -> list[tuple[int, torch.dtype, bool]]:
    """(values, type, in two steps) of each call: mostly of one or two programs, some of all sixteen."""
    calls = []
    for _ in range(count):
        dtype = dice.choice(DTYPES)
        step = 16 * ranks
        most = 1 << (20 if dice.random() < 0.02 else dice.randint(9, 15))
        nbytes = step * dice.randint(1, max(1, most // step))
        calls.append((nbytes // dtype.itemsize, dtype, dice.random() < 0.4))
    for place, nbytes, in_two in ((0, ONE_SHOT_BYTES, False), (1, 1 << 20, False), (-1, ONE_SHOT_BYTES, True)):
        calls[place] = (nbytes // (16 * ranks) * 8 * ranks, torch.bfloat16, in_two)
    return calls


def sums(ranks: int, count: int, seed: int) -> bool:
    """Calls of any size and type, in one shot, in two, and as scatter and collect, one behind another: every rank has
    the oracle's bits; then the same call on the same memory, as a graph replays it."""
    regions, calls = shared(ranks), sizes(ranks, random.Random(seed), count)
    two = calls[0][0] * 2 if ranks > 2 else 0
    assert two == 0 or in_two_shots(two, ranks)
    vars(one_shot)["in_two_shots"] = lambda nbytes, ranks: nbytes == two or nbytes // (16 * ranks) % 3 == 0

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        delayed(random.Random(f"{seed} {rank}"))
        reduce = OneShot(rank, regions)
        for number, (values, dtype, in_two) in enumerate(calls):
            given = parts(ranks, values, dtype, seed + number)
            x = given[rank].clone()
            assert reduce.carries(x)
            if in_two:
                part = x.view(ranks, -1)[rank]
                reduce.scatter(x, part)
                reduce.collect(x, part)
            else:
                reduce(x)
            assert torch.equal(x.view(torch.uint8), in_rank_order(given).view(torch.uint8)), (number, values, dtype)
        x = torch.empty(4096, dtype=torch.bfloat16)
        for number in range(20):
            given = parts(ranks, len(x), x.dtype, number)
            x.copy_(given[rank])
            reduce(x)
            assert torch.equal(x, in_rank_order(given)), number
        assert reduce.missing() == []

    return forked(list(range(ranks)), work)


def checked(ranks: int) -> bool:
    """The check at the start finds nothing wrong."""
    regions, few, event = (
        shared(ranks),
        symmetric.checked_sizes(ranks)[:3],
        SimpleNamespace(record=int, query=lambda: True),
    )
    symmetric._EVENT, symmetric.checked_sizes = lambda: event, lambda ranks: few

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        delayed(random.Random(rank))
        assert symmetric.wrong_in_node(OneShot(rank, regions), ALIVE_S, True) == ""

    return forked(list(range(ranks)), work)


def across(ranks: int, seed: int) -> bool:
    """Two nodes of half the ranks each, gloo between them: the sum of the nodes' sums, on all ranks the same bits."""
    per_node, folder = ranks // 2, tempfile.mkdtemp()
    nodes = [shared(per_node) for _ in range(2)]

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        delayed(random.Random(f"{seed} {rank}"))
        make: Any = vars(dist)["FileStore"]  # torch leaves its stores without public types
        store, limit = make(f"{folder}/store", ranks), timedelta(seconds=ALIVE_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
        node, index = divmod(rank, per_node)
        rails = [dist.new_group([i, i + per_node]) for i in range(per_node)]
        levels = symmetric.DirectLevels(OneShot(index, nodes[node]), rails[index], lambda nbytes: True)
        for number in range(10):
            given = parts(ranks, 64 * per_node * (number + 1), torch.float32, seed + number)
            x = given[rank].clone()
            levels(x)
            assert torch.equal(x, in_rank_order(given[:per_node]) + in_rank_order(given[per_node:])), number
        dist.destroy_process_group()

    try:
        return forked(list(range(ranks)), work)
    finally:
        shutil.rmtree(folder)


def absent(ranks: int) -> bool:
    """The last rank never comes: the others wait until they are told to stop, have no sums, and know who it was."""
    regions = shared(ranks)

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        reduce, x = OneShot(rank, regions), torch.ones(64 * ranks)
        waiting = threading.Thread(target=reduce, args=(x,), daemon=True)
        waiting.start()
        arrived, until = regions[rank][: 8 * ranks].view(torch.int64), time.monotonic() + ALIVE_S
        while int(arrived[:-1].min()) == 0 and time.monotonic() < until:
            time.sleep(1e-3)
        assert arrived.bool().tolist() == [True] * (ranks - 1) + [False]
        assert waiting.is_alive()
        assert not x.isnan().any()
        reduce.abort()
        waiting.join(ALIVE_S)
        assert not waiting.is_alive()
        assert x.isnan().all()
        assert reduce.missing() == [ranks - 1]
        for gathers in (False, True):
            x.fill_(1.0)
            if gathers:
                reduce.collect(x, x.view(ranks, -1)[rank])
            else:
                reduce(x)
            assert x.isnan().all()

    return forked(list(range(ranks - 1)), work)


if __name__ == "__main__":
    ranks, count, seed = map(int, sys.argv[1:])
    done = {"sums": sums(ranks, count, seed), "absent": absent(ranks), "checked": checked(ranks)}
    print(json.dumps(done | {"across": ranks in (2, 3) or across(ranks, seed)}))
