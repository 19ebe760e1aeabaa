"""Every series that laddertron exports: name, type, labels, meaning. Data alone: engine/metrics/collector.py fills it;
docs/metrics.md, the dashboards and the alerts are tested against it. Names omit the prefix `laddertron_`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ..job import CULPRIT, JobPhase
from ..request import FinishReason
from .histogram import RANK_HISTOGRAMS

PREFIX = "laddertron_"
Kind = Literal["counter", "gauge", "histogram"]

FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_SECONDS = RANK_HISTOGRAMS["request_queue_time_seconds"]
TOKENS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))
COMMIT_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
HTTP_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 600.0)

BATCH_STATUSES = (
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled",
)  # fmt: skip
STORED_KINDS = ("row", "result", "file")
FAILURE_KINDS = (
    "mismatch", "model_changed", "refused", "rank_error", "launcher_killed", "rank_lost", "silent", "stalled",
    "load_stalled", "consequence", "protocol", "launch", "shortage", "launcher_exit", "other",
)  # fmt: skip
FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)
PHASES: tuple[str, ...] = get_args(JobPhase)


@dataclass(frozen=True, slots=True)
class Series:
    """One metric family. `bounds` are a histogram's."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    bounds: tuple[float, ...] = ()
    prefix: str = PREFIX

    @property
    def full_name(self) -> str:
        return self.prefix + self.name


_RANK = ("replica", "rank", "node")
_COLLECTIVE = (*_RANK, "op", "link")
_PORT = ("node", "hca", "port")


def _gauge(name: str, help: str, *labels: str) -> Series:
    return Series(name, "gauge", labels, help)


def _counter(name: str, help: str, *labels: str) -> Series:
    return Series(name, "counter", labels, help)


def _histogram(name: str, help: str, bounds: tuple[float, ...], *labels: str) -> Series:
    return Series(name, "histogram", labels, help, bounds)


def _engine() -> Iterator[Series]:
    yield _gauge("num_requests_running", "Requests with a choice in the running batch.", "replica")
    yield _gauge("num_requests_waiting", "Sequences waiting in the engine for a slot or KV blocks.", "replica")
    yield _gauge(
        "kv_cache_usage_ratio",
        "Share of KV blocks in use; cached blocks that no sequence uses count as free.",
        "replica",
    )
    yield _gauge("kv_cached_blocks", "Unreferenced KV blocks, kept for prompts with the same prefix.", "replica")
    yield _gauge("engine_oldest_waiting_age_seconds", "Age of the oldest request waiting in the engine.", "replica")
    yield _counter("prompt_tokens_total", "Prompt tokens of requests that entered the engine.", "replica")
    yield _counter("surplus_tokens_total", "Tokens generated past a sequence's end and discarded.", "replica")
    yield _counter("split_steps_total", "Steps computed as two streams (parallel.split_steps).", "replica")
    yield _counter(
        "spec_decode_num_drafts_total", "Decode steps of a sequence with a draft (engine.speculation).", "replica"
    )
    yield _counter("spec_decode_num_draft_tokens_total", "Draft tokens verified.", "replica")
    yield _counter("spec_decode_num_accepted_tokens_total", "Draft tokens accepted.", "replica")
    yield _counter(
        "spec_decode_num_accepted_tokens_per_pos_total", "Draft tokens accepted, by position.", "replica", "position"
    )
    yield _counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", "replica")
    yield _counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", "replica")
    yield _counter("num_preemptions_total", "Sequences preempted for lack of KV blocks.", "replica")
    for name, text in (
        ("iteration_tokens", "Tokens computed in one step."),
        ("expert_rows", "Rows computed by one expert in one step, for all experts of a middle layer (CPUs only)."),
        ("request_queue_time_seconds", "Time from arrival in the engine to the first step."),
        ("request_prefill_time_seconds", "Time from the first step to the first token."),
        ("request_decode_time_seconds", "Time from the first token to the last."),
    ):
        yield _histogram(name, text, RANK_HISTOGRAMS[name], "replica")


def _requests() -> Iterator[Series]:
    yield _counter("generation_tokens_total", "Generated tokens, counted as in usage.", "replica")
    yield _counter("request_success_total", "Finished choices, by reason.", "finished_reason")
    yield _histogram(
        "time_to_first_token_seconds", "Time from arrival at the daemon to the first token.", FIRST_TOKEN_SECONDS
    )
    yield _histogram("inter_token_latency_seconds", "Time between two tokens of a choice.", INTER_TOKEN_SECONDS)
    yield _histogram(
        "e2e_request_latency_seconds", "Time from arrival at the daemon to the last token.", REQUEST_SECONDS
    )
    yield _histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
    yield _histogram("request_generation_tokens", "Tokens generated for a request, all choices.", TOKENS)
    yield _counter("ignored_fields_total", "Unknown fields of assistant turns, which are ignored.")
    yield _counter("unparsed_tool_calls_total", "Texts like a tool call that were returned as content.")
    yield _counter("responses_evicted_total", "Stored responses deleted before their time, for want of room.")
    yield _counter("key_requests_total", "Requests and batch lines computed for a key.", "key")
    yield _counter("key_tokens_total", "Tokens computed for a key, counted as in usage.", "key", "tokens")
    yield _counter("key_limited_total", "Requests refused by a limit of their key.", "key", "limit")
    yield _counter("nonfinite_logits_total", "Choices ended because their logits were NaN or Inf.")
    yield _counter("http_requests_total", "HTTP requests by route template and status code.", "route", "code")
    yield _histogram(
        "http_request_duration_seconds",
        "Time from the request to the last byte of the response.",
        HTTP_SECONDS,
        "route",
    )


