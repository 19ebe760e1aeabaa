"""KV capacity of a rank: what is kept free for steps, in the start's words, in the errors, and as the plan has it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import fake_flashinfer
import numpy as np
import pytest
import torch
from laddertron import __version__
from laddertron.engine.config.schema import CPU_KV_CACHE_MEMORY, Deployment, EngineConfig, ModelSection
from laddertron.engine.step import cuda_graphs
from laddertron.engine.step import kv_capacity as capacity
from laddertron.engine.step.cuda_graphs import GraphsError, StepGraphs
from laddertron.engine.step.draft_model import check_alike
from laddertron.engine.step.kv_capacity import (
    Budget,
    CapacityError,
    agreed_budget,
    check_memory,
    count_blocks,
    describe_budget,
    kv_budget,
    working_bytes,
)
from laddertron.engine.step.memory import (
    GPU_CONTEXT,
    GRAPH_BYTES,
    NCCL_BUFFERS,
    MemoryKeys,
    graph_shapes,
    working_memory,
)
from laddertron.models.attention import KVCache
from laddertron.models.config.known_models import known
from laddertron.models.config.model_config import ModelConfig, make_wiring
from laddertron.models.config.predictor import whole_in_node
from laddertron.models.cpu.kernels import Kernels
from laddertron.models.cuda.flashinfer import FlashInferAttention
from laddertron.models.cuda.workspace import WRAPPER_BYTES, partial_bytes, workspace_bytes
from laddertron.models.stages import RankShard, predictor_stage
from laddertron.models.weights.slices import expected_shapes
from laddertron.tools.plan.memory import StoredTypes, memory

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIB, MIB = 1 << 30, 1 << 20
H100 = 81559 << 20
WORKING = {"activations": 256 * MIB, "all-reduces in flight": 0, "attention workspace": GIB // 2, "CUDA graphs": GIB}


def deployment(**engine: Any) -> Deployment:
    return Deployment(ModelSection("somewhere"), engine=EngineConfig(**engine))


def working(
    d: Deployment, config: ModelConfig, size: int, backend: str, widens: bool = False, device: torch.device = CUDA
) -> dict[str, int]:
    kind = torch.bfloat16
    return working_bytes(d, RankShard(config, size, 0), backend, kind, kind, 8192, device, widens)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "kernels_attend", lambda wanted, *_: wanted != "torch")
    monkeypatch.setattr(cuda_graphs, "triton_missing", lambda: None)


def test_a_step_that_flashinfer_cannot_plan_is_refused_before_loading(flashinfer: None) -> None:
    """DeepSeek-V3 on one rank: 128 heads; on sixteen, or by torch, the same tokens are few enough."""
    d, config = deployment(max_num_batched_tokens=16384, max_num_seqs=64), known("deepseek-v3")
    wanted = (
        r"tokens=16384, max_num_seqs=64: .* 128 heads a rank could need 16641: set max_num_batched_tokens to at most"
    )
    with pytest.raises(CapacityError, match=wanted):
        working(d, config, 1, "nccl")
    assert working(d, config, 16, "nccl")
    by_torch = replace(d, engine=replace(d.engine, attention="torch"))
    assert working(by_torch, config, 1, "nccl")


def test_the_arithmetic_of_a_gpu() -> None:
    """80 GiB, 60 of them free beside the weights: a tenth of all stays unused, steps have their parts, KV the rest."""
    budget = kv_budget(EngineConfig(), 80 * GIB, 60 * GIB, WORKING)
    assert budget.kv == pytest.approx(60 * GIB - 8 * GIB - sum(WORKING.values()), abs=2)
    line = describe_budget(budget, 1234, 16)
    assert line == (
        "KV cache: 50.25 GiB (60.00 GiB free after the weights, less 8.00 unused by engine.gpu_memory_utilization=0.9,"
        " 0.25 for activations, 0.50 for attention workspace, 1.00 for CUDA graphs); 1234 blocks of 16 positions"
    )
    assert kv_budget(EngineConfig(), 80 * GIB, 9 * GIB, WORKING).kv == 0


def test_what_is_configured_is_taken() -> None:
    assert kv_budget(EngineConfig(kv_cache_memory=5 * GIB), 80 * GIB, 60 * GIB, WORKING).kv == 5 * GIB
    assert kv_budget(EngineConfig(), None, 60 * GIB, {}).kv == CPU_KV_CACHE_MEMORY


def test_too_few_blocks_are_refused_with_the_numbers() -> None:
    """One sequence of 100 positions needs 7 blocks of 16; there is room for 6, and then for 7, one of them nobody's."""
    budget = kv_budget(EngineConfig(max_num_seqs=4), 80 * GIB, 9 * GIB + sum(WORKING.values()), WORKING)
    one = budget.kv // 6
    with pytest.raises(CapacityError) as caught:
        count_blocks(budget, one, 16, 4, 100)
    words = str(caught.value)
    assert "model.max_model_len=100 needs 7 KV blocks" in words
    assert f"({-(-7 * one // MIB)} MiB) and there is room for 6 ({budget.kv >> 20} MiB: 10.75 GiB free" in words
    for part in ("8.00 unused", "0.50 for attention workspace", "1.00 for CUDA graphs", "raise engine.gpu_memory"):
        assert part in words
    assert words.endswith("or set max_model_len to at most 95")
    assert count_blocks(replace(budget, kv=7 * one), one, 16, 4, 100) == 7
    with pytest.raises(CapacityError, match="room for 6"):
        count_blocks(replace(budget, kv=7 * one), one, 16, 4, 100, spare=1)
    assert count_blocks(replace(budget, kv=99 * one), one, 16, 4, 100) == 28
    with pytest.raises(CapacityError, match=r"raise engine\.kv_cache_memory to that, or set"):
        count_blocks(kv_budget(EngineConfig(kv_cache_memory=one), None, 0, {}), one, 16, 4, 100)


