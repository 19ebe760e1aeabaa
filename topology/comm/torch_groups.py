"""The torch groups of one tensor-parallel group, made by Megatron-core's HyperCommGrid. Each replica is a torch world
numbered by tensor-parallel index, stage by stage, so that replicas may have different placements.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from ipaddress import ip_address
from typing import Any

import torch.distributed as dist

from ..hardware.interfaces import interface_of
from ..placement.layout import GroupLayout
from .bootstrap import Bootstrap, store_at
from .groups import CommOptions, TorchGroups

_BARE = "laddertron_bare"


def make_torch_groups(
    bootstrap: Bootstrap,
    layout: GroupLayout,
    options: CommOptions,
    backend: str,
    two_levels: bool,
    stages: Sequence[GroupLayout] = (),
) -> TorchGroups:
    """All ranks of the job call it at once. `stages`: of the pipeline that the group is one of, which share a world.
    torch.distributed is initialised if necessary, and then ended with the groups. `two_levels`: some messages go so,
    for which gloo needs a second group of the node. Raises ValueError."""
    world = tuple(rank for stage in stages or (layout,) for rank in stage.ranks)
    index = world.index(bootstrap.rank)
    kind = "nccl" if backend == "nccl" else "gloo"
    wait = timedelta(seconds=options.connect_timeout_s)
    axes = {"intra": layout.per_node, "rail": len(layout.nodes)}  # ranks count along the first axis first
    every = axes | ({"stages": len(stages)} if len(stages) > 1 else {})
    mine, store = not dist.is_initialized(), None
    if kind == "nccl":
        # Else torch's watchdog ends a process whose collective failed, before anybody could be named (nccl.DeviceWait).
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    if mine:
        store = _open_world(bootstrap, world, options, index, wait)
    elif (dist.get_rank(), dist.get_world_size()) != (index, len(world)):
        raise ValueError(
            f"torch.distributed was initialised before, as rank {dist.get_rank()} of {dist.get_world_size()}; this is "
            f"rank {index} of a replica of {len(world)}: destroy that process group first"
        )
    try:
        # gloo takes its interface from the environment alone, the grid believes a stray WORLD_SIZE.
        with environment(**_gloo_interface(options.address), WORLD_SIZE=str(len(world))):
            grid = hyper_comm_grid()(list(every.values()), list(every), backend=kind)
            # One group for the same ranks: each has connections and, of gloo, a thread that wakes 100 times a second.
            tp = grid.create_pg(list(axes), timeout=wait)
            subgroups = {
                axis: tp if ranks == layout.size else grid.create_pg(axis, timeout=wait)
                for axis, ranks in axes.items()
                if ranks > 1
            }
            if backend == "gloo" and two_levels and len(subgroups) == 2:
                again = hyper_comm_grid()(list(every.values()), list(every), backend=kind)  # a grid makes a group once
                subgroups["gather"] = again.create_pg("intra", timeout=wait)
            if kind == "nccl" and len(stages) > 1:
                subgroups["stages"] = grid.create_pg("stages", timeout=wait)
        bootstrap.all_gather(b"")  # gloo cannot connect to a peer that has already exited
    except BaseException:
        if mine:
            dist.destroy_process_group()
        raise
    return TorchGroups(tp, subgroups, dist.destroy_process_group if mine else lambda: None, store)


def _gloo_interface(address: str) -> dict[str, str]:
    """The variable by which gloo takes the interface of an address. Of a host whose own address is on no link (but on
    lo, announced over several), gloo would take 127.0.0.1: there it takes the address of the hostname."""
    interface = interface_of(address)
    announced = interface == interface_of("127.0.0.1") and not ip_address(address).is_loopback
    return {} if announced else {"GLOO_SOCKET_IFNAME": interface}


@cache
def hyper_comm_grid() -> Any:
    """The class HyperCommGrid. Its file needs einops and torch alone and is loaded by itself: importing megatron.core
    imports all of it, 2.8 s and 137 MB in every rank."""
    name = "megatron.core.hyper_comm_grid"
    if "megatron.core" in sys.modules:
        from megatron.core.hyper_comm_grid import HyperCommGrid

        return HyperCommGrid
    package = find_spec("megatron")
    folders = [] if package is None else [f"{path}/core" for path in package.submodule_search_locations or ()]
    spec = PathFinder.find_spec(name, folders)
    if spec is None or spec.loader is None:
        raise ImportError("no megatron/core/hyper_comm_grid.py: install megatron-core 0.16 (pip install -e .)")
    module = module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # absl is not installed
        spec.loader.exec_module(module)
    return module.HyperCommGrid


class _Bare(dist.ProcessGroup):
    """The world's own group: it knows rank and size and opens no connection, as nothing is sent through it. A class of
    its own, since torch asks plain ones for a backend when they end, and warns of its absence on every rank."""


def _open_world(bootstrap: Bootstrap, world: tuple[int, ...], options: CommOptions, index: int, wait: timedelta) -> Any:
    if _BARE not in dist.Backend.backend_list:
        bare: Any = _Bare  # torch's types name the constructor with a store, which a subclass cannot use
        dist.Backend.register_backend(
            _BARE, lambda store, rank, size, timeout: bare(rank, size), devices=["cpu", "cuda"]
        )
    store = store_at(bootstrap, world[0], options.address, options.connect_timeout_s, options.ports)
    dist.init_process_group(_BARE, store=store, rank=index, world_size=len(world), timeout=wait)
    return store


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
