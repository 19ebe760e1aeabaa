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
@pytest.mark.parametrize(("ranks", "calls"), [(2, 150), (3, 50), (4, 50), (8, 15)])
def test_sums_are_in_rank_order_whoever_is_late(ranks: int, calls: int, run_seed: int) -> None:
    """Messages of any size and type, in one shot, in two or by scatter and collect, while ranks are late at the two
    places where the protocol could lose data; the same call again and again; a rank that never comes is named, and sums
    are NaN; two nodes with gloo between them."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("interpret_one_shot.py"))]
    paths = os.pathsep.join((*FOLDERS, os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [*command, str(ranks), str(calls), str(run_seed)], capture_output=True, text=True, timeout=600, check=False,
        env=os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict.fromkeys(("sums", "absent", "checked", "across"), True), done.stderr


@needs_triton
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("parts", [1, 8])
def test_compiled_it_orders_its_memory(parts: int, capability: int) -> None:
    """What no interpreter shows: in PTX the release and the acquire are of the system's scope, in this order, each
    beside a barrier; what peers published is read behind them, by 16 bytes and from no cache."""
    import triton
    from laddertron.topology.comm.one_shot_kernel import exchange
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"out": "*bf16", "source": "*bf16", "regions": "*i64", "epochs": "*i64", "stop": "*i64"}
    signature |= dict.fromkeys(("rank", "part", "chunk"), "i32")
    constants = {"flag_bytes": 2048, "slice_bytes": 65792, "PROGRAMS": 16, "RANKS": 8, "LANES": 8, "PARTS": parts}
    constants |= {"GATHER": False, "VEC": 8, "BLOCK": 4096}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(5)}
    source = ASTSource(exchange, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    ptx = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": 16}).asm["ptx"]
    release, acquire = (ptx.index(f"atom.global.sys.{name}64") for name in ("release.exch.b", "acquire.add.u"))
    published, last_flag = ptx.rindex("st.global.v4.b32", 0, release), ptx.rindex("ld.volatile.global.b64")
    read = ptx.index("ld.volatile.global.v4.b32")
    assert published < ptx.rindex("bar.sync", 0, release) < release < acquire < last_flag < read
    assert "bar.sync" in ptx[last_flag:read]
    assert ptx.count("ld.volatile.global.v4.b32") == 8
    assert ptx.count("ld.global.v4.b32") == parts, "peers' data are not read from a cache"


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_streams_as_ranks_on_a_gpu(ranks: int) -> None:
    """Each rank a stream: sums of four sizes, by calls and in a graph that is replayed."""
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
    for count in (16 * ranks, 1 << 14, 1 << 19, 1 << 21):
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
