"""From a tuning file to one strategy on all ranks; what preflight reads of a transport, and shows. No ranks."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from laddertron.engine.config.schema import Deployment, EngineConfig, LaunchConfig, ModelSection, ParallelConfig
from laddertron.launchers.cli.commands.preflight import show, size_name
from laddertron.launchers.measure.preflight import PreflightOutcome, message_bytes
from laddertron.launchers.measure.preflight_links import transport_in
from laddertron.launchers.measure.preflight_plan import Finding, LinkTime, NodeTransport, Pair, RankReport
from laddertron.launchers.rank import load_tuning as tuned
from laddertron.topology.cost.cost import Shape, shape_of
from laddertron.topology.cost.fit import Fit, Point, fit
from laddertron.topology.cost.tuning import Choice, Chooser, Tuning, make
from laddertron.topology.hardware.discover import Discovery, DiscoveryError, discover
from laddertron.topology.hardware.fabric import Fabric
from laddertron.topology.hardware.presets import preset
from laddertron.topology.link_cost import SIZES, WHOLE_BYTES
from laddertron.topology.placement.layout import GroupLayout
from rich.console import Console
from waiting import HANG_S

ONE_NODE = GroupLayout(((0, 1),))
SHAPE = Shape(1, 2)


class Alone:
    """A bootstrap whose other ranks say what this one says: enough for what rank 0 decides."""

    def __init__(self, rank: int = 0, size: int = 2, first: bytes | None = None) -> None:
        self.rank, self.size, self.first = rank, size, first
        self.said: list[bytes] = []

    def all_gather(self, payload: bytes) -> list[bytes]:
        self.said.append(payload)
        return [payload if self.first is None else self.first] * self.size

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laddertron.topology.transport.transport.available", lambda: True)


def measured(shape: Shape, fabric: Fabric, crossing: int) -> Tuning:
    """A sweep in which two_level (or doubling) overtakes exchange at `crossing` bytes."""
    other = "two_level" if shape.per_node > 1 and shape.nodes > 1 else "exchange"
    points = []
    for nbytes in (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10):
        points.append(Point("exchange", nbytes, 1e-5 + nbytes * 1e-9, shape))
        if other == "two_level":
            points.append(Point("two_level", nbytes, (2e-5 if nbytes < crossing else 0.5e-5) + nbytes * 1e-9, shape))
    return make(fabric, shape, fit(points, "native"), tuned.versions())


def deployment(path: Path | None, **parallel: object) -> Deployment:
    keys = ParallelConfig(tensor_parallel_size=2, tuning_file=None if path is None else str(path))
    return Deployment(model=ModelSection(path="nowhere"), parallel=replace(keys, **parallel))  # type: ignore[arg-type]


def fabric_here() -> Fabric:
    return Fabric((discover(None).node,))


def nodes_here(fabric: Fabric) -> tuple[str, str]:
    return (fabric.nodes[0].hostname,) * 2


def chooser_of(*choices: Choice) -> Chooser:
    shape = Shape(2, 2)
    costs = measured(shape, fabric_here(), 16 << 10).costs
    return Chooser(shape, costs, choices, "measured")


def test_a_table_says_what_the_chooser_says() -> None:
    """At every size that was asked about, and between them the larger neighbour's."""
    choose = chooser_of(Choice(20_000, "exchange"), Choice(None, "two_level"))
    table = tuned.tabulate(choose)
    assert [strategy for _, strategy in table] == ["exchange", "two_level", "pipeline"]
    look = tuned.look_up(table)
    for size in SIZES:
        assert look(size) == choose.strategy(size)
    assert look(1) == "exchange"
    assert look(WHOLE_BYTES // 2) == "two_level"
    assert look(1 << 40) == "pipeline", "nothing else carries that, whatever an older file says"


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to choose from"):
        tuned.look_up(())


def test_ranks_follow_rank_0_whatever_lies_on_their_own_disk(tmp_path: Path) -> None:
    """Rank 1 has no file at that path; it does as rank 0 says."""
    fabric = fabric_here()
    nodes = nodes_here(fabric)
    told = Alone(rank=0)
    path = tmp_path / "tuning.json"
    measured(SHAPE, fabric, 1 << 14).save(path)
    leader = tuned.tuned_choice(deployment(path), told, nodes, ONE_NODE)
    follower = tuned.tuned_choice(deployment(tmp_path / "gone.json"), _Second(told.said), nodes, ONE_NODE)
    assert leader is not None
    assert follower is not None
    assert [leader(n) for n in SIZES] == [follower(n) for n in SIZES]
    assert {leader(n) for n in SIZES if n <= WHOLE_BYTES} == {"exchange"}


class _Second(Alone):
    """Rank 1, which hears what rank 0 said."""

    def __init__(self, said: list[bytes]) -> None:
        super().__init__(rank=1)
        self._heard = iter(said)

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [next(self._heard), payload]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: replace(t, fabric="0" * 32), "made for another fabric"),
        (lambda t: replace(t, versions={**t.versions, "torch": "1.0"}), "measured with torch 1.0"),
        (None, "not used"),
    ],
    ids=["another fabric", "another library", "no file"],
)
def test_a_file_that_does_not_fit_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Tuning], Tuning] | None, words: str
) -> None:
    """Refused or doubted, it is said so on rank 0, and there is a choice all the same."""
    fabric, path = fabric_here(), tmp_path / "tuning.json"
    if spoil is not None:
        spoil(measured(SHAPE, fabric, 1 << 14)).save(path)
    with caplog.at_level(logging.WARNING):
        choose = tuned.tuned_choice(deployment(path), Alone(), nodes_here(fabric), ONE_NODE)
    assert words in caplog.text
    assert choose is not None
    assert choose(4096) == "exchange"


