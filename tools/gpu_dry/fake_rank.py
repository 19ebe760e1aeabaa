"""A rank of a case on the FakeGpu: a checkpoint of its shapes without bytes, a group whose peers send nothing, and the
engine's own build. `install` of stand_ins.py comes first."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import laddertron.engine.step.build as _build
import numpy as np
import stream_order
import torch
import torch.distributed as dist
from cases import Case
from fake_gpu import DEVICE, FakeGpu
from laddertron.engine.batch import decode
from laddertron.engine.config.schema import Deployment, EngineConfig, ModelSection, ParallelConfig
from laddertron.engine.step import cuda_graphs
from laddertron.models import attention_choice
from laddertron.models.config.dialects import dialect_of, stock_json, to_dialect
from laddertron.models.config.known_models import known, published_fp8
from laddertron.models.config.model_config import ModelConfig, from_folder, make_wiring
from laddertron.models.config.quantisation import Quantisation, read_quantisation
from laddertron.models.stages import RankShard, predictor_stage
from laddertron.models.weights import tensor_reader
from laddertron.models.weights.checkpoint import StoredTensor
from laddertron.models.weights.parallel_reader import Readers
from laddertron.models.weights.quantised import is_scale
from laddertron.models.weights.slices import PRODUCTS, expected_shapes, fused_experts, sources_of
from laddertron.topology.comm.collectives import Alone, AloneGather, Gathering
from laddertron.topology.comm.groups import Communicator, TorchGroups
from laddertron.topology.comm.ledger import Ledger
from laddertron.topology.comm.lines import Lines
from laddertron.topology.comm.nccl import DeviceWait, NcclGather, Roll, nccl_collective
from laddertron.topology.comm.nccl_boundary import NcclBoundary
from laddertron.topology.comm.one_shot import REGION_BYTES, OneShot
from laddertron.topology.comm.pipeline import RING, Pipeline
from laddertron.topology.comm.symmetric import DirectLevels
from laddertron.topology.comm.two_level import TwoLevel
from laddertron.topology.placement.layout import GroupLayout
from torch.testing._internal.distributed.fake_pg import FakeStore

builder: Any = _build
_Stored = tuple[str, str, tuple[int, ...]]
"""A tensor's name, type and shape."""
BATCHED = 4096
_SIZES = {"BF16": 2, "F8_E4M3": 1, "F32": 4, "I32": 4, "U8": 1}


def config_json(case: Case) -> dict[str, Any]:
    if case.words:
        return dict(case.words)
    wiring = make_wiring(case.wiring, case.layers)
    declares = wiring.name != "standard"
    config = replace(known(case.model), num_layers=case.layers, wiring=wiring, declares_wiring=declares)
    fields = to_dialect(config, stock_json(config, {}), dialect_of(config))
    how = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    return {**fields, "quantization_config": how} if case.fp8 else fields


