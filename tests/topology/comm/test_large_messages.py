"""All-reduces too large to go whole: scattered, summed and gathered in chunks, on real ranks over 1 to 4 nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from laddertron.topology.comm.collectives import CollectiveTimeout, CommunicationError, RanksDisagree
from laddertron.topology.comm.groups import CommOptions
from laddertron.topology.connect import connect
from laddertron.topology.placement.layout import GroupLayout
from rank_pool import Rank
from waiting import HANG_S

Ranks = Callable[..., list[Any]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIB = 1 << 20


def _parts(size: int, count: int, dtype: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator).to(DTYPES[dtype]) for _ in range(size)]


def _fixed_order(parts: list[torch.Tensor], per_node: int) -> torch.Tensor:
    """The sum of each node in rank order, then of the nodes in theirs; each in float32, rounded once."""

    def add(some: list[torch.Tensor]) -> torch.Tensor:
        total = some[0].float()
        for part in some[1:]:
            total = total + part.float()
        return total.to(some[0].dtype)

    nodes = [add(parts[at : at + per_node]) for at in range(0, len(parts), per_node)]
    return add(nodes) if len(nodes) > 1 else nodes[0]


def case_sums(rank: Rank, per_node: int, counts: list[int], chunk: int) -> list[str]:
    """Four all-reduces of every size and dtype in flight, held to the fixed order bit for bit; what came, hashed."""
    digests = []
    options = CommOptions(collective="pipeline", process_groups=False, timeout_s=HANG_S, chunk_bytes=chunk)
    with rank.connect(per_node, options) as comm:
        for count in counts:
            for dtype in DTYPES:
                given = [_parts(rank.size, count, dtype, seed) for seed in range(4)]
                xs = [parts[rank.rank].clone() for parts in given]
                flying = [comm.all_reduce.start(x) for x in xs]
                for x, pending, parts in zip(xs, flying, given, strict=True):
                    assert pending.wait() is x
                    assert torch.equal(x, _fixed_order(parts, per_node)), (count, dtype)
                    digests.append(hashlib.sha256(x.view(torch.uint8).numpy().tobytes()).hexdigest())
        assert {entry.strategy for entry in comm.ledger.entries()} == {"pipeline"}
    return digests


@pytest.mark.parametrize(
    ("size", "per_node", "chunk"),
    [(2, 1, 65536), (3, 1, 4096), (4, 1, 4096), (4, 1, 262144), (4, 2, 4096), (4, 4, 65536), (6, 2, 4096)],
)
def test_large_sums_are_the_same_everywhere_and_again(ranks: Ranks, size: int, per_node: int, chunk: int) -> None:
    """1 element (most ranks' pieces are empty), sizes that divide into nothing, up to some hundred chunks, which is
    many times what may be on its way at once: all ranks hold the sum in the fixed order, and so does a second run."""
    args = {"per_node": per_node, "counts": [1, 7, 1000, 70_001, 300_007], "chunk": chunk}
    first = ranks(size, "test_large_messages:case_sums", args)
    again = ranks(size, "test_large_messages:case_sums", args)
    assert all(digests == first[0] for digests in first + again)


def case_beside_gloo(rank: Rank, per_node: int, nbytes: int) -> float:
    """The largest difference from gloo's ring, relative to the sum of magnitudes."""
    parts = _parts(rank.size, nbytes // 4, "float32", 1)
    ours, theirs = parts[rank.rank].clone(), parts[rank.rank].clone()
    with rank.connect(per_node, CommOptions(process_groups=False, timeout_s=HANG_S)) as comm:
        comm.all_reduce.start(ours).wait()
        assert {entry.strategy for entry in comm.ledger.entries()} == {"pipeline"}, "auto, above what goes whole"
    with rank.connect(per_node, CommOptions(backend="gloo", timeout_s=HANG_S)) as comm:
        comm.all_reduce.start(theirs).wait()
    scale = torch.stack(parts).abs().sum(0).clamp_min(1e-3)
    return float(((ours - theirs).abs() / scale).max())


@pytest.mark.parametrize("per_node", [1, 2])
def test_eight_megabytes_agree_with_flat_gloo(ranks: Ranks, per_node: int) -> None:
    args = {"per_node": per_node, "nbytes": 8 * MIB}
    assert max(ranks(4, "test_large_messages:case_beside_gloo", args)) < 1e-6


def case_late(rank: Rank, per_node: int, late: int) -> bool:
    """Everybody but one rank starts four large all-reduces, a small one among them; then the last rank does."""
    options = CommOptions(process_groups=False, timeout_s=HANG_S, chunk_bytes=4096)
    counts = [200_000, 100, 150_001, 90_000]
    given = [_parts(rank.size, count, "float32", seed) for seed, count in enumerate(counts)]
    xs = [parts[rank.rank].clone() for parts in given]
    with rank.connect(per_node, options) as comm:
        if rank.rank == late:
            rank.bootstrap.all_gather(b"the others have started")
        flying = [comm.all_reduce.start(x) for x in xs]
        if rank.rank != late:
            rank.bootstrap.all_gather(b"started")
        for pending in reversed(flying):
            pending.wait()
    return all(torch.allclose(x, torch.stack(parts).sum(0), atol=1e-5) for x, parts in zip(xs, given, strict=True))


@pytest.mark.parametrize(("per_node", "late"), [(1, 0), (1, 3), (2, 1)])
def test_who_comes_late_finds_everything(ranks: Ranks, per_node: int, late: int) -> None:
    """What has arrived for a rank that has not started is kept, as much as may be on its way, and the rest stays on
    the wire; nothing is lost, nothing stands in the way of the small one."""
    assert all(ranks(4, "test_large_messages:case_late", {"per_node": per_node, "late": late}))


def case_disagree(rank: Rank, per_node: int, counts: list[int], dtypes: list[str]) -> str:
    x = torch.ones(counts[rank.rank], dtype=DTYPES[dtypes[rank.rank]])
    options = CommOptions(collective="pipeline", process_groups=False, timeout_s=5)
    with rank.connect(per_node, options) as comm:
        said = "nothing"
        try:
            comm.all_reduce.start(x).wait()
        except CommunicationError as error:
            said = f"{type(error).__name__}: {error}"
        rank.bootstrap.all_gather(b"")  # nobody closes before all have seen it
    return said


@pytest.mark.parametrize(
    ("size", "per_node", "odd"),
    [
        (2, 1, {"count": 60_000}),
        (4, 1, {"count": 60_000}),
        (4, 1, {"count": 200_000, "dtype": "bfloat16"}),
        (4, 2, {"count": 60_000}),
        (2, 2, {"count": 99_999}),
        (4, 4, {"count": 200_000, "dtype": "bfloat16"}),
    ],
)
def test_other_sizes_and_types_are_not_added_up(ranks: Ranks, size: int, per_node: int, odd: dict[str, Any]) -> None:
    """The last rank's tensor is shorter, or as many bytes of another type: somebody on every node that meets it says
    RanksDisagree, and nobody gets a sum."""
    counts = [100_000] * (size - 1) + [odd["count"]]
    dtypes = ["float32"] * (size - 1) + [odd.get("dtype", "float32")]
    said = ranks(size, "test_large_messages:case_disagree", {"per_node": per_node, "counts": counts, "dtypes": dtypes})
    assert "nothing" not in said
    assert any(words.startswith(RanksDisagree.__name__) for words in said[: size - 1]), said


def case_given_back(rank: Rank, per_node: int) -> bool:
    """The last rank starts when the others have given up; what they got back then stays as they leave it."""
    x = torch.zeros(500_000)
    last = rank.rank == rank.size - 1
    options = CommOptions(process_groups=False, timeout_s=0.2, chunk_bytes=16384)
    with rank.connect(per_node, options) as comm:
        if last:
            rank.bootstrap.all_gather(b"")
        try:
            comm.all_reduce.start(x).wait()
        except (CollectiveTimeout, CommunicationError):
            pass
        else:
            raise AssertionError("a sum without all ranks")
        if not last:
            x.fill_(7.0)
            rank.bootstrap.all_gather(b"")
        rank.bootstrap.all_gather(b"")
    return last or bool((x == 7.0).all())


@pytest.mark.parametrize("per_node", [1, 2])
def test_a_tensor_that_was_given_back_is_touched_no_more(ranks: Ranks, per_node: int) -> None:
    """Totals are received into the tensor itself: after a time out it is the caller's again."""
    assert all(ranks(4, "test_large_messages:case_given_back", {"per_node": per_node}))


def case_chosen(rank: Rank) -> dict[str, int]:
    """Calls of each strategy where a table says where to change over."""
    layout = GroupLayout(tuple((r,) for r in range(rank.size)))
    options = CommOptions(process_groups=False, timeout_s=HANG_S)
    with connect(rank.bootstrap, layout, options, lambda n: "exchange" if n <= 4096 else "pipeline") as comm:
        for count in (1024, 1025, 16_384):
            x = torch.ones(count)
            assert (comm.all_reduce.start(x).wait() == rank.size).all()
        return {entry.strategy: entry.count for entry in comm.ledger.entries()}


def test_auto_goes_by_the_table(ranks: Ranks) -> None:
    """A tuning that found the pipeline faster from some size on is followed below what must go in chunks, too."""
    assert ranks(4, "test_large_messages:case_chosen") == [{"exchange": 1, "pipeline": 2}] * 4
