"""launch.share_gpu: several ranks on one GPU, as nodes of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laddertron.engine.config.schema import Deployment, LaunchConfig, ModelSection, ParallelConfig
from laddertron.engine.step import kv_capacity
from laddertron.launchers.rank.shared_gpu import gpu_index, node_names, separate
from laddertron.topology.placement.identity import Identity
from laddertron.topology.placement.mapping import MappingError


def test_each_rank_is_a_host_to_nccl() -> None:
    """Else NCCL refuses a second rank on the GPU; what the user has set stays, but for the id."""
    environs = [{"NCCL_NET": "IB", "NCCL_HOSTID": "one"}, dict[str, str]()]
    for rank, environ in enumerate(environs):
        separate(Identity(2, rank, rank, 2, "box", "openmpi"), environ)
    assert [environ["NCCL_HOSTID"] for environ in environs] == ["box-0", "box-1"]
    assert [environ["NCCL_NET"] for environ in environs] == ["IB", "Socket"]
    assert environs[1]["NCCL_SOCKET_IFNAME"] == "=lo"
    assert environs[1]["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"


def test_nodes_are_groups_of_ranks() -> None:
    hosts = ["box"] * 4
    assert node_names(LaunchConfig(), hosts) == ("box",) * 4
    assert len(set(node_names(LaunchConfig(share_gpu=True), hosts))) == 4
    pairs = node_names(LaunchConfig(share_gpu=True, ranks_per_node=2), hosts)
    assert pairs[0] == pairs[1] != pairs[2] == pairs[3]
    with pytest.raises(MappingError, match=r"on box, other: start all of them on one host"):
        node_names(LaunchConfig(share_gpu=True), ["box", "other"])


def test_which_gpu_a_rank_has() -> None:
    assert [gpu_index(rank, 2, True) for rank in range(5)] == [0, 1, 0, 1, 0]
    assert [gpu_index(rank, 2, False) for rank in range(3)] == [0, 1, None]
    assert gpu_index(0, 0, True) is None


def test_ranks_on_one_gpu_have_equal_shares_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    properties: Any = lambda device: type("Properties", (), {"total_memory": 80})  # noqa: E731
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 80))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    parallel = ParallelConfig(tensor_parallel_size=4, pipeline_parallel_size=2)
    alone = Deployment(ModelSection("m"), parallel=parallel)
    shared = Deployment(ModelSection("m"), parallel=parallel, launch=LaunchConfig(share_gpu=True))
    cuda = torch.device("cuda")
    assert kv_capacity.sharers(alone, cuda) == kv_capacity.sharers(shared, torch.device("cpu")) == 1
    assert (share := kv_capacity.sharers(shared, cuda)) == 4
    assert (kv_capacity.available_bytes(cuda, share), kv_capacity.total_bytes(cuda, share)) == (15, 20)
