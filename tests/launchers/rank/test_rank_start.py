"""What a rank insists on before it joins its group: the transport, the order of devices, whom it meets at a store."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from laddertron.engine.config.load import load
from laddertron.engine.config.schema import Deployment, EngineConfig, LaunchConfig, ModelSection, ParallelConfig
from laddertron.engine.step.share import has_room
from laddertron.launchers.compose.rank_mapping import ENV_CORES
from laddertron.launchers.control.messages import (
    Announce,
    Command,
    Drain,
    HeldWeights,
    Load,
    Shutdown,
    Standing,
    StateMessage,
)
from laddertron.launchers.control.processes import start_time
from laddertron.launchers.rank import rank
from laddertron.launchers.rank.rank import (
    DeviceError,
    comm_options,
    require_transport,
    run_rank,
    set_threads,
)
from laddertron.launchers.rank.rank_status import Status
from laddertron.launchers.rank.shared_memory import SharedMemoryTooSmall
from laddertron.launchers.rank.standing_by import StandbyRefused, stand_by
from laddertron.topology.comm.bootstrap import StoreBootstrap, bootstrap_of, open_store, require_own_hostnames
from laddertron.topology.comm.groups import CommOptions
from laddertron.topology.connect import connect
from laddertron.topology.hardware.cpu_tier import VARIABLE
from laddertron.topology.placement.identity import Identity
from laddertron.topology.placement.layout import GroupLayout
from laddertron.topology.placement.mapping import MappingError
from rank_pool import Rank
from waiting import HANG_S

Ranks = Callable[..., list[Any]]
ME = Identity(2, 0, 0, 2, "here", "torchrun")


def deployment(wanted: Literal["any", "ib", "socket"]) -> Deployment:
    return Deployment(model=ModelSection(path="nowhere"), parallel=ParallelConfig(require_transport=wanted))


@pytest.mark.parametrize(
    ("modules", "never"),
    [
        ("launchers.rank.worker", {"torch", "mpi4py", "megatron", "pydantic.v1", "rich", "click", "fastapi"}),
        ("launchers.rank.rank", {"torch", "mpi4py", "megatron", "transformers"}),
        (
            "launchers.rank.rank engine.step.build",
            {
                "megatron",
                "einops",
                "transformers",
                "tokenizers",
                "jinja2",
                "triton",
                "sympy",
                "torch._dynamo",
                "fastapi",
            },
        ),
    ],
    ids=["before its channel", "before it has tested its host", "in all"],
)
def test_a_rank_imports_what_it_uses(modules: str, never: set[str]) -> None:
    """Each start waits for it. torch itself comes after the channel, by which the rank says that it lives."""
    names = ", ".join(f"laddertron.{name}" for name in modules.split())
    code = f"import sys, {names}; print(sorted({never!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(
    ("wanted", "spans", "said"),
    [("ib", True, "IB"), ("socket", True, "Socket"), ("any", True, None), ("ib", False, None)],
)
def test_nccl_is_told_its_network_where_one_is_required(
    monkeypatch: pytest.MonkeyPatch, wanted: Literal["any", "ib", "socket"], spans: bool, said: str | None
) -> None:
    """With a network named, NCCL fails without it; on one node, and where any will do, it chooses."""
    monkeypatch.setenv("NCCL_NET", "")  # so that it is put back
    monkeypatch.delenv("NCCL_NET")
    require_transport(deployment(wanted), "nccl", spans)
    assert os.environ.get("NCCL_NET") == said


def test_what_the_operator_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NET", "AWS Libfabric")
    require_transport(deployment("ib"), "nccl", True)
    assert os.environ["NCCL_NET"] == "AWS Libfabric"


@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_sockets_are_refused_where_infiniband_is_required(backend: str) -> None:
    with pytest.raises(ValueError, match=f"require_transport is ib, backend {backend} sends over sockets"):
        require_transport(deployment("ib"), backend, True)
    require_transport(deployment("ib"), backend, False)
    require_transport(deployment("socket"), backend, True)


def test_a_host_is_tested_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a dozen ranks on few cores torch takes a minute, and another model or a small /dev/shm is known before."""
    shared = SharedMemoryTooSmall("n1: /dev/shm has 64 KiB")
    reports: list[StateMessage] = []
    channel: Any = SimpleNamespace(send_state=reports.append)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(rank, "require_shared_memory", lambda identity, environ: raising(shared))
    monkeypatch.setattr(rank, "set_threads", lambda deployment, identity: pytest.fail("it imports torch"))
    keys = replace(deployment("any"), model=ModelSection(path=str(tmp_path)))
    with pytest.raises(SharedMemoryTooSmall):
        run_rank(keys, ME, channel, Status())
    (announce,) = reports
    assert isinstance(announce, Announce)
    assert announce.digests.keys() >= {"config", "config.json"}


