"""Ranks for the tests of the cluster: `python rank_cases.py CASE JSON` under an mpirun over its nodes. Rank 0 prints
one JSON object."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from laddertron.topology.comm.bootstrap import MpiBootstrap
from laddertron.topology.comm.collectives import CommunicationError
from laddertron.topology.comm.groups import CommOptions
from laddertron.topology.connect import connect
from laddertron.topology.hardware.interfaces import address_of
from laddertron.topology.placement.identity import identify
from laddertron.topology.placement.layout import GroupLayout
from laddertron.topology.placement.world import World


def layout_of(bootstrap: MpiBootstrap) -> tuple[GroupLayout, tuple[str, ...]]:
    me = identify()
    assert me is not None
    nodes = tuple(name.decode() for name in bootstrap.all_gather(me.node.encode()))
    return World(bootstrap.size).on(nodes).layout(0), nodes


def around_the_link() -> dict[str, int]:
    """What could carry bytes past the link: loopback's counter, and shared files."""
    loopback = sum(int(Path(f"/sys/class/net/lo/statistics/{way}_bytes").read_text()) for way in ("rx", "tx"))
    return {"loopback": loopback, "shm": len(os.listdir("/dev/shm"))}


def all_reduces(backend: Any, count: int, nbytes: int) -> dict[str, Any]:
    """`count` all-reduces of nbytes between nodes; raises if a sum is wrong."""
    bootstrap = MpiBootstrap()
    layout, nodes = layout_of(bootstrap)
    options = CommOptions(backend=backend, address=address_of("eth0"), process_groups=backend == "gloo")
    with connect(bootstrap, layout, options) as communicator:
        x = torch.empty(nbytes // 4)
        before, began = around_the_link(), time.monotonic()
        for call in range(count):
            x.fill_(bootstrap.rank + call)
            total = communicator.all_reduce.start(x).wait()
            right = call * bootstrap.size + sum(range(bootstrap.size))
            if not bool((total == right).all()):
                raise AssertionError(f"call {call}: {total[:4].tolist()} is not {right}")
        seconds = time.monotonic() - began
        after = around_the_link()
        told = bootstrap.all_gather(json.dumps([before, after]).encode())
    return {"nodes": nodes, "seconds": seconds, "around": [json.loads(t) for t in told]}


def until_broken(timeout_s: float) -> dict[str, Any]:
    """All-reduces until the group breaks; how long the last one took to say so."""
    bootstrap = MpiBootstrap()
    layout, _ = layout_of(bootstrap)
    options = CommOptions(address=address_of("eth0"), process_groups=False, timeout_s=timeout_s)
    communicator = connect(bootstrap, layout, options)
    x = torch.zeros(1024)
    if bootstrap.rank == 0:
        print(json.dumps({"ready": True}), flush=True)
    while True:
        began = time.monotonic()
        try:
            communicator.all_reduce.start(x).wait()
        except CommunicationError as error:
            return {"error": type(error).__name__, "words": str(error), "seconds": time.monotonic() - began}


CASES = {"all_reduces": all_reduces, "until_broken": until_broken}


def main() -> None:
    torch.set_num_threads(1)
    case: Any = CASES[sys.argv[1]]
    result = case(**json.loads(sys.argv[2]))
    me = identify()
    if me is not None and me.rank == 0:
        print(json.dumps(result), flush=True)
    if sys.argv[1] == "until_broken":
        os._exit(0)  # the peer is out of reach: MPI's own farewell would wait for it


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