def _ranks() -> Iterator[Series]:
    yield _gauge("rank_info", "Always 1; labels describe the rank's device.", *_RANK, "device", "cpu_tier", "threads")
    yield _gauge("rank_up", "1 while the rank's heartbeat is at most 3 s old.", *_RANK)
    yield _gauge("rank_heartbeat_timestamp_seconds", "Time of the rank's last heartbeat, unix seconds.", *_RANK)
    yield _histogram(
        "step_duration_seconds", "Duration of one step on one rank.", RANK_HISTOGRAMS["step_duration_seconds"], *_RANK
    )
    yield _gauge("last_step_timestamp_seconds", "Time when the rank last completed a step, unix seconds.", *_RANK)
    yield _gauge(
        "straggler_score",
        "The rank's own time per step (without waits for others) divided by the other ranks' mean, last 15 s.",
        *_RANK,
    )
    yield _counter("rank_run_delay_seconds_total", "Time the rank's step thread was runnable but had no CPU.", *_RANK)
    middle = "Rows computed by the rank's experts in a middle layer."
    yield _counter("rank_expert_rows_total", middle, *_RANK)
    yield _gauge(
        "expert_imbalance",
        "Rows of the rank with the most expert rows, divided by the mean of ranks with experts, last 15 s.",
        "replica",
    )
    yield _gauge("rank_resident_memory_bytes", "The rank process's memory on the host.", *_RANK)
    yield _counter(
        "collective_seconds_total",
        "Time of collectives: hidden (overlapped with computation) or exposed (waited for).",
        *_COLLECTIVE,
        "exposure",
    )
    yield _counter(
        "layer_collective_seconds_total",
        "Time of all-reduces, by the wiring and the sub-block whose output they sum.",
        *_RANK,
        "layer",
        "link",
        "exposure",
    )
    yield _counter("collective_bytes_total", "Message bytes of collectives.", *_COLLECTIVE)
    yield _counter("collectives_total", "Collectives completed.", *_COLLECTIVE)
    yield _gauge(
        "overlap_ratio", "Share of collective time that is hidden, all ranks, last 15 s.", "replica", "op", "link"
    )


def _hosts() -> Iterator[Series]:
    yield _gauge("infiniband_port_up", "1 while the RDMA port is active.", *_PORT)
    yield _counter("infiniband_received_bytes_total", "Bytes received by the port.", *_PORT)
    yield _counter("infiniband_transmitted_bytes_total", "Bytes sent by the port.", *_PORT)
    yield _counter(
        "infiniband_transmit_wait_ticks_total",
        "Ticks in which data waited for flow-control credits (congestion).",
        *_PORT,
    )
    yield _counter("infiniband_errors_total", "Port errors, by kind.", "node", "error", "hca", "port")
    yield _gauge("gpu_memory_used_bytes", "Memory in use on the rank's GPU.", *_RANK)
    yield _gauge("gpu_memory_total_bytes", "Memory of the rank's GPU.", *_RANK)
    yield _gauge("gpu_utilization_ratio", "Share of time with a kernel running.", *_RANK)
    yield _gauge("gpu_temperature_celsius", "Temperature of the rank's GPU.", *_RANK)
    yield _gauge("gpu_power_watts", "Power drawn by the rank's GPU.", *_RANK)
    yield _gauge("gpu_sm_clock_hertz", "SM clock of the rank's GPU.", *_RANK)
    yield _gauge("gpu_throttled", "1 while the GPU's clocks are lowered for this reason.", *_RANK, "reason")
    yield _counter("gpu_ecc_errors_total", "Memory errors since the driver was loaded.", *_RANK, "error")


