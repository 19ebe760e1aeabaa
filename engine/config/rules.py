"""The constraints between keys, one row each; RULE_CASES of tests/helpers/config_cases.py has a case for each."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from ...topology.hardware.ports import LAST_PORT, port_range
from ...topology.link_cost import Emulation
from .schema import PLACEMENT, Deployment, ParallelConfig


@dataclass(frozen=True, slots=True)
class Rule:
    """`broken` returns a truthy value if the constraint is violated. `message` has the error and its fix; it may
    contain `{section.key}`, and `{found}` for the value of `broken`. The error is reported at the first of `keys` that
    the file sets, and omitted if one of them is unreadable."""

    keys: tuple[str, ...]
    broken: Callable[[Deployment], object]
    message: str


def broken_rules(d: Deployment) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields (keys, message) of each rule that the deployment violates."""
    for rule in RULES:
        if values := rule.broken(d):
            sections = {"model": d.model, "parallel": d.parallel, "launch": d.launch, "engine": d.engine}
            yield rule.keys, rule.message.format(found=values, daemon=d.daemon, metrics=d.metrics, **sections)


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine. A name other than localhost may resolve to any."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _where_not(fine: Callable[[Deployment], bool], key: str) -> Callable[[Deployment], object]:
    """A condition that is violated if `key` is set, unless `fine`."""
    return lambda d: not fine(d) and attrgetter(key)(d)


def _duplicate_hosts(d: Deployment) -> str:
    names = [host.partition(":")[0] for host in (*d.launch.hosts, *d.launch.spare_hosts)]
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


def _missing_slots(d: Deployment) -> str:
    world = d.parallel.world
    slots = [int(host.partition(":")[2] or d.launch.ranks_per_node or 0) for host in d.launch.hosts]
    if not slots or not all(slots) or sum(slots) >= world.size:
        return ""
    return f"{' + '.join(map(str, slots))} = {sum(slots)} slots for {world.product} ranks"


_TP, _PP = "parallel.tensor_parallel_size", "parallel.pipeline_parallel_size"