def test_a_rank_with_a_gpu_says_which_kernels_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host without FlashInfer's kernels, or a compiler for Triton's, would record no steps: the owner compares. On a
    CPU neither is of use."""
    (tmp_path / "config.json").write_text("{}")
    facts = SimpleNamespace(gpus=8, hidden=False, torch_cuda="12.8")
    monkeypatch.setattr(rank, "look", lambda: facts)
    versions = {"torch": "2.13.0", "flashinfer-python": "0.7.2", "triton": "3.7.1"}
    monkeypatch.setattr(metadata, "version", lambda name: versions[name])
    faults: dict[str, str | None] = {"flashinfer": None, "triton": None}
    monkeypatch.setattr(rank, "kernels_missing", lambda: faults["flashinfer"])
    monkeypatch.setattr(rank, "triton_missing", lambda: faults["triton"])

    def found(device: Literal["cpu", "auto"], attention: Literal["auto", "torch"] = "auto") -> tuple[str, str]:
        engine = EngineConfig(device=device, attention=attention)
        keys = replace(deployment("any"), model=ModelSection(path=str(tmp_path)), engine=engine)
        digests = rank.files_of(keys).digests
        return digests["flashinfer"], digests["triton"]

    assert found("auto") == ("0.7.2", "3.7.1")
    assert found("auto", "torch") == ("", "3.7.1")
    faults |= {"flashinfer": "no nvcc", "triton": "no Python.h"}
    assert found("auto") == ("without kernels", "without a compiler")
    assert found("cpu") == ("", "")
    faults["flashinfer"] = None
    monkeypatch.setattr(metadata, "version", lambda name: raising(metadata.PackageNotFoundError()))
    assert found("auto")[0] == "missing"
    faults["triton"] = None
    assert found("auto") == ("missing", "missing")
    for name, value in (("hidden", True), ("torch_cuda", ""), ("gpus", 0)):
        monkeypatch.setattr(rank, "look", lambda: SimpleNamespace(**(vars(facts) | {name: value})))  # noqa: B023
        assert found("auto") == ("", "")


def raising(error: Exception) -> None:
    raise error


def test_devices_are_counted_in_pci_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the fabric counts them; CUDA by itself puts the fastest first, which on a mixed host is another GPU."""
    monkeypatch.setattr("torch.set_num_threads", lambda n: None)
    monkeypatch.setattr("torch.set_grad_enabled", lambda on: None)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    set_threads(deployment("any"), ME)
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    set_threads(deployment("any"), ME)
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (0.5, 1), (5.0, 2), (40.0, 8)])
def test_threads_follow_the_quota(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, quota: float | None, threads: int
) -> None:
    """Two ranks on 16 processors share the quota; where it is less than those, the log says so."""
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch, "set_grad_enabled", lambda on: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    for module in ("launchers.rank.rank", "topology.hardware.cpu_quota"):
        monkeypatch.setattr(f"laddertron.{module}.cpu_quota", lambda fs=None: quota)
    with caplog.at_level("INFO", "laddertron"):
        set_threads(deployment("any"), ME)
    assert asked == [threads]
    assert (
        (f"the CPU quota of the cgroup is {quota:g} of 16" in caplog.text) if quota and quota < 16 else not caplog.text
    )
    keys = replace(deployment("any"), engine=EngineConfig(threads=12))
    with caplog.at_level("WARNING", "laddertron"):
        set_threads(keys, ME)
    assert asked[1] == 12, "as configured, with a warning"
    assert ("12 compute threads: the CPU quota" in caplog.text) == (quota is not None and quota < 16)