def write_checkpoint(folder: Path, case: Case) -> Path:
    """config.json and one safetensors file of the true shapes, sparse: it has a header and no data."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_json(case)))
    config = from_folder(folder)
    kinds: dict[str, str] = {}
    quantisation = read_quantisation(folder)
    block = None if quantisation is None else quantisation.block
    if quantisation is not None and quantisation.code != "e4m3":
        return _write(folder, _with_codes(config, quantisation))
    if block is not None:
        kinds = {
            name: "F8_E4M3"
            for name in expected_shapes(config)
            if name.endswith("_proj.weight") and "indexer" not in name
        }
    elif case.fp8:
        wide = published_fp8(case.model)
        wide_layers = (*wide[: case.layers - 1], wide[-1])  # the first layer and the last one keep more
        for layer in range(case.layers):
            for product in set(PRODUCTS) - set(wide_layers[layer]):
                kinds |= dict.fromkeys(sources_of(RankShard(config, 1, 0), layer, product), "F8_E4M3")
    predictor = predictor_stage(config, embeds=False) if case.engine.get("speculation") == "mtp" else None
    stored = list[_Stored]()
    for name, shape in expected_shapes(config, predictor).items():
        kind = kinds.get(name, "BF16")
        stored.append((name, kind, shape))
        if kind == "F8_E4M3":
            scales = (
                (shape[0], 1) if block is None else tuple(-(-n // size) for n, size in zip(shape, block, strict=True))
            )
            stored.append((f"{name}_scale", "F32", scales))
    return _write(folder, stored)


def _with_codes(config: ModelConfig, q: Quantisation) -> Iterator[_Stored]:
    """The tensors of a model whose experts alone have 4-bit codes, as Kimi's and gpt-oss's."""
    expected, group = expected_shapes(config), q.block[1] if q.block else 1
    if q.method == "mxfp4":
        for fused, names, (columns, *rows) in fused_experts(config):
            if rows:
                groups = (len(names), *rows, columns // group)
                yield from ((f"{fused}_blocks", "U8", (*groups, group // 2)), (f"{fused}_scales", "U8", groups))
                for (name,) in names:
                    del expected[name]
    for name, shape in expected.items():
        if q.method == "mxfp4" or ".experts." not in name:
            yield name, "BF16", shape
            continue
        yield f"{name}_packed", "I32", (shape[0], shape[1] // 8)
        yield f"{name}_scale", "BF16", (shape[0], shape[1] // group)


def _write(folder: Path, stored: Iterable[_Stored]) -> Path:
    tensors, at = {}, 0
    for name, dtype, dims in stored:
        end = at + int(np.prod(dims)) * _SIZES[dtype]
        tensors[name] = {"dtype": dtype, "shape": dims, "data_offsets": [at, end]}
        at = end
    header = json.dumps(tensors).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + at)
    return folder


def deployment_of(case: Case, folder: Path) -> Deployment:
    sizes = {"tensor_parallel_size": case.tp, "pipeline_parallel_size": case.stages}
    return Deployment(
        ModelSection(str(folder), max_model_len=case.length),
        parallel=ParallelConfig(**{**sizes, "backend": "nccl", **case.parallel}),
        engine=EngineConfig(
            **{"device": "cuda", "max_num_seqs": 256, "max_num_batched_tokens": BATCHED, **case.engine}
        ),
    )


class _Gather(NcclGather):
    """The host finds its own bytes in every rank's place."""

    def start(self, payload: Any) -> Gathering:
        under_way = super().start(payload)

        def finish() -> Any:
            return np.tile(np.ascontiguousarray(payload, np.uint8), (len(under_way.wait()), 1))

        return Gathering(finish)


