"""What a deployment file may say: every section, key, type, bound and default, as frozen data composed by field.

Knows nothing of YAML or of files: engine/config.py reads a file into these, everyone else is handed them. Each key is
explained in configs/reference.yaml, which a test holds to this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive bounds of a number, or of every number of a list."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Unit:
    """How a number may be written: "bytes" takes 512MiB and 200MB, "seconds" takes 1ms, 30s and 24h."""

    kind: Literal["bytes", "seconds"]


@dataclass(frozen=True, slots=True)
class PathKind:
    """A path, made absolute against the file's folder; a "program" without a slash is left for PATH to find."""

    kind: Literal["path", "program"]


@dataclass(frozen=True, slots=True)
class Word:
    """A regular expression that text must match in full, and what to call it."""

    pattern: str
    name: str


KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
DAY = 86400.0
CPU_KV_CACHE_MEMORY = 512 * MIB
"""The KV cache of a rank on a CPU where `engine.kv_cache_memory` is null, in bytes."""
PLACEMENT = "placement"
"""`launch.bind_to`: ranks bind themselves to the cores of their seats; any other value is the launcher's own word."""

PathStr = Annotated[str, PathKind("path")]
Program = Annotated[str, PathKind("program")]
Address = Annotated[str, Word(r"[A-Za-z0-9._:%-]{1,255}", "a host name or address")]
HostSlots = Annotated[
    str, Word(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}(:[1-9][0-9]{0,3})?", "a host name, or host:slots such as node1:8")
]
EnvName = Annotated[str, Word(r"[A-Za-z_][A-Za-z0-9_]{0,127}", "a variable's name: letters, digits, _")]
Device = Annotated[str, Word(r"[A-Za-z0-9][A-Za-z0-9_.@:-]{0,63}", "a device's name")]
Port = Annotated[int, Range(0, 65535)]
Count = Annotated[int, Range(1, 2**31 - 1)]
Size = Annotated[int, Unit("bytes"), Range(1, 2**60)]
Duration = Annotated[float, Unit("seconds"), Range(0, 3650 * DAY)]


