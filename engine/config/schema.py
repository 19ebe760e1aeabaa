"""Every section, key, type, bound and default of a deployment file. configs/reference.yaml explains each key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, GroupedMetadata, Le
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ...models.config.wiring import WIRINGS
from ...topology.placement.world import World


@dataclass(frozen=True)
class Range(GroupedMetadata):
    """Inclusive bounds of a number, or of every number of a list."""

    low: float
    high: float

    def __iter__(self) -> Iterator[object]:
        return iter((Ge(self.low), Le(self.high)))


_QUANTITY = re.compile(r"([-+]?[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ]*)")
_UNITS: dict[str, dict[str, float]] = {
    "none": {"": 1},
    "bytes": {"": 1, "B": 1, "KB": 1000}
    | {f"{p}B": 10 ** (3 * i) for i, p in enumerate("kMGT", 1)}
    | {f"{p}iB": 2 ** (10 * i) for i, p in enumerate("KMGT", 1)},
    "seconds": {"": 1, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400},
}


@dataclass(frozen=True, slots=True)
class Unit:
    """How a number may be written: "bytes" takes 512MiB and 200MB, "seconds" takes 1ms and 30s, all take 1e-3."""

    kind: Literal["bytes", "seconds", "none"]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._read, handler(source))

    def _read(self, value: Any) -> Any:
        match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) and len(value) < 60 else None
        if match is None or match[2] not in _UNITS[self.kind]:
            return value
        amount = float(match[1].replace("_", "")) * _UNITS[self.kind][match[2]]
        return int(amount) if amount.is_integer() else amount


@dataclass(frozen=True, slots=True)
class PathKind:
    """A path, made absolute against the file's folder; a "program" without a slash is left for PATH to find."""

    kind: Literal["path", "program"]


@dataclass(frozen=True, slots=True)
class Word:
    """A regular expression that text must match in full, and what to call it."""

    pattern: str
    name: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.str_schema(pattern=f"^(?:{self.pattern})$", strict=True)


KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
DAY = 86400.0
CPU_KV_CACHE_MEMORY = 512 * MIB
"""The KV cache of a rank on a CPU where `engine.kv_cache_memory` is null, in bytes."""
PLACEMENT = "placement"
"""`launch.bind_to`: ranks bind themselves to the cores of their seats; any other value is the launcher's own word."""

REMOVED = {
    "model.shared_filesystem": "remove the key: each rank reads its own slices; to read every byte once, write "
    "per-rank files with `laddertron shard`",
    "parallel.backend=mpi": "use auto or native, also under mpirun, which still starts the ranks",
    "parallel.collective_timeout": "remove the key: it follows measured step times, in preflight it is 30 s",
    "parallel.emulated_bandwidth": "remove the key: an emulated link has a delay alone, emulated_delay",
    "parallel.emulated_fabric": "set emulated_delay, or plan for that fabric with `laddertron plan --fabric`",
    "parallel.emulated_multiprocessors": "remove the key: emulated links are for CPUs",
    "launch.slurm.partition": "add --partition=NAME to launch.slurm.extra_args",
    "launch.slurm.account": "add --account=NAME to launch.slurm.extra_args",
    "launch.slurm.qos": "add --qos=NAME to launch.slurm.extra_args",
    "launch.slurm.time_limit": "add --time=D-HH:MM:SS to launch.slurm.extra_args",
    "launch.slurm.gpus": "remove the key: GPUs are requested unless engine.device is cpu",
    "launch.kubernetes.namespace": "remove the key: kubectl -n NAMESPACE chooses it",
    "launch.kubernetes.gpu_resource": "remove the key: it is nvidia.com/gpu; edit the manifest for another",
    "launch.kubernetes.rdma_count": "remove the key: it is 8; edit the manifest for another number",
    "launch.kubernetes.ssh_secret": "remove the key: name the Secret laddertron-ssh",
    "launch.kubernetes.keys_secret": "remove the key: name the Secret laddertron-keys",
    "launch.kubernetes.shm_size": "remove the key: it is 64 GiB; edit the manifest for another size",
    "engine.priority_ageing": "remove the key: a waiting line gains a priority every 30 s",
    "engine.max_whitespace": "remove the key: it is 32",
    "engine.enable_chunked_prefill": "remove the key: long prompts are always computed in chunks",
    "daemon.log_format": "remove the key: text on a terminal, else JSON",
    "daemon.limits.max_header_bytes": "remove the key: it is 16 KiB",
    "daemon.limits.max_request_bytes": "set daemon.limits.max_line_bytes, which limits lines and requests alike",
    "daemon.limits.max_choices": "remove the key: it is 128, and at most engine.max_num_seqs",
    "metrics.enabled": "remove the key: metrics are always served; with daemon.api_key_file they need a key",
    "acceptance.max_memory": "remove the key: it is 1.1 of the prediction",
    "acceptance.min_hidden": "remove the key: compare the column `hidden` of the page",
    "acceptance.timeout": "remove the key: it is an hour for one measurement",
}
"""Former keys and key=value pairs, and what to do instead."""

