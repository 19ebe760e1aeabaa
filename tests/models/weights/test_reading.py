"""Fills on several threads: order, bounds, and what happens to the others when one fails."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from laddertron.models.weights.parallel_reader import PIECE_BYTES, Readers, cut
from laddertron.models.weights.slices import Fill
from laddertron.models.weights.tensor_reader import Reader
from waiting import HANG_S

FILLS = [Fill("p", 10 * i, 10, "t", 10 * i) for i in range(40)]


def test_pieces_tile_the_fill() -> None:
    """Rows of a third of a piece: threes, the last one short, each from where it lies in the file."""
    fill = Fill("p", 5, 11, "t", source_row=100, source_col=3, columns=7)
    pieces = list(cut(fill, PIECE_BYTES // 3))
    assert [(p.row, p.source_row, p.count) for p in pieces] == [(5, 100, 3), (8, 103, 3), (11, 106, 3), (14, 109, 2)]
    assert all(replace(p, row=5, source_row=100, count=11) == fill for p in pieces)
    assert list(cut(fill, 10 * PIECE_BYTES))[-1].row == 15  # a row larger than a piece is one piece
    assert list(cut(replace(fill, columns=None), 0)) == [replace(fill, columns=None)]


def test_they_come_in_order_and_are_read_together() -> None:
    """Two threads meet inside two fills at once; what is given out keeps the order, ahead of it stands a bounded
    number."""
    meet, begun = threading.Barrier(2), list[Fill]()

    def read(reader: Reader, fill: Fill) -> None:
        begun.append(fill)
        meet.wait(HANG_S)

    with Readers(2) as readers:
        for number, fill in enumerate(readers.each(FILLS, read)):
            assert fill is FILLS[number]
            assert len(begun) <= number + 6
    assert len(begun) == len(FILLS)


def test_a_failure_is_raised_at_its_turn_and_ends_the_rest() -> None:
    """Fill 5 fails: 0 to 4 are given out, its error is raised, and most of the others are never begun."""
    begun: list[Fill] = []
    files: list[Reader] = []

    def read(reader: Reader, fill: Fill) -> None:
        begun.append(fill)
        files.append(reader)
        if fill is FILLS[5]:
            raise ValueError("damaged")

    given: list[Fill] = []
    with pytest.raises(ValueError, match="damaged"), Readers(3) as readers:
        given.extend(readers.each(FILLS, read))
    assert given == FILLS[:5]
    assert len(begun) < 20
    assert all(not reader._files for reader in files)
    assert not [t for t in threading.enumerate() if t.name.startswith("weights")]
