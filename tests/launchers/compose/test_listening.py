"""Where a job's processes listen, by the kernel's own tables: on loopback alone where all ranks are on this host."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from job_tools import MPIRUN
from laddertron.engine.config.load import load
from laddertron.launchers.compose.detect_launcher import survey
from laddertron.launchers.compose.host_allocation import JobHosts
from laddertron.launchers.compose.hosts import Host, LaunchError
from laddertron.launchers.compose.mpi import Kind, compose, torchrun_hosts
from laddertron.launchers.compose.ports import ENV_PORTS
from waiting import HANG_S

CONFIG = Path(__file__).parents[3] / "configs" / "demo.yaml"
RANK = """
import os, socket, sys

def listening(pid):
    own = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            own.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            pass
    for table in ("tcp", "tcp6"):
        for row in open(f"/proc/net/{table}").read().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                yield words[1].split(":")[0]

if sys.argv[1] == "torchrun":
    socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
else:
    from mpi4py import MPI
    MPI.COMM_WORLD.allreduce(1)
for who, pid in (("rank", os.getpid()), ("launcher", os.getppid())):
    for address in listening(pid):
        print("listens", who, address, flush=True)
if sys.argv[1] != "torchrun":
    MPI.COMM_WORLD.Barrier()
"""
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.mark.parametrize("kind", ["openmpi", "torchrun"])
def test_a_job_on_this_host_listens_on_loopback_alone(kind: Kind, tmp_path: Path) -> None:
    """prterun or torchrun with its store, and the ranks, IPv4 and IPv6; without the preloaded library the same job
    listens on every address, so that the table is shown to be read right."""
    if kind == "openmpi" and not MPIRUN.exists():
        pytest.skip(f"no Open MPI at {MPIRUN}")
    deployment = load(CONFIG, (f"launch.launcher={kind}",))
    here = survey(deployment, os.environ)
    assert here.listen is not None, "launchers/compose/listen.c was not built"
    script = tmp_path / "rank.py"
    script.write_text(RANK, encoding="utf-8")
    found = {}
    for listen in (here.listen, None):
        command = compose(
            deployment,
            replace(here, listen=listen),
            JobHosts((Host("localhost", 2),)),
            [here.python, str(script), kind],
        )
        done = subprocess.run(
            command.argv, env={**os.environ, **command.env}, capture_output=True, text=True, timeout=HANG_S
        )
        assert done.returncode == 0, done.stderr
        rows = [line.split() for line in done.stdout.splitlines() if line.startswith("listens")]
        found[listen] = {(who, address) for _, who, address in rows}
    assert {who for who, _ in found[here.listen]} >= {"launcher"}
    assert {address for _, address in found[here.listen]} <= LOOPBACK
    assert not {address for _, address in found[None]} <= LOOPBACK


@pytest.mark.parametrize("kind", ["openmpi", "mpich", "slurm", "torchrun"])
def test_where_a_job_is_bound_to(kind: Kind) -> None:
    """Loopback on this host alone, the chosen interface over several, nothing where none is chosen; a preload that the
    user asks for is left as it is. Open MPI's daemons on other hosts are told on their own command line."""
    deployment = load(CONFIG, ("launch.launcher=openmpi",))
    here = replace(survey(deployment, {}), listen="/x/_listen.so", host="node7", kind=kind, version=(5, 0))
    for name, interface, more, bound in (
        (("localhost",), None, (), "lo"),
        (("node7",), "ib0", (), "lo"),
        (("node8",), None, (), None),
        (("node8",), "ib0", (), "ib0"),
        (("node7", "node8"), None, (), None),
        (("node7", "node8"), "ib0", (), "ib0"),
        (("localhost",), None, ("LD_PRELOAD",), None),
    ):
        said = replace(deployment, launch=replace(deployment.launch, interface=interface))
        site = replace(here, shell=frozenset(more))
        share = JobHosts(tuple(Host(n, 2) for n in name))
        if kind == "torchrun" and len(name) > 1:
            assert "LD_PRELOAD" not in torchrun_hosts(said, site, share, ["prog"])[0].env
            continue
        command = compose(said, site, share, ["prog"])
        bound = None if kind == "slurm" or (kind == "torchrun" and bound != "lo") else bound
        assert command.env.get("LADDERTRON_LISTEN") == bound
        assert command.env.get("LD_PRELOAD") == (bound and "/x/_listen.so")
        agent = "env LD_PRELOAD=/x/_listen.so LADDERTRON_LISTEN=ib0 prted"
        assert (agent in command.argv) == (kind == "openmpi" and bound == "ib0" and len(name) > 1)


@pytest.mark.parametrize("kind", ["openmpi", "mpich", "slurm", "torchrun"])
def test_where_a_job_takes_its_ports(kind: Kind) -> None:
    """Over several hosts the range goes to every rank, to Open MPI's own parameter, since it tries ports by itself, and
    to its daemons; torchrun's store takes the last port. On this host alone any port will do. Where the library cannot
    be preloaded, the launch is refused."""
    deployment = load(CONFIG, ("launch.launcher=openmpi", "launch.port_range=40000-40099"))
    here = replace(survey(deployment, {}), listen="/x/_listen.so", host="node7", kind=kind, version=(5, 0))
    pair, alone = JobHosts((Host("node7", 2), Host("node8", 2))), JobHosts((Host("localhost", 2),))
    if kind == "torchrun":
        command = torchrun_hosts(deployment, here, pair, ["prog"])[0]
        assert "--master-port=40099" in command.argv
    else:
        command = compose(deployment, here, pair, ["prog"])
    assert (command.env[ENV_PORTS], command.env["LD_PRELOAD"]) == ("40000-40099", "/x/_listen.so")
    words = " ".join(command.argv)
    assert ("btl_tcp_port_min_v4 40000 --mca btl_tcp_port_range_v4 100" in words) == (kind == "openmpi")
    agent = f"env LD_PRELOAD=/x/_listen.so {ENV_PORTS}=40000-40099 prted"
    assert (agent in command.argv) == (kind == "openmpi")
    assert ENV_PORTS not in compose(deployment, here, alone, ["prog"]).env
    for site in (replace(here, listen=None), replace(here, shell=frozenset({"LD_PRELOAD"}))):
        with pytest.raises(LaunchError, match=r"launch\.port_range=40000-40099: .* LD_PRELOAD|compiler"):
            compose(deployment, site, pair, ["prog"])