RULES: tuple[Rule, ...] = (
    Rule(
        ("model.wiring", "model.ladder_layers"),
        lambda d: d.model.wiring == "hybrid" and d.model.ladder_layers is None,
        "hybrid needs model.ladder_layers: last n, or a list",
    ),
    Rule(
        ("model.ladder_layers", "model.wiring"),
        lambda d: d.model.wiring not in ("auto", "hybrid") and d.model.ladder_layers is not None,
        "has no effect with wiring {model.wiring}: set wiring: hybrid",
    ),
    Rule(
        ("model.weights", "engine.device"),
        lambda d: d.model.weights == "int8" and d.engine.device == "cuda",
        "int8 needs engine.device: cpu; on a GPU use stored, or an fp8 checkpoint",
    ),
    Rule(
        ("model.weights", "model.dtype"),
        lambda d: d.model.weights == "int8" and d.model.dtype not in ("auto", "bfloat16"),
        "int8 needs dtype bfloat16, not {model.dtype}: use stored",
    ),
    Rule(
        ("parallel.emulated_delay", "parallel.collective"),
        _where_not(lambda d: d.parallel.collective == "emulated", "parallel.emulated_delay"),
        "has no effect with collective {parallel.collective}: set collective: emulated, or leave it out",
    ),
    Rule(
        ("parallel.collective", "engine.device"),
        lambda d: d.parallel.collective == "emulated" and d.engine.device == "cuda",
        "emulated needs engine.device: cpu",
    ),
    Rule(
        ("parallel.collective", "parallel.backend", "engine.device"),
        lambda d: (
            d.parallel.collective == "one_shot"
            and (d.engine.device == "cpu" or d.parallel.backend in ("native", "gloo"))
        ),
        "one_shot needs engine.device: cuda and backend: nccl; on a CPU use auto",
    ),
    Rule(
        ("parallel.collective", "parallel.deterministic"),
        lambda d: d.parallel.collective == "one_shot" and bool(d.parallel.deterministic),
        "one_shot has no effect with deterministic: use auto",
    ),
    Rule(
        ("parallel.split_steps", _TP),
        lambda d: d.parallel.split_steps == "always" and d.parallel.world.tp == 1,
        "always needs all-reduces to overlap, tensor_parallel_size is 1: use auto or never",
    ),
    Rule(
        ("parallel.split_steps", "parallel.overlap"),
        lambda d: d.parallel.split_steps == "always" and not d.parallel.overlap,
        "always needs overlap: true; use auto or never",
    ),
    Rule(
        ("parallel.backend", "engine.device"),
        lambda d: d.parallel.backend == "nccl" and d.engine.device == "cpu",
        "nccl needs engine.device: cuda; on a CPU use auto",
    ),
    Rule(
        ("parallel.deterministic", "engine.kv_cache_dtype"),
        lambda d: d.parallel.deterministic and d.engine.kv_cache_dtype == "fp8",
        "it needs keys and values in the model's type, not fp8: use kv_cache_dtype: auto",
    ),
    Rule(
        ("parallel.deterministic", "engine.attention"),
        lambda d: d.parallel.deterministic and d.engine.attention == "torch",
        "attention torch depends on the other rows of a step: use engine.attention: auto",
    ),
    Rule(
        ("engine.kv_cache_dtype", "engine.device"),
        lambda d: d.engine.kv_cache_dtype == "fp8" and d.engine.device == "cpu",
        "fp8 needs engine.device: cuda; on a CPU use auto",
    ),
    Rule(
        ("engine.attention", "engine.device"),
        lambda d: d.engine.attention == "flashinfer" and d.engine.device == "cpu",
        "flashinfer needs engine.device: cuda; on a CPU use auto or torch",
    ),
    Rule(
        ("engine.speculation",),
        lambda d: d.engine.speculation is True,
        "true names no source of drafts: use ngram, model, mtp, auto or false",
    ),
    Rule(
        ("engine.speculation", "engine.draft_model"),
        lambda d: d.engine.speculation == "model" and d.engine.draft_model is None,
        "model needs engine.draft_model: the folder of a small model with the same tokenizer; or use ngram",
    ),
    Rule(
        ("engine.draft_model", "engine.speculation"),
        lambda d: (
            d.engine.draft_model is not None
            and d.engine.speculation not in ("model", "auto")
            and (d.engine.speculation or "false")
        ),
        "has no effect with speculation {found}: use model or auto, or leave it out",
    ),
    Rule(
        ("engine.speculation", "engine.device"),
        lambda d: d.engine.device == "cuda" and (d.engine.speculation == "model" or d.engine.draft_model),
        "engine.draft_model needs engine.device: cpu: on a GPU drafts are looked up, or the model's own: use ngram, "
        "mtp, auto without it, or false",
    ),
    Rule(
        ("engine.cuda_graphs", "engine.device"),
        lambda d: d.engine.cuda_graphs is True and d.engine.device == "cpu",
        "true needs engine.device: cuda; on a CPU use auto or false",
    ),
    Rule(
        ("parallel.pipeline_layers", _PP),
        lambda d: (
            d.parallel.pipeline_layers
            and len(d.parallel.pipeline_layers) != d.parallel.world.stages
            and len(d.parallel.pipeline_layers)
        ),
        "names {found} stages, pipeline_parallel_size is {parallel.pipeline_parallel_size}: name one number a "
        "stage, or leave it out",
    ),
    Rule(
        ("parallel.pipeline_microbatches", _PP),
        lambda d: d.parallel.pipeline_microbatches is not None and d.parallel.microbatches < d.parallel.world.stages,
        "{parallel.microbatches} < {parallel.pipeline_parallel_size} stages, of which some would always be idle: use "
        "{parallel.pipeline_parallel_size} or more",
    ),
    Rule(
        ("parallel.pipeline_microbatches", _PP),
        lambda d: d.parallel.pipeline_microbatches is not None and d.parallel.world.stages == 1,
        "has no effect with one stage: leave it out",
    ),
    Rule(
        ("engine.max_num_seqs", "parallel.pipeline_microbatches", _PP),
        lambda d: d.parallel.world.stages > 1 and d.engine.max_num_seqs < d.parallel.microbatches,
        "{engine.max_num_seqs} < {parallel.microbatches} micro-batches: each needs a sequence: raise it",
    ),
    Rule(
        ("launch.hostfile", "launch.hosts"),
        lambda d: d.launch.hosts and d.launch.hostfile,
        "conflicts with launch.hosts: keep one of them",
    ),
    Rule(
        ("launch.hosts", "launch.spare_hosts"),
        _duplicate_hosts,
        "duplicate host {found}: name each host once",
    ),
    Rule(
        ("launch.port_range",),
        lambda d: d.launch.port_range is not None and not port_range(d.launch.port_range),
        "{launch.port_range} ends before it begins: write the lower port first",
    ),
    Rule(
        ("launch.port_range",),
        lambda d: d.launch.port_range is not None and port_range(d.launch.port_range).stop - 1 > LAST_PORT,
        f"{{launch.port_range}}: the last port is {LAST_PORT}",
    ),
    Rule(
        ("launch.bind_to", "launch.fabric"),
        lambda d: d.launch.bind_to == PLACEMENT and d.launch.fabric is None,
        "placement needs launch.fabric, which lists the cores: set it, or bind_to: none",
    ),
    Rule(
        ("launch.share_gpu", "parallel.require_transport"),
        lambda d: d.launch.share_gpu and d.parallel.require_transport == "ib",
        "ranks that share a GPU send over sockets: use share_gpu: false, or require_transport: any",
    ),
    Rule(
        ("launch.ranks_per_node", _TP),
        lambda d: (
            (per_node := d.launch.ranks_per_node) is not None
            and (tp := d.parallel.world.tp) > per_node
            and tp % per_node
        ),
        "{parallel.tensor_parallel_size} ranks are not a multiple of {launch.ranks_per_node} per node: use a divisor "
        "of {parallel.tensor_parallel_size}",
    ),
    Rule(
        ("launch.hosts", _TP, "parallel.replicas"),
        _missing_slots,
        "{found}: add hosts, or lower parallel.tensor_parallel_size or parallel.replicas",
    ),
    Rule(
        ("engine.max_num_batched_tokens", "engine.max_num_seqs"),
        lambda d: d.engine.max_num_batched_tokens < d.engine.max_num_seqs,
        "{engine.max_num_batched_tokens} < max_num_seqs={engine.max_num_seqs}: every running sequence needs a "
        "token a step: raise it or lower engine.max_num_seqs",
    ),
    Rule(
        ("daemon.tls_cert", "daemon.tls_key"),
        lambda d: d.daemon.tls_cert and d.daemon.tls_key is None,
        "needs daemon.tls_key too: TLS needs both",
    ),
    Rule(
        ("daemon.tls_key", "daemon.tls_cert"),
        lambda d: d.daemon.tls_key and d.daemon.tls_cert is None,
        "needs daemon.tls_cert too: TLS needs both",
    ),
    Rule(
        ("daemon.host", "daemon.api_key_file"),
        lambda d: not is_loopback(d.daemon.host) and d.daemon.api_key_file is None,
        "{daemon.host} can be reached from other machines: set daemon.api_key_file (laddertron keys add), "
        "or use 127.0.0.1",
    ),
    Rule(
        ("daemon.limits.max_line_bytes", "daemon.limits.max_body_bytes"),
        lambda d: d.daemon.limits.max_line_bytes > d.daemon.limits.max_body_bytes,
        "{daemon.limits.max_line_bytes} is more than limits.max_body_bytes={daemon.limits.max_body_bytes}: "
        "a line is part of a file",
    ),
    Rule(
        ("metrics.port", "daemon.port"),
        lambda d: d.metrics.port and (d.metrics.host, d.metrics.port) == (d.daemon.host, d.daemon.port),
        "{metrics.port} is the daemon's port: leave it out to share the daemon's listener",
    ),
)


def emulated_link(keys: ParallelConfig) -> Emulation | None:
    """The link of `collective: emulated`, else None."""
    if keys.collective != "emulated":
        return None
    return Emulation(f"link {keys.emulated_delay * 1e3:g} ms", keys.emulated_delay)
