"""Seats: what the composer tells ranks of where they belong, and how they find out that they are elsewhere."""

from __future__ import annotations

import pytest
from laddertron.launchers.hosts import Host
from laddertron.launchers.seats import expected, seats_text, verify_seats
from laddertron.topology.mapping import MappingError


def test_ranks_in_their_places_pass_and_dealt_ones_are_told_the_mend() -> None:
    """Two hosts of two. In order all is well, domains or not; dealt round the hosts, every rank refuses with the
    launcher's own option."""
    text = seats_text((Host("a", 2), Host("b", 2)))
    assert text == "a:2,b:2"
    verify_seats(text, [(0, "a", 0), (1, "a.example.org", 1), (2, "b", 0), (3, "b", 1)], "openmpi")
    with pytest.raises(MappingError, match=r"dealt round the nodes.*--map-by ppr:2:node"):
        verify_seats(text, [(0, "a", 0), (1, "b", 0), (2, "a", 1), (3, "b", 1)], "openmpi")
    with pytest.raises(MappingError, match=r"-ppn 2 -hosts a,b"):
        verify_seats(text, [(0, "b", 0), (1, "b", 1), (2, "a", 0), (3, "a", 1)], "mpich")


def test_who_was_told_nothing_expects_nothing() -> None:
    verify_seats(None, [(0, "anywhere", 0)], "slurm")


@pytest.mark.parametrize("text", ["", "a", "a:0", "a:x", ":2", "a:2,b:1", "a:99999999"])
def test_what_is_not_ours_is_refused(text: str) -> None:
    with pytest.raises(MappingError, match="LADDERTRON_SEATS"):
        expected(text)
