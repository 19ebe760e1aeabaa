"""The deployment file: `load(path, overrides) -> Deployment`, frozen, strict, every error reported at once.

Reads one YAML file and `--set section.key=value` overrides, and touches nothing else: whether folders exist is for
`laddertron check` and for those who open them. No torch; also read by ranks, which get it as JSON (`from_json`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...topology.json_codec import ReadError, build
from .bind import bind, located
from .emulation import emulated_link
from .schema import PLACEMENT, EngineConfig, LaunchConfig, ParallelConfig
from .schema import Deployment as Deployment
from .yaml_tree import ConfigError as ConfigError
from .yaml_tree import graft, read_file, read_text


@dataclass(frozen=True, slots=True)
class LoadedDeployment:
    """A deployment and where each of its keys was said, for those who find errors later."""

    deployment: Deployment
    name: str
    places: Mapping[str, str]

    def fault(self, key: str, text: str) -> str:
        """`file:line: key: text`, at the key's line, or else its section's, or else the file's first."""
        place = key
        while place and place not in self.places:
            place = place.rpartition(".")[0]
        return located(self.places.get(place, f"{self.name}:1"), key, text)


@dataclass(frozen=True, slots=True)
class Draft:
    """A deployment as far as it could be read: `faults` may be none; keys in `bad` hold defaults in place of what the
    file says."""

    loaded: LoadedDeployment
    faults: tuple[str, ...]
    bad: frozenset[str]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Deployment:
    """The deployment that the file and the overrides (`engine.max_num_seqs=8`) describe, defaults filled in. Relative
    paths stand against the file's folder, those in overrides against the working directory. A model's folder in place
    of a file is a deployment of that model with every other key at its default, and its data in the working directory.
    Raises ConfigError."""
    return read(path, overrides).deployment


def read(path: str | Path, overrides: Sequence[str] = (), working: Path | None = None) -> LoadedDeployment:
    """As `load`, with the places of the keys. `working`: a directory to read it in, in place of the process's."""
    found = draft(path, overrides, working)
    if found.faults:
        raise ConfigError(found.faults)
    return found.loaded


def draft(path: str | Path, overrides: Sequence[str] = (), working: Path | None = None) -> Draft:
    """As `read`, but what is wrong is listed, so that whoever looks further can report all errors at once. Raises
    ConfigError only where nothing can be read."""
    working = working or Path.cwd()
    file = working / path
    folder = Path(os.path.abspath(file)).parent
    if (file / "config.json").is_file():
        folder = working
        tree, faults = read_text(f"model: {{path: {json.dumps(str(file), ensure_ascii=False)}}}", str(path))
    else:
        tree, faults = read_file(file, str(path))
    for override in overrides:
        tree, more = graft(tree, override)
        faults += more
    deployment, places, errors, bad = bind(tree, folder, working)
    loaded, faults = LoadedDeployment(deployment, str(path), places), [*faults, *errors]
    for keys, text in rules(deployment):
        if bad.isdisjoint(keys):
            faults.append(loaded.fault(next((key for key in keys if key in places), keys[0]), text))
    return Draft(loaded, tuple(sorted(faults, key=by_line)), bad)


def to_json(deployment: Deployment) -> dict[str, Any]:
    """As plain JSON values; `from_json` is its inverse."""
    data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(deployment)))
    return data


def from_json(data: Mapping[str, Any]) -> Deployment:
    """Raises ConfigError on anything that `to_json` would not have written."""
    try:
        deployment = build(Deployment, data)
    except ReadError as error:
        raise ConfigError([f"config: {error}"]) from None
    if broken := [f"config: {keys[0]}: {text}" for keys, text in rules(deployment)]:
        raise ConfigError(broken)
    return deployment