def test_a_rank_refuses_a_tier_that_its_processor_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "avx1024")
    with pytest.raises(DeviceError, match="LADDERTRON_CPU_TIER='avx1024' is no CPU tier: this processor can play"):
        set_threads(deployment("any"), ME)


def test_a_rank_without_memory_does_not_stand_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before it takes any: torch is not asked for threads, no group is joined."""
    monkeypatch.setattr(rank, "available_bytes", lambda sysfs: 500 << 20)
    monkeypatch.setattr(rank, "set_threads", lambda deployment, identity: pytest.fail("it went on"))
    with pytest.raises(StandbyRefused, match="2 ranks here need 300 MiB each, 500 MiB are free"):
        run_rank(deployment("any"), replace(ME, local_size=2), Channel(), Status(), standby=True)


@pytest.mark.parametrize("environ", [{}, {"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "a", "MASTER_PORT": "x"}])
def test_a_store_that_is_not_named_is_said_so(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="torchrun sets both"):
        bootstrap_of(ME, environ)


def test_rank_0_keeps_the_store_where_no_agent_does() -> None:
    """MASTER_ADDR and MASTER_PORT alone, without torchrun's agent behind them."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", 0))  # and stays, so that nobody else gets the port
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
        alone = bootstrap_of(replace(ME, size=1, local_size=1), environ)
        assert alone.all_gather(b"me") == [b"me"]


def test_ranks_that_were_started_again_do_not_meet_the_dead() -> None:
    """torchrun's agent keeps one store over all attempts: what rank 1 of the first left there is not taken for the
    second's."""
    store = open_store("127.0.0.1", 0, True, HANG_S)
    dead = [StoreBootstrap(store, rank, 2, HANG_S, attempt="0") for rank in (0, 1)]
    store.set("bootstrap/0/0/0", b"dead 0".hex())
    assert dead[1].all_gather(b"dead 1") == [b"dead 0", b"dead 1"]
    again = StoreBootstrap(store, 0, 2, 0.2, attempt="1")
    with pytest.raises(Exception, match=r"(?i)time"):
        again.all_gather(b"alive 0")


def test_who_keeps_the_store_stays_until_all_have_read() -> None:
    """Rank 0 may end right after a round, and the store with it: a slow rank 1 must have had everything by then."""
    store = open_store("127.0.0.1", 0, True, HANG_S)
    keeper = StoreBootstrap(store, 0, 2, HANG_S, keeps=True)
    other = open_store("127.0.0.1", store.port, False, HANG_S)  # a connection serves one caller at a time
    slow = StoreBootstrap(other, 1, 2, HANG_S)
    with ThreadPoolExecutor(1) as pool:
        round_of_0 = pool.submit(keeper.all_gather, b"0")
        other.wait(["bootstrap/0/0/0"])
        other.set("bootstrap/0/0/1", b"1".hex())  # rank 1 has given its part, and not read yet
        with pytest.raises(TimeoutError):
            round_of_0.result(0.3)
        assert slow.all_gather(b"1") == [b"0", b"1"]
        assert round_of_0.result(HANG_S) == [b"0", b"1"]


