"""The start-up check of all-reduces: right ones pass on real ranks, and every injected fault is found and named."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laddertron.topology import sum_check
from laddertron.topology.comm.collectives import Done, Pending
from laddertron.topology.comm.groups import CommOptions
from laddertron.topology.comm.ledger import Ledger
from laddertron.topology.sum_check import LAYER, WrongSum, check_sums, pattern, size_classes
from rank_pool import Rank
from torch import Tensor

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")
WIDTH, ROWS, FAULTS = 96, 40, 100


def one_lost(x: Tensor, parts: list[Tensor], dice: random.Random) -> None:
    """One element is another number."""
    x[dice.randrange(len(x))] += dice.choice((-1, 1))


def part_missing(x: Tensor, parts: list[Tensor], dice: random.Random) -> None:
    """A run of one rank's part never arrives."""
    first, part = dice.randrange(len(x)), dice.choice(parts)
    run = slice(first, first + dice.randrange(1, len(x)))
    x[run] -= part[run]


def part_twice(x: Tensor, parts: list[Tensor], dice: random.Random) -> None:
    first, part = dice.randrange(len(x)), dice.choice(parts)
    run = slice(first, first + dice.randrange(1, len(x)))
    x[run] += part[run]


def elsewhere(x: Tensor, parts: list[Tensor], dice: random.Random) -> None:
    """Two chunks have changed places."""
    size = dice.choice((8, 16, 32))
    a, b = (k * size for k in dice.sample(range(len(x) // size), 2))
    first, second = x[a : a + size].clone(), x[b : b + size].clone()
    x[a : a + size], x[b : b + size] = second, first


def shifted(x: Tensor, parts: list[Tensor], dice: random.Random) -> None:
    x.copy_(x.roll(dice.randrange(1, len(x))))


def not_reduced(x: Tensor, parts: list[Tensor], dice: random.Random) -> None:
    x.copy_(parts[0])


def stale(x: Tensor, parts: list[Tensor], dice: random.Random) -> None:
    """The sum of the message before, where that was as long; of another one of this length here."""
    x.copy_(torch.stack([pattern(rank, len(x), 99, CPU).to(x.dtype) for rank in range(len(parts))]).sum(0))


KINDS = (one_lost, part_missing, part_twice, elsewhere, shifted, not_reduced, stale)


class Faulty:
    """Rank 0's all-reduce of a group that is not there: right, but for message `at`."""

    def __init__(self, size: int, at: int, fault: Callable[[Tensor], None], ledger: Ledger) -> None:
        self._size, self._at, self._fault, self._ledger, self._count = size, at, fault, ledger, 0

    def start(self, x: Tensor, *_: object) -> Pending:
        salt, self._count = self._count, self._count + 1
        for rank in range(1, self._size):
            x += pattern(rank, len(x), salt, CPU).to(x.dtype)
        if salt == self._at:
            self._fault(x)
        self._ledger.add("all_reduce", f"strategy-{salt}", "net", x.nbytes, 0.0, 0.0, 0.0)
        return Done(x)


def group(size: int, at: int = -1, fault: Callable[[Tensor], None] = lambda x: None) -> Any:
    ledger = Ledger()
    reduce = Faulty(size, at, fault, ledger)
    return SimpleNamespace(
        rank=0,
        size=size,
        backend="native",
        all_reduce=reduce,
        ledger=ledger,
        gather=lambda payload: payload[None],
        drain=list,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [2, 3, 16])
def test_right_sums_pass(size: int, dtype: torch.dtype) -> None:
    check_sums(group(size), WIDTH, ROWS, dtype, CPU)


def test_every_fault_is_found_and_named(run_seed: int) -> None:
    """A hundred faults of seven kinds in messages of every class; each is refused, with its strategy and size."""
    dice, sizes = random.Random(run_seed), list(size_classes(WIDTH, ROWS))
    for number in range(FAULTS):
        size, at, kind = dice.randrange(2, 17), dice.randrange(len(sizes)), KINDS[number % len(KINDS)]

        def fault(x: Tensor, size: int = size, at: int = at, kind: Any = kind) -> None:
            right, parts = x.clone(), [pattern(rank, len(x), at, CPU).to(x.dtype) for rank in range(size)]
            while torch.equal(x, right):  # zeros may be lost without a trace
                kind(x, parts, dice)

        with pytest.raises(WrongSum, match=f"strategy-{at} of {sizes[at] * 2} bytes: wrong on rank 0 of {size}"):
            check_sums(group(size, at, fault), WIDTH, ROWS, torch.bfloat16, CPU)


def test_sizes_reach_from_one_row_to_the_most() -> None:
    assert list(size_classes(4, 1)) == [4]
    assert list(size_classes(4, 40)) == [4, 8, 16, 32, 64, 128, 160]


def case_checked(rank: Rank, options: dict[str, Any], spoil: bool) -> str:
    """The check over a real group; with `spoil`, rank 1 reads what nobody sent."""
    with rank.connect(2 if rank.size == 4 else 1, CommOptions(**options)) as communicator:
        inner = communicator.all_reduce

        class Spoiled:
            def start(self, x: Tensor, *_: object) -> Pending:
                y = inner.start(x).wait()
                if rank.rank == 1 and len(y) == WIDTH * 8:
                    y[5] += 1
                return Done(y)

        if spoil:
            communicator.all_reduce = Spoiled()
        try:
            check_sums(communicator, WIDTH, ROWS, torch.bfloat16, CPU)
        except WrongSum as error:
            return str(error)
        assert spoil or {e.layer for e in communicator.ledger.entries() if e.op == "all_reduce"} == {LAYER}
        return "right"


@pytest.mark.parametrize(
    "options", [{}, {"backend": "gloo"}, {"collective": "pipeline"}, {"deterministic": "everywhere"}], ids=str
)
def test_real_groups_pass(ranks: Ranks, options: dict[str, Any]) -> None:
    assert ranks(4, "test_sum_check:case_checked", {"options": options, "spoil": False}) == ["right"] * 4


def test_all_ranks_refuse_what_one_sees(ranks: Ranks) -> None:
    told = ranks(2, "test_sum_check:case_checked", {"options": {}, "spoil": True})
    for words in told:
        assert "native, strategy" in words
        assert f"of {WIDTH * 8 * 2} bytes: wrong on rank 1 of 2" in words
    assert "element 5 of 768 is " in told[1]


def test_long_messages_repeat_the_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """In runs that no chunk's size divides; a fault behind the first run is found at its place."""
    monkeypatch.setattr(sum_check, "PERIOD", 97)

    class Two(Faulty):
        def start(self, x: Tensor, *_: object) -> Pending:
            salt, self._count = self._count, self._count + 1
            x += pattern(1, min(97, len(x)), salt, CPU).to(x.dtype).repeat(len(x) // 97 + 1)[: len(x)]
            if salt == self._at:
                self._fault(x)
            return Done(x)

    def spoil(x: Tensor) -> None:
        x[300] += 1

    both = group(2), group(2, 3, spoil)
    for each, fault in zip(both, (None, spoil), strict=True):
        each.all_reduce = Two(2, 3 if fault else -1, fault or (lambda x: None), each.ledger)
    check_sums(both[0], WIDTH, ROWS, torch.bfloat16, CPU)
    with pytest.raises(WrongSum, match="element 300 of 768 is "):
        check_sums(both[1], WIDTH, ROWS, torch.bfloat16, CPU)
