"""Every series that laddertron exports: name, type, labels, meaning. Data alone: engine/metrics/collector.py fills it;
docs/metrics.md, the dashboards and the alerts are held to it. Names stand without the prefix `laddertron_`.
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

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


_RANK = ("replica", "rank", "node")
_COLLECTIVE = (*_RANK, "op", "link")
_PORT = ("node", "hca", "port")


def _engine() -> Iterator[Series]:
    replica = ("replica",)
    yield Series("num_requests_running", "gauge", replica, "Requests with a choice in the engine's step.")
    yield Series("num_requests_waiting", "gauge", replica, "Sequences that wait in the engine for a slot or KV blocks.")
    yield Series(
        "kv_cache_usage_ratio", "gauge", replica, "Share of KV blocks that somebody holds; cached ones are free."
    )
    yield Series(
        "kv_cached_blocks", "gauge", replica, "KV blocks that nobody holds, kept for prompts that begin alike."
    )
    yield Series(
        "engine_oldest_waiting_age_seconds", "gauge", replica, "Age of the oldest request waiting in the engine."
    )
    yield Series("prompt_tokens_total", "counter", replica, "Prompt tokens of requests that entered.")
    yield Series("surplus_tokens_total", "counter", replica, "Tokens drawn past a sequence's end and dropped.")
    yield Series("split_steps_total", "counter", replica, "Steps computed as two streams (parallel.split_steps).")
    yield Series("spec_decode_num_drafts_total", "counter", replica, "Decodes that had drafts (engine.speculation).")
    yield Series("spec_decode_num_draft_tokens_total", "counter", replica, "Drafts verified.")
    yield Series("spec_decode_num_accepted_tokens_total", "counter", replica, "Drafts that were right.")
    yield Series(
        "spec_decode_num_accepted_tokens_per_pos_total", "counter", ("replica", "position"), "The same by position."
    )
    yield Series("prefix_cache_queries_total", "counter", replica, "Prompt tokens looked up in the prefix cache.")
    yield Series("prefix_cache_hits_total", "counter", replica, "Prompt tokens found in the prefix cache.")
    yield Series("num_preemptions_total", "counter", replica, "Sequences put back to wait for lack of room.")
    for name, text in (
        ("iteration_tokens", "Tokens computed in one step."),
        ("request_queue_time_seconds", "From arrival in the engine until the first step."),
        ("request_prefill_time_seconds", "From the first step until the first token."),
        ("request_decode_time_seconds", "From the first token until the last."),
    ):
        yield Series(name, "histogram", replica, text, RANK_HISTOGRAMS[name])


def _requests() -> Iterator[Series]:
    yield Series(
        "generation_tokens_total",
        "counter",
        ("replica",),
        "Tokens of answers as their usage counts them.",
    )
    yield Series("request_success_total", "counter", ("finished_reason",), "Choices that ended, by reason.")
    yield Series(
        "time_to_first_token_seconds",
        "histogram",
        (),
        "From arrival at the daemon until the first token.",
        FIRST_TOKEN_SECONDS,
    )
    yield Series("inter_token_latency_seconds", "histogram", (), "Between two tokens of a choice.", INTER_TOKEN_SECONDS)
    yield Series(
        "e2e_request_latency_seconds",
        "histogram",
        (),
        "From arrival at the daemon until the last token.",
        REQUEST_SECONDS,
    )
    yield Series("request_prompt_tokens", "histogram", (), "Prompt tokens of a request.", TOKENS)
    yield Series("request_generation_tokens", "histogram", (), "Tokens drawn for a request, all choices.", TOKENS)
    yield Series("key_requests_total", "counter", ("key",), "Requests and batch lines computed for a key.")
    yield Series("key_tokens_total", "counter", ("key", "tokens"), "Tokens computed for a key, as usage counts them.")
    yield Series("key_limited_total", "counter", ("key", "limit"), "Requests refused by a limit of their key.")
    yield Series("nonfinite_logits_total", "counter", (), "Choices ended because their logits were NaN or Inf.")
    yield Series(
        "http_requests_total", "counter", ("route", "code"), "HTTP requests by route template and status code."
    )
    yield Series(
        "http_request_duration_seconds", "histogram", ("route",), "Until the response's last byte.", HTTP_SECONDS
    )


def _ranks() -> Iterator[Series]:
    yield Series("rank_info", "gauge", (*_RANK, "device", "cpu_tier", "threads"), "1; what the rank computes with.")
    yield Series("rank_up", "gauge", _RANK, "1 while the rank's heartbeat is not older than 3 s.")
    yield Series("rank_heartbeat_timestamp_seconds", "gauge", _RANK, "When the rank was last heard, unix seconds.")
    yield Series(
        "step_duration_seconds", "histogram", _RANK, "One step on one rank.", RANK_HISTOGRAMS["step_duration_seconds"]
    )
    yield Series("last_step_timestamp_seconds", "gauge", _RANK, "When the rank last finished a step, unix seconds.")
    yield Series(
        "straggler_score",
        "gauge",
        _RANK,
        "Own time a step (duration less waits for others) over the other ranks' mean, last 15 s.",
    )
    yield Series(
        "rank_run_delay_seconds_total",
        "counter",
        _RANK,
        "Time in which the rank's stepping thread could have run and had no processor.",
    )
    yield Series("rank_resident_memory_bytes", "gauge", _RANK, "The rank process's memory on the host.")
    yield Series(
        "collective_seconds_total",
        "counter",
        (*_COLLECTIVE, "exposure"),
        "Time collectives travelled: hidden behind compute, or exposed as waits.",
    )
    yield Series(
        "layer_collective_seconds_total",
        "counter",
        (*_RANK, "layer", "link", "exposure"),
        "The same of all-reduces alone, by what they completed: wiring and sub-block.",
    )
    yield Series("collective_bytes_total", "counter", _COLLECTIVE, "Message bytes of collectives.")
    yield Series("collectives_total", "counter", _COLLECTIVE, "Collectives completed.")
    yield Series(
        "overlap_ratio", "gauge", ("replica", "op", "link"), "Hidden over all travel time, all ranks, last 15 s."
    )


def _hosts() -> Iterator[Series]:
    yield Series("infiniband_port_up", "gauge", _PORT, "1 while the RDMA port is active.")
    yield Series("infiniband_received_bytes_total", "counter", _PORT, "Bytes received, by the port's counter.")
    yield Series("infiniband_transmitted_bytes_total", "counter", _PORT, "Bytes sent, by the port's counter.")
    yield Series(
        "infiniband_transmit_wait_ticks_total", "counter", _PORT, "Ticks in which data waited for credits (congestion)."
    )
    yield Series("infiniband_errors_total", "counter", ("node", "error", "hca", "port"), "Port errors, by kind.")
    yield Series("gpu_memory_used_bytes", "gauge", _RANK, "Memory in use on the rank's GPU.")
    yield Series("gpu_memory_total_bytes", "gauge", _RANK, "Memory of the rank's GPU.")
    yield Series("gpu_utilization_ratio", "gauge", _RANK, "Share of time in which a kernel ran.")
    yield Series("gpu_temperature_celsius", "gauge", _RANK, "Temperature of the rank's GPU.")
    yield Series("gpu_power_watts", "gauge", _RANK, "Power drawn by the rank's GPU.")
    yield Series("gpu_sm_clock_hertz", "gauge", _RANK, "SM clock of the rank's GPU.")
    yield Series("gpu_throttled", "gauge", (*_RANK, "reason"), "1 while clocks are held down for the reason.")
    yield Series("gpu_ecc_errors_total", "counter", (*_RANK, "error"), "Memory errors since the driver was loaded.")


def _daemon() -> Iterator[Series]:
    yield Series("build_info", "gauge", ("version", "model", "wiring"), "1; what runs.")
    yield Series("engine_ready", "gauge", ("replica",), "1 while the replica takes requests.")
    yield Series("engine_phase", "gauge", ("replica", "phase"), "1 for the replica's phase, 0 for the others.")
    yield Series("engine_phase_start_timestamp_seconds", "gauge", ("replica",), "When the phase began (unix seconds).")
    yield Series("engine_load_seconds", "gauge", ("replica",), "How long the last load took; 0 before the first.")
    yield Series("engine_standby", "gauge", ("replica",), "1 while a launch stands by to take over (daemon.standby).")
    yield Series(
        "config_reloads_total", "counter", ("outcome",), "Reloads of the deployment file, by what came of them."
    )
    yield Series("engine_restarts_total", "counter", ("replica", "reason"), "Launches that failed, by kind of failure.")
    yield Series(
        "engine_last_failure_timestamp_seconds",
        "gauge",
        ("replica", "reason", *CULPRIT),
        "When the replica's last launch failed, and who is to blame.",
    )
    yield Series("rank_desync_total", "counter", ("replica",), "Launches ended because ranks drew different tokens.")
    yield Series("quarantined_requests_total", "counter", (), "Requests given up because they kept ending the engine.")
    yield Series("batch_jobs", "gauge", ("status",), "Batches by status.")
    yield Series("batch_requests", "gauge", ("status",), "Lines of batches under way: left, completed, failed.")
    yield Series("dispatch_requests", "gauge", ("status",), "Bodies in the daemon: waiting for a replica, in flight.")
    yield Series("batch_eta_seconds", "gauge", (), "Until all queued lines are answered, at the present rate.")
    yield Series("oldest_queued_request_age_seconds", "gauge", (), "Age of the oldest batch that has lines left.")
    yield Series("batch_deadline_seconds", "gauge", (), "Until the first batch under way expires.")
    yield Series(
        "batch_overdue_seconds",
        "gauge",
        (),
        "By how much a batch will miss its window at the present rate, of all the most; negative: all are kept.",
    )
    yield Series(
        "store_commit_seconds", "histogram", (), "One grouped commit to the store, fsync included.", COMMIT_SECONDS
    )
    yield Series("store_writable", "gauge", (), "1 while the store accepts writes.")
    yield Series("store_errors_total", "counter", (), "Writes to the store that failed.")
    yield Series(
        "clock_jump_seconds", "gauge", (), "By how much the clock jumped while deletion and expiry wait; else 0."
    )
    yield Series("disk_free_bytes", "gauge", (), "Free on the data folder's disk.")
    yield Series("disk_size_bytes", "gauge", (), "Size of the data folder's disk.")


GROUPS: Mapping[str, tuple[Series, ...]] = {
    "Requests": tuple(_requests()),
    "Engine (rank 0's schedule)": tuple(_engine()),
    "Ranks and collectives": tuple(_ranks()),
    "Ports and GPUs": tuple(_hosts()),
    "Daemon, batches and store": tuple(_daemon()),
}
CATALOGUE: Mapping[str, Series] = {series.name: series for group in GROUPS.values() for series in group}
_FROM_HEARTBEATS = {"rank_up", "rank_heartbeat_timestamp_seconds", "straggler_score", "overlap_ratio"}
REPORTED: Mapping[str, Series] = {
    series.name: series for series in (*_engine(), *_ranks(), *_hosts()) if series.name not in _FROM_HEARTBEATS
}
"""What ranks send as rows of their heartbeats; of all other series the daemon finds the values itself."""

LABELS: Mapping[str, str] = {
    "replica": "Number of the replica, from 0.",
    "rank": "Rank inside its replica, from 0.",
    "position": "Place of a draft behind the last known token, from 0.",
    "node": "Host name of the rank.",
    "op": "all_reduce, gather, boundary (hidden rows from the pipeline stage before), or stage_wait (waited for that "
    "stage to send them).",
    "layer": "What an all-reduce completes: wiring and sub-block (ladder mlp, ladder experts, …), embedding or head.",
    "link": "Slowest link class crossed: node (shared memory), net, or the emulated link's name.",
    "exposure": "hidden or exposed.",
    "finished_reason": ", ".join(FINISH_REASONS) + ".",
    "reason": "For restarts " + ", ".join(FAILURE_KINDS) + "; for throttling power, thermal, hardware, sync.",
    "phase": ", ".join(PHASES) + ".",
    "outcome": "done, refused or failed.",
    "status": "For batches "
    + ", ".join(BATCH_STATUSES)
    + "; for lines left, completed, failed; for bodies waiting, in_flight.",
    "route": "The route's template, such as /v1/batches/{id}.",
    "code": "HTTP status code.",
    "key": "A key's id (not the key); none without a key file, other beyond 256 of them.",
    "tokens": "prompt or completion.",
    "limit": "requests_per_minute, concurrent_requests, tokens_per_day, stored_bytes.",
    "hca": "RDMA adapter, such as mlx5_0.",
    "port": "Port number of the adapter.",
    "device": "cpu or cuda; for failures with the GPU's number on its node.",
    "stage": "Pipeline stage, from 0; empty without.",
    "collective": "What the rank to blame waited in, or had started last.",
    "cpu_tier": "amx, avx512_bf16, avx512, avx2 or generic; the lesser one where LADDERTRON_CPU_TIER forces it.",
    "threads": "Compute threads of the rank.",
    "error": "Kind of error: for ports symbol, link_down, …; for ECC corrected, uncorrected.",
    "version": "laddertron's version.",
    "model": "The name that clients use.",
    "wiring": "The residual wiring.",
}
