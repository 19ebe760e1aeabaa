"""Point to point between ranks that torchrun started, and the whole of preflight there: real processes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from laddertron.launchers.measure.preflight_job import Watch
from laddertron.launchers.measure.preflight_links import measure_links
from laddertron.launchers.measure.preflight_plan import make_preflight_plan
from laddertron.topology.comm.groups import CommOptions
from laddertron.topology.cost.cost import shape_of
from laddertron.topology.cost.links import line_of, needs_torch_groups
from laddertron.topology.hardware.presets import preset
from laddertron.topology.placement.placement import place
from laddertron.topology.placement.world import World
from rank_pool import Rank
from waiting import HANG_S

Ranks = Callable[..., list[Any]]
ROOT = Path(__file__).resolve().parents[3]


def case_links(rank: Rank, per_node: int) -> dict[str, Any]:
    nodes = rank.size // per_node
    fabric = preset(f"{nodes}x{per_node}xcpu")
    placement = place(fabric, World(rank.size))
    wanted = make_preflight_plan(fabric, placement, shape_of(fabric, placement), "native")
    assert needs_torch_groups(rank.bootstrap, "native")
    with rank.connect(per_node, CommOptions()) as comm:
        line = line_of(rank.bootstrap, "native", torch.device("cpu"), comm)
        found = measure_links(wanted, rank.bootstrap, line, ["here"] * rank.size, Watch(inf, print))
    return {"carrier": line.carrier, "links": found}


@pytest.mark.parametrize(
    ("size", "per_node", "expected"),
    [
        (2, 2, {(0, 1, None)}),
        (2, 1, {(0, 1, 0)}),
        (4, 2, {(0, 1, None), (2, 3, None), (0, 2, 0), (1, 3, 1)}),
        (4, 1, {(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 0, 0)}),
    ],
)
def test_every_link_and_rail_is_measured_without_mpi(
    ranks: Ranks, size: int, per_node: int, expected: set[tuple[int, int, int | None]]
) -> None:
    """Ranks that met at a store, as torchrun's do: gloo carries the messages, each pair of the plan is told once, by
    its first rank, with a latency and a rate that loopback can have."""
    answers = ranks(size, "test_links:case_links", {"per_node": per_node})
    assert {a["carrier"] for a in answers} == {"gloo"}
    told = [(rank, *link) for rank, a in enumerate(answers) for link in a["links"]]
    assert {(a, b, rail) for _, a, b, rail, _, _, _ in told} == expected
    assert len(told) == len(expected)
    for rank, a, _, _, _, latency_s, bytes_per_s in told:
        assert rank == a
        assert 1e-7 < latency_s < 1.0, "a busy machine's at the most, in seconds"
        assert 1e4 < bytes_per_s < 1e12


def _deployment(folder: Path, size: int) -> Path:
    parts = {
        "model": {"path": str(ROOT / "configs/demo/demo-ladder"), "served_model_name": "demo", "dtype": "float32"},
        "parallel": {"tensor_parallel_size": size},
        "engine": {"device": "cpu", "threads": 1},
        "daemon": {"data_dir": str(folder / "data")},
    }
    path = folder / "deploy.yaml"
    path.write_text(json.dumps(parts))  # YAML holds JSON
    return path


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _by_torchrun(size: int, words: list[str], env: dict[str, str]) -> str:
    """The program that torch brings."""
    run = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    run += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
    done = subprocess.run([*run, "-m", *words], capture_output=True, text=True, env=env, timeout=300, check=False)
    assert (done.returncode == 0) != ("error:" in done.stdout), done.stdout + done.stderr
    return done.stdout


def _by_environment(size: int, words: list[str], env: dict[str, str]) -> str:
    """Whoever sets torchrun's variables, with no agent behind them."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(size)}
    started = []
    try:
        for rank in range(size):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
            command = [sys.executable, "-W", "ignore", "-m", *words]
            pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            started.append(
                subprocess.Popen(command, stdout=pipe, stderr=None, text=True, env={**env, **meeting, **place})
            )
        out, _ = started[0].communicate(timeout=300)
        assert [process.wait(HANG_S) for process in started] == [int("error:" in out)] * size, out
        return str(out)
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "start"), [(2, _by_torchrun), (2, _by_environment), (4, _by_environment)])
def test_preflight_under_torchrun_reports_and_tunes(tmp_path: Path, size: int, start: Callable[..., str]) -> None:
    """The same report and the same file as under mpirun: every pair of neighbours with latency and rate, every size
    from 32 KiB to 8 MiB, a tuning that says what was measured."""
    tuning = tmp_path / "tuning.json"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_"))}
    env |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    words = ["laddertron.launchers.cli", "preflight", str(_deployment(tmp_path, size)), "--save", str(tuning)]
    out = start(size, words, env)
    assert "Links, gloo, point to point" in out
    host = socket.gethostname()
    for a in range(size - 1):
        row = next(line for line in out.splitlines() if f"{host} rank {a} - {host} rank {a + 1}" in line)
        assert re.search(r"[0-9.]+ us .* [0-9.]+ GB/s", row), row
    # Preflight compares the ranks' speeds, and these share their cores with whatever else runs here.
    errors = [line for line in out.splitlines() if line.startswith("error:")]
    assert all("a matmul takes" in line or "link " in line for line in errors), out
    if errors:
        assert not tuning.exists()
        pytest.skip(f"no quiet machine: {errors[0]}")
    saved = json.loads(tuning.read_text())
    assert (saved["shape"]["nodes"], saved["shape"]["per_node"]) == (1, size)
    measured = {(p["strategy"], p["nbytes"]) for p in saved["points"]}
    assert {("exchange", 32 << 10), ("pipeline", 32 << 10), ("pipeline", 8 << 20)} <= measured
    assert ("exchange", 8 << 20) not in measured, "nothing but the pipeline carries that"
    assert saved["choices"][-1] == {"up_to_bytes": None, "strategy": "pipeline"}


@pytest.mark.slow
def test_topo_under_torchruns_variables_makes_one_host(tmp_path: Path) -> None:
    """Two ranks without an agent behind them meet at a store that rank 0 keeps, and make one host of what they see."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_"))}
    out = _by_environment(2, ["laddertron.launchers.cli", "topo", "--json"], env)
    assert len(json.loads(out)["fabric"]["nodes"]) == 1
