"""Megatron-core's GPTModel with the layer spec: the engine's logits, plain torch's gradients, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from queue import Queue
from threading import Thread
from types import SimpleNamespace
from typing import Any

import checkpoints
import loaded_reference as reference
import pytest
import torch
import torch.distributed as dist
from engine_cases import build_on, deployment, forward_all
from laddertron.models.config.model_config import from_folder
from laddertron.models.weights.checkpoint import CheckpointError
from laddertron.models.weights.convert import convert
from laddertron.topology.comm.bootstrap import store_at
from rank_pool import Rank
from safetensors.torch import load_file

Ranks = Callable[..., list[Any]]
WIRINGS = ("llama", "ladder", "hybrid", "hybrid_early", "delay2", "delay3")
VOCAB = 384  # the same rows on each rank in both: a padded row would also count in the softmax


@contextmanager
def megatron(rank: Rank) -> Iterator[Any]:
    """Megatron-core's groups over gloo, as Megatron-LM makes them, and the places where it insists on CUDA."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import random

    rank.close_kept()
    store = store_at(rank.bootstrap, 0, "127.0.0.1", 60.0)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.size)
    parallel_state.initialize_model_parallel(rank.size)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
            patch.setattr(torch.cuda, "synchronize", lambda *_: None)
            patch.setattr(random.get_cuda_rng_tracker(), "fork", lambda *_: nullcontext())
            yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def gpt_of(folder: str, groups: Any, **options: Any) -> Any:
    from laddertron.models.megatron.gpt import make_gpt
    from laddertron.models.megatron.weights import load_folder

    model = make_gpt(from_folder(folder), groups, use_cpu_initialization=True, masked_softmax_fusion=False, **options)
    load_folder(model, Path(folder))
    return model


def batch(length: int = 24) -> torch.Tensor:
    return torch.randint(6, VOCAB, (2, length), generator=torch.Generator().manual_seed(5))


def forward(model: Any, ids_BT: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
    length = ids_BT.shape[1]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    return model(ids_BT, torch.arange(length).expand_as(ids_BT), later, labels=labels)


def case_logits(rank: Rank, folder: str) -> float:
    """The largest difference of this rank's logits from the engine's."""
    ids = batch()
    ours = forward_all(build_on(rank, deployment(folder, rank.size)), ids.tolist())
    with megatron(rank) as groups, torch.inference_mode():
        theirs = forward(gpt_of(folder, groups), ids).flatten(0, 1)
    assert theirs.shape == ours.shape
    return float((theirs - ours).abs().max())


def case_gradients(rank: Rank, folder: str, target: str) -> None:
    """Writes the gradients of a batch's mean cross-entropy to the folder `target`, under the folder's names."""
    from laddertron.models.megatron.weights import export_folder

    ids = batch()
    with megatron(rank) as groups, torch.enable_grad():
        model = gpt_of(folder, groups)
        forward(model, ids[:, :-1], ids[:, 1:].contiguous()).mean().backward()
        for parameter in model.parameters():
            parameter.data = parameter.grad
        export_folder(model, Path(target), Path(folder))


def saved(folder: Path, recipe: str) -> Path:
    return checkpoints.save(folder, recipe, vocab_size=VOCAB, tokenizer=False)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("recipe", [*WIRINGS, "qwen2", "qwen3"])
def test_logits_are_the_engines(ranks: Ranks, recipe: str, tp: int, tmp_path: Path) -> None:
    """Two implementations of tensor parallelism, Megatron-core's layers and this engine's, agree in fp32."""
    folder = saved(tmp_path, recipe)
    assert max(ranks(tp, "test_megatron_training:case_logits", {"folder": str(folder)})) < 2e-4


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recipe", WIRINGS)
def test_gradients_are_those_of_plain_torch(ranks: Ranks, recipe: str, tp: int, tmp_path: Path) -> None:
    folder, target = saved(tmp_path / "model", recipe), tmp_path / "gradients"
    ranks(tp, "test_megatron_training:case_gradients", {"folder": str(folder), "target": str(target)})
    model, ids = reference.load(folder).train(), batch()
    loss: Any = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(load_file(target / "model.safetensors"), expected, atol=1e-5, rtol=1e-3)
    assert from_folder(target).wiring == from_folder(folder).wiring


def case_checkpoint(rank: Rank, source: str, checkpoint: str, target: str | None = None) -> None:
    """Reads the folder `source` and writes a distributed checkpoint; or reads the checkpoint and writes a folder."""
    from laddertron.models.megatron.gpt import make_gpt
    from laddertron.models.megatron.weights import export_folder
    from laddertron.tools.train.megatron import load_checkpoint, save_checkpoint
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Its writers are forked, which a process with gloo's threads may not do: here they are threads.
    threads: Any = SimpleNamespace(Process=Thread, Queue=Queue, JoinableQueue=Queue, Manager=lambda: threads)
    with megatron(rank) as groups, pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem_async, "mp", SimpleNamespace(get_context=lambda kind: threads))
        patch.setattr(filesystem_async, "_process_memory", lambda: 0)  # needs psutil, and is for its log
        if target is None:
            save_checkpoint(gpt_of(source, groups), Path(checkpoint))
            return
        model = make_gpt(from_folder(source), groups, use_cpu_initialization=True)
        load_checkpoint(model, Path(checkpoint))
        export_folder(model, Path(target), Path(source))


@pytest.mark.parametrize("recipe", ["hybrid", "qwen2", "qwen3"])
def test_a_folder_is_the_same_after_a_distributed_checkpoint(ranks: Ranks, recipe: str, tmp_path: Path) -> None:
    """Written by two ranks, read by one: every tensor's bits and the wiring. `convert` refuses the checkpoint, whose
    metadata are pickled."""
    folder, checkpoint, target = saved(tmp_path / "model", recipe), tmp_path / "checkpoint", tmp_path / "again"
    arguments = {"source": str(folder), "checkpoint": str(checkpoint)}
    ranks(2, "test_megatron_training:case_checkpoint", arguments)
    with pytest.raises(CheckpointError, match="to-folder"):
        convert(checkpoint, target, "laddertron")
    ranks(1, "test_megatron_training:case_checkpoint", {**arguments, "target": str(target)})
    before, after = (load_file(path / "model.safetensors") for path in (folder, target))
    torch.testing.assert_close(after, before, atol=0.0, rtol=0.0)
    assert replace(from_folder(target), declares_wiring=False) == replace(from_folder(folder), declares_wiring=False)
