"""vLLM's names for series of catalogue.py (metrics.vllm_names), for its dashboards and endpoint pickers. One process of
vLLM is one engine, so replicas are summed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from .catalogue import CATALOGUE, FINISH_REASONS, Series
from .ranks import Histograms, Labels, Values

PREFIX = "vllm:"
_SAME = (
    "num_requests_running", "num_requests_waiting", "prompt_tokens_total", "generation_tokens_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "request_success_total",
    "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
)  # fmt: skip
NAMES = {**{name: name for name in _SAME}, "iteration_tokens": "iteration_tokens_total"}
"""vLLM's name, without its prefix, of each series that has one; kv_cache_usage_perc and cache_config_info are made."""
_REASONS = {reason: reason for reason in ("stop", "length")} | {"cancelled": "abort", "timeout": "abort"}


def vllm_series() -> dict[str, Series]:
    """Each as vLLM exports it, by the name that it has in catalogue.py: with model_name, without replica."""
    series_by_name = {}
    for own, name in NAMES.items():
        series = CATALOGUE[own]
        labels = ("model_name", *(label for label in series.labels if label != "replica"))
        series_by_name[own] = replace(series, name=name, labels=labels, prefix=PREFIX)
    return series_by_name


def summed(values: Values, histograms: Histograms, model: str) -> tuple[Values, Histograms]:
    """Values and histograms of NAMES over all replicas, labelled as vLLM labels them."""
    sums: Values = {}
    counts: Histograms = {}
    for name, series in vllm_series().items():
        totals: defaultdict[Labels, float] = defaultdict(float)
        for labels, value in values[name].items():
            totals[_relabelled(CATALOGUE[name], labels, model)] += value
        if name == "request_success_total":
            for reason in dict.fromkeys(_REASONS.get(reason, "error") for reason in FINISH_REASONS):
                totals[model, reason] += 0.0
        sums[name] = dict(totals)
        counts[name] = {}
        for labels, (buckets, total) in histograms[name].items():
            key = _relabelled(CATALOGUE[name], labels, model)
            before, so_far = counts[name].get(key, ([0] * len(buckets), 0.0))
            counts[name][key] = [a + b for a, b in zip(before, buckets, strict=True)], so_far + total
        if series.kind == "histogram" and not counts[name]:
            counts[name][model,] = [0] * (len(series.bounds) + 1), 0.0
    return sums, counts


def made(values: Values, model: str, block_size: int) -> Iterator[Metric]:
    """The two that no series of ours is: the mean usage of the replicas' KV caches, and the caches' size in blocks."""
    usage = values["kv_cache_usage_ratio"].values()
    family = GaugeMetricFamily(PREFIX + "kv_cache_usage_perc", "KV cache usage; 1 is full.", labels=("model_name",))
    family.add_metric((model,), sum(usage) / max(1, len(usage)))
    yield family
    blocks = sum(int(tokens) // block_size for tokens in values["kv_cache_tokens"].values())
    labels = ("model_name", "block_size", "num_gpu_blocks")
    info = GaugeMetricFamily(PREFIX + "cache_config_info", "Always 1; labels give the KV cache's size.", labels=labels)
    info.add_metric((model, str(block_size), str(blocks)), 1.0)
    yield info


def _relabelled(series: Series, labels: Labels, model: str) -> Labels:
    named = zip(series.labels, labels, strict=True)
    label_values = (_REASONS.get(value, "error") if name == "finished_reason" else value for name, value in named
            if name != "replica")  # fmt: skip
    return (model, *label_values)
