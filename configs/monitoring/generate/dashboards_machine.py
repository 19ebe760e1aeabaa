"""Dashboards of what it runs on: Fabric, Reliability."""

from __future__ import annotations

from ....engine.metrics.catalogue import PHASES
from .dashboards import Board, Panel, PanelRow, Query
from .dashboards_parts import (
    EACH,
    EXPOSED,
    HIDDEN,
    ME,
    RATE,
    TRAVEL,
    WAITS,
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

FABRIC = Board(
    "fabric",
    "Fabric",
    (
        PanelRow(
            "What is hidden",
            (
                lines(
                    "Overlap by link",
                    "percentunit",
                    Query(f"{HIDDEN} / {TRAVEL}", "{{link}}"),
                    top=1.0,
                    help="Hidden over all travel time.",
                ),
                lines(
                    "All-reduces: seconds a second and rank",
                    "s",
                    Query(f"{HIDDEN} / on () group_left () count(laddertron_rank_up{{{K}}})", "hidden, {{link}}"),
                    Query(f"{EXPOSED} / on () group_left () count(laddertron_rank_up{{{K}}})", "exposed, {{link}}"),
                    stack=True,
                ),
                lines(
                    "Share of a step that waits",
                    "percentunit",
                    Query(f"sum({EXPOSED}) / {rate('step_duration_seconds_sum', K)}", "exposed"),
                ),
                lines(
                    "Share of travel that waits, by layer",
                    "percentunit",
                    Query(
                        f"{rate('layer_collective_seconds_total', WAITS, 'layer')} / "
                        f"{rate('layer_collective_seconds_total', K, 'layer')}",
                        "{{layer}}",
                    ),
                    top=1.0,
                    help="Exposed over all travel time of the all-reduces that complete this sub-block.",
                ),
                lines("Bytes", "Bps", Query(rate("collective_bytes_total", K, "op, link"), "{{op}}, {{link}}")),
                lines(
                    "Effective bandwidth a rank",
                    "Bps",
                    Query(
                        ratio("collective_bytes_total", "collective_seconds_total", K, "op, link"),
                        "{{op}}, {{link}}",
                    ),
                    help="Message bytes over travel time.",
                ),
                lines(
                    "Time of one collective",
                    "s",
                    Query(
                        ratio("collective_seconds_total", "collectives_total", K, "op, link"),
                        "{{op}}, {{link}}",
                    ),
                ),
            ),
        ),
        PanelRow(
            "Ranks",
            (
                Panel(
                    "Straggler score",
                    "status-history",
                    "none",
                    (Query(f"laddertron_straggler_score{{{K}}}", ME),),
                    "Own time a step over the peers' mean. The slow rank is the one that others wait for.",
                    width=12,
                    steps=((1.5, "yellow"), (2.0, "red")),
                ),
                Panel(
                    "Mean step",
                    "status-history",
                    "s",
                    (
                        Query(
                            ratio("step_duration_seconds_sum", "step_duration_seconds_count", K, EACH),
                            ME,
                        ),
                    ),
                    width=12,
                ),
                lines(
                    "Waiting in collectives, by rank",
                    "percentunit",
                    Query(
                        rate("collective_seconds_total", WAITS, EACH)
                        + " / "
                        + rate("step_duration_seconds_sum", K, EACH),
                        ME,
                    ),
                    help="The straggler waits least.",
                    width=12,
                ),
                lines(
                    "Ready to run, without a processor",
                    "percentunit",
                    Query(rate("rank_run_delay_seconds_total", K, EACH), ME),
                    help="Of the thread that steps. Something else runs on the rank's cores.",
                    width=12,
                ),
                heat("Step durations, all ranks", "step_duration_seconds", K, width=24),
            ),
        ),
        PanelRow(
            "Ports and GPUs",
            (
                lines(
                    "InfiniBand received",
                    "Bps",
                    Query(
                        f'rate(laddertron_infiniband_received_bytes_total{{{D}, node=~"$node"}}[{RATE}])',
                        "{{node}} {{hca}}/{{port}}",
                    ),
                ),
                lines(
                    "InfiniBand sent",
                    "Bps",
                    Query(
                        f'rate(laddertron_infiniband_transmitted_bytes_total{{{D}, node=~"$node"}}[{RATE}])',
                        "{{node}} {{hca}}/{{port}}",
                    ),
                ),
                lines(
                    "Port errors",
                    "ops",
                    Query(
                        f'rate(laddertron_infiniband_errors_total{{{D}, node=~"$node"}}[{RATE}]) > 0',
                        "{{node}} {{hca}}/{{port}} {{error}}",
                    ),
                ),
                lines(
                    "Congestion",
                    "ops",
                    Query(
                        f'rate(laddertron_infiniband_transmit_wait_ticks_total{{{D}, node=~"$node"}}[{RATE}])',
                        "{{node}} {{hca}}/{{port}}",
                    ),
                    help="Ticks a second in which data waited for credits.",
                ),
                lines("GPU clock", "hertz", Query(f"laddertron_gpu_sm_clock_hertz{{{K}}}", ME)),
                lines("GPU temperature", "celsius", Query(f"laddertron_gpu_temperature_celsius{{{K}}}", ME)),
                lines("GPU utilisation", "percentunit", Query(f"laddertron_gpu_utilization_ratio{{{K}}}", ME), top=1.0),
                lines("GPU power", "watt", Query(f"laddertron_gpu_power_watts{{{K}}}", ME)),
                lines(
                    "Held back and failing",
                    "short",
                    Query(f"laddertron_gpu_throttled{{{K}}} == 1", ME + " {{reason}}"),
                    Query(f"increase(laddertron_gpu_ecc_errors_total{{{K}}}[1h]) > 0", ME + " ECC {{error}}"),
                    Query(
                        f'laddertron_infiniband_port_up{{{D}, node=~"$node"}} == 0', "{{node}} {{hca}}/{{port}} down"
                    ),
                ),
            ),
        ),
    ),
)

RELIABILITY = Board(
    "reliability",
    "Reliability",
    (
        PanelRow(
            "Replicas and ranks",
            (
                Panel(
                    "Phase",
                    "state-timeline",
                    "none",
                    (
                        Query(
                            " + ".join(
                                f'{i} * max by (replica) (laddertron_engine_phase{{{R}, phase="{phase}"}})'
                                for i, phase in enumerate(PHASES)
                            ),
                            "replica {{replica}}",
                        ),
                    ),
                    width=12,
                    names=dict(enumerate(PHASES)),
                ),
                Panel(
                    "Ranks",
                    "status-history",
                    "none",
                    (Query(f"1 - laddertron_rank_up{{{K}}}", ME),),
                    width=12,
                    steps=((1.0, "red"),),
                    names={0: "up", 1: "down"},
                ),
                lines(
                    "Relaunches within 15 minutes",
                    "short",
                    Query(
                        f"sum by (replica, reason) (increase(laddertron_engine_restarts_total{{{R}}}[15m])) > 0",
                        "{{replica}} {{reason}}",
                    ),
                ),
                lines(
                    "Heartbeat's age",
                    "s",
                    Query(f"time() - laddertron_rank_heartbeat_timestamp_seconds{{{K}}}", ME),
                    steps=((3.0, "red"),),
                ),
                lines("Since the last step", "s", Query(f"time() - laddertron_last_step_timestamp_seconds{{{K}}}", ME)),
                stat(
                    "Desyncs, last day", "none", f"sum(increase(laddertron_rank_desync_total{{{R}}}[1d]))", (1.0, "red")
                ),
                stat(
                    "NaN logits, last day",
                    "none",
                    f"sum(increase(laddertron_nonfinite_logits_total{{{D}}}[1d]))",
                    (1.0, "red"),
                ),
                stat(
                    "Quarantined, last day",
                    "none",
                    f"sum(increase(laddertron_quarantined_requests_total{{{D}}}[1d]))",
                    (1.0, "red"),
                ),
                stat("Store writable", "none", f"min(laddertron_store_writable{{{D}}})"),
                stat("Clock jump", "s", f"max(abs(laddertron_clock_jump_seconds{{{D}}}))", (1.0, "red")),
                stat("Disk free", "bytes", f"min(laddertron_disk_free_bytes{{{D}}})"),
                stat("Version", "none", f"count by (version, model, wiring) (laddertron_build_info{{{D}}})"),
            ),
        ),
        PanelRow(
            "Store",
            (
                heat("Commits", "store_commit_seconds"),
                lines("Commits", "s", *quantiles("store_commit_seconds"), width=6),
                lines(
                    "Commits a second",
                    "ops",
                    Query(rate("store_commit_seconds_count", D), "commits"),
                    Query(rate("store_errors_total", D), "failed"),
                    width=6,
                ),
            ),
        ),
    ),
)
