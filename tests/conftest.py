"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """`ranks(4, "test_x:case", {"seed": 1}, timeout_s=60) -> [result of rank 0, …]`: runs `case(rank, seed=1)` on four
    ranks at once. `rank` is a rank_pool.Rank; arguments and results are JSON. A failure on any rank raises RankError
    with its traceback, and the next call gets fresh ranks."""
    pool = RankPool()
    yield pool.run
    pool.close()