def case_bound(rank: Rank, fits: bool) -> dict[str, Any]:
    """This rank bound as set_threads binds it, while another thread of it runs; then, after an all-reduce that wakes
    the transport's thread, the cores of every thread. All is put back: the next case is in the same process."""
    mine = sorted(os.sched_getaffinity(0))
    # one core each where there are two, or else the same: told of as two ranks of this host
    told = "/".join(str(mine[i % len(mine)]) for i in range(2)) if fits else "60001/60002"
    me = Identity(2, rank.rank, rank.rank, 2, socket.gethostname(), "openmpi")
    launch = LaunchConfig(bind_to="placement", fabric="f.json")
    bound = Deployment(model=ModelSection(path="nowhere"), engine=EngineConfig(device="cpu"), launch=launch)
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    over = threading.Event()
    beside = threading.Thread(target=over.wait)
    beside.start()
    os.environ[ENV_CORES] = f"{me.node}={told}"
    try:
        set_threads(bound, me)
        compute = torch.get_num_threads()
        with rank.connect(None, comm_options(bound, "127.0.0.1", b"")) as communicator:
            communicator.all_reduce.start(torch.ones(8)).wait()
            found = set[tuple[int, ...]]()
            for thread in map(int, os.listdir("/proc/self/task")):
                with contextlib.suppress(ProcessLookupError):  # of an earlier case's, some end only now
                    found.add(tuple(os.sched_getaffinity(thread)))
        return {"told": int(told.split("/")[rank.rank]), "found": sorted(found), "threads": compute}
    except MappingError as error:
        return {"refused": str(error)}
    finally:
        over.set()
        beside.join()
        del os.environ[ENV_CORES]
        for thread in map(int, os.listdir("/proc/self/task")):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, mine)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)


def test_two_ranks_keep_to_the_cores_of_their_seats(ranks: Ranks) -> None:
    """launch.bind_to: placement, two real ranks: every thread of each, those that ran before and the transport's, is on
    its seat's core and computes with as many threads; cores that this machine lacks are refused with the fix."""
    for found in ranks(2, "test_rank_start:case_bound", {"fits": True}):
        assert found["found"] == [[found["told"]]]
        assert found["threads"] == 1
    for found in ranks(2, "test_rank_start:case_bound", {"fits": False}):
        assert "with cores 6000" in found["refused"]
        assert "or set launch.bind_to: none" in found["refused"]


@pytest.mark.parametrize(("cores", "spin"), [({3}, 0.0), ({3, 4}, 20.0)])
def test_a_bound_rank_spins_on_a_core_of_its_own(monkeypatch: pytest.MonkeyPatch, cores: set[int], spin: float) -> None:
    """The cores that it sees are not the node's, to be shared with other ranks: unbound, the group divides them."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: cores)
    bound = replace(deployment("any"), launch=LaunchConfig(bind_to="placement", fabric="f.json"))
    assert comm_options(bound, "127.0.0.1", b"").spin_us == spin
    assert comm_options(deployment("any"), "127.0.0.1", b"").spin_us is None


def test_a_rank_that_was_told_no_cores_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """An mpirun of one's own knows nothing of seats; running anywhere while the table names cores would be a lie."""
    monkeypatch.delenv(ENV_CORES, raising=False)
    bound = replace(deployment("any"), launch=LaunchConfig(bind_to="placement", fabric="f.json"))
    with pytest.raises(MappingError, match="no cores were given to rank 0 on here"):
        set_threads(bound, ME)


def case_collective(rank: Rank, collective: str, deterministic: bool) -> str:
    options = CommOptions(backend="gloo", collective=collective, deterministic=deterministic)  # type: ignore[arg-type]
    try:
        rank.connect(None, options).close()
    except ValueError as error:
        return str(error)
    return ""