def digest(deployment: Deployment) -> str:
    """BLAKE2b of the deployment's canonical JSON, 32 hex digits: equal exactly where all keys are."""
    text = json.dumps(to_json(deployment), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def by_line(line: str) -> tuple[int, int]:
    """Sorts errors as they stand in the file."""
    parts = line.split(":", 2)
    return (0, int(parts[1])) if len(parts) > 1 and parts[1].isdigit() else (1, 0)


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    return host in ("localhost", "::1") or host.startswith("127.")


def rules(d: Deployment) -> Iterator[tuple[tuple[str, ...], str]]:
    """What keys ask of each other: (the keys concerned, what is wrong and its fix) for each rule that is broken."""
    model, parallel, launch, engine, daemon = d.model, d.parallel, d.launch, d.engine, d.daemon
    if model.wiring == "hybrid" and model.ladder_layers is None:
        yield ("model.wiring", "model.ladder_layers"), "hybrid needs model.ladder_layers: last n, or a list"
    if model.wiring not in ("auto", "hybrid") and model.ladder_layers is not None:
        yield ("model.ladder_layers", "model.wiring"), f"has no meaning with wiring {model.wiring}: set wiring: hybrid"
    if model.weights == "int8" and engine.device == "cuda":
        yield ("model.weights", "engine.device"), "int8 is computed on CPUs: use stored, or an fp8 checkpoint"
    if model.weights == "int8" and model.dtype not in ("auto", "bfloat16"):
        yield ("model.weights", "model.dtype"), f"int8 is computed with bfloat16, not {model.dtype}: use stored"
    if parallel.collective != "emulated":
        for key in ("emulated_delay", "emulated_bandwidth", "emulated_fabric", "emulated_multiprocessors"):
            if getattr(parallel, key):
                yield (
                    (f"parallel.{key}", "parallel.collective"),
                    f"has no effect with collective {parallel.collective}: set collective: emulated, or leave it out",
                )
    elif parallel.emulated_fabric is not None:
        for key in ("emulated_delay", "emulated_bandwidth"):
            if getattr(parallel, key):
                yield (
                    (f"parallel.{key}", "parallel.emulated_fabric"),
                    f"the prices of {parallel.emulated_fabric} say this already: leave one of the two out",
                )
        try:
            emulated_link(parallel)
        except ValueError as fault:
            yield ("parallel.emulated_fabric", "parallel.tensor_parallel_size"), str(fault)
    if parallel.split_steps == "always":
        if parallel.tensor_parallel_size == 1:
            yield (
                ("parallel.split_steps", "parallel.tensor_parallel_size"),
                "always has nothing to hide with tensor_parallel_size 1: use auto or never",
            )
        if not parallel.overlap:
            yield ("parallel.split_steps", "parallel.overlap"), "always needs overlap: true; use auto or never"
    if parallel.emulated_multiprocessors and engine.device == "cpu":
        yield (
            ("parallel.emulated_multiprocessors", "engine.device"),
            "only a GPU has multiprocessors to hold: leave it at 0 on a CPU",
        )
    if parallel.backend == "nccl" and engine.device == "cpu":
        yield ("parallel.backend", "engine.device"), "nccl needs engine.device: cuda; on a CPU use auto"
    if parallel.deterministic and engine.kv_cache_dtype == "fp8":
        yield (
            ("parallel.deterministic", "engine.kv_cache_dtype"),
            "it needs keys and values in the model's type, not fp8: use kv_cache_dtype: auto",
        )
    if parallel.deterministic and engine.attention == "torch":
        yield (
            ("parallel.deterministic", "engine.attention"),
            "attention torch computes a row as its step's other rows have it: use engine.attention: auto",
        )
    if engine.kv_cache_dtype == "fp8" and engine.device == "cpu":
        yield ("engine.kv_cache_dtype", "engine.device"), "fp8 needs engine.device: cuda; on a CPU use auto"
    if engine.attention == "flashinfer" and engine.device == "cpu":
        yield ("engine.attention", "engine.device"), "flashinfer needs engine.device: cuda; on a CPU use auto or torch"
    if engine.speculation is True:
        yield ("engine.speculation",), "true does not say by which drafts: use ngram, model, auto or false"
    if engine.speculation == "model" and engine.draft_model is None:
        yield (
            ("engine.speculation", "engine.draft_model"),
            "model needs engine.draft_model: the folder of a small model with the same tokenizer; or use ngram",
        )
    if engine.draft_model is not None and engine.speculation not in ("model", "auto"):
        yield (
            ("engine.draft_model", "engine.speculation"),
            f"has no effect with speculation {engine.speculation or 'false'}: use model or auto, or leave it out",
        )
    if engine.speculation and engine.device == "cuda":
        yield (
            ("engine.speculation", "engine.device"),
            f"{engine.speculation} needs engine.device: cpu: on a GPU steps are set off before the ids that drafts "
            "follow are known; use false",
        )
    if engine.cuda_graphs is True and engine.device == "cpu":
        yield ("engine.cuda_graphs", "engine.device"), "true needs engine.device: cuda; on a CPU use auto or false"
    yield from _pipeline_rules(parallel, engine)
    yield from _launch_rules(parallel, launch)
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        yield (
            ("engine.max_num_batched_tokens", "engine.max_num_seqs"),
            f"{engine.max_num_batched_tokens} < max_num_seqs={engine.max_num_seqs}: every running sequence needs a "
            f"token a step: raise it or lower engine.max_num_seqs",
        )
    if not engine.enable_chunked_prefill and engine.max_num_batched_tokens < (model.max_model_len or 0):
        yield (
            ("engine.enable_chunked_prefill", "engine.max_num_batched_tokens", "model.max_model_len"),
            f"false needs max_num_batched_tokens ({engine.max_num_batched_tokens}) >= model.max_model_len "
            f"({model.max_model_len}): a prompt would not fit one step",
        )
    if (daemon.tls_cert is None) != (daemon.tls_key is None):
        given, other = ("tls_cert", "tls_key") if daemon.tls_cert else ("tls_key", "tls_cert")
        yield (f"daemon.{given}", f"daemon.{other}"), f"needs daemon.{other} too: TLS takes the pair"
    if not is_loopback(daemon.host) and daemon.api_key_file is None:
        yield (
            ("daemon.host", "daemon.api_key_file"),
            f"{daemon.host} can be reached from other machines: set daemon.api_key_file (laddertron keys add), "
            f"or use 127.0.0.1",
        )
    if daemon.limits.max_line_bytes > daemon.limits.max_body_bytes:
        yield (
            ("daemon.limits.max_line_bytes", "daemon.limits.max_body_bytes"),
            f"{daemon.limits.max_line_bytes} is more than limits.max_body_bytes={daemon.limits.max_body_bytes}: "
            f"a line is part of a file",
        )
    if d.metrics.enabled and d.metrics.port and (d.metrics.host, d.metrics.port) == (daemon.host, daemon.port):
        yield ("metrics.port", "daemon.port"), f"{d.metrics.port} is the daemon's: leave it out to share its listener"


def _pipeline_rules(parallel: ParallelConfig, engine: EngineConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    stages, size = parallel.pipeline_parallel_size, "parallel.pipeline_parallel_size"
    if parallel.pipeline_layers and len(parallel.pipeline_layers) != stages:
        yield (
            ("parallel.pipeline_layers", size),
            f"names {len(parallel.pipeline_layers)} stages, {size.partition('.')[2]} is {stages}: name one number a "
            "stage, or leave it out",
        )
    if parallel.pipeline_microbatches is not None and parallel.microbatches < stages:
        yield (
            ("parallel.pipeline_microbatches", size),
            f"{parallel.microbatches} < {stages} stages: so many less would always stand idle: use {stages} or more",
        )
    if parallel.pipeline_microbatches is not None and stages == 1:
        yield ("parallel.pipeline_microbatches", size), "has no effect with one stage: leave it out"
    if stages > 1 and engine.max_num_seqs < parallel.microbatches:
        yield (
            ("engine.max_num_seqs", "parallel.pipeline_microbatches", size),
            f"{engine.max_num_seqs} < {parallel.microbatches} micro-batches: each needs a sequence: raise it",
        )
    if stages > 1 and engine.speculation:
        yield (
            ("engine.speculation", size),
            f"{engine.speculation} needs one stage: drafts follow ids that the first one does not know yet; use false",
        )
    if stages > 1 and engine.cuda_graphs is True:
        yield ("engine.cuda_graphs", size), "stages are not recorded yet: use auto or false"


def _launch_rules(parallel: ParallelConfig, launch: LaunchConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    tp, replicas, stages = parallel.tensor_parallel_size, parallel.replicas, parallel.pipeline_parallel_size
    if launch.hosts and launch.hostfile:
        yield ("launch.hostfile", "launch.hosts"), "stands beside launch.hosts: keep one of them"
    names = [host.partition(":")[0] for host in (*launch.hosts, *launch.spare_hosts)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        yield ("launch.hosts", "launch.spare_hosts"), f"{', '.join(twice)} stands twice: name each host once"
    if launch.bind_to == PLACEMENT and launch.fabric is None:
        yield (
            ("launch.bind_to", "launch.fabric"),
            "placement needs launch.fabric, which says the cores: set it (or --fabric FILE), or bind_to: none",
        )
    per_node = launch.ranks_per_node
    if per_node is not None and tp > per_node and tp % per_node:
        yield (
            ("launch.ranks_per_node", "parallel.tensor_parallel_size"),
            f"{tp} ranks are no multiple of {per_node} a node: use a divisor of {tp}",
        )
    slots = [int(host.partition(":")[2] or per_node or 0) for host in launch.hosts]
    ranks = tp * stages * replicas
    if slots and all(slots) and sum(slots) < ranks:
        product = f"{tp} x {stages} x {replicas}" if stages > 1 else f"{tp} x {replicas}"
        yield (
            ("launch.hosts", "parallel.tensor_parallel_size", "parallel.replicas"),
            f"{' + '.join(map(str, slots))} = {sum(slots)} slots for {product} = {ranks} ranks: "
            f"add hosts, or lower parallel.tensor_parallel_size or parallel.replicas",
        )
