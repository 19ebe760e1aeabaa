"""Who reads what where nodes load together: pure plans of all ranks, played against one another."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laddertron.models.checkpoint import Stored
from laddertron.models.config import ModelConfig
from laddertron.models.known import known
from laddertron.models.shard import Shard
from laddertron.models.weights_once import Rates
from laddertron.models.weights_plan import Fill, expected_shapes
from laddertron.models.weights_shared import Division, Round, Sharing, Spread, blocks_of, divide
from shared_cases import rounds_of
from test_weights_cover import models


def stored_of(c: ModelConfig, itemsize: int = 2) -> dict[str, Stored]:
    """The tensors of a checkpoint that is nowhere, three to a file."""
    tensors, at = {}, 100
    for i, (name, shape) in enumerate(expected_shapes(c).items()):
        at = at if i % 3 else 100
        size = itemsize * prod(shape)
        tensors[name] = Stored(name, Path(f"m{i // 3}"), "BF16" if itemsize == 2 else "F32", shape, at, at + size)
        at += size
    return tensors


def elements(fill: Fill, shape: tuple[int, ...], first: int, count: int) -> Any:
    """Numbers [count, columns] of a tensor's elements that a fill's rows from `first` on want."""
    width = prod(shape[1:])
    columns = np.arange(width) if fill.columns is None else fill.source_col + np.arange(fill.columns)
    return (fill.source_row + first + np.arange(count))[:, None] * width + columns


def play(division: Division, c: ModelConfig, tensors: dict[str, Stored], size: int) -> list[set[tuple[str, int]]]:
    """What every rank does, by numbers of elements; asserts that each part it is sent is what it lacks. Returns the
    rows that each node reads of each tensor."""
    wanted = expected_shapes(c)
    spread = division.spread
    reads: list[set[tuple[str, int]]] = [set() for _ in range(spread.nodes)]
    going: dict[tuple[int, int], list[Any]] = defaultdict(list)
    coming: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for rank, plan in enumerate(division.plans):
        node = spread.node(rank)
        for fill in plan:
            if fill.tensor is None:
                continue
            shape = wanted[fill.tensor]
            if division.holders(fill, rank) is None:
                reads[node] |= {(fill.tensor, fill.source_row + i) for i in range(fill.count)}
                continue
            filled = np.full((fill.count, fill.columns or prod(shape[1:])), -1)
            for one in division.rounds(fill, rank, tensors):
                check_round(one, node)
                mine = one.mine
                reads[node] |= {(fill.tensor, fill.source_row + mine.first + i) for i in range(mine.count)}
                for part in (one.mine, *one.others):
                    assert (filled[part.first : part.first + part.count] == -1).all(), "a row comes twice"
                    filled[part.first : part.first + part.count] = elements(fill, shape, part.first, part.count)
                for part in one.others:
                    peer = spread.ranks(part.node)[rank % spread.per_node]
                    theirs = Fill(fill.parameter, fill.row, 0, fill.tensor, fill.source_row, part.column, part.columns)
                    going[rank, peer].append(elements(theirs, shape, mine.first, mine.count))
                    coming[peer, rank].append(elements(fill, shape, part.first, part.count))
            assert np.array_equal(filled, elements(fill, shape, 0, fill.count)), "a row never comes"
    assert going.keys() == coming.keys()
    for pair, sent in going.items():
        assert len(sent) == len(coming[pair])
        assert all(np.array_equal(a, b) for a, b in zip(sent, coming[pair], strict=True)), pair
    return reads


def check_round(one: Round, node: int) -> None:
    assert one.mine.node == node
    assert node not in {part.node for part in one.others}
    assert one.count == sum(part.count for part in (one.mine, *one.others))
    assert [one.piece(part).count for part in one.others] == [part.count for part in one.others]


@settings(max_examples=80)
@given(models(), st.data())
def test_any_division_gives_everyone_what_they_want_and_reads_rows_once(
    drawn: tuple[ModelConfig, int], data: st.DataObject
) -> None:
    """Any model, any nodes, rounds of any size: what is sent is what the receiver lacks, in the same order on both
    ends; column slices and what all hold are read by one node each. Nothing is divided where it does not pay."""
    c, size = drawn
    nodes = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    spread, tensors = Spread(nodes, size // nodes), stored_of(c)
    replicate = data.draw(st.booleans())
    shard = Shard(c, size, 0)
    with rounds_of(data.draw(st.integers(1, 4000))):
        reads = play(divide(shard, spread, tensors, lambda sharing: True, replicate), c, tensors, size)
        for name, shape in expected_shapes(c).items():
            often = [sum((name, row) in seen for seen in reads) for row in range(shape[0])]
            assert min(often) >= 1, name
            if name.endswith(("o_proj.weight", "down_proj.weight", "c_proj.weight", "norm.weight")):
                assert max(often) == 1, name
        alone = divide(shard, spread, tensors, lambda sharing: False, replicate)
        assert not alone.divided
        play(alone, c, tensors, size)


def test_what_dividing_saves_is_counted_by_node() -> None:
    """405B over 2 x 8: a node is spared half of o_proj's rows and sent its ranks' columns of them; of a norm, or a
    replicated table, every rank is sent all of it."""
    c = known("llama-3.1-405b")
    asked: dict[tuple[float, float], Sharing] = {}

    def note(sharing: Sharing) -> bool:
        asked[sharing.spared, sharing.received] = sharing
        return False

    divide(Shard(c, 16, 0), Spread(2, 8), stored_of(c), note, replicate_embedding=True)
    d, row, mib = 16384, 2 * 16384, 2**20
    o = asked[d * row / 2, d * row / 4]
    assert o == Sharing(256 * mib, 128 * mib, 4, True), "4 rounds of 4 MiB are 16 MiB a rank"
    norm = asked[row / 2, 8 * row / 2]
    assert (norm.messages, norm.columns) == (1, False)
    table = asked[c.vocab_size * row / 2, 8 * c.vocab_size * row / 2]
    assert not table.columns
    slow = Rates(storage_bytes_per_s=2e9, link_bytes_per_s=10e9, latency_s=50e-6)
    assert [slow.saved_s(s.spared, s.received, s.messages) > 0 for s in (o, norm, table)] == [True, False, False]
    fast = Rates(storage_bytes_per_s=1e9, link_bytes_per_s=40e9, latency_s=50e-6)
    assert fast.saved_s(table.spared, table.received, table.messages) > 0
    warm = Rates(storage_bytes_per_s=20e9, link_bytes_per_s=1e9, latency_s=50e-6)
    assert warm.saved_s(o.spared, o.received, o.messages) < 0


@pytest.mark.parametrize(("size", "nodes"), [(4, 2), (4, 4), (8, 2)])
def test_every_block_is_verified_where_it_is_read(size: int, nodes: int) -> None:
    """Of each file every block is somebody's, those that hold bytes that a node reads are that node's, and no two ranks
    of a node verify the same."""
    c = known("llama-3.2-1b")
    spread, tensors = Spread(nodes, size // nodes), stored_of(c)
    tensors["beside"] = Stored("beside", Path("m0"), "F32", (10_000_000,), 10**9, 10**9 + 40_000_000)
    block = 1 << 20
    division = divide(Shard(c, size, 0), spread, tensors, lambda sharing: True)
    picks = [blocks_of(division, rank, tensors) for rank in range(size)]
    for name in {stored.file.name for stored in tensors.values()}:
        count = -(-max(stored.end for stored in tensors.values() if stored.file.name == name) // block)
        every = [pick(name, count, block) for pick in picks]
        assert set().union(*every) == set(range(count))
        for node in range(nodes):
            mine = [block for rank in spread.ranks(node) for block in every[rank]]
            assert len(mine) == len(set(mine))
            for _, begin, end in (span for span in division.reads(node, tensors) if span[0] == name):
                assert set(range(begin // block, -(-end // block))) <= set(mine)
