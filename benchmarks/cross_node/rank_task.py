"""What cross_node.py's rank programs share: who they are, how they speak, how they start and fail."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from laddertron.topology.comm.bootstrap import MpiBootstrap
from laddertron.topology.comm.groups import Communicator
from laddertron.topology.hardware.interfaces import address_of
from laddertron.topology.placement.identity import identify
from laddertron.topology.placement.layout import GroupLayout, observed_layout
from numpy.typing import NDArray

Spec = dict[str, Any]
Task = Callable[[Spec, MpiBootstrap, GroupLayout, str], None]


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def of_all(communicator: Communicator, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Every rank's values, [ranks, n]."""
    return np.ascontiguousarray(communicator.gather(values.view(np.uint8))).view(np.float64)


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