def _daemon() -> Iterator[Series]:
    yield _gauge("build_info", "Always 1; labels give version and model.", "version", "model", "wiring")
    yield _gauge("engine_ready", "1 while the replica accepts requests.", "replica")
    yield _gauge("engine_phase", "1 for the replica's phase, 0 for the others.", "replica", "phase")
    yield _gauge("engine_phase_start_timestamp_seconds", "Time when the phase began, unix seconds.", "replica")
    yield _gauge("engine_load_seconds", "Duration of the last load; 0 before the first.", "replica")
    yield _gauge("kv_cache_tokens", "Tokens that fit in the replica's KV cache.", "replica")
    yield _gauge("engine_standby", "1 while a hot standby is ready to take over (daemon.standby).", "replica")
    yield _counter("config_reloads_total", "Reloads of the deployment file, by outcome.", "outcome")
    yield _counter("engine_restarts_total", "Failed launches, by kind of failure.", "replica", "reason")
    yield _gauge(
        "engine_last_failure_timestamp_seconds",
        "Time of the replica's last failure; labels give the failed rank.",
        "replica",
        "reason",
        *CULPRIT,
    )
    yield _counter("rank_desync_total", "Launches ended because ranks computed different tokens.", "replica")
    yield _counter("quarantined_requests_total", "Requests rejected because they repeatedly crashed a rank.")
    yield _gauge("batch_jobs", "Batches by status.", "status")
    yield _gauge("batch_requests", "Lines of running batches: left, completed, failed.", "status")
    yield _gauge("dispatch_requests", "Requests in the daemon: waiting for a replica, or in flight.", "status")
    yield _gauge("batch_eta_seconds", "Time until all queued lines are answered, at the present rate.")
    yield _gauge("oldest_queued_request_age_seconds", "Age of the oldest batch with lines left.")
    yield _gauge("batch_deadline_seconds", "Time until the first running batch expires.")
    yield _gauge(
        "batch_overdue_seconds",
        "Longest time by which a batch will miss its window at the present rate; negative if none will.",
    )
    yield _histogram("store_commit_seconds", "Duration of a grouped commit to the store, with fsync.", COMMIT_SECONDS)
    yield _gauge(
        "store_writable", "1 while the store accepts writes; 0 also while a disk of the daemon does not answer."
    )
    yield _counter("store_errors_total", "Failed writes to the store.")
    yield _counter("store_damaged_total", "Reads of stored data that did not match its checksum.", "kind")
    yield _gauge(
        "clock_jump_seconds", "Size of the clock jump that paused deletion and expiry; 0 if they are not paused."
    )
    yield _gauge("disk_free_bytes", "Free space on the data folder's disk.")
    yield _gauge("disk_size_bytes", "Size of the data folder's disk.")


GROUPS: Mapping[str, tuple[Series, ...]] = {
    "Requests": tuple(_requests()),
    "Engine (rank 0's schedule)": tuple(_engine()),
    "Ranks and collectives": tuple(_ranks()),
    "Ports and GPUs": tuple(_hosts()),
    "Daemon, batches and store": tuple(_daemon()),
}
CATALOGUE: Mapping[str, Series] = {series.name: series for group in GROUPS.values() for series in group}
_FROM_HEARTBEATS = {
    "rank_up",
    "rank_heartbeat_timestamp_seconds",
    "straggler_score",
    "overlap_ratio",
    "expert_imbalance",
}
REPORTED: Mapping[str, Series] = {
    series.name: series for series in (*_engine(), *_ranks(), *_hosts()) if series.name not in _FROM_HEARTBEATS
}
"""Series that ranks send in their heartbeats; the daemon computes all other series itself."""

LABELS: Mapping[str, str] = {
    "replica": "Number of the replica, from 0.",
    "rank": "Rank inside its replica, from 0.",
    "position": "Position of a draft token after the last accepted token, from 0.",
    "node": "Host name of the rank.",
    "op": "all_reduce, gather, boundary (activations from the previous pipeline stage), or stage_wait (wait for that "
    "stage to send them).",
    "layer": "What the all-reduce sums: the output of a sub-block, with its wiring (ladder mlp, …), embedding or head.",
    "link": "Slowest link class crossed: node (shared memory), net, or the emulated link's name.",
    "exposure": "hidden or exposed.",
    "finished_reason": ", ".join(FINISH_REASONS) + ".",
    "reason": "For restarts " + ", ".join(FAILURE_KINDS) + "; for throttling power, thermal, hardware, sync.",
    "phase": ", ".join(PHASES) + ".",
    "outcome": "done, refused or failed.",
    "status": "For batches "
    + ", ".join(BATCH_STATUSES)
    + "; for batch lines left, completed, failed; for requests waiting, in_flight.",
    "route": "The route's template, such as /v1/batches/{id}.",
    "code": "HTTP status code.",
    "key": "A key's id (not its secret); none without a key file, other beyond 256 keys.",
    "tokens": "prompt or completion.",
    "limit": "requests_per_minute, concurrent_requests, tokens_per_day, stored_bytes.",
    "kind": ", ".join(STORED_KINDS) + ".",
    "hca": "RDMA adapter, such as mlx5_0.",
    "port": "Port number of the adapter.",
    "device": "cpu or cuda; in failures also the GPU's index on its node.",
    "stage": "Pipeline stage, from 0; empty without a pipeline.",
    "collective": "Collective in which the failed rank waited, or that it started last.",
    "cpu_tier": "amx, avx512_bf16, avx512, avx2 or generic; lower if LADDERTRON_CPU_TIER is set.",
    "threads": "Compute threads of the rank.",
    "error": "Kind of error: for ports symbol, link_down, …; for ECC corrected, uncorrected.",
    "version": "laddertron's version.",
    "model": "The name that clients use.",
    "wiring": "The residual wiring.",
}
