"""Shared by cross_node.py's rank programs: identity, how they start and fail, models that take turns."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from bench_model import Size, make_model
from cluster.nodes import CONTROL, Control
from laddertron.models.llama import LlamaModel
from laddertron.topology.comm.bootstrap import MpiBootstrap
from laddertron.topology.comm.groups import CommOptions, Communicator
from laddertron.topology.connect import connect
from laddertron.topology.hardware.interfaces import address_of
from laddertron.topology.placement.identity import identify
from laddertron.topology.placement.layout import GroupLayout, observed_layout
from numpy.typing import NDArray
from variants import Driver, Variant, play

Spec = dict[str, Any]
Task = Callable[[Spec, MpiBootstrap, GroupLayout, str], None]


def of_all(communicator: Communicator, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Every rank's values, [ranks, n]."""
    return np.ascontiguousarray(communicator.gather(values.view(np.uint8))).view(np.float64)


def in_turns(
    make: Callable[[Spec, LlamaModel, Communicator], Iterable[Variant]],
    lead: Callable[[Spec, Size, list[Driver], Communicator, Control], None],
) -> Task:
    """Variants of one random model, of spec["size"] (bench_model.Size), and what rank 0 does with them."""

    def task(spec: Spec, bootstrap: MpiBootstrap, layout: GroupLayout, address: str) -> None:
        torch.set_grad_enabled(False)
        size = Size(**spec["size"])
        with connect(bootstrap, layout, CommOptions(address=address)) as communicator:
            variants = list(make(spec, make_model(size, communicator), communicator))

            def lead_variants() -> None:
                drivers = [Driver(variant, communicator) for variant in variants]
                lead(spec, size, drivers, communicator, Control(os.environ[CONTROL]))

            play(variants, communicator, lead_variants)

    return task


def be_rank(task: Task) -> None:
    """Runs the task with argv's JSON; a rank that fails leaves at once, and mpirun ends those that wait for it."""
    try:
        torch.set_num_threads(1)
        spec = json.loads(sys.argv[1])
        bootstrap = MpiBootstrap()
        me = identify()
        assert me is not None
        nodes = tuple(name.decode() for name in bootstrap.all_gather(me.node.encode()))
        task(spec, bootstrap, observed_layout(nodes, 0, bootstrap.size), address_of("eth0"))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
