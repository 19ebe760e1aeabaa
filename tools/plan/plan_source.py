"""From a deployment file, or names of a model and a fabric, to the Question of tools/plan/estimate.py. What is not on
this machine (weights, hosts) is assumed, and the assumption noted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from ...engine.config.load import ConfigError, Deployment, LoadedDeployment, read
from ...engine.config.rules import emulated_link
from ...engine.schedule.speculation import MOST
from ...engine.step.memory import MemoryKeys
from ...launchers.cli.fabric_source import backend_of, lay_out, read_fabric, suits
from ...models.config.known_models import assumed_fp8, by_folder, known, published_fp8
from ...models.config.model_config import ModelConfig, from_folder
from ...models.config.predictor import predictor_of, whole_in_node
from ...models.config.quantisation import BYTES, Quantisation, read_quantisation
from ...models.config.shapes import ShapeError, check_draft, check_shapes, replicates_embedding, share, splits
from ...models.config.wiring import choose_wiring
from ...models.cuda.workspace import HEAD_DIMS, latent_unfit
from ...models.stages import RankShard, StageError, choose_layers
from ...models.weights.checkpoint import CheckpointError
from ...models.weights.mapping import open_checkpoint
from ...models.weights.slices import EXPERTS, PRODUCTS, SHARED
from ...topology.cost.cost import Backend, Costs, Shape, shape_of
from ...topology.hardware.fabric import Fabric
from ...topology.hardware.presets import preset
from ...topology.placement.placement import Placement, place
from .estimate import Question, memory_in
from .layouts import Work
from .memory import StoredTypes


@dataclass(frozen=True, slots=True)
class Asked:
    """Command-line options that all plans share. `fabric` None: the deployment's, or assumed."""

    fabric: Fabric | None
    work: Work
    fp8: bool = False


def question(
    config: str | None,
    model: str | None,
    fabric: str | None,
    work: Work,
    fp8: bool = False,
    overrides: Sequence[str] = (),
) -> Question:
    """The question about a deployment file, a model's folder or a known architecture. Raises UsageError and theirs."""
    if (config is None) == (model is None):
        raise click.UsageError("give a CONFIG or --model NAME|FOLDER, one of the two")
    asked = Asked(None if fabric is None else read_fabric(fabric), work, fp8)
    if model is None or (Path(model) / "config.json").is_file():
        return from_deployment(read(config or model, overrides), asked)
    return from_names(model, asked, overrides)


def from_deployment(loaded: LoadedDeployment, asked: Asked) -> Question:
    """The deployment's plan. Raises ConfigError, PlacementError, ValueError, OSError."""
    d, model = loaded.deployment, _model(loaded, asked.fp8)
    config, notes = model.config, model.notes
    try:
        if config.experts is None:  # else what is cut depends on the nodes, in _question
            check_shapes(config, d.parallel.world.tp)
        choose_layers(config, d.parallel.world.stages, d.parallel.pipeline_layers)
    except ShapeError as error:
        raise ConfigError([loaded.fault("parallel.tensor_parallel_size", str(error))]) from None
    except StageError as error:
        raise ConfigError([loaded.fault("parallel.pipeline_parallel_size", str(error))]) from None
    fabric = asked.fabric
    if fabric is None and d.launch.fabric is not None:
        fabric = read_fabric(d.launch.fabric)
    if fabric is not None:
        return _question(loaded, model, *lay_out(d, fabric, {}), asked.work)
    assumed = assumed_fabric(d)
    fabric = preset(assumed)
    notes.append(f"no fabric was named: {assumed} is assumed (--nodes, --fabric, or launch.fabric)")
    # Host names of the file mean machines that the assumed fabric does not know.
    placement = place(fabric, d.parallel.world, ranks_per_node=d.launch.ranks_per_node, suits=suits(config))
    return _question(loaded, model, fabric, placement, asked.work)