Text = Annotated[str, Word(r"[^\x00]+", "text")]
PathStr = Annotated[str, Word(r"[^~\x00][^\x00]*", "a path"), PathKind("path")]
Program = Annotated[str, Word(r"[^~\x00][^\x00]*", "a path"), PathKind("program")]
Address = Annotated[str, Word(r"[A-Za-z0-9._:%-]{1,255}", "a host name or address")]
HostSlots = Annotated[
    str,
    Word(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}(:[1-9][0-9]{0,3})?",
        "a host name or IPv4 address, or host:slots such as node1:8; for IPv6 a name that resolves to it",
    ),
]
EnvName = Annotated[str, Word(r"[A-Za-z_][A-Za-z0-9_]{0,127}", "a variable's name: letters, digits, _")]
Device = Annotated[str, Word(r"[A-Za-z0-9][A-Za-z0-9_.@:-]{0,63}", "a device's name")]
ToolFormat = Literal[
    "auto", "none", "hermes", "longcat", "qwen3_coder", "glm", "deepseek_v32", "deepseek_v31", "deepseek_v3", "kimi",
    "mistral", "llama", "gpt_oss",
]  # fmt: skip
Port = Annotated[int, Range(0, 65535)]
PortRange = Annotated[str, Word(r"[1-9][0-9]{3,4}-[1-9][0-9]{3,4}", "a range of ports, such as 40000-40100")]
Count = Annotated[int, Range(1, 2**31 - 1)]
Size = Annotated[int, Unit("bytes"), Range(1, 2**60)]
Duration = Annotated[float, Unit("seconds"), Range(0, 3650 * DAY)]


