"""`laddertron check`: validates a deployment file and the files it names without torch or MPI."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ....engine.config.load import ConfigError, Deployment, LoadedDeployment, by_line, draft, read
from ....engine.daemon.http.tls import TlsFault, check_pair
from ....engine.daemon.store.disk import holder_pid
from ....models.config.json_fields import Refusal
from ....topology.hardware import fabric as fabrics
from ....topology.hardware.cpu_quota import memory_bytes
from ....topology.hardware.cpu_tier import VARIABLE, Tier, TierError, lowered, own, require_int8
from ....topology.hardware.cuda_stack import look, stack_faults
from ...compose.detect_launcher import fabric_of, survey
from ...compose.host_allocation import JobHosts, divide
from ...compose.host_names import NEEDS_IPV4, HostNames
from ...compose.hosts import LaunchError, read_hosts
from ...compose.ports import require_ports
from ..errors import show_warning
from ..fabric_source import set_option

if TYPE_CHECKING:
    from ....models.config.model_config import ModelConfig

FILES = (
    "model.tokenizer",
    "parallel.tuning_file",
    "launch.hostfile",
    "launch.fabric",
    "daemon.api_key_file",
    "daemon.tls_cert",
    "daemon.tls_key",
)


def missing_files(loaded: LoadedDeployment, keys: Sequence[str] = FILES) -> Iterator[str]:
    """One fault for each file that the deployment names under `keys` and this machine has not."""
    for key in keys:
        path = attrgetter(key)(loaded.deployment)
        if path is not None and not Path(path).exists():
            yield loaded.fault(key, f"{path}: no such file; relative paths start at the config's folder")


def refused(loaded: LoadedDeployment, key: str, ask: Callable[[], object], taken: str = "") -> Iterator[str]:
    """The key's fault, in one line, if `ask` raises; `taken`: what the answer rests on."""
    try:
        ask()
    except (Refusal, ValueError, OSError) as error:
        yield loaded.fault(key, f"{' '.join(str(error).split())}{taken}")


def tokenizer_faults(loaded: LoadedDeployment) -> Iterator[str]:
    """Faults of the tokenizer by which a start would be refused, where the model's folder is one."""
    from ....engine.text.tokenizer import TextModel

    d = loaded.deployment
    folder = Path(d.text_folder)
    if d.model.load_format == "dummy" and not d.model.allow_dummy:
        return  # nothing is answered
    if (Path(d.model.path) / "config.json").is_file() and folder.is_dir():
        key = "model.path" if d.model.tokenizer is None else "model.tokenizer"
        yield from refused(loaded, key, lambda: TextModel.from_folder(folder).chat)


def weights_faults(loaded: LoadedDeployment) -> Iterator[str]:
    """Faults of the weights' headers by which ranks would refuse, for a model that passed model_faults; and of a sample
    of their values those that are NaN or infinite."""
    from ....models.config.model_config import from_folder
    from ....models.stages import RankShard, choose_layers, make_stages, predictor_stage
    from ....models.weights.checkpoint import check_finite
    from ....models.weights.mapping import open_source

    folder, p = Path(loaded.deployment.model.path), loaded.deployment.parallel
    size, seed, mtp = p.world.tp, loaded.deployment.dummy_seed, loaded.deployment.engine.speculation == "mtp"

    def read_headers() -> None:
        config = from_folder(folder)
        stages = make_stages(config, choose_layers(config, p.world.stages, p.pipeline_layers))
        for shard in (RankShard.of(stage, size, rank) for stage in stages for rank in range(size)):
            predictor = predictor_stage(config, not shard.embeds) if mtp else None
            source = open_source(folder, shard, config, seed, predictor)
            if seed is None:
                check_finite(source.tensors.values())
            if not source.sharded_over:
                return  # the checkpoint itself, the same for each rank

    yield from refused(loaded, "model.path", read_headers)