def from_names(name: str, asked: Asked, overrides: Sequence[str] = ()) -> Question:
    """The plan of a known architecture, as a deployment of it with room for many sequences. Without
    `parallel.tensor_parallel_size` a replica has a node's devices, or those of as few nodes as it fits on; without
    `parallel.replicas` there are as many as there are devices for. Raises ConfigError, PlacementError, ValueError."""
    fabric = asked.fabric or preset("1x8xH100")
    gpu = any(n.devices for n in fabric.nodes)
    config = guess.config if (guess := by_folder(name)) else known(name)
    total = sum(len(n.devices) or len(n.numa) for n in fabric.nodes)
    length = min(8192 if gpu else 2048, config.max_position_embeddings)
    keys = [f"model.path={json.dumps(name)}", f"model.max_model_len={length}"]
    keys += ["engine.max_num_seqs=512", "engine.max_num_batched_tokens=8192"] if gpu else []
    named = read(None, (*keys, *overrides))
    stages = named.deployment.parallel.world.stages

    def of(tp: int) -> Question:
        sizes = (f"parallel.tensor_parallel_size={tp}", f"parallel.replicas={max(1, total // (tp * stages))}")
        of_model = from_deployment(read(None, (*keys, *sizes, *overrides)), replace(asked, fabric=fabric))
        if asked.fabric is not None:
            return of_model
        return replace(
            of_model, notes=("no fabric was named: 1x8xH100 is assumed (--nodes or --fabric)", *of_model.notes)
        )

    if "parallel.tensor_parallel_size" in named.places:
        return of(named.deployment.parallel.world.tp)
    if not gpu:
        return of(max(1, total // stages))
    per_node = len(fabric.nodes[0].devices)
    sizes = [n for n in range(1, total + 1) if splits(config, n) and total % (n * stages) == 0]
    inside = max((n for n in sizes if n <= per_node), default=1)
    questions = map(of, (inside, *(n for n in sizes if n > per_node)))
    return next((q for q in questions if memory_in(q).fits), None) or of(max(sizes, default=1))


def _question(loaded: LoadedDeployment, model: _Model, fabric: Fabric, placement: Placement, work: Work) -> Question:
    """What the deployment asks of the model on this placement. Raises ConfigError."""
    d, config, notes = loaded.deployment, model.config, list(model.notes)
    shape, p = shape_of(fabric, placement), d.parallel
    try:
        sharing = share(config, p.expert_layout, p.dense_path, shape.nodes, shape.per_node)
        check_shapes(config, p.world.tp, sharing)
    except ShapeError as error:
        raise ConfigError([loaded.fault("parallel.tensor_parallel_size", str(error))]) from None
    heads = config.num_heads // (sharing.per_node or p.world.tp)
    gpu = any(n.devices for n in fabric.nodes) and d.engine.device != "cpu"
    values = config.dtype if d.model.dtype == "auto" else d.model.dtype
    kv = values if d.engine.kv_cache_dtype == "auto" else d.engine.kv_cache_dtype
    form = model.form
    quantises = model.stored or (model.fp8 and gpu)
    weights = d.model.weights if d.model.weights != "stored" else form.title.lower() if quantises else values
    stored = StoredTypes(weights, values, kv, _kept_here(model.wide, config, form, fabric) if gpu else model.wide, form)
    predictor = _predictor(loaded, config)
    alone = predictor is not None and whole_in_node(config, int(BYTES[values]), shape.nodes, shape.per_node)
    keys = MemoryKeys(
        max_num_seqs=d.engine.max_num_seqs,
        max_num_batched_tokens=d.engine.max_num_batched_tokens,
        max_model_len=d.model.max_model_len or config.max_position_embeddings,
        block_size=d.engine.block_size,
        utilization=d.engine.gpu_memory_utilization,
        kv_cache_memory=d.engine.kv_cache_memory if gpu else d.engine.cpu_kv_bytes,
        gpu=gpu,
        graphs=d.engine.cuda_graphs is not False,
        attention_kernels=_attends(config, heads, d.engine.attention, values, kv),
        replicate_embedding=_replicates(d.parallel.embedding, config, values, shape.nodes > 1),
        deterministic=bool(d.parallel.deterministic),
        widens_fp8=gpu
        and stored.by_scaled_rows
        and stored.keeps_dense
        and not (_multiplies_fp8(fabric) and form.activations),
        drafts=MOST if d.engine.speculation else 0,
        draft_model=_draft_model(loaded, config),
        predictor=predictor,
        predictor_ranks=shape.per_node if alone else 0,
        standby=d.daemon.standby > 0,
    )
    backend = backend_of(d, shape)
    costs, source, more = _tuned(d, fabric, shape, backend)
    if not p.overlap:
        notes.append("parallel.overlap is false: this layout waits for every all-reduce; other layouts do not")
    return Question(
        name=d.served_model_name, config=config, stored=stored, keys=keys, fabric=fabric, placement=placement,
        shape=shape, backend=backend, work=work, costs=costs, costs_source=source, emulated=emulated_link(p),
        overlap=p.overlap, split=p.split_steps != "never", layers=p.pipeline_layers, threads=d.engine.threads,
        sharing=sharing,
        notes=(*notes, *more, *placement.notes),
    )  # fmt: skip


def _draft_model(loaded: LoadedDeployment, config: ModelConfig) -> ModelConfig | None:
    folder = loaded.deployment.engine.draft_model
    if folder is None:
        return None
    try:
        draft = from_folder(Path(folder))
        check_draft(draft, config, loaded.deployment.model.max_model_len)
    except (OSError, ValueError) as error:
        raise ConfigError([loaded.fault("engine.draft_model", " ".join(str(error).split()))]) from None
    return draft


def _predictor(loaded: LoadedDeployment, config: ModelConfig) -> ModelConfig | None:
    if loaded.deployment.engine.speculation != "mtp":
        return None
    try:
        return predictor_of(config)
    except ShapeError as error:
        raise ConfigError([loaded.fault("engine.speculation", str(error))]) from None


def _multiplies_fp8(fabric: Fabric) -> bool:
    return all(device.fp8_flops for node in fabric.nodes for device in node.devices)


@dataclass(frozen=True, slots=True)
class _Model:
    """The model as wired; the `form` of its weights where they are quantised, the products of each layer that are not
    then, and the assumptions. `stored`: its weights are quantised; `fp8`: they shall be on a GPU."""

    config: ModelConfig
    form: Quantisation
    wide: tuple[tuple[str, ...], ...]
    notes: list[str]
    stored: bool
    fp8: bool = False


def _model(loaded: LoadedDeployment, fp8: bool) -> _Model:
    d = loaded.deployment
    folder, notes = Path(d.model.path), list[str]()
    if (folder / "config.json").is_file():
        config, quantised = from_folder(folder), read_quantisation(folder)
    else:
        guess = by_folder(folder.name)
        if guess is None:
            raise ConfigError(
                [loaded.fault("model.path", f"{folder}: no such folder, and its name is none of a known architecture")]
            )
        config, quantised = guess.config, guess.form
        form = f", {quantised.title} weights" if quantised else ""
        form += "" if guess.how == "stock" else f", {config.wiring.name} wiring"
        notes.append(f"{folder} is not on this machine: taken for {guess.name}{form} by its name")
    wide = _wide(folder, config, quantised, notes)
    # Whether weights suit their wiring is for `check` and the ranks: a plan may ask what if.
    config, _ = choose_wiring(config, d.model.wiring, d.model.ladder_layers, allow_untrained=True)
    stored = quantised is not None and d.dummy_seed is None  # a dummy of these is drawn wide
    return _Model(config, quantised or assumed_fp8(config), wide, notes, stored, fp8)


def _wide(
    folder: Path, config: ModelConfig, quantised: Quantisation | None, notes: list[str]
) -> tuple[tuple[str, ...], ...]:
    """The products of each layer that quantised weights leave wide: by the headers of the folder's files, else as the
    published checkpoint of its name has it. Appends to `notes` which of the two."""
    if quantised is not None and any(folder.glob("*.safetensors")):
        try:
            names = open_checkpoint(folder, config).quantised_products(RankShard(config, 1, 0))
        except (CheckpointError, OSError) as fault:
            notes.append(f"the headers of {folder} cannot be read ({fault}): they are assumed by its name")
        else:
            wide = tuple(
                tuple(p for p, parts in _products(config, i) if not {f"layers.{i}.{x}" for x in parts} & names)
                for i in range(config.num_layers)
            )
            notes += _kept_wide(wide, quantised, f"{folder} keeps")
            return wide if any(wide) else ()
    guess = by_folder(folder.name)
    wide = published_fp8(guess.name) if guess else ()
    if len(wide) != config.num_layers:
        return _widened(config, quantised or assumed_fp8(config))
    notes += _kept_wide(wide, quantised or assumed_fp8(config), "the published checkpoint keeps")
    return wide


def _products(config: ModelConfig, layer: int) -> list[tuple[str, tuple[str, ...]]]:
    """The products of a layer that may be quantised, each with the names of its parts."""
    e, mixed = config.experts, config.has_experts(layer)
    names = ["o", *(("gate_up", "down") if config.has_mlp(layer) else ()), *(EXPERTS if mixed else ())]
    names += [SHARED] if mixed and e is not None and e.shared_ffn_size else []
    first = ("qkv",) if config.latent is None else ("latent.down", "latent.q")
    return [("qkv", first), *((name, (name,)) for name in names)]


def _widened(config: ModelConfig, form: Quantisation) -> tuple[tuple[str, ...], ...]:
    """The products of each layer that a published checkpoint keeps wide: all but experts of INT4."""
    return () if form.code == "e4m3" else ((*PRODUCTS, SHARED),) * config.num_layers


def _kept_here(
    wide: tuple[tuple[str, ...], ...], config: ModelConfig, form: Quantisation, fabric: Fabric
) -> tuple[tuple[str, ...], ...]:
    """`wide` with the products whose kernels read fp8, where devices have none."""
    if form.code != "e4m3" or _multiplies_fp8(fabric) or (form.block is None and config.experts is None):
        return wide
    products = EXPERTS if form.block is None else (*PRODUCTS, SHARED, *EXPERTS)
    return tuple((*layer, *products) for layer in wide or ((),) * config.num_layers)


def _kept_wide(wide: tuple[tuple[str, ...], ...], form: Quantisation, who: str) -> list[str]:
    counts = [(product, sum(product in layer for layer in wide)) for product in (*PRODUCTS, SHARED, *EXPERTS)]
    words = ", ".join(f"{product} of {count}" for product, count in counts if count)
    return [f"{form.title} weights: {who} {words} of {len(wide)} layers wide"] if words else []


def assumed_fabric(d: Deployment) -> str:
    """A preset that has room for the deployment: H100 nodes of 8, or CPU hosts."""
    if d.engine.device == "cpu":
        hosts = max(1, len(d.launch.hosts))
        return f"{hosts}x16xcpu"
    world = d.parallel.world
    per_node = d.launch.ranks_per_node or min(8, world.tp)
    return f"{-(-world.size // per_node)}x{per_node}xH100"


def _attends(config: ModelConfig, heads: int, setting: str, values: str, kv: str) -> bool:
    """Whether there are kernels for these heads, so many a rank: FlashInfer's, or those of sparse attention. setting:
    engine.attention; values, kv: types of activations and of the cache."""
    latent = config.latent
    if latent is not None and latent.index is not None:
        return setting == "auto" and kv == values
    if setting == "torch" or values == "float32":
        return False
    return config.head_dim in HEAD_DIMS if latent is None else not latent_unfit(latent, heads)


def _replicates(setting: str, config: ModelConfig, dtype: str, spans_nodes: bool) -> bool:
    """`parallel.embedding`, settled."""
    if setting != "auto":
        return setting == "replicate"
    return replicates_embedding(config, int(BYTES[dtype]), spans_nodes)


def _tuned(d: Deployment, fabric: Fabric, shape: Shape, backend: Backend) -> tuple[Costs | None, str, Sequence[str]]:
    """Prices of the tuning file, if there is one that can be read here."""
    if d.parallel.tuning_file is None:
        return None, "untuned prices", ()
    try:
        from ...topology.cost.tuning import chooser
    except ImportError as error:
        return None, "untuned prices", (f"{d.parallel.tuning_file} is not used: {error}",)
    tuned, warnings = chooser(Path(d.parallel.tuning_file), fabric, shape, backend)
    costs = None if tuned.source == "untuned" else tuned.costs
    return costs, f"{tuned.source} prices of {Path(d.parallel.tuning_file).name}", warnings
