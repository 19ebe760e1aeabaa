"""Dashboards of what is served: Overview, Latency, Engine."""

from __future__ import annotations

from .dashboards import Board, PanelRow, Query
from .dashboards_parts import (
    ENDED,
    ERRORS,
    FIRST,
    GATHERS,
    GENERATION,
    HIDDEN,
    ME,
    STEPS,
    TRAVEL,
    D,
    K,
    R,
    heat,
    lines,
    quantiles,
    rate,
    ratio,
    stat,
)

OVERVIEW = Board(
    "overview",
    "Overview",
    (
        PanelRow(
            "Now",
            (
                stat("Replicas ready", "none", f"sum(laddertron_engine_ready{{{R}}})"),
                stat("Ranks up", "none", f"sum(laddertron_rank_up{{{K}}})"),
                stat("Tokens/s", "none", GENERATION.expr, help="Tokens drawn, all replicas."),
                stat(
                    "Errors",
                    "percentunit",
                    f"{rate('request_success_total', ERRORS)} / ({ENDED} > 0) or vector(0)",
                    (0.01, "yellow"),
                    (0.05, "red"),
                    help="Share of choices that ended in an error or a timeout.",
                ),
                stat(
                    "Communication hidden",
                    "percentunit",
                    f"sum({HIDDEN}) / sum({TRAVEL})",
                    help="Share of the all-reduces' travel time behind compute.",
                ),
                stat(
                    "KV cache",
                    "percentunit",
                    f"max(laddertron_kv_cache_usage_ratio{{{R}}})",
                    (0.9, "yellow"),
                    (0.97, "red"),
                ),
            ),
        ),
        PanelRow(
            "Traffic",
            (
                lines("Tokens", "short", GENERATION, Query(rate("prompt_tokens_total", R), "prompt"), help="A second."),
                lines(
                    "Requests in the engine",
                    "short",
                    Query(f"sum(laddertron_num_requests_running{{{R}}})", "running"),
                    Query(f"sum(laddertron_num_requests_waiting{{{R}}})", "waiting"),
                    Query(f'sum(laddertron_dispatch_requests{{{D}, status="waiting"}})', "waiting for a replica"),
                ),
                lines(
                    "Choices that ended",
                    "ops",
                    Query(rate("request_success_total", D, "finished_reason"), "{{finished_reason}}"),
                    stack=True,
                ),
                lines("First token", "s", *quantiles("time_to_first_token_seconds")),
                lines("Between tokens", "s", *quantiles("inter_token_latency_seconds")),
                lines("HTTP responses", "reqps", Query(rate("http_requests_total", D, "code"), "{{code}}"), stack=True),
            ),
        ),
        PanelRow(
            "Batches",
            (
                stat("Lines left", "none", f'sum(laddertron_batch_requests{{{D}, status="left"}})'),
                stat(
                    "Time left",
                    "s",
                    f"max(laddertron_batch_eta_seconds{{{D}}})",
                    help="At the rate of the last minutes.",
                ),
                stat("First window ends in", "s", f"min(laddertron_batch_deadline_seconds{{{D}}})"),
                lines(
                    "Batches by status",
                    "short",
                    Query(f"sum by (status) (laddertron_batch_jobs{{{D}}})", "{{status}}"),
                    width=12,
                ),
                lines(
                    "Lines by status",
                    "short",
                    Query(f"sum by (status) (laddertron_batch_requests{{{D}}})", "{{status}}"),
                    width=12,
                ),
                lines(
                    "Will it be done in time?",
                    "s",
                    Query(f"max(laddertron_batch_eta_seconds{{{D}}})", "needed at this rate"),
                    Query(f"min(laddertron_batch_deadline_seconds{{{D}}})", "left until the first window ends"),
                    Query(f"max(laddertron_batch_overdue_seconds{{{D}}})", "beyond its window, the latest batch"),
                    help="Of the latest batch: below zero it is done before its window ends.",
                    width=12,
                    floor=None,
                ),
            ),
        ),
    ),
)