@pytest.mark.parametrize(
    "given", [{"deterministic": True}, {"collective": "exchange"}, {"backend": "gloo"}], ids=lambda g: next(iter(g))
)
def test_who_leaves_no_choice_gets_none(tmp_path: Path, given: dict[str, object]) -> None:
    """A fixed strategy, one tree for all sizes, or a backend with a choice of its own: nobody looks at files."""
    told = Alone()
    assert tuned.tuned_choice(deployment(tmp_path / "gone.json", **given), told, ("a", "a"), ONE_NODE) is None
    assert tuned.tuned_choice(deployment(None), told, ("a", "a"), ONE_NODE) is None
    assert told.said == []


def test_an_untuned_group_over_nodes_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a file a group that spans nodes goes by the cost model's own prices, and rank 0 says how to better that;
    inside a node nothing is asked and nothing said."""
    here = fabric_here()
    pair = Fabric(tuple(replace(here.nodes[0], hostname=name) for name in ("a", "b")))
    pair.save(tmp_path / "fabric.json")
    over = GroupLayout(((0, 1), (2, 3)))
    given = replace(
        deployment(None),
        launch=LaunchConfig(fabric=str(tmp_path / "fabric.json")),
        parallel=ParallelConfig(tensor_parallel_size=4),
    )
    told = Alone()
    with caplog.at_level(logging.WARNING):
        choose = tuned.tuned_choice(given, told, ("a", "a", "b", "b"), over)
    assert "untuned prices" in caplog.text
    assert "laddertron preflight CONFIG --save" in caplog.text
    assert choose is not None
    assert [choose(n) for n in (4096, 64 << 10, 1 << 20)] == ["exchange", "two_level", "pipeline"]
    follower = tuned.tuned_choice(given, _Second(told.said), ("a", "a", "b", "b"), over)
    assert follower is not None
    assert [follower(n) for n in SIZES] == [choose(n) for n in SIZES]


def test_a_fabric_that_lacks_the_hosts_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The configured fabric is of other machines: the job starts, by message size alone, and says why."""
    fabric_here().save(tmp_path / "fabric.json")
    given = replace(deployment(None), launch=LaunchConfig(fabric=str(tmp_path / "fabric.json")))
    with caplog.at_level(logging.WARNING):
        assert tuned.tuned_choice(given, Alone(), ("a", "b"), GroupLayout(((0,), (1,)))) is None
    assert "host 'a' is not in the fabric" in caplog.text