def test_what_cannot_fit_is_refused_before_loading() -> None:
    """Weights alone would fit; with what steps take they do not, and the message says what that is."""
    check_memory(deployment().engine, 2, 10 * GIB, 11 * GIB + 769 * MIB, WORKING, CUDA)
    with pytest.raises(CapacityError) as caught:
        check_memory(deployment().engine, 2, 10 * GIB, 11 * GIB + 767 * MIB, WORKING, CUDA)
    assert str(caught.value) == (
        "a rank needs about 10240 MiB for weights and 0 MiB for KV, 256 MiB for activations, 512 MiB for attention "
        "workspace, 1024 MiB for CUDA graphs, 12031 MiB are free: use more ranks than 2, a smaller kv_cache_memory or "
        "another dtype"
    )


def test_the_check_before_loading_counts_the_kv_cache_that_a_cpu_allocates_by_default() -> None:
    """With kv_cache_memory null as with the same figure given."""
    for engine in ({}, {"kv_cache_memory": CPU_KV_CACHE_MEMORY}):
        least = GIB + kv_budget(deployment(**engine).engine, None, 0, {}).kv
        check_memory(deployment(**engine).engine, 1, GIB, least, {}, CPU)
        with pytest.raises(CapacityError, match="1024 MiB for weights and 512 MiB for KV, 1535 MiB are free"):
            check_memory(deployment(**engine).engine, 1, GIB, least - 1, {}, CPU)


def test_a_cpu_keeps_nothing_free() -> None:
    config = known("llama-3.1-8b")
    assert working(deployment(), config, 1, "native", device=CPU) == {}


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-3.1-8b", 1),
        ("llama-3.1-70b", 8),
        ("llama-3.1-405b", 16),
        ("qwen3-30b-a3b", 4),
        ("laneformer-2b", 2),
        ("deepseek-v3.2", 32),
    ],
)
def test_the_plan_has_the_engines_figure(name: str, size: int) -> None:
    """A device that holds what the plan lists beside KV, weights and what the driver and NCCL take being there already:
    the engine comes to the plan's bytes of KV, whatever is recorded and whichever attention serves."""
    config = known(name)
    for engine in ({}, {"cuda_graphs": False}, {"attention": "torch"}, {"max_num_seqs": 64, "block_size": 32}):
        d = deployment(**engine)
        keys = MemoryKeys(
            max_num_seqs=d.engine.max_num_seqs,
            max_num_batched_tokens=d.engine.max_num_batched_tokens,
            max_model_len=8192,
            block_size=d.engine.block_size,
            graphs=d.engine.cuda_graphs is not False,
            attention_kernels=d.engine.attention != "torch",
        )
        room = memory(config, size, StoredTypes(), keys, H100)
        backend = "native" if size == 1 else "nccl"
        taken = working(d, config, size, backend)
        rotary = room.parts["activations"] - taken["activations"]
        assert rotary == 8193 * config.head_dim * 4 * 2
        there = room.weight_bytes + rotary + GPU_CONTEXT + (NCCL_BUFFERS if size > 1 else 0)
        budget = kv_budget(d.engine, H100, H100 - there, taken)
        assert budget.kv == pytest.approx(room.kv_bytes, abs=2)
        assert room.kv_bytes > GIB
        held = taken["attention workspace"] > 0, taken["CUDA graphs"] > 0
        assert held == (keys.attention_kernels, keys.graphs and keys.attention_kernels)


