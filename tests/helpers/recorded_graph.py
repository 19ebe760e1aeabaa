"""A recorded graph without a GPU: notes every torch operator of a computation and repeats it on the same tensors.

As strict as a CUDA graph: what Python decided while recording is fixed, only what lies in the noted tensors may change.
All-reduces are no operators; `Noted` puts them into the record. Also the engine on ranks, with and without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import engine_cases
import torch
from fake_flashinfer import LIBRARY
from laddertron.engine.batch import Chunk
from laddertron.engine.config.schema import Deployment
from laddertron.engine.sampling.sampler import Sampler
from laddertron.engine.schedule.speculation import MOST
from laddertron.engine.step import share
from laddertron.engine.step.build import Built, _greatest
from laddertron.engine.step.cuda_graphs import CudaRecorder, StepGraphs
from laddertron.engine.step.memory import graph_shapes
from laddertron.engine.step.predictor import PredictorDrafts
from laddertron.models.attention import KVCache
from laddertron.models.cuda.flashinfer import FlashInferAttention
from laddertron.models.llama import LlamaModel
from laddertron.models.ops import TorchOps
from laddertron.models.transfer import download
from laddertron.topology.comm.collectives import Collective, Pending
from laddertron.topology.comm.groups import Communicator
from overlapped import JOINED, overlap, sampler, told
from rank_pool import Rank
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BATCHED = 64
"""engine.max_num_batched_tokens of engine_cases.deployment."""


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators while active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        fresh = [not any(out is given for given in _tensors((args, kwargs))) for out in _tensors(results)]

        def again() -> None:
            for new, noted, own in zip(_tensors(func(*args, **kwargs)), _tensors(results), fresh, strict=True):
                if own and new.data_ptr() != noted.data_ptr():  # a view of what is noted has changed with it
                    noted.copy_(new)

        self.calls.append(again)
        return results


class TapeRecorder(CudaRecorder):
    """engine/step/cuda_graphs.py's Recorder on a CPU. `computed` counts the runs of Python code, `replayed` those of a
    tape."""

    def __init__(self) -> None:
        self.tape: _Tape | None = None
        self.computed = self.replayed = 0

    def warm_up(self, compute: Callable[[], None]) -> None:
        compute()  # as for a GPU: the first call of anything is not recorded
        self.computed += 1

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.tape = tape = _Tape()
        with tape:
            compute()
        self.tape = None
        self.computed += 1

        def replay() -> None:
            self.replayed += 1
            for call in tape.calls:
                call()

        return replay

    def memory(self) -> int:
        return 0

    def wait(self) -> None: ...


class Noted:
    """A Collective that takes part in recordings: a replay starts and awaits it where the recording did."""

    def __init__(self, inner: Collective, recorder: TapeRecorder) -> None:
        self._inner, self._recorder = inner, recorder

    def start(self, x: Tensor, layer: str = "", at_once: bool = False, /) -> Pending:
        tape = self._recorder.tape
        if tape is None:
            return self._inner.start(x)
        under_way = [self._inner.start(x)]
        tape.calls.append(lambda: under_way.__setitem__(0, self._inner.start(x)))
        return _NotedPending(under_way, tape)


class _NotedPending:
    def __init__(self, under_way: list[Pending], tape: _Tape) -> None:
        self._under_way, self._tape = under_way, tape

    def wait(self) -> Tensor:
        self._tape.calls.append(lambda: (self._under_way[0].wait(), None)[1])
        return self._under_way[0].wait()


def generate(
    rank: Rank,
    folder: str,
    prompts: list[list[int]],
    how: str,
    params: dict[str, Any],
    shapes: list[tuple[int, int]] | None = None,
    stages: int = 1,
    speculation: str | bool = False,
    graph_s: list[float] | None = None,
) -> dict[str, Any] | None:
    """Answers by request, of 4 lengths, so that few and many run at once. how: "portable" as built, "eager" with the
    FlashInfer backend (its stand-in), "recorded" with its steps recorded (shapes: which), "overlapped" with these drawn
    on the device and set off ahead of the ids before. graph_s: seconds that each rank takes for a graph, by which some
    may wait for their first use. On rank 0, with how often steps were computed for a recording, replayed and computed
    eagerly, and what the host waited for."""
    if stages > 1:
        rank.close_kept()
    communicator, recorder = rank.connect(stages=stages) if stages > 1 else rank.communicator, TapeRecorder()
    keys: dict[str, Any] = {"max_num_seqs": 5, "enable_prefix_caching": False, "speculation": speculation}
    d = engine_cases.deployment(folder, rank.size // stages, **keys)
    d = replace(d, parallel=replace(d.parallel, pipeline_parallel_size=stages))
    seconds = None if graph_s is None else graph_s[rank.rank]
    built = build_of_operators(rank, d, communicator)
    notes: list[str] = []
    eager = count_calls(built.runner.model)
    if how != "portable":
        shapes = shapes or list(graph_shapes(5, BATCHED, MOST if speculation else 0))
        built = as_on_a_gpu(built, communicator, recorder, how, notes, shapes, graph_s=seconds)
    at_start = recorder.computed
    lengths = [params["max_tokens"] + 4 * (i % 4) for i in range(len(prompts))]
    requests = [engine_cases.request(i, p, **params | {"max_tokens": lengths[i]}) for i, p in enumerate(prompts)]
    answers = engine_cases.run_requests(rank, built, communicator, requests)
    if stages > 1:
        communicator.close()
    counts = {"at_start": at_start, "computed": recorder.computed, "replayed": recorder.replayed, "steps": told(notes)}
    return {"answers": answers, "eager": len(eager), **counts}


def build_of_operators(rank: Rank, d: Deployment, communicator: Communicator) -> Built:
    """Built of torch's operators, since C kernels are none."""
    with patch.object(share, "make_ops", lambda *_: TorchOps()):
        return engine_cases.build_on(rank, d, communicator)