def dummy_faults(loaded: LoadedDeployment) -> Iterator[str]:
    """A refusal to answer with random weights."""
    if loaded.deployment.model.load_format == "dummy" and not loaded.deployment.model.allow_dummy:
        yield loaded.fault(
            "model.load_format",
            "dummy weights are random, so answers are meaningless: use them with bench only, or set "
            "model.allow_dummy: true",
        )


def unmeasured_weights(deployment: Deployment) -> str | None:
    """A warning for weights that are random, or declare another wiring and have no evaluation record."""
    if deployment.model.load_format == "dummy":
        return "model.load_format: dummy: weights are random, answers mean nothing"
    from ....models.config.model_config import from_folder
    from ....models.config.wiring import missing_record

    folder = Path(deployment.model.path)
    return missing_record(folder, from_folder(folder)) if (folder / "config.json").is_file() else None


def shared_gpu_warning(deployment: Deployment) -> str | None:
    if not deployment.launch.share_gpu:
        return None
    return (
        "launch.share_gpu=true: ranks share GPUs and send over sockets, which is slow and only tests the path between "
        "nodes: use false to serve"
    )


def kernels_warning(deployment: Deployment) -> str | None:
    """A warning where this host has FlashInfer, which the deployment may use, and no way to its kernels."""
    from ....models.cuda.workspace import kernels_missing

    keys = deployment.engine
    return None if keys.device == "cpu" or keys.attention == "torch" else kernels_missing()


def stack_warnings(deployment: Deployment) -> tuple[str, ...]:
    """Faults of this host's CUDA stack, unless the deployment computes on CPUs."""
    if deployment.engine.device == "cpu":
        return ()
    facts, launch = look(), deployment.launch
    if deployment.engine.device == "cuda" and not (facts.gpus or launch.hosts or launch.hostfile or launch.fabric):
        return ("engine.device: cuda, and this host shows no NVIDIA GPU: ranks cannot start here",)
    return stack_faults(facts)


def tls_faults(loaded: LoadedDeployment) -> Iterator[str]:
    """Faults of the daemon's certificate and key, where both exist."""
    daemon = loaded.deployment.daemon
    if daemon.tls_cert and daemon.tls_key and Path(daemon.tls_cert).exists() and Path(daemon.tls_key).exists():
        try:
            check_pair(daemon.tls_cert, daemon.tls_key)
        except TlsFault as fault:
            yield loaded.fault(f"daemon.{fault.key}", str(fault))


def host_tiers(deployment: Deployment) -> dict[Tier, str]:
    """The CPU tiers of the fabric's hosts, else of this host, each with one host that has it."""
    launch = deployment.launch
    if launch.fabric is not None:
        nodes = fabrics.load(Path(launch.fabric)).nodes if Path(launch.fabric).exists() else ()
        return {node.cpu_tier: node.hostname for node in reversed(nodes) if node.cpu_tier is not None}
    return {} if launch.hosts or launch.hostfile else {own(): "this host"}


def cpu_faults(loaded: LoadedDeployment) -> Iterator[str]:
    """Faults of the hosts' processors: a CPU tier, or int8 weights, that they do not support."""
    d = loaded.deployment
    try:
        tiers = host_tiers(d)
    except (OSError, ValueError) as error:
        yield loaded.fault("launch.fabric", str(error))
        return
    forced = d.launch.env.get(VARIABLE) or os.environ.get(VARIABLE)
    for tier, host in tiers.items():
        key = "launch.env"
        try:
            played = lowered(forced, tier) if forced else tier
            key = "model.weights"
            if d.model.weights == "int8":
                require_int8(played)
        except TierError as error:
            yield loaded.fault(key, f"{host}: {error}")


def shares_of(deployment: Deployment) -> tuple[JobHosts, ...]:
    """Each replica's hosts. Raises OSError or ValueError for hosts that do not fit."""
    fabric = fabric_of(deployment)
    return divide(read_hosts(deployment, os.environ, fabric), deployment.parallel.world, fabric)