@pytest.mark.usefixtures("flashinfer")
def test_what_widening_fp8_takes_is_counted() -> None:
    """The largest product of a rank in bf16 (8B whole: gate and up, 2 x 14336 rows of 4096), once for eager steps and
    once for recorded ones, by engine and plan alike; a device that has room for all but that is refused."""
    config, largest = known("llama-3.1-8b"), 2 * 14336 * 4096 * 2
    kept, widened = (working(deployment(), config, 1, "native", widens) for widens in (False, True))
    assert widened == kept | {
        "widened fp8 weights": largest, "CUDA graphs": kept["CUDA graphs"] + largest
    }  # fmt: skip
    rooms = [memory(config, 1, StoredTypes("fp8"), MemoryKeys(widens_fp8=widens), H100) for widens in (False, True)]
    assert rooms[0].kv_bytes - rooms[1].kv_bytes == 2 * largest
    free = 10 * GIB + sum(kept.values())
    check_memory(deployment().engine, 1, 10 * GIB, free, kept, CUDA)
    with pytest.raises(CapacityError, match="224 MiB for widened fp8 weights"):
        check_memory(deployment().engine, 1, 10 * GIB, free, widened, CUDA)


def test_drafts_and_their_model_are_counted() -> None:
    """Two rows of fp32 logits more a draft, up to the rows of a step; the draft model whole on each rank of 8, its keys
    and values beside the model's."""
    config, draft = known("llama-3.1-70b"), known("llama-3.1-8b")
    keys = MemoryKeys(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=8192)
    plain = memory(config, 8, StoredTypes(), keys, H100)
    row = 2 * 4 * -(-config.vocab_size // 8)
    for drafts, rows in ((8, 9 * 64), (100, 2048)):
        drafted = memory(config, 8, StoredTypes(), replace(keys, drafts=drafts), H100)
        assert drafted.parts["activations"] - plain.parts["activations"] == (rows - 64) * row
    modelled = memory(config, 8, StoredTypes(), replace(keys, draft_model=draft), H100)
    assert modelled.weight_bytes - plain.weight_bytes == 2 * draft.num_parameters
    per_token = 2 * 2 * draft.num_layers * draft.num_kv_heads * draft.head_dim
    assert modelled.kv_bytes_per_token - plain.kv_bytes_per_token == per_token


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.2", "glm-4.6", "longcat-flash"])
def test_the_predicting_layer_is_counted(name: str) -> None:
    """As many elements as the checkpoint's tensors have, and its cache beside the model's; in a pipeline the stage that
    has the head embeds, too."""
    config, keys = known(name), MemoryKeys(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=8192)
    stage = predictor_stage(config, embeds=False)
    drafting = replace(keys, predictor=stage.config)
    own = expected_shapes(config, stage).items() - expected_shapes(config).items()
    elements = sum(math.prod(shape) for _, shape in own)
    for stages in (1, 2):
        plain, counted = (memory(config, 1, StoredTypes(), each, H100, stages) for each in (keys, drafting))
        embedding = config.vocab_size * config.hidden_size * (stages > 1)
        assert counted.weight_bytes - plain.weight_bytes == pytest.approx(2 * (elements + embedding), rel=1e-6)
        cached = 2 * RankShard(stage.config, 1, 0).cached_elements
        assert counted.kv_bytes_per_token - plain.kv_bytes_per_token == cached


def test_the_predicting_layer_is_whole_in_a_node_where_that_costs_less_than_its_messages() -> None:
    """16 ranks of a small one read more in less time than four messages take, DeepSeek-V3's do not; each rank of a node
    of one then has all of the layer, embedding and head."""
    large = known("deepseek-v3")
    small = replace(large, hidden_size=1024, vocab_size=8192, experts=None)
    assert whole_in_node(small, 2, 2, 8)
    assert not whole_in_node(small, 2, 1, 16)
    assert not whole_in_node(large, 2, 2, 8)
    uneven = replace(known("glm-4.6"), hidden_size=1024, vocab_size=8192, experts=None)  # 8 KV heads, 96 heads
    assert whole_in_node(uneven, 2, 3, 8)
    assert not whole_in_node(uneven, 2, 2, 12)  # 24 ranks share 8 KV heads evenly, 12 of a node do not
    stage = predictor_stage(large, embeds=False)
    keys = MemoryKeys(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=8192)
    drafting = replace(keys, predictor=stage.config, predictor_ranks=1)
    own = expected_shapes(large, stage).items() - expected_shapes(large).items()
    elements = sum(math.prod(shape) for _, shape in own) + 2 * large.vocab_size * large.hidden_size
    plain, counted = (memory(large, 2, StoredTypes(), each, H100) for each in (keys, drafting))
    assert counted.weight_bytes - plain.weight_bytes == pytest.approx(2 * elements, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "size", "wiring", "deterministic", "peak"),
    [
        ("llama-3.1-405b", 16, "standard", False, 642),
        ("llama-3.1-405b", 16, "ladder", False, 770),
        ("llama-3.1-8b", 8, "standard", False, 284),
        ("llama-3.1-8b", 8, "standard", True, 514),
    ],
)
def test_the_peak_of_a_step_is_reserved(name: str, size: int, wiring: str, deterministic: bool, peak: int) -> None:
    """The peaks [MiB] of `make gpu-dry` where less was reserved before: norms of 4,096 tokens of prompts, filters of
    256 rows, and all-reduces in one order of summation."""
    config = known(name)
    config = replace(config, wiring=make_wiring(wiring, config.num_layers))
    keys = MemoryKeys(max_num_batched_tokens=4096, max_model_len=16384, deterministic=deterministic)
    kept = working_memory(config, size, 2, keys)
    assert peak * MIB <= kept["activations"] + kept["all-reduces in flight"] < 2.2 * peak * MIB


