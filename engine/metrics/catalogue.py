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
FAILURE_KINDS = (
    "mismatch", "refused", "rank_error", "launcher_killed", "rank_lost", "silent", "stalled", "load_stalled",
    "consequence", "protocol", "launch", "launcher_exit", "other",
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


def _engine() -> Iterator[Series]:
    replica = ("replica",)
    yield Series("num_requests_running", "gauge", replica, "Requests with a choice in the running batch.")
    yield Series("num_requests_waiting", "gauge", replica, "Sequences waiting in the engine for a slot or KV blocks.")
    yield Series(
        "kv_cache_usage_ratio",
        "gauge",
        replica,
        "Share of KV blocks in use; cached blocks that no sequence uses count as free.",
    )
    yield Series("kv_cached_blocks", "gauge", replica, "Unreferenced KV blocks, kept for prompts with the same prefix.")
    yield Series(
        "engine_oldest_waiting_age_seconds", "gauge", replica, "Age of the oldest request waiting in the engine."
    )
    yield Series("prompt_tokens_total", "counter", replica, "Prompt tokens of requests that entered the engine.")
    yield Series("surplus_tokens_total", "counter", replica, "Tokens generated past a sequence's end and discarded.")
    yield Series("split_steps_total", "counter", replica, "Steps computed as two streams (parallel.split_steps).")
    yield Series(
        "spec_decode_num_drafts_total",
        "counter",
        replica,
        "Decode steps of a sequence with a draft (engine.speculation).",
    )
    yield Series("spec_decode_num_draft_tokens_total", "counter", replica, "Draft tokens verified.")
    yield Series("spec_decode_num_accepted_tokens_total", "counter", replica, "Draft tokens accepted.")
    yield Series(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        ("replica", "position"),
        "Draft tokens accepted, by position.",
    )
    yield Series("prefix_cache_queries_total", "counter", replica, "Prompt tokens looked up in the prefix cache.")
    yield Series("prefix_cache_hits_total", "counter", replica, "Prompt tokens found in the prefix cache.")
    yield Series("num_preemptions_total", "counter", replica, "Sequences preempted for lack of KV blocks.")
    for name, text in (
        ("iteration_tokens", "Tokens computed in one step."),
        ("expert_rows", "Rows computed by one expert in one step, for all experts of a middle layer (CPUs only)."),
        ("request_queue_time_seconds", "Time from arrival in the engine to the first step."),
        ("request_prefill_time_seconds", "Time from the first step to the first token."),
        ("request_decode_time_seconds", "Time from the first token to the last."),
    ):
        yield Series(name, "histogram", replica, text, RANK_HISTOGRAMS[name])


def _requests() -> Iterator[Series]:
    yield Series(
        "generation_tokens_total",
        "counter",
        ("replica",),
        "Generated tokens, counted as in usage.",
    )
    yield Series("request_success_total", "counter", ("finished_reason",), "Finished choices, by reason.")
    yield Series(
        "time_to_first_token_seconds",
        "histogram",
        (),
        "Time from arrival at the daemon to the first token.",
        FIRST_TOKEN_SECONDS,
    )
    yield Series(
        "inter_token_latency_seconds", "histogram", (), "Time between two tokens of a choice.", INTER_TOKEN_SECONDS
    )
    yield Series(
        "e2e_request_latency_seconds",
        "histogram",
        (),
        "Time from arrival at the daemon to the last token.",
        REQUEST_SECONDS,
    )
    yield Series("request_prompt_tokens", "histogram", (), "Prompt tokens of a request.", TOKENS)
    yield Series("request_generation_tokens", "histogram", (), "Tokens generated for a request, all choices.", TOKENS)
    yield Series("key_requests_total", "counter", ("key",), "Requests and batch lines computed for a key.")
    yield Series("key_tokens_total", "counter", ("key", "tokens"), "Tokens computed for a key, counted as in usage.")
    yield Series("key_limited_total", "counter", ("key", "limit"), "Requests refused by a limit of their key.")
    yield Series("nonfinite_logits_total", "counter", (), "Choices ended because their logits were NaN or Inf.")
    yield Series(
        "http_requests_total", "counter", ("route", "code"), "HTTP requests by route template and status code."
    )
    yield Series(
        "http_request_duration_seconds",
        "histogram",
        ("route",),
        "Time from the request to the last byte of the response.",
        HTTP_SECONDS,
    )


def _ranks() -> Iterator[Series]:
    yield Series(
        "rank_info", "gauge", (*_RANK, "device", "cpu_tier", "threads"), "Always 1; labels describe the rank's device."
    )
    yield Series("rank_up", "gauge", _RANK, "1 while the rank's heartbeat is at most 3 s old.")
    yield Series("rank_heartbeat_timestamp_seconds", "gauge", _RANK, "Time of the rank's last heartbeat, unix seconds.")
    yield Series(
        "step_duration_seconds",
        "histogram",
        _RANK,
        "Duration of one step on one rank.",
        RANK_HISTOGRAMS["step_duration_seconds"],
    )
    yield Series(
        "last_step_timestamp_seconds", "gauge", _RANK, "Time when the rank last completed a step, unix seconds."
    )
    yield Series(
        "straggler_score",
        "gauge",
        _RANK,
        "The rank's own time per step (without waits for others) divided by the other ranks' mean, last 15 s.",
    )
    yield Series(
        "rank_run_delay_seconds_total",
        "counter",
        _RANK,
        "Time the rank's step thread was runnable but had no CPU.",
    )
    middle = "Rows computed by the rank's experts in a middle layer."
    yield Series("rank_expert_rows_total", "counter", _RANK, middle)
    yield Series(
        "expert_imbalance",
        "gauge",
        ("replica",),
        "Rows of the rank with the most expert rows, divided by the mean of ranks with experts, last 15 s.",
    )
    yield Series("rank_resident_memory_bytes", "gauge", _RANK, "The rank process's memory on the host.")
    yield Series(
        "collective_seconds_total",
        "counter",
        (*_COLLECTIVE, "exposure"),
        "Time of collectives: hidden (overlapped with computation) or exposed (waited for).",
    )
    yield Series(
        "layer_collective_seconds_total",
        "counter",
        (*_RANK, "layer", "link", "exposure"),
        "Time of all-reduces, by the wiring and the sub-block whose output they sum.",
    )
    yield Series("collective_bytes_total", "counter", _COLLECTIVE, "Message bytes of collectives.")
    yield Series("collectives_total", "counter", _COLLECTIVE, "Collectives completed.")
    yield Series(
        "overlap_ratio",
        "gauge",
        ("replica", "op", "link"),
        "Share of collective time that is hidden, all ranks, last 15 s.",
    )


def _hosts() -> Iterator[Series]:
    yield Series("infiniband_port_up", "gauge", _PORT, "1 while the RDMA port is active.")
    yield Series("infiniband_received_bytes_total", "counter", _PORT, "Bytes received by the port.")
    yield Series("infiniband_transmitted_bytes_total", "counter", _PORT, "Bytes sent by the port.")
    yield Series(
        "infiniband_transmit_wait_ticks_total",
        "counter",
        _PORT,
        "Ticks in which data waited for flow-control credits (congestion).",
    )
    yield Series("infiniband_errors_total", "counter", ("node", "error", "hca", "port"), "Port errors, by kind.")
    yield Series("gpu_memory_used_bytes", "gauge", _RANK, "Memory in use on the rank's GPU.")
    yield Series("gpu_memory_total_bytes", "gauge", _RANK, "Memory of the rank's GPU.")
    yield Series("gpu_utilization_ratio", "gauge", _RANK, "Share of time with a kernel running.")
    yield Series("gpu_temperature_celsius", "gauge", _RANK, "Temperature of the rank's GPU.")
    yield Series("gpu_power_watts", "gauge", _RANK, "Power drawn by the rank's GPU.")
    yield Series("gpu_sm_clock_hertz", "gauge", _RANK, "SM clock of the rank's GPU.")
    yield Series("gpu_throttled", "gauge", (*_RANK, "reason"), "1 while the GPU's clocks are lowered for this reason.")
    yield Series("gpu_ecc_errors_total", "counter", (*_RANK, "error"), "Memory errors since the driver was loaded.")


def _daemon() -> Iterator[Series]:
    yield Series("build_info", "gauge", ("version", "model", "wiring"), "Always 1; labels give version and model.")
    yield Series("engine_ready", "gauge", ("replica",), "1 while the replica accepts requests.")
    yield Series("engine_phase", "gauge", ("replica", "phase"), "1 for the replica's phase, 0 for the others.")
    yield Series(
        "engine_phase_start_timestamp_seconds", "gauge", ("replica",), "Time when the phase began, unix seconds."
    )
    yield Series("engine_load_seconds", "gauge", ("replica",), "Duration of the last load; 0 before the first.")
    yield Series("kv_cache_tokens", "gauge", ("replica",), "Tokens that fit in the replica's KV cache.")
    yield Series(
        "engine_standby", "gauge", ("replica",), "1 while a hot standby is ready to take over (daemon.standby)."
    )
    yield Series("config_reloads_total", "counter", ("outcome",), "Reloads of the deployment file, by outcome.")
    yield Series("engine_restarts_total", "counter", ("replica", "reason"), "Failed launches, by kind of failure.")
    yield Series(
        "engine_last_failure_timestamp_seconds",
        "gauge",
        ("replica", "reason", *CULPRIT),
        "Time of the replica's last failure; labels give the failed rank.",
    )
    yield Series(
        "rank_desync_total", "counter", ("replica",), "Launches ended because ranks computed different tokens."
    )
    yield Series(
        "quarantined_requests_total", "counter", (), "Requests rejected because they repeatedly crashed a rank."
    )
    yield Series("batch_jobs", "gauge", ("status",), "Batches by status.")
    yield Series("batch_requests", "gauge", ("status",), "Lines of running batches: left, completed, failed.")
    yield Series(
        "dispatch_requests", "gauge", ("status",), "Requests in the daemon: waiting for a replica, or in flight."
    )
    yield Series("batch_eta_seconds", "gauge", (), "Time until all queued lines are answered, at the present rate.")
    yield Series("oldest_queued_request_age_seconds", "gauge", (), "Age of the oldest batch with lines left.")
    yield Series("batch_deadline_seconds", "gauge", (), "Time until the first running batch expires.")
    yield Series(
        "batch_overdue_seconds",
        "gauge",
        (),
        "Longest time by which a batch will miss its window at the present rate; negative if none will.",
    )
    yield Series(
        "store_commit_seconds",
        "histogram",
        (),
        "Duration of a grouped commit to the store, with fsync.",
        COMMIT_SECONDS,
    )
    yield Series("store_writable", "gauge", (), "1 while the store accepts writes.")
    yield Series("store_errors_total", "counter", (), "Failed writes to the store.")
    yield Series(
        "clock_jump_seconds",
        "gauge",
        (),
        "Size of the clock jump that paused deletion and expiry; 0 if they are not paused.",
    )
    yield Series("disk_free_bytes", "gauge", (), "Free space on the data folder's disk.")
    yield Series("disk_size_bytes", "gauge", (), "Size of the data folder's disk.")


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
