"""Which of a step's results the check compares with those of a sequence alone."""

from __future__ import annotations

import numpy as np
import pytest
from laddertron.engine.batch import Chunk
from laddertron.engine.sampling.digest import Digests
from laddertron.engine.step.row_check import RowCheck


def rows(*values: int) -> Digests:
    return np.array(values, np.uint64)


MLP, LOGITS = "layer 0 mlp", "logits"
WHOLE = [(MLP, rows(1, 2, 3)), (LOGITS, rows(4, 5, 6))]


@pytest.mark.parametrize(
    ("alone", "trace", "found"),
    [
        (WHOLE, [(MLP, rows(9, 2, 3)), (LOGITS, rows(9, 5, 6))], None),
        (WHOLE, [(MLP, rows(9, 2, 7)), (LOGITS, rows(9, 5, 6))], (0, 2)),
        (WHOLE, [(MLP, rows(9, 2, 3)), (LOGITS, rows(9, 7, 6))], (1, 1)),
        (WHOLE, [(LOGITS, rows(9, 5, 6))], None),
        (WHOLE, [(LOGITS, rows(9, 5, 7))], (0, 2)),
        (WHOLE[1:], [(MLP, rows(9, 8, 8)), (LOGITS, rows(9, 5, 6))], None),
    ],
    ids=["equal", "a sub-block", "the logits", "a graph's", "a graph's logits", "alone in a graph"],
)
def test_results_are_compared_by_name(
    alone: list[tuple[str, Digests]], trace: list[tuple[str, Digests]], found: tuple[int, int] | None
) -> None:
    """The step's row 0 is another sequence's; rows 1 and 2 are positions 1 and 2."""
    check = RowCheck.__new__(RowCheck)
    check._alone = {5: alone}
    assert check._differs(trace, 1, Chunk(0, 1, 2, samples=False, prompt_logprobs=True), 5) == found
