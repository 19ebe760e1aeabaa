"""A rank's share of a deployment: its layers and shard, their checkpoint, dtypes, operators, and the bytes of the
weights. Determined from headers, before weights are read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ...models.config.model_config import ModelConfig, from_folder
from ...models.config.predictor import whole_in_node
from ...models.config.shapes import Sharing, check_everywhere, check_shapes, share
from ...models.config.wiring import check_split, choose_wiring
from ...models.cuda.fp8 import StoredProducts
from ...models.ops import TorchOps
from ...models.ops_choice import make_ops, make_stored_products
from ...models.stages import RankShard, Stage, choose_layers, make_stages, predictor_shard
from ...models.weights.identity import Sample, Stamps, stamps_of
from ...models.weights.mapping import Source, open_source
from ...models.weights.tensor_reader import FP8
from ...topology.comm.groups import Communicator
from ..config.schema import Deployment, ModelSection, ParallelConfig
from ..identity import DRAFT, MODEL
from .draft_model import DraftWeights
from .kv_capacity import CapacityError, available_bytes
from .loading import held_weights, share_of_node
from .predictor import PredictorShare

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = DTYPES | {"fp8": FP8}


@dataclass(frozen=True, slots=True)
class ModelShare:
    """A rank's share of the model. `length`: the longest sequence served; `draft`: the draft model, if this rank
    samples; `predictor`: its share of the predicting layer, then, if that drafts; `needed`: bytes of the weights of all
    that are not in memory yet; `samples`: of model and draft model, by part (engine/identity.py); `stamps`: of their
    files, before the samples were read."""

    config: ModelConfig
    warnings: list[str]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    length: int
    stage: Stage
    shard: RankShard
    source: Source
    stored: StoredProducts | None
    ops: TorchOps
    sharing: Sharing
    draft: DraftWeights | None
    predictor: PredictorShare | None
    needed: int
    samples: dict[str, Sample]
    stamps: Stamps


def model_config(
    keys: ModelSection, parallel: ParallelConfig, nodes: int = 1
) -> tuple[ModelConfig, Sharing, list[str]]:
    """The checkpoint's config with its resolved wiring, how a group on `nodes` nodes shares it, and warnings. Raises
    ConfigError, WiringError or ShapeError."""
    config, warnings = choose_wiring(
        from_folder(Path(keys.path)),
        keys.wiring,
        keys.ladder_layers,
        keys.allow_untrained_ladder or keys.load_format == "dummy",
    )
    size = parallel.world.tp
    sharing = share(config, parallel.expert_layout, parallel.dense_path, nodes, size // nodes)
    check_shapes(config, size, sharing)
    check_split(config.wiring, parallel.split_steps)
    if parallel.deterministic == "everywhere":
        check_everywhere(config, size)
    return config, sharing, warnings


def model_length(config: ModelConfig, requested: int | None) -> int:
    """The length of the longest sequence that is served. Raises CapacityError."""
    most = config.longest_context
    if requested is not None and requested > most:
        raise CapacityError(
            f"model.max_model_len={requested}: the checkpoint knows {most} positions; use at most {most}, or declare a "
            "scaling in its config.json (rope_scaling)"
        )
    return requested or min(most, config.max_position_embeddings)


def make_share(
    deployment: Deployment,
    communicator: Communicator,
    device: torch.device,
    retained_fd: int | None = None,
    salt: bytes = b"",
) -> ModelShare:
    """Reads the checkpoint's headers and samples of its weights, and resolves `auto` and null. held: the descriptor of
    retained weights, -1 if there are none; None: nothing will be loaded. salt: see Sample. Raises like `build`."""
    keys, parallel, engine = deployment.model, deployment.parallel, deployment.engine
    config, sharing, warnings = model_config(keys, parallel, len(communicator.layout.nodes))
    dtype = DTYPES[config.dtype if keys.dtype == "auto" else keys.dtype]
    kv_dtype = dtype if engine.kv_cache_dtype == "auto" else KV_DTYPES[engine.kv_cache_dtype]
    length = model_length(config, keys.max_model_len)
    stage = Stage(config)
    if communicator.pipeline is not None:
        layers = choose_layers(config, parallel.world.stages, parallel.pipeline_layers)
        stage = make_stages(config, layers)[communicator.pipeline.stage]
    shard = RankShard.of(stage, communicator.size, communicator.rank, sharing)
    last, node_size = None, 0
    if engine.speculation == "mtp":
        nodes, per_node = len(communicator.layout.nodes), communicator.layout.per_node
        if communicator.node_reduce is not None and whole_in_node(config, dtype.itemsize, nodes, per_node):
            node_size = per_node
        last = predictor_shard(config, shard, node_size)
    source = open_source(Path(keys.path), shard, config, deployment.dummy_seed, None if last is None else last.stage)
    draft = None if engine.draft_model is None else DraftWeights(Path(engine.draft_model), config, dtype, length)
    sources = {MODEL: source} if draft is None else {MODEL: source, DRAFT: draft.source}
    sources = {part: source for part, source in sources.items() if source.seed is None}
    stamps = stamps_of(stored.file for source in sources.values() for stored in source.tensors.values())
    samples = {part: source.sample(salt, *share_of_node(communicator)) for part, source in sources.items()}
    stored = make_stored_products(source, shard, device, parallel.deterministic, keys.weights)
    pages = None
    if retained_fd is not None and device.type == "cpu" and deployment.daemon.standby:
        read = repr(config), source.seed, [(sample.files, sample.fixed, sample.origin) for sample in samples.values()]
        pages = held_weights(source, keys, parallel, communicator, retained_fd, read)
    ops = make_ops(device, dtype, keys.weights, parallel.deterministic, pages)
    products = frozenset[str]() if stored is None else stored.products
    needed = source.rank_bytes(shard, dtype.itemsize, products, ops.matrix_bytes)
    if pages is not None:
        needed = max(0, needed - pages.nbytes)
    draft = draft if shard.samples else None
    predictor: PredictorShare | None = None
    if last is not None and shard.samples:
        predictor = PredictorShare(last, source, dtype, keys.weights, parallel.deterministic, device)
    needed += sum(drafter.bytes for drafter in (draft, predictor) if drafter is not None)
    return ModelShare(
        config,
        warnings,
        dtype,
        kv_dtype,
        length,
        stage,
        shard,
        source,
        stored,
        ops,
        sharing,
        draft,
        predictor,
        needed,
        samples,
        stamps,
    )


def has_room(
    deployment: Deployment, communicator: Communicator, device: torch.device, ranks_here: int, weights_file: int = -1
) -> bool:
    """Whether the weights and KV caches of this host's ranks fit into free memory. On a GPU they never do: the serving
    ranks use all that engine.gpu_memory_utilization allows. weights_file: see `build`. Raises like `build`."""
    share = make_share(deployment, communicator, device, None if weights_file < 0 else os.dup(weights_file))
    kv = deployment.engine.cpu_kv_bytes
    return device.type == "cpu" and (share.needed + kv) * ranks_here <= available_bytes(device)