class _Met(Alone):
    """Two ranks in threads of one process, really waiting for one another."""

    def __init__(self, rank: int, door: threading.Barrier, board: list[bytes]) -> None:
        super().__init__(rank=rank)
        self._door, self._board = door, board

    def all_gather(self, payload: bytes) -> list[bytes]:
        self._board[self.rank] = payload
        self._door.wait(HANG_S)
        every = list(self._board)
        self._door.wait(HANG_S)
        return every


@pytest.mark.parametrize("blind", [0, 1])
def test_a_rank_that_cannot_see_its_host_takes_no_other_down(
    blind: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a leftover CUDA_VISIBLE_DEVICES names is not there. The advice is gone, the start is not: every rank gathers
    as often as the others, and rank 0 says why."""
    nodes, layout = ("a", "b"), GroupLayout(((0,), (1,)))
    door, board, me = threading.Barrier(2), [b"", b""], threading.local()
    here = discover(None)

    def seen(_: str | None) -> Discovery:
        if me.rank == blind:
            raise DiscoveryError("CUDA_VISIBLE_DEVICES='0': '0' is not one of this host's 0 GPUs")
        return here

    def start(rank: int) -> Callable[[int], str] | None:
        me.rank = rank
        return tuned.tuned_choice(deployment(None), _Met(rank, door, board), nodes, layout)

    monkeypatch.setattr(tuned, "discover", seen)
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(start, range(2), timeout=2 * HANG_S)) == [None, None]
    assert len(caplog.records) == 1
    assert "is not known" in caplog.text
    assert ("is not one of this host's" in caplog.text) == (blind == 0)
    assert ("rank 1 sent no host" in caplog.text) == (blind == 1)


def test_a_file_fits_a_replica_that_is_a_job_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two replicas, each inside one of two nodes. What preflight measured over both hosts is one group's: the replica
    that is launched alone, and sees its own host only, takes it, and so does each group of one job."""
    here = fabric_here().nodes[0]
    both = Fabric(tuple(replace(here, hostname=name) for name in ("a", "b")))
    nodes, given = ("a", "a", "b", "b"), deployment(tmp_path / "tuning.json", replicas=2)
    own, shape = tuned.group_hosts(both, nodes, ONE_NODE), shape_of(both, tuned.placed(both, given, nodes), 0)
    assert [n.hostname for n in own.nodes] == ["a"]
    measured(shape, own, 1 << 14).save(tmp_path / "tuning.json")
    both.save(tmp_path / "fabric.json")
    given = replace(given, launch=LaunchConfig(fabric=str(tmp_path / "fabric.json")))
    with caplog.at_level(logging.WARNING):
        for place in (("b", "b"), nodes):
            assert tuned.tuned_choice(given, Alone(size=len(place)), place, ONE_NODE) is not None
    assert caplog.text == ""


def test_the_models_own_messages_are_measured() -> None:
    """A width of 192 in fp32 at the batches of decode; nothing where the model is elsewhere."""
    demo = Path(__file__).parents[3] / "configs" / "demo" / "demo-ladder"
    found = message_bytes(replace(deployment(None), model=ModelSection(path=str(demo), dtype="float32")))
    assert found == tuple(found[0] * batch for batch in (1, 4, 16, 64, 256))
    assert message_bytes(deployment(None)) == ()


def test_transport_is_read_from_nccls_log() -> None:
    """IB where NCCL says IB; a log without a word of it counts as sockets, which `require_transport: ib` refuses."""
    log = "node1:4:5 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB\nnode1:4:5 [0] NCCL INFO Using network IB\n"
    assert transport_in(log) == "NET/IB"
    assert transport_in("x NCCL INFO Using network Socket\n") == "NET/Socket"
    assert transport_in("x NCCL INFO Using network AWS Libfabric\n") == "NET/AWS"
    assert transport_in("") == "NET/Socket"


def outcome(*findings: Finding) -> PreflightOutcome:
    fabric = fabric_here()
    points = [Point("exchange", n, 1e-5 + n * 1e-9, SHAPE) for n in (1 << 10, 1 << 15, 1 << 20)]
    fitted: Fit = fit(points, "native")
    reports = tuple(RankReport(r, f"node{r}", NodeTransport(), 0.0, 1e-3 * (r + 1)) for r in (0, 1))
    links = (LinkTime(Pair(0, 1, 0), 12e-6, 10e9),)
    return PreflightOutcome(fabric, SHAPE, "native", reports, links, fitted, findings, None, "gloo")


def shown(found: PreflightOutcome, saved: Path | None = None) -> str:
    stream = io.StringIO()
    show(found, saved, Console(file=stream, width=120))
    return stream.getvalue()


def test_the_view_names_links_sizes_and_culprits() -> None:
    text = shown(outcome(Finding("error", "rank 1 on node1", "a matmul takes twice as long")))
    assert "Links, gloo, point to point" in text
    assert "node0 rank 0 - node1 rank 1" in text
    assert "12.0 us" in text
    assert "1 MiB" in text
    assert "error: rank 1 on node1: a matmul takes twice as long" in text
    assert "no tuning file" in text
    assert "slowest matmul: 2.00 ms, rank 1 on node1" in text


def test_the_view_says_where_the_file_went(tmp_path: Path) -> None:
    text = shown(outcome(), tmp_path / "t.json")
    assert f"saved {tmp_path / 't.json'}" in text
    assert "error" not in text.replace("median error", "")


def test_one_rank_has_nothing_to_tune() -> None:
    text = shown(replace(outcome(), fitted=None, links=()))
    assert "tensor_parallel_size is 1" in text
    assert "cost model" not in text


def test_sizes_read_as_people_write_them() -> None:
    assert [size_name(n) for n in (384, 1536, 32 << 10, 8 << 20)] == ["384 B", "1.5 KiB", "32 KiB", "8 MiB"]


def test_auto_is_nccl_where_ranks_compute_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native transport reads host memory alone: `backend: auto` must not come to it beside a GPU, unless the
    deployment computes on the CPU there; and what the ranks connect with is the same choice."""
    from laddertron.launchers.rank.rank import comm_options

    on_cpu = replace(deployment(None), engine=EngineConfig(device="cpu"))
    assert tuned.backend_here(deployment(None)) == "native"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert tuned.backend_here(deployment(None)) == "nccl"
    assert tuned.backend_here(on_cpu) == "native"
    assert tuned.backend_here(deployment(None, backend="gloo")) == "gloo"
    assert comm_options(deployment(None), "127.0.0.1", b"").backend == "nccl"


def test_nccl_inside_a_node_goes_by_prices_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a file and within a node: one_shot for small messages where NVLink joins the GPUs, and no warning. Over
    PCIe, and where ranks share GPUs, nothing but NCCL's own."""
    fabrics = {name: preset("1x8xH100") for name in ("nvlink", "pcie")}
    (node,) = fabrics["pcie"].nodes
    links = tuple(replace(link, path="PHB") if link.path.startswith("NV") else link for link in node.links)
    fabrics["pcie"] = Fabric((replace(node, links=links, nvswitch=False),))
    layout, hosts = GroupLayout((tuple(range(8)),)), (node.hostname,) * 8

    def choice(links: str, **launch: object) -> Callable[[int], str] | None:
        fabrics[links].save(tmp_path / f"{links}.json")
        given = replace(
            deployment(None),
            launch=LaunchConfig(fabric=str(tmp_path / f"{links}.json"), **launch),  # type: ignore[arg-type]
            parallel=ParallelConfig(tensor_parallel_size=8, backend="nccl"),
        )
        return tuned.tuned_choice(given, Alone(size=8), hosts, layout)

    with caplog.at_level(logging.WARNING):
        found = choice("nvlink")
        assert found is not None
        assert [found(n) for n in (1 << 10, 1 << 15, 1 << 18, 1 << 21, 1 << 23)] == ["one_shot"] * 4 + ["flat"]
        assert choice("pcie") is None
        assert choice("nvlink", share_gpu=True) is None
    assert caplog.text == ""
