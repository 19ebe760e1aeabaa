"""Which layers each stage holds: as even as can be, where the wiring lets a stage end, and what crosses there."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest
from laddertron.models.config.known_models import known
from laddertron.models.config.parts import Wiring, make_wiring
from laddertron.models.residual import pending_at
from laddertron.models.stages import StageError, choose_layers, head_in_layers, make_stages

SMALL = replace(known("llama-3.1-8b"), num_layers=9, wiring=make_wiring("standard", 9))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("vocab", [1, 128256, 900_000])
def test_the_slowest_stage_is_as_fast_as_can_be(count: int, vocab: int) -> None:
    """Against every split there is of nine layers, with heads of nothing, half a layer and several layers."""
    config = replace(SMALL, vocab_size=vocab)
    head = head_in_layers(config)

    def pace(layers: tuple[int, ...]) -> float:
        return max(*layers[:-1], layers[-1] + head, 0)

    every = [tuple(b - a for a, b in pairwise((0, *ends, 9))) for ends in combinations(range(1, 9), count - 1)]
    assert pace(choose_layers(config, count)) == min(map(pace, every))


def test_405b_and_70b_are_cut_in_halves() -> None:
    """The head is less than a layer of 405B, and more than one of 70B."""
    assert choose_layers(known("llama-3.1-405b"), 2) == (63, 63)
    assert choose_layers(known("llama-3.1-70b"), 2) == (41, 39)


@pytest.mark.parametrize("every", [1, 2, 3, 4, 6])
def test_desync_stages_begin_after_a_reduce(every: int) -> None:
    config = replace(SMALL, wiring=make_wiring("desync", 9, every=every, tensor_parallel_size=2))
    for end in accumulate(choose_layers(config, 3)[:-1]):
        assert 2 * end % every == 0


def test_what_cannot_be_is_refused_with_the_arithmetic() -> None:
    desync = replace(SMALL, wiring=make_wiring("desync", 9, every=4, tensor_parallel_size=2))
    shortcut = replace(SMALL, num_layers=8, wiring=Wiring(("shortcut", "standard") * 4))
    assert all(layers % 2 == 0 for layers in choose_layers(shortcut, 3))
    for config, count, wanted, match in (
        (SMALL, 10, (), "9 layers make at most 9 stages"),
        (SMALL, 2, (4, 4, 1), "names 3 stages, pipeline_parallel_size=2"),
        (SMALL, 2, (4, 4), r"4 \+ 4 = 8, the model has 9"),
        (SMALL, 2, (9, 0), "at least 1 a stage"),
        (desync, 2, (3, 6), r"6 % 4 = 2, and desync-4 reduces after every 4"),
        (desync, 6, (), "9 layers in steps of 2"),
        (shortcut, 2, (3, 5), "stage 1 would begin at layer 3, before the experts of layer 2 have joined"),
    ):
        with pytest.raises(StageError, match=match):
            choose_layers(config, count, wanted)


def test_a_boundary_owes_what_the_wiring_does() -> None:
    """None where the residual is complete, one in a ladder, d with delay-d, and never more than there were outputs."""
    for wiring, layer, pending in (
        (make_wiring("standard", 9), 4, 0),
        (make_wiring("parallel", 9), 4, 0),
        (make_wiring("ladder", 9), 4, 1),
        (make_wiring("hybrid", 9, [4, 5]), 4, 1),
        (make_wiring("hybrid", 9, [2, 3]), 4, 0),
        (make_wiring("delay", 9, delay=3), 4, 3),
        (make_wiring("delay", 9, delay=3), 1, 2),
        (make_wiring("ladder", 9), 0, 0),
        (make_wiring("ladder", 9), 9, 0),
    ):
        assert pending_at(wiring, layer) == pending, (wiring.name, layer)


def test_stages_meet() -> None:
    """One's end is the next one's beginning, in layers and in what is pending; windows go with their layers."""
    config = replace(SMALL, wiring=make_wiring("ladder", 9), sliding_window=tuple(range(9)))
    stages = make_stages(config, (2, 4, 3))
    assert [s.first_layer for s in stages] == [0, 2, 6]
    assert [s.config.sliding_window for s in stages] == [(0, 1), (2, 3, 4, 5), (6, 7, 8)]
    assert [(s.pending, s.left) for s in stages] == [(0, 1), (1, 1), (1, 0)]
    assert [(s.first, s.last) for s in stages] == [(True, False), (False, False), (False, True)]
