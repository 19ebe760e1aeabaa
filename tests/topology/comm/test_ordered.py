"""`deterministic`: one order of summation for every message size, whoever carries it; on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laddertron.topology.comm.groups import CommOptions
from laddertron.topology.comm.ordered import Ordered
from rank_pool import Rank
from waiting import HANG_S

Ranks = Callable[..., list[Any]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COUNTS = [1, 1000, 20_000, 70_001, 400_000]
"""Below and above what goes whole, and what one chunk holds."""


def case_prefixes(rank: Rank, per_node: int, backend: str, collective: str) -> list[str]:
    """Sums of the same numbers, alone and as the beginning of ever longer messages: hashed, by type. Two in flight."""
    keys: dict[str, Any] = {"backend": backend, "collective": collective, "process_groups": backend == "gloo"}
    options = CommOptions(deterministic=True, timeout_s=HANG_S, **keys)
    seen = []
    with rank.connect(per_node, options) as comm:
        for name, dtype in DTYPES.items():
            generator = torch.Generator().manual_seed(rank.rank)
            whole = torch.randn(COUNTS[-1], generator=generator).to(dtype)
            first, second = whole.clone(), whole[: COUNTS[1]].clone()
            pending = [comm.all_reduce.start(first), comm.all_reduce.start(second)]
            total = pending[0].wait()
            assert torch.equal(pending[1].wait(), total[: COUNTS[1]])
            assert pending[0].wait() is first, "a second wait gives the same again"
            for count in COUNTS:
                part = whole[:count].clone()
                assert torch.equal(comm.all_reduce.start(part).wait(), total[:count]), (name, count)
            seen.append(str(total.double().sum().item()) + str(total[-7:].tolist()))
    return seen


@pytest.mark.parametrize(
    ("backend", "per_node", "collective"),
    [
        ("gloo", 4, "auto"),
        ("native", 4, "auto"),
        ("native", 1, "flat"),
        ("native", 2, "exchange"),
        ("native", 2, "auto"),
        ("native", 2, "pipeline"),
    ],
)
def test_what_else_is_in_the_message_changes_no_bit(ranks: Ranks, backend: str, per_node: int, collective: str) -> None:
    """Four ranks: an element's sum is the same alone and among 400,000 others, and on every rank."""
    args = {"per_node": per_node, "backend": backend, "collective": collective}
    answers = ranks(4, "test_ordered:case_prefixes", args)
    assert all(answer == answers[0] for answer in answers)


def case_rank_order(rank: Rank) -> bool:
    """What NCCL's stream is given to do, over gloo here: gather and add up in one go."""
    parts = [torch.randn(3, 501, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(rank.size)]
    want = parts[0].float()
    for part in parts[1:]:
        want = want + part.float()
    x = parts[rank.rank].clone()
    with rank.connect(None, CommOptions(backend="gloo", timeout_s=HANG_S)) as comm:
        Ordered(x, comm.tp, False, True).add_up()
    return torch.equal(x, want.bfloat16())


def test_the_order_is_that_of_ranks(ranks: Ranks) -> None:
    """Accumulated in float32, rounded once: an order or a rounding of its own would show in some of 1,503 numbers."""
    assert ranks(4, "test_ordered:case_rank_order") == [True] * 4