def as_on_a_gpu(
    built: Built,
    communicator: Communicator,
    recorder: TapeRecorder,
    how: str,
    notes: list[str],
    shapes: Sequence[tuple[int, int]],
    kind: type[FlashInferAttention] = FlashInferAttention,
    graph_s: float | None = None,
) -> Built:
    """The same rank with another runner, see `generate`. notes: of an overlapped one."""
    old = built.runner
    parts: dict[str, Any] = parts_of(built, kind)
    if how == "overlapped":
        parts["sampler"] = sampler(built, communicator, notes)
    greatest = partial(_of_ranks, communicator, graph_s) if graph_s is not None else (lambda seconds: 0.0)
    graphs = None if how == "eager" else _graphs(built, recorder, shapes, greatest, **parts)
    parts |= {"proposer": old.proposer, "speculates": old._speculates}
    if isinstance(old.proposer, PredictorDrafts):
        cache, config = old.proposer.cache, old.proposer._predictor.config
        scale, heads = config.head_dim**-0.5, old.proposer._predictor.shard.num_heads
        old.proposer._attention = kind(cache, (None,), scale, heads, torch.float32, LIBRARY)
        parts["cache"].draft_cache = cache
    if how == "overlapped":
        built, _ = overlap(built, communicator, notes, **parts)
    else:
        if communicator.pipeline is not None:
            parts |= {"pipeline": communicator.pipeline, "index": communicator.rank, "fetch": download}
        slots, most = len(old.length), built.limits.max_model_len
        runner = type(old)(old.model, sampler=old.sampler, max_slots=slots, max_model_len=most, **parts)
        built = replace(built, runner=runner)
    built.runner.warmed_up(None, graphs)
    if graphs is not None and graphs.drafted:
        shape_of: Any = graphs.shape

        def noted(chunks: Sequence[Chunk]) -> Any:
            shape = shape_of(chunks)
            notes.extend([JOINED] * (shape is not None and not shape[0]))
            return shape

        graphs.shape = noted  # type: ignore[method-assign]
        built = replace(built, scheduler_limits=replace(built.scheduler_limits, most_rows=graphs.most_rows))
    return built


def count_calls(model: LlamaModel) -> list[None]:
    """The steps that are computed eagerly from now on."""
    steps: list[None] = []
    forward: Any = model.forward_streams

    def counted(*arguments: Any) -> Tensor:
        steps.append(None)
        out: Tensor = forward(*arguments)
        return out

    model.forward_streams = counted  # type: ignore[method-assign, assignment]
    return steps


def parts_of(built: Built, kind: type[FlashInferAttention] = FlashInferAttention) -> dict[str, Any]:
    """Cache and attention of a Runner that records, with a block that is nobody's."""
    old, model = built.runner, built.runner.model
    config, shard = model.config, model.shard
    cache = KVCache(shard, old.cache.num_blocks + 1, old.size, torch.float32, torch.device("cpu"))
    windows = config.sliding_window or (None,) * config.num_layers
    attention = kind(cache, windows, config.head_dim**-0.5, shard.num_heads, torch.float32, LIBRARY)
    return {"cache": cache, "attention": attention}


def _of_ranks(communicator: Communicator, graph_s: float, measured: float) -> float:
    """build.py's, with this rank's number in place of what it measured."""
    return _greatest(communicator, graph_s)


def _graphs(
    built: Built,
    recorder: TapeRecorder,
    shapes: Sequence[tuple[int, int]],
    greatest: Callable[[float], float],
    cache: KVCache,
    attention: FlashInferAttention,
    sampler: Sampler | None = None,
) -> StepGraphs:
    model = built.runner.model
    model.all_reduce = Noted(model.all_reduce, recorder)
    latest = None if sampler is None else sampler.latest
    scratch, most = cache.num_blocks - 1, built.runner.blocks.shape[1]
    graphs = StepGraphs(
        model,
        attention,
        recorder,
        [(decodes, rows) for decodes, rows in shapes],
        scratch_block=scratch,
        most_blocks=most,
        block_size=cache.block_size,
        latest=latest,
        greatest=greatest,
    )
    graphs.record()
    if sampler is not None:
        sizes = sorted({*graphs.sizes, *graphs.drafted})
        sampler.record(graphs._out, sizes, lambda compute: compute)  # gathers are no operators
    return graphs