@pytest.mark.usefixtures("flashinfer")
def test_graphs_that_cannot_be_had_are_refused_before_loading() -> None:
    config = known("llama-3.1-8b")
    with pytest.raises(GraphsError, match="attention torch"):
        working(deployment(cuda_graphs=True, attention="torch"), config, 1, "native")
    assert working(deployment(), config, 2, "gloo")["CUDA graphs"] == 0


class _Counting:
    """The library's two wrappers, counted; the workspaces that they were given."""

    def __init__(self) -> None:
        self.made, self.workspaces = 0, set[int]()

    def __getattr__(self, name: str) -> Any:
        def make(workspace: torch.Tensor, *args: Any, **more: Any) -> Any:
            self.made += 1
            self.workspaces.add(workspace.data_ptr())
            return getattr(fake_flashinfer.LIBRARY, name)(workspace, *args, **more)

        return make


@pytest.mark.parametrize("windows", [(None,), (None, 64, None, 64)])
def test_the_workspace_is_that_of_the_wrappers_made(windows: tuple[int | None, ...]) -> None:
    """Each wrapper holds the library's 8 MiB, all share one buffer, and those of recorded steps one set of tables."""
    shard: Any = SimpleNamespace(config=SimpleNamespace(num_layers=len(windows), head_dim=8), num_kv_heads=1)
    library, recorded = _Counting(), graph_shapes(64, 300, 8)
    cache = KVCache(shard, 4, 4, torch.float32, CPU)
    attention = FlashInferAttention(cache, windows, 1.0, 1, torch.float32, library)
    attention.twin()
    attention.captured(recorded, 100)
    assert len(library.workspaces) == 1
    tables = 3 * 4 * (64 + 256) * (100 + 2)
    kinds = len(set(windows))
    shape = 1, 1, 8
    room = partial_bytes(*shape)
    assert workspace_bytes(shape, kinds, recorded, 100) == room + library.made * WRAPPER_BYTES + tables
    assert workspace_bytes(shape, kinds, (), 100) == room + 4 * kinds * WRAPPER_BYTES


