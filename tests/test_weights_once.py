"""What several nodes read twice, counted from the plans of every rank, and when it would pay to send it instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from laddertron.models.known import known
from laddertron.models.weights_once import Rates, Reading, reading

LLAMA = known("llama-3.1-405b")
SMALL = replace(LLAMA, num_layers=2, wiring=replace(LLAMA.wiring, kinds=LLAMA.wiring.kinds[:2]))
NORMS, ROW = 5, 2 * 16384


def test_every_byte_is_wanted_once() -> None:
    """On one node nothing is read again, and what is wanted are all parameters."""
    assert reading(LLAMA, 8, 1) == Reading(2 * LLAMA.num_parameters, 0, 0, 0)
    assert reading(SMALL, 16, 2).wanted == 2 * SMALL.num_parameters


def test_405b_on_two_nodes_reads_its_norms_twice_and_rows_of_column_slices() -> None:
    """KV heads are held twice, but by neighbours of one node; o and down are read whole by both nodes."""
    found = reading(LLAMA, 16, 2)
    assert (found.replicated, found.tensors) == (253 * ROW, 253)
    assert found.columns == 126 * ROW * (16384 + 53248)


def test_kv_heads_count_where_their_ranks_are_on_different_nodes() -> None:
    """16 ranks on 16 nodes: each of 8 KV heads is read by two of them, a norm by all."""
    found = reading(SMALL, 16, 16)
    heads = 2 * 2 * 8 * 128 * ROW
    assert found.replicated == 15 * NORMS * ROW + heads
    assert found.columns == 15 * 2 * ROW * (16384 + 53248)
    whole = reading(SMALL, 16, 2, replicate_embedding=True)
    assert whole.replicated == NORMS * ROW + SMALL.vocab_size * ROW


def test_nodes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="use a divisor of 16"):
        reading(SMALL, 16, 3)


def test_when_sending_pays() -> None:
    """Norms across InfiniBand: their messages' latency alone is more than reading them takes. A replicated table of
    4 GB over storage ten times slower than the link: sending half of it wins; over a slower link it loses."""
    rates = Rates(storage_bytes_per_s=2e9, link_bytes_per_s=50e9, latency_s=20e-6)
    norms = reading(LLAMA, 16, 2)
    assert rates.saved_s(norms.replicated / 2, norms.replicated / 2, norms.tensors) < 0
    assert rates.saved_s(2 << 30, 2 << 30, 512) > 0.8
    assert Rates(50e9, 2e9, 20e-6).saved_s(2 << 30, 2 << 30, 512) < 0
    assert rates.saved_s(0, 0, 0) == 0.0