LATENCY = Board(
    "latency",
    "Latency",
    (
        PanelRow(
            "As clients see it",
            (
                heat("First token", "time_to_first_token_seconds"),
                heat("Between tokens", "inter_token_latency_seconds"),
                lines("First token", "s", *quantiles("time_to_first_token_seconds")),
                lines("Between tokens", "s", *quantiles("inter_token_latency_seconds")),
                lines("Whole request", "s", *quantiles("e2e_request_latency_seconds")),
            ),
        ),
        PanelRow(
            "Where the time goes",
            (
                lines(
                    "Mean, by stage",
                    "s",
                    *(
                        Query(
                            ratio(f"request_{stage}_time_seconds_sum", f"request_{stage}_time_seconds_count", R),
                            stage,
                        )
                        for stage in ("queue", "prefill", "decode")
                    ),
                    stack=True,
                ),
                lines("Queued in the engine", "s", *quantiles("request_queue_time_seconds", R)),
                lines("Prefill", "s", *quantiles("request_prefill_time_seconds", R)),
                lines(
                    "Oldest waiting",
                    "s",
                    Query(f"max(laddertron_engine_oldest_waiting_age_seconds{{{R}}})", "in the engine"),
                ),
                lines(
                    "HTTP, p95 by route",
                    "s",
                    Query(
                        f"histogram_quantile(0.95, {rate('http_request_duration_seconds_bucket', D, 'le, route')})",
                        "{{route}}",
                    ),
                ),
                lines("One step", "s", *quantiles("step_duration_seconds", K)),
            ),
        ),
        PanelRow(
            "What is asked",
            (
                heat("Prompt tokens", "request_prompt_tokens", unit="short"),
                heat("Generated tokens", "request_generation_tokens", unit="short"),
            ),
        ),
    ),
)

ENGINE = Board(
    "engine",
    "Engine",
    (
        PanelRow(
            "Steps",
            (
                heat("Tokens in a step", "iteration_tokens", R, "short"),
                lines(
                    "Mean tokens in a step",
                    "short",
                    Query(
                        ratio("iteration_tokens_sum", "iteration_tokens_count", R, "replica"),
                        "replica {{replica}}",
                    ),
                    width=6,
                ),
                lines(
                    "Steps a second",
                    "ops",
                    Query(rate("step_duration_seconds_count", FIRST, "replica"), "replica {{replica}}"),
                    width=6,
                ),
                lines(
                    "Gathers of the sampler",
                    "s",
                    Query(f"{rate('collective_seconds_total', GATHERS)} / {STEPS}", "a step"),
                    help="The small all-gather from which every rank draws the same ids.",
                ),
                lines(
                    "Tokens drawn for nothing",
                    "percentunit",
                    Query(ratio("surplus_tokens_total", "generation_tokens_total", R), "surplus"),
                ),
                lines(
                    "Running and waiting",
                    "short",
                    Query(f"laddertron_num_requests_running{{{R}}}", "running, {{replica}}"),
                    Query(f"laddertron_num_requests_waiting{{{R}}}", "waiting, {{replica}}"),
                ),
            ),
        ),
        PanelRow(
            "KV cache",
            (
                lines(
                    "Held",
                    "percentunit",
                    Query(f"laddertron_kv_cache_usage_ratio{{{R}}}", "replica {{replica}}"),
                    top=1.0,
                ),
                lines(
                    "Cached, nobody's",
                    "short",
                    Query(f"laddertron_kv_cached_blocks{{{R}}}", "replica {{replica}}"),
                    help="Blocks.",
                ),
                lines("Preemptions", "ops", Query(rate("num_preemptions_total", R, "replica"), "replica {{replica}}")),
                lines(
                    "Prefix cache: found",
                    "percentunit",
                    Query(
                        ratio("prefix_cache_hits_total", "prefix_cache_queries_total", R),
                        "of tokens asked",
                    ),
                    top=1.0,
                ),
                lines("Host memory of ranks", "bytes", Query(f"laddertron_rank_resident_memory_bytes{{{K}}}", ME)),
                lines("GPU memory", "bytes", Query(f"laddertron_gpu_memory_used_bytes{{{K}}}", ME)),
            ),
        ),
    ),
)