def test_partial_results_have_the_room_that_the_library_takes() -> None:
    """What its plan asks for, at most: 128 rows for each of two programs a multiprocessor, or all tiles of a recorded
    step; 512 sequences under 128 heads are the largest."""
    h100 = 2 * 132 * 128 * 129 * 4
    for heads, kv_heads in ((32, 8), (8, 1), (128, 8), (32, 32)):
        assert h100 < partial_bytes(heads, kv_heads, 128) == partial_bytes(heads, kv_heads, 128, 16) < 1.6 * h100
    assert partial_bytes(32, 32, 128, 512) == partial_bytes(32, 32, 128)  # no tensor cores: it splits contexts alone
    largest = (512 + 512 - 1) * 16 * 8 * 129 * 4
    assert largest <= partial_bytes(128, 8, 128, 512) < largest + (2 << 20)
    for heads, kv_heads in ((32, 32), (128, 8)):  # 128 packed rows a tile, and each prompt may begin one
        tiles = 1024 * heads // kv_heads // 128 + 7
        assert tiles * 128 * kv_heads * 129 * 4 <= partial_bytes(heads, kv_heads, 128, 256, 1024)
        assert (512 * heads // kv_heads // 128 + 255) * 128 * kv_heads * 516 <= partial_bytes(
            heads, kv_heads, 128, 0, 0, 512
        )
    shape = 128, 8, 128
    both = partial_bytes(*shape) + partial_bytes(*shape, 512)
    tables = workspace_bytes(shape, 1, ((512, 0),), 100) - both - 5 * WRAPPER_BYTES
    assert tables == 3 * 4 * 512 * 102


def test_what_graphs_hold_is_told_beside_what_was_kept() -> None:
    """Measured once they are recorded."""
    graphs = StepGraphs.__new__(StepGraphs)
    graphs.reserved = 3 * GRAPH_BYTES
    assert graphs.room_text(GRAPH_BYTES) == "32 MiB of the 96 kept free for them"
    assert graphs.room_text(4 * GRAPH_BYTES).endswith("too few; lower engine.gpu_memory_utilization")
    graphs.reserved = None
    assert graphs.room_text(GRAPH_BYTES) == "32 MiB"


@pytest.mark.parametrize("least", [True, False])
def test_the_group_agrees_on_the_least(monkeypatch: pytest.MonkeyPatch, least: bool) -> None:
    """Memory is measured after a first collective, whose buffers are not free any more."""
    free = [70 * GIB]

    class Pair:
        gathers = 0

        def gather(self, payload: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            self.gathers += 1
            free[0] = 60 * GIB
            if len(payload) != 8:
                return np.stack([payload, payload])
            other = payload.view(np.int64) + (GIB if least else -GIB)
            return np.stack([payload, other.view(np.uint8)])

    monkeypatch.setattr(capacity, "available_bytes", lambda device, share: free[0])
    monkeypatch.setattr(capacity, "total_bytes", lambda device, share: 80 * GIB)
    pair: Any = Pair()
    own = kv_budget(EngineConfig(), 80 * GIB, 60 * GIB, WORKING)
    agreed = agreed_budget(EngineConfig(), pair, CUDA, WORKING)
    assert pair.gathers == 2
    if least:
        assert agreed == own
    else:
        assert agreed == Budget(own.kv - GIB, f"another rank has less than this one: {own.words}", own.fixes)


def test_ranks_that_would_decide_differently_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another CPU tier or version where CPUs compute; another kind of GPU where GPUs do, which may have any CPUs."""

    def group(*texts: str) -> Any:
        rows = [np.frombuffer(text.ljust(96).encode(), np.uint8) for text in texts]
        return SimpleNamespace(gather=lambda own: np.stack([own, *rows]))

    alike = f"(torch {torch.__version__}, laddertron {__version__})"
    monkeypatch.setattr(Kernels, "find", staticmethod(lambda: SimpleNamespace(tier="avx2")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    check_alike(group(f"avx2 {alike}"), cpu, "sparse attention", "choose positions")
    check_alike(group(f"9.0 with 132 multiprocessors {alike}"), gpu, "sparse attention", "choose positions")
    wanted = r"sparse attention: ranks compute in the CPU tiers avx2 .* and avx512 .* would choose .*_CPU_TIER"
    with pytest.raises(CapacityError, match=wanted):
        check_alike(group(f"avx512 {alike}"), cpu, "sparse attention", "choose positions")
    with pytest.raises(CapacityError, match="and install the same versions"):
        check_alike(group("avx2 (torch 2.11.0, laddertron 0.1.0)"), cpu, "sparse attention", "choose positions")
    with pytest.raises(CapacityError, match=r"of capability 9.0 with 114 .* and 9.0 with 132 .*: use hosts with"):
        check_alike(group(f"9.0 with 114 multiprocessors {alike}"), gpu, "sparse attention", "choose positions")