@dataclass(frozen=True, slots=True)
class ModelSection:
    """Which weights, under what name, in what form. `path` alone has no default."""

    path: PathStr
    tokenizer: PathStr | None = None
    served_model_name: Annotated[str, Word(r"[^\s\x00-\x1f]{1,256}", "a name without spaces")] | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weights: Literal["stored", "int8"] = "stored"
    max_model_len: Count | None = None
    wiring: Annotated[str, Word("|".join(WIRINGS), f"one of {', '.join(WIRINGS)}")] = "auto"
    ladder_layers: Annotated[int, Range(0, 10000)] | tuple[Annotated[int, Range(0, 10000)], ...] | None = None
    allow_untrained_ladder: bool = False
    load_format: Literal["auto", "dummy"] = "auto"
    allow_dummy: bool = False
    tool_format: ToolFormat = "auto"
    allow_special_tokens_in_content: bool = True
    reasoning_format: Literal["auto", "none", "think", "kimi", "mistral", "longcat", "seed", "gpt_oss"] = "auto"


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How the model is spread and how its ranks speak. `emulated_delay` is of an emulated link."""

    tensor_parallel_size: Annotated[int, Range(1, 1024)] = 1
    pipeline_parallel_size: Annotated[int, Range(1, 256)] = 1
    pipeline_layers: tuple[Annotated[int, Range(1, 10000)], ...] = ()
    pipeline_microbatches: Annotated[int, Range(1, 1024)] | None = None
    replicas: Annotated[int, Range(1, 4096)] = 1
    overlap: bool = True
    split_steps: Literal["auto", "always", "never"] = "auto"
    collective: Literal["auto", "flat", "two_level", "one_shot", "exchange", "emulated"] = "auto"
    backend: Literal["auto", "native", "gloo", "nccl"] = "auto"
    emulated_delay: Annotated[float, Unit("seconds"), Range(0, 10)] = 0.0
    deterministic: Literal["everywhere"] | bool = False
    require_transport: Literal["any", "ib", "socket"] = "any"
    embedding: Literal["auto", "shard", "replicate"] = "auto"
    expert_layout: Literal["auto", "tensor", "spread"] = "auto"
    dense_path: Literal["whole", "node"] = "whole"
    tuning_file: PathStr | None = None

    @property
    def world(self) -> World:
        """All ranks of the deployment."""
        return World(self.tensor_parallel_size, self.pipeline_parallel_size, self.replicas)

    @property
    def microbatches(self) -> int:
        """Batches that are in the pipeline at once; 1 without one."""
        return self.pipeline_microbatches or self.pipeline_parallel_size


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    """Options of `srun` and of the script of `launch --emit slurm`."""

    mpi: Annotated[str, Word(r"[a-z0-9_]{1,32}", "a plugin that `srun --mpi=list` names")] = "pmix"
    container_image: Text | None = None
    container_mounts: tuple[Text, ...] = ()
    extra_args: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True)
class KubernetesConfig:
    """Fields of the manifests of `launch --emit mpijob|lws`."""

    name: Annotated[str, Word(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "a lower-case DNS label of up to 40")] = "laddertron"
    image: Text = "laddertron:latest"
    rdma_resource: Text | None = None
    model_claim: Text | None = None
    data_claim: Text | None = None


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Where ranks are started and by which launcher. Names of interfaces and HCAs come from the fabric unless set."""

    launcher: Literal["auto", "openmpi", "mpich", "slurm", "torchrun"] = "auto"
    mpirun: Program | None = None
    python: Program | None = None
    hosts: tuple[HostSlots, ...] = ()
    hostfile: PathStr | None = None
    spare_hosts: tuple[HostSlots, ...] = ()
    ranks_per_node: Annotated[int, Range(1, 1024)] | None = None
    fabric: PathStr | None = None
    interface: Device | None = None
    port_range: PortRange | None = None
    hcas: tuple[Device, ...] = ()
    rsh_agent: Program | None = None
    map_by: Text | None = None
    bind_to: Text = "none"  # PLACEMENT, or what mpirun --bind-to takes
    oversubscribe: bool | None = None
    share_gpu: bool = False
    extra_args: tuple[Text, ...] = ()
    env: Mapping[EnvName, Annotated[str, Word(r"[^\x00]*", "text")]] = field(default_factory=dict)
    forward_env: tuple[EnvName, ...] = ()
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One rank's engine: what fits in a step, where KV lives, what computes."""

    max_num_seqs: Annotated[int, Range(1, 4096)] = 256
    max_num_batched_tokens: Annotated[int, Range(1, 2**20)] = 2048
    block_size: Annotated[int, Range(1, 1024)] = 16
    gpu_memory_utilization: Annotated[float, Unit("none"), Range(0.05, 1.0)] = 0.9
    kv_cache_memory: Size | None = None
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    enable_prefix_caching: bool = True
    attention: Literal["auto", "torch", "flashinfer"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Range(1, 1024)] | None = None
    cuda_graphs: Literal["auto"] | bool = "auto"
    speculation: Literal["auto", "ngram", "model", "mtp"] | bool = False
    draft_model: PathStr | None = None
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0

    @property
    def cpu_kv_bytes(self) -> int:
        """The KV cache of a rank on a CPU."""
        return CPU_KV_CACHE_MEMORY if self.kv_cache_memory is None else self.kv_cache_memory


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Limits on requests; a request over a limit is refused before anything is stored or allocated for it."""

    max_body_bytes: Size = 200_000_000
    max_line_bytes: Size = 10_000_000
    max_lines: Count = 50_000
    max_connections: Count = 1024
    header_timeout: Annotated[float, Unit("seconds"), Range(0.1, 3600)] = 10.0
    body_timeout: Annotated[float, Unit("seconds"), Range(0.1, 3600)] = 10.0
    request_timeout: Annotated[float, Unit("seconds"), Range(0.1, 30 * DAY)] = 3600.0
    max_interactive_requests: Count = 1024
    max_held_bytes: Size = 256 * MIB
    max_connections_per_address: Count = 512
    max_responses_bytes: Size = 4 * GIB
    min_free_disk: Annotated[int, Unit("bytes"), Range(0, 2**60)] = 1 * GIB


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """The HTTP service and its store. Secrets stand in files, never here."""

    host: Address = "127.0.0.1"
    port: Port = 8000
    data_dir: PathStr = "laddertron-data"
    export_dir: PathStr | None = None
    control_host: Address | None = None
    api_key_file: PathStr | None = None
    tls_cert: PathStr | None = None
    tls_key: PathStr | None = None
    drain_timeout: Annotated[float, Unit("seconds"), Range(0, DAY)] = 30.0
    retention: Annotated[float, Unit("seconds"), Range(60, 3650 * DAY)] | None = 30 * DAY
    responses_retention: Annotated[float, Unit("seconds"), Range(60, 3650 * DAY)] | None = None
    load_timeout: Annotated[float, Unit("seconds"), Range(1, 7 * DAY)] = 600.0
    heartbeat_timeout: Annotated[float, Unit("seconds"), Range(1, 3600)] = 10.0
    max_restarts: Annotated[int, Range(0, 1000)] = 3
    standby: Annotated[int, Range(0, 1)] = 0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    keep_alive: Annotated[float, Unit("seconds"), Range(1, 3600)] = 75.0
    cors_origins: tuple[Annotated[str, Word(r"\*|https?://[^/\s]+", "an origin such as https://app.example")], ...] = ()
    limits: LimitsConfig = field(default_factory=LimitsConfig)


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Batches of the daemon and `laddertron run`. `deduplicate`: lines of one job that differ in `custom_id` alone and
    are greedy or have a seed are computed once while one of them is in flight."""

    deduplicate: bool = True


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Where /metrics is served (on the daemon's own listener, or with /health and /ready on a second one where `port`
    is set), and the OpenTelemetry collectors."""

    host: Address = "127.0.0.1"
    port: Port | None = None
    vllm_names: bool = False
    traces_endpoint: Text | None = None
    otlp_metrics_endpoint: Text | None = None


@dataclass(frozen=True, slots=True)
class AcceptanceConfig:
    """Thresholds of `laddertron acceptance`; shares are relative to the prediction of `plan`."""

    min_speed: Annotated[float, Unit("none"), Range(0, 1)] = 0.7
    max_spread: Annotated[float, Unit("none"), Range(1, 1000)] | None = None
    recovery_margin: Duration = 10.0
    max_load: Annotated[float, Unit("none"), Range(0, 1)] = 0.1


@dataclass(frozen=True, slots=True)
class Deployment:
    """One deployment file, complete: defaults filled in, paths absolute, every rule between keys kept."""

    model: ModelSection
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    daemon: DaemonConfig = field(default_factory=DaemonConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)

    @property
    def dummy_seed(self) -> int | None:
        """The seed of random weights; None if weights are read from files."""
        return self.engine.seed if self.model.load_format == "dummy" else None

    @property
    def served_model_name(self) -> str:
        """The name that clients use: as configured, else the model folder's."""
        return self.model.served_model_name or self.model.path.rstrip("/").rsplit("/", 1)[-1]

    @property
    def text_folder(self) -> str:
        """Where tokenizer.json is: model.tokenizer (the folder, or that file in it), else the model folder."""
        return (self.model.tokenizer or self.model.path).removesuffix("/tokenizer.json")