@dataclass(frozen=True, slots=True)
class Model:
    """Which weights, under what name, in what form. `path` alone has no default."""

    path: PathStr
    tokenizer: PathStr | None = None
    served_model_name: Annotated[str, Word(r"[^\s\x00-\x1f]{1,256}", "a name without spaces")] | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weights: Literal["stored", "int8"] = "stored"
    max_model_len: Count | None = None
    wiring: Literal["auto", "standard", "parallel", "ladder", "hybrid", "no-communication"] = "auto"
    ladder_layers: Annotated[int, Range(0, 10000)] | tuple[Annotated[int, Range(0, 10000)], ...] | None = None
    allow_untrained_ladder: bool = False
    shared_filesystem: Literal["auto"] | bool = "auto"


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the model is spread and how its ranks speak. `emulated_*` describe a link that is not there."""

    tensor_parallel_size: Annotated[int, Range(1, 1024)] = 1
    replicas: Annotated[int, Range(1, 4096)] = 1
    overlap: bool = True
    collective: Literal["auto", "flat", "two_level", "exchange", "emulated"] = "auto"
    backend: Literal["auto", "native", "mpi", "gloo", "nccl"] = "auto"
    emulated_delay: Annotated[float, Unit("seconds"), Range(0, 10)] = 0.0
    emulated_bandwidth: Size | None = None  # bytes a second; None: only the delay
    emulated_fabric: Annotated[str, Word(r"[0-9]+x[A-Za-z0-9-]{1,40}", "a fabric such as 2x8xH100")] | None = None
    emulated_multiprocessors: Annotated[int, Range(0, 128)] = 0
    deterministic: bool = False
    require_transport: Literal["any", "ib", "socket"] = "any"
    embedding: Literal["auto", "shard", "replicate"] = "auto"
    tuning_file: PathStr | None = None
    collective_timeout: Annotated[float, Unit("seconds"), Range(0.1, DAY)] | None = None


@dataclass(frozen=True, slots=True)
class Slurm:
    """What an allocation wants said: `srun` and the script of `launch --emit slurm`."""

    mpi: Annotated[str, Word(r"[a-z0-9_]{1,32}", "a plugin that `srun --mpi=list` names")] = "pmix"
    partition: Device | None = None
    account: Device | None = None
    qos: Device | None = None
    time_limit: Annotated[float, Unit("seconds"), Range(60, 365 * DAY)] = DAY
    gpus: bool = True
    container_image: str | None = None
    container_mounts: tuple[str, ...] = ()
    extra_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """What the manifests of `launch --emit mpijob|lws` want said."""

    name: Annotated[str, Word(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "a lower-case DNS label of up to 40")] = "laddertron"
    namespace: Annotated[str, Word(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "a lower-case DNS label")] = "default"
    image: str = "laddertron:latest"
    gpu_resource: str = "nvidia.com/gpu"
    rdma_resource: str | None = None
    rdma_count: Annotated[int, Range(1, 64)] = 8
    model_claim: str | None = None
    data_claim: str | None = None
    ssh_secret: str = "laddertron-ssh"
    shm_size: Size = 64 * GIB


@dataclass(frozen=True, slots=True)
class Launch:
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
    hcas: tuple[Device, ...] = ()
    rsh_agent: Program | None = None
    map_by: str | None = None
    bind_to: str = "none"  # PLACEMENT, or what mpirun --bind-to takes
    oversubscribe: bool | None = None
    extra_args: tuple[str, ...] = ()
    env: Mapping[EnvName, str] = field(default_factory=dict)
    forward_env: tuple[EnvName, ...] = ()
    slurm: Slurm = field(default_factory=Slurm)
    kubernetes: Kubernetes = field(default_factory=Kubernetes)


@dataclass(frozen=True, slots=True)
class Engine:
    """One rank's engine: what fits in a step, where KV lives, what computes."""

    max_num_seqs: Annotated[int, Range(1, 4096)] = 256
    max_num_batched_tokens: Annotated[int, Range(1, 2**20)] = 2048
    block_size: Annotated[int, Range(1, 1024)] = 16
    gpu_memory_utilization: Annotated[float, Range(0.05, 1.0)] = 0.9
    kv_cache_memory: Size | None = None
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    attention: Literal["auto", "torch", "flashinfer"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Range(1, 1024)] | None = None
    cuda_graphs: Literal["auto"] | bool = "auto"
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    priority_ageing: Duration = 30.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the door accepts from a client; everything beyond is refused before it is stored or allocated."""

    max_body_bytes: Size = 200_000_000
    max_request_bytes: Size = 10_000_000
    max_line_bytes: Size = 10_000_000
    max_lines: Count = 50_000
    max_connections: Count = 1024
    max_header_bytes: Size = 16 * KIB
    header_timeout: Annotated[float, Unit("seconds"), Range(0.1, 3600)] = 10.0
    body_timeout: Annotated[float, Unit("seconds"), Range(0.1, 3600)] = 10.0
    request_timeout: Annotated[float, Unit("seconds"), Range(0.1, 30 * DAY)] = 3600.0
    max_interactive_requests: Count = 1024
    max_choices: Annotated[int, Range(1, 1024)] = 128
    min_free_disk: Annotated[int, Unit("bytes"), Range(0, 2**60)] = 1 * GIB


@dataclass(frozen=True, slots=True)
class Daemon:
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
    load_timeout: Annotated[float, Unit("seconds"), Range(1, 7 * DAY)] = 600.0
    heartbeat_timeout: Annotated[float, Unit("seconds"), Range(1, 3600)] = 10.0
    max_restarts: Annotated[int, Range(0, 1000)] = 3
    log_format: Literal["auto", "json", "text"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Metrics:
    """Where /metrics is served (on the daemon's own listener, or on one of its own where `port` is set), and where
    requests' spans go."""

    enabled: bool = True
    host: Address = "127.0.0.1"
    port: Port | None = None
    traces_endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Deployment:
    """One deployment file, complete: defaults filled in, paths absolute, every rule between keys kept."""

    model: Model
    parallel: Parallel = field(default_factory=Parallel)
    launch: Launch = field(default_factory=Launch)
    engine: Engine = field(default_factory=Engine)
    daemon: Daemon = field(default_factory=Daemon)
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def world_size(self) -> int:
        """Ranks of all replicas together."""
        return self.parallel.tensor_parallel_size * self.parallel.replicas

    @property
    def served_model_name(self) -> str:
        """The name that clients use: as configured, else the model folder's."""
        return self.model.served_model_name or self.model.path.rstrip("/").rsplit("/", 1)[-1]

    @property
    def text_folder(self) -> str:
        """Where tokenizer.json is: model.tokenizer (the folder, or that file in it), else the model folder."""
        return (self.model.tokenizer or self.model.path).removesuffix("/tokenizer.json")
