"""The one-shot all-reduce: its kernel interpreted on the CPU by processes that share memory; on a GPU, streams."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import FOLDERS
from waiting import HANG_S

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make env ACCEL=cuda"
)


@needs_triton
@pytest.mark.parametrize(("ranks", "calls"), [(2, 150), (4, 50), (8, 15)])
def test_sums_are_in_rank_order_whoever_is_late(ranks: int, calls: int, run_seed: int) -> None:
    """Messages of any size and type, whole or by scatter and collect, while ranks are late at the two places where the
    protocol could lose data; the same call again and again; a rank that never comes is named, and sums are NaN."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("interpret_one_shot.py"))]
    paths = os.pathsep.join((*FOLDERS, os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [*command, str(ranks), str(calls), str(run_seed)], capture_output=True, text=True, timeout=600, check=False,
        env=os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"sums": True, "absent": True, "checked": True}, done.stderr


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_streams_as_ranks_on_a_gpu(ranks: int) -> None:
    """Each rank a stream: sums of three sizes, by calls and in a graph that is replayed."""
    from laddertron.topology.comm.one_shot import REGION_BYTES, OneShot

    regions = [torch.zeros(REGION_BYTES, dtype=torch.uint8, device="cuda") for _ in range(ranks)]
    make: Any = torch.cuda.Stream  # torch leaves it without types
    one_shots, streams = [OneShot(rank, regions) for rank in range(ranks)], [make() for _ in range(ranks)]

    def end() -> None:
        """Streams may be run one behind another, which no sum would survive."""
        for one_shot in one_shots:
            one_shot.abort()

    guard = threading.Timer(HANG_S, end)
    guard.start()
    for count in (16 * ranks, 1 << 14, 1 << 19):
        given = torch.randn(ranks, count, device="cuda", dtype=torch.bfloat16)
        total = given[0].float()
        for other in given[1:]:
            total = total + other.float()
        xs = given.clone()

        def step(xs: torch.Tensor = xs, given: torch.Tensor = given) -> None:
            xs.copy_(given)
            for one_shot, stream, x in zip(one_shots, streams, xs, strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    one_shot(x)
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)

        step()
        torch.cuda.synchronize()
        assert torch.equal(xs, total.to(xs.dtype).expand_as(xs))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(20):
            xs.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(xs, total.to(xs.dtype).expand_as(xs))
    guard.cancel()
