"""The simulator against published speeds of 70B and 405B: fitted on half of the rows, held to the other half."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from laddertron.tools.plan.published import TOKENS
from laddertron.tools.plan.roofline import Contention
from laddertron.topology.hardware.presets import GPU_MODELS

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools" / "benchmarks"))

import simulate_published as published  # noqa: E402


@pytest.fixture(scope="module")
def fitted() -> published.Constants:
    return published.fit()


def test_half_of_the_rows_are_fitted() -> None:
    """Six of twelve: the smallest and the largest batch of each interconnect, tested in between."""
    assert len(published.FITTED) * 2 == len(TOKENS)
    assert set(published.FITTED) < set(TOKENS)


def test_every_speedup_is_met_within_a_tenth(fitted: published.Constants) -> None:
    """70B at tp 8 and 405B at tp 16, ladder and parallel, peer access on and off; most rows nothing was fitted on."""
    rows = list(published.speedups(fitted))
    missed = [f"{row.key} {row.what}: {row.error:+.1%}" for row in rows if abs(row.error) > published.LIMIT]
    assert not missed
    assert sum(not row.fitted for row in rows) >= 15


def test_without_contention_the_same_rows_are_missed(fitted: published.Constants) -> None:
    """The guard fires: an overlap that costs nothing promises more than was measured."""
    still = dict.fromkeys(fitted.contention, Contention(0.0, 0.0))
    dreaming = replace(fitted, contention=still)
    assert any(row.error > published.LIMIT for row in published.speedups(dreaming))


def test_constants_are_physical(fitted: published.Constants) -> None:
    """Shares of what the hardware has, latencies and rates of the right order, contention that slows."""
    peak = GPU_MODELS["H100"].memory_bandwidth
    assert 0.5 < fitted.rates.weight_bytes_per_s / peak < 1.0
    assert 5e-6 < fitted.rates.call_one_s < fitted.rates.call_many_s < 50e-6
    assert fitted.links["nvlink"].latency_s < fitted.links["pcie"].latency_s < fitted.links["ib"].latency_s
    assert all(0 <= c.waiting < c.moving for c in fitted.contention.values())


def test_what_plan_uses_is_said_to_miss_where_it_does(fitted: published.Constants) -> None:
    """The shipped prices are not this fit: their misses are few, and the document has them."""
    missed = [row for row in published.speedups(published.shipped(fitted)) if abs(row.error) > published.LIMIT]
    assert {row.key for row in missed} <= {("70B", "no p2p", 16)}


def test_the_document_says_what_the_simulator_says(fitted: published.Constants) -> None:
    """docs/plans/validation.md lists every row and every miss as they come out now; `make plans` renews it."""
    text = (ROOT / "docs" / "plans" / "validation.md").read_text(encoding="utf-8")
    assert text.count("**miss**") == sum(
        abs(row.error) > published.LIMIT
        for rows in (
            published.speedups(fitted),
            published.rates(fitted),
            published.other_sizes(fitted),
            published.speedups(published.shipped(fitted)),
        )
        for row in rows
    )
