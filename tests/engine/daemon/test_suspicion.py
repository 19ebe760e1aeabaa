"""What deaths say of a request, and in which order the suspected ones run alone."""

from __future__ import annotations

import pytest
from laddertron.engine.daemon.flight import SUSPECT_TOKENS, Suspicion


def after(*deaths: tuple[int, bool]) -> Suspicion:
    """`deaths`: where it stood, and whether it was alone."""
    found = Suspicion()
    for place, alone in deaths:
        found.died(place, SUSPECT_TOKENS, alone)
    return found


@pytest.mark.parametrize(
    ("deaths", "apart", "guilty"),
    [
        ([(0, False)], False, False),
        ([(0, True)], False, False),
        ([(100, False)], False, False),
        ([(0, False), (0, False)], True, False),
        ([(100, False), (100 + SUSPECT_TOKENS, False)], True, False),
        ([(100, False), (101 + SUSPECT_TOKENS, False)], False, False),
        ([(5, True), (5, True)], True, True),
        ([(5, False), (5, False), (5, True), (5, True)], True, True),
        ([(5, True), (6 + SUSPECT_TOKENS, True)], False, False),
        ([(5, False)] * 9, True, False),
        # what ends for lack of memory creeps on a little each time
        ([(100, False), (104, False), (111, True), (115, True)], True, True),
    ],
)
def test_what_deaths_say(deaths: list[tuple[int, bool]], apart: bool, guilty: bool) -> None:
    """The second death at about one place sets apart; only two alone, there, convict."""
    found = after(*deaths)
    place = deaths[-1][0]
    assert (found.isolated(place, SUSPECT_TOKENS), found.guilty) == (apart, guilty)
    assert not found.isolated(place + SUSPECT_TOKENS + 1, SUSPECT_TOKENS), "past the place it runs beside others again"