class _Wait(DeviceWait):
    """Counted as what it is; on this device every event has happened."""

    def __init__(self, gpu: FakeGpu, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._gpu = gpu

    def __call__(self, event: Any | None, what: str) -> None:
        super().__call__(event, what)
        self._gpu.note("wait", f"the {what}", refused=True)


class Plans:
    """PlanChannel of rank 0; `others`: what runs a plan elsewhere; `steps`: the plans with chunks that were sent."""

    def __init__(self) -> None:
        self.others: list[Callable[[Any], Any]] = []
        self.steps = 0

    def send(self, frame: bytes) -> None:
        self.steps += bool(decode(frame).chunks)
        for run in self.others:
            run(decode(frame))

    def close(self) -> None: ...


class _Pipeline(Pipeline):
    def least(self, value: int) -> int:
        return value


def communicator(gpu: FakeGpu, case: Case, rank: int, stage: int, ring: Any, plans: Plans) -> Communicator:
    """Makes the communicator of `rank` in the case's group, which is stage `stage`. ring: this end of the line between
    the first and last stages."""
    per_node, nodes = case.tp // case.nodes, range(case.nodes)
    layout = GroupLayout(tuple(tuple(range(n * per_node, (n + 1) * per_node)) for n in nodes))
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.tp)
    tp, ledger = dist.group.WORLD, Ledger()
    ways: list[TwoLevel] = []
    intra = rail = None
    if case.nodes > 1 and case.strategy != "flat":
        intra, rail = ([dist.new_group(list(ranks)) for ranks in cut] for cut in (layout.nodes, layout.rails))
        intra, rail = intra[rank // per_node], rail[rank % per_node]
    if case.strategy == "two_level":
        ways.append(TwoLevel(intra, rail, lambda size: size > 40_000))
    elif case.strategy == "one_shot":
        regions = [torch.zeros(REGION_BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(per_node)]
        ways.append(DirectLevels(OneShot(rank % per_node, regions), rail, lambda size: True))
    pipeline = None
    if case.stages > 1:
        lines = Lines({RING: ring}, lambda line: "the other stage is gone", "stage")
        pipeline = _Pipeline(stage, case.stages, [-1, -1, 0], lines, ledger)
        line: Any = stream_order.NcclGroup(gpu.order, stage, case.stages)
        pipeline.boundary = NcclBoundary(line, tp, ledger)
    deterministic = case.parallel.get("deterministic", False)
    sender: Any = plans
    wait = _Wait(gpu, [tp], ledger, [60.0], Roll(None, rank, ["host"] * case.tp))
    alone = case.tp == 1
    reduce: Any = Alone() if alone else nccl_collective(tp, ledger, "net", deterministic, ways)
    node_reduce: Any = None
    if case.parallel.get("dense_path") == "node":
        inside = [dist.new_group(list(node)) for node in layout.nodes]
        node_reduce = nccl_collective(inside[rank // per_node], ledger, "node")
    gathers: Any = AloneGather() if alone else _Gather(tp, ledger, wait)
    return Communicator(
        rank, layout, "nccl", reduce, gathers, sender, ledger, TorchGroups(tp), [], lambda seconds: None,
        pipeline, node_reduce,
    )  # fmt: skip


@dataclass
class Memory:
    """Bytes at the peak of loading above what stays, of the attention's buffers, and of recorded steps."""

    loading: int = 0
    attention: int = 0
    recorded: int = 0


def _in_this_thread(readers: Readers, pieces: Iterable[Any], read: Callable[[Any, Any], None]) -> Iterator[Any]:
    for piece in pieces:
        readers._read(read, piece)
        yield piece


def _read_none(reader: Any, stored: StoredTensor, at: int, target: torch.Tensor) -> None:
    """Reads no bytes. Scales, which loading checks, are small numbers above 0 in every type."""
    if is_scale(stored.name):
        target.fill_(1)


def build(gpu: FakeGpu, deployment: Deployment, group: Communicator, memory: Memory, late: bool = False) -> Any:
    """engine/step/build.py's, with what it allocates noted; of the checkpoint the bytes are not read. late: whether the
    start records one graph, and not as many as this machine's speed allows."""
    load, attention, graphs = builder.load_weights, builder.make_attention, builder.make_graphs

    def loading(*a: Any) -> None:
        gpu.peak = gpu.live
        load(*a)
        memory.loading = gpu.peak - gpu.live

    def making(*a: Any) -> Any:
        before = gpu.live
        made = attention(*a)
        memory.attention += gpu.live - before
        return made

    def recording(*a: Any) -> Any:
        before, first = gpu.live, len(gpu.graphs)
        made = graphs(*a)
        memory.recorded = gpu.live - before + max((g.peak for g in gpu.graphs[first:]), default=0)
        return made

    with ExitStack() as stack:
        for owner, name, value in (
            (builder, "load_weights", loading),
            (builder, "make_attention", making),
            (builder, "make_graphs", recording),
            (builder, "make_grammars", lambda *_: None),
            (cuda_graphs, "START_S", 0.0 if late else inf),
            (attention_choice, "kernels_missing", lambda: None),
            (Readers, "each", _in_this_thread),  # modes of torch are a thread's own
            (tensor_reader, "_copy_bits", lambda *_: None),
            (tensor_reader.Reader, "_fill", _read_none),
        ):
            stack.enter_context(patch.object(owner, name, value))
        return builder.build(deployment, group, DEVICE)


def start(gpu: FakeGpu, case: Case, rank: int, folder: Path) -> tuple[list[Any], list[Memory], Plans, list[int]]:
    """Every stage's `rank`, built, and the number of its first graph. A later stage comes first: what its warm-up draws
    is sent back to the first one."""
    near, far = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)
    plans, built = Plans(), dict[int, Any]()
    memories, first_graphs = [Memory() for _ in range(case.stages)], [0] * case.stages
    if dist.is_initialized():
        dist.destroy_process_group()
    for stage in reversed(range(case.stages)):
        group = communicator(gpu, case, rank, stage, near if stage == 0 else far, plans)
        first_graphs[stage] = len(gpu.graphs)
        built[stage] = build(gpu, deployment_of(case, folder), group, memories[stage], case.late)
        if stage:
            plans.others.append(built[stage].runner.run)
    return [built[stage] for stage in range(case.stages)], memories, plans, first_graphs