def nodes_of_group(deployment: Deployment) -> int:
    """The nodes that each tensor-parallel group spans, by the hosts or launch.ranks_per_node."""
    world = deployment.parallel.world
    with suppress(OSError, ValueError):
        return max(1, len(shares_of(deployment)[0].hosts) // world.stages)
    return max(1, world.tp // (deployment.launch.ranks_per_node or world.tp))


def address_faults(loaded: LoadedDeployment) -> Iterator[str]:
    """Hosts that the configured launcher cannot reach."""
    launch = loaded.deployment.launch
    if launch.launcher == "mpich":
        listed = [host.partition(":")[0] for host in (*launch.hosts, *launch.spare_hosts)]
        if host := HostNames(listed, socket.gethostname()).only_ipv6(listed):
            yield loaded.fault("launch.launcher", f"{host}{NEEDS_IPV4}")


def port_faults(loaded: LoadedDeployment) -> Iterator[str]:
    """A range of ports that is too small for the ranks of a host."""
    if loaded.deployment.launch.port_range is not None:
        with suppress(OSError, ValueError):  # hosts that do not fit are a fault of their own
            shares = shares_of(loaded.deployment)
            yield from refused(loaded, "launch.port_range", lambda: require_ports(loaded.deployment, shares))


def memory_faults(loaded: LoadedDeployment) -> Iterator[str]:
    """A KV cache that this host cannot hold, where all ranks are on it: found here, not by each rank."""
    d = loaded.deployment
    launch, bytes_per_rank = d.launch, d.engine.kv_cache_memory
    listed = [host.partition(":")[0] for host in launch.hosts]
    elsewhere = not all(map(HostNames(listed, socket.gethostname()).is_here, listed))
    elsewhere |= bool(launch.hostfile or launch.fabric) or "SLURM_JOB_ID" in os.environ
    if bytes_per_rank is None or elsewhere or d.engine.device == "cuda":
        return
    have = memory_bytes()
    if bytes_per_rank * (ranks := d.parallel.world.size) > have:
        text = f"{bytes_per_rank >> 20} MiB for each of {ranks} ranks, and this host has {have >> 20} MiB: lower it"
        yield loaded.fault("engine.kv_cache_memory", text)


def latent_faults(loaded: LoadedDeployment, model: ModelConfig, heads: int, taken: str) -> Iterator[str]:
    """Limits of a step that FlashInfer, if GPUs compute, cannot plan for attention over latents, with `heads` a
    rank."""
    from ....models.cuda.workspace import latent_unfit, too_many_latent_items

    keys, latent = loaded.deployment.engine, model.latent
    if latent is None or keys.device != "cuda" or keys.attention == "torch" or keys.kv_cache_dtype == "fp8":
        return
    if latent_unfit(latent, heads) is None:
        why = too_many_latent_items(keys.max_num_batched_tokens, keys.max_num_seqs, heads)
        if why is not None:
            yield loaded.fault("engine.max_num_batched_tokens", why + taken)


def model_faults(loaded: LoadedDeployment, look: bool = True, bad: Set[str] = frozenset()) -> Iterator[str]:
    """Conflicts of model and deployment. Unless `look`, the model is known by its folder's name. Keys in `bad` are
    skipped."""
    from ....models.config.known_models import by_folder
    from ....models.config.model_config import from_folder
    from ....models.config.predictor import predictor_of
    from ....models.config.shapes import check_draft, check_everywhere, check_shapes, share
    from ....models.config.wiring import WiringError, check_split, choose_wiring
    from ....models.stages import choose_layers

    d = loaded.deployment
    folder, guess = Path(d.model.path), by_folder(Path(d.model.path).name)
    model, taken = (None, "") if guess is None else (guess.config, f" ({guess.name} by its folder's name)")
    if not bad.isdisjoint(("model", "model.path")):
        return
    if look and not folder.is_dir():
        yield loaded.fault("model.path", _no_folder(folder))
    elif look:
        try:
            model, taken = from_folder(folder), ""
        except (OSError, ValueError) as error:
            yield loaded.fault("model.path", " ".join(str(error).split()))
            return
    if model is None:
        return
    if "parallel.tensor_parallel_size" not in bad:
        size, p = d.parallel.world.tp, d.parallel
        layout = p.expert_layout, p.dense_path
        nodes = nodes_of_group(d)
        key = "parallel.dense_path" if layout[0] == "auto" else "parallel.expert_layout"
        cut = partial(share, model, *layout, nodes, size // nodes)
        faults = [*refused(loaded, key, cut, taken)] or [
            *refused(loaded, "parallel.tensor_parallel_size", lambda: check_shapes(model, size, cut()), taken)
        ]
        yield from faults or latent_faults(loaded, model, model.num_heads // (cut().per_node or size), taken)
        if d.parallel.deterministic == "everywhere":
            yield from refused(loaded, "parallel.deterministic", lambda: check_everywhere(model, size), taken)
    if bad.isdisjoint(("parallel.pipeline_parallel_size", "parallel.pipeline_layers")):
        stages, layer_counts = d.parallel.world.stages, d.parallel.pipeline_layers
        key = "parallel.pipeline_layers" if layer_counts else "parallel.pipeline_parallel_size"
        yield from refused(loaded, key, lambda: choose_layers(model, stages, layer_counts), taken)
    if look and (small := d.engine.draft_model) is not None and "engine.draft_model" not in bad:
        longest = d.model.max_model_len
        yield from refused(loaded, "engine.draft_model", lambda: check_draft(from_folder(Path(small)), model, longest))
    if d.engine.speculation == "mtp":
        yield from refused(loaded, "engine.speculation", lambda: predictor_of(model), taken)
    if d.model.max_model_len is not None and d.model.max_model_len > model.longest_context:
        most, longest = model.max_position_embeddings, model.longest_context
        stretched = f", stretched to {longest} by its rope_scaling" if longest > most else ""
        yield loaded.fault(
            "model.max_model_len",
            f"{d.model.max_model_len} is more than the model's max_position_embeddings={most}{stretched}{taken}",
        )
    with suppress(WiringError):  # a start, or the line above, says it
        wiring = choose_wiring(model, d.model.wiring, d.model.ladder_layers, True)[0].wiring
        yield from refused(loaded, "parallel.split_steps", lambda: check_split(wiring, d.parallel.split_steps), taken)
    layers = d.model.ladder_layers
    last = layers if isinstance(layers, int) else max((n + 1 for n in layers or ()), default=0)
    if last > model.num_layers:
        yield loaded.fault("model.ladder_layers", f"names {last} layers, the model has {model.num_layers}{taken}")
    elif not taken:
        allowed = d.model.allow_untrained_ladder or d.model.load_format == "dummy"
        choose = partial(choose_wiring, model, d.model.wiring, d.model.ladder_layers, allowed)
        yield from refused(loaded, "model.wiring", choose)


def _no_folder(path: Path) -> str:
    if path.name == "config.json" and path.is_file():
        return f"{path}: a model's config.json: name its folder, {path.parent}"
    if path.is_file():
        return f"{path}: a file: name the model's folder"
    hint = "" if path.parent.is_dir() else "; models are not downloaded by name: hf download NAME --local-dir FOLDER"
    return f"{path}: no such folder{hint} (check --no-model skips the model)"


def read_model(config: str, overrides: Sequence[str] = ()) -> Deployment:
    """The deployment, after checks of its model, launch files and hosts' memory. Raises ConfigError."""
    loaded = read(config, overrides)
    absent = missing_files(loaded, ("launch.hostfile", "launch.fabric"))
    if faults := [*model_faults(loaded), *absent, *memory_faults(loaded)]:
        raise ConfigError(sorted(faults, key=by_line))
    return loaded.deployment


def summary(loaded: LoadedDeployment) -> str:
    d = loaded.deployment
    p = d.parallel
    world = p.world
    pipeline = f" x pp {world.stages}" if world.stages > 1 else ""
    hosts = len(d.launch.hosts)
    where = fabrics.counted(hosts, "host") if hosts else d.launch.hostfile or "this host or the allocation"
    return (
        f"{loaded.name}: OK: {d.served_model_name}, tp {world.tp}{pipeline} x {world.replicas} "
        f"= {fabrics.counted(world.size, 'rank')} on {where}, "
        f"wiring {d.model.wiring}, collective {p.collective}"
    )


def unchecked(deployment: Deployment, no_model: bool) -> str:
    """In one line: what a start needs that `check` has not looked at, and the command for it."""
    launch = deployment.launch
    parts = ["that memory suffices (laddertron plan)", "weights beyond a sample (laddertron manifest --check)"]
    if no_model:
        parts = ["the model and other files that the deployment names", "launcher, ports and data folder"]
    if launch.hosts or launch.hostfile or launch.fabric or launch.ranks_per_node:
        parts.append("the other hosts and the network between them (laddertron preflight)")
    return f"not checked: {'; '.join(parts)}"


def start_faults(loaded: LoadedDeployment) -> Iterator[str]:
    """What of this machine keeps a job or the daemon from starting: no launcher, a locked data folder, a port in use. A
    daemon that uses this data folder has the ports, and the file may be meant for its reload."""
    d = loaded.deployment
    try:
        survey(d, os.environ)
    except LaunchError as error:
        yield loaded.fault("launch.launcher", str(error).removeprefix(f"launch.launcher={d.launch.launcher}: "))
    except (OSError, ValueError) as error:
        yield loaded.fault("launch.fabric", str(error))
    if (pid := holder_pid(Path(d.daemon.data_dir))) is not None:
        show_warning(
            f"daemon.data_dir: process {pid} uses {d.daemon.data_dir}: `serve` is refused; `reload` applies the file"
        )
        return
    doors = (("daemon.port", d.daemon.host, d.daemon.port), ("metrics.port", d.metrics.host, d.metrics.port))
    for key, host, port in doors:
        if port and _in_use(host, port):
            yield loaded.fault(key, f"{host}:{port} is in use: end the process that listens there, or use another port")


def _in_use(host: str, port: int) -> bool:
    with suppress(OSError):  # a name or address of another machine: the file may be meant for it
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as door:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                door.bind(address)
            except OSError as error:
                return error.errno == errno.EADDRINUSE
    return False


@click.command()
@click.argument("config", type=click.Path())
@set_option
@click.option("--no-model", is_flag=True, help="Check only the file, not the model and other files that it names.")
def command(config: str, overrides: tuple[str, ...], no_model: bool) -> None:
    """Validate CONFIG, the files it names, the split of its model over the ranks, its tokenizer and weight headers.

    Prints each error on one line, FILE:LINE: KEY: what is wrong, what is allowed, and exits with 2.

    \b
      laddertron check deploy.yaml
      laddertron check configs/405b/stock.yaml --no-model
      laddertron check deploy.yaml --set parallel.tensor_parallel_size=4
    """
    drafted = draft(config, overrides)
    loaded = drafted.loaded
    faults = [*drafted.faults, *model_faults(loaded, not no_model, drafted.bad)]
    if not no_model:
        faults += [*missing_files(loaded), *tls_faults(loaded), *cpu_faults(loaded), *memory_faults(loaded)]
        faults += [*address_faults(loaded), *port_faults(loaded)]
        if drafted.bad.isdisjoint(("model", "model.path")):
            faults += tokenizer_faults(loaded)
    if not faults and not no_model:
        faults += [*weights_faults(loaded), *start_faults(loaded)]
    if faults:
        raise ConfigError(sorted(faults, key=by_line))
    if not no_model:
        d = loaded.deployment
        for warning in filter(
            None, (shared_gpu_warning(d), unmeasured_weights(d), kernels_warning(d), *stack_warnings(d))
        ):
            show_warning(warning)
    click.echo(summary(loaded))
    click.echo(unchecked(loaded.deployment, no_model))