def test_a_strategy_that_a_library_does_not_have_is_refused(ranks: Ranks) -> None:
    """collective: exchange with gloo would otherwise be gloo's ring, unsaid; two_level it has; asked for one order of
    summation, it is the library's own that holds."""
    case = "test_rank_start:case_collective"
    for name in ("exchange", "pipeline"):
        said = ranks(2, case, {"collective": name, "deterministic": False})
        assert all(f"collective: {name} is the native transport's, backend gloo has" in words for words in said)
    for name in ("flat", "two_level"):
        assert ranks(2, case, {"collective": name, "deterministic": False}) == ["", ""]
    assert ranks(2, case, {"collective": "auto", "deterministic": True}) == ["", ""]


class Channel:
    """Gives what a daemon would send, keeps what is said."""

    def __init__(self, *commands: Command) -> None:
        self._commands, self.said = list(commands), list[StateMessage]()

    def poll(self, timeout: float | None = 0.0) -> list[Command]:
        return [self._commands.pop(0)] if self._commands else []  # [] for ever: the channel is over

    def send_state(self, message: StateMessage) -> None:
        self.said.append(message)

    def send_tokens(self, events: object) -> None: ...

    def wait_for_ranks(self) -> tuple[str, ...]:
        return ()

    def exchange_doors(self, place: str) -> tuple[str, ...]:
        return ()


@pytest.mark.parametrize(
    ("commands", "told"), [((Drain(), Load()), -1), ((Shutdown(),), None), ((), None)], ids=["load", "end", "lost"]
)
def test_a_rank_stands_by_until_it_is_told(commands: tuple[Command, ...], told: int | None) -> None:
    """It says what it holds, and whether the demo's weights and cache have room here: not a million times."""
    demo = load(Path(__file__).resolve().parents[3] / "configs" / "demo.yaml", ["parallel.tensor_parallel_size=1"])
    bootstrap = StoreBootstrap(open_store("127.0.0.1", 0, True), 0, 1)
    with connect(bootstrap, GroupLayout(((0,),)), CommOptions(process_groups=False)) as communicator:
        cpu = torch.device("cpu")
        channel = Channel(*commands)
        assert stand_by(channel, communicator, lambda file: has_room(demo, communicator, cpu, 1, file)) == told
        (said,) = channel.said
        assert isinstance(said, Standing)
        assert said.room
        assert said.resident > 50_000_000
        assert not has_room(demo, communicator, cpu, 1_000_000)


def test_a_rank_that_stands_by_keeps_the_weights_of_the_one_that_serves(caplog: pytest.LogCaptureFixture) -> None:
    """Not those of a process that is gone, or whose pid is another's by now."""
    code = "import os, sys\nos.write(f := os.memfd_create('w'), b'weights')\nprint(f, flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as serving:
        assert serving.stdin is not None
        assert serving.stdout is not None
        there = HeldWeights(serving.pid, start_time(serving.pid) or 0, int(serving.stdout.readline()))
        other = replace(there, start_time=there.start_time + 1)
        alone: Any = SimpleNamespace(gather=lambda payload: payload)
        room = list[int]()

        def has_room(file: int) -> bool:
            room.append(file)
            return True

        kept, another = (stand_by(Channel(held, Load()), alone, has_room) for held in (there, other))
        serving.stdin.close()
    gone = stand_by(Channel(there, Load()), alone, has_room)
    assert (another, gone, room) == (-1, -1, [kept, -1, -1])
    assert "a failure costs their load" in caplog.text
    assert kept is not None
    assert os.pread(kept, 16, 0) == b"weights"
    os.close(kept)


def test_a_hostname_of_two_machines_ends_the_ranks_before_they_connect() -> None:
    """Ranks of an outer launcher have no owner that would compare them."""

    def namesake(payload: bytes) -> list[bytes]:
        own = json.loads(payload)
        return [payload, json.dumps({**own, "boot_id": "another", "addresses": ["10.9.9.9"]}).encode()]

    with pytest.raises(MappingError, match=rf"the hostname {socket.gethostname()}: .* and 10\.9\.9\.9 \(rank 1\)"):
        require_own_hostnames(namesake)
