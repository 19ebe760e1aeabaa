"""The supervisor's decisions, with a clock of the test's own: no processes, no sockets, no waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from laddertron import __version__
from laddertron.engine.identity import ModelIdentity
from laddertron.engine.job import NOBODY, Culprit, MetricRow
from laddertron.engine.request import ModelLimits
from laddertron.launchers.control.control import UNREACHABLE
from laddertron.launchers.control.messages import Announce, Beat, Failure, Hello, Loading, Ready
from laddertron.launchers.job.detect import (
    Evidence,
    FailureKind,
    JobFailure,
    RestartPolicy,
    StepWatch,
    bad_node,
    behind,
    blame,
    by_a_request,
    differing,
)
from laddertron.launchers.job.options import JobTimeouts
from laddertron.launchers.job.rank_board import RankBoard, Recovered, Suspect
from laddertron.topology.placement.world import World

LIMITS = ModelLimits(4096, 50000, 8, 65536)


def hello(rank: int, version: str = __version__) -> Hello:
    return Hello(rank, rank, f"node-{rank}", 100 + rank, 5, "boot", version)


def ready_board(world_size: int = 3, timeouts: JobTimeouts | None = None) -> RankBoard:
    """Every rank is ready and has beaten at second 10."""
    board = RankBoard(World(world_size), timeouts or JobTimeouts(), began=0.0)
    for rank in range(world_size):
        board.heard(rank, hello(rank), 1.0)
        board.heard(rank, Announce({"weights": "feed"}), 2.0)
        board.heard(rank, Ready(LIMITS), 3.0)
        board.heard(rank, Beat(), 10.0)
    return board


def kinds(news: Sequence[object]) -> list[str]:
    return [item.kind if isinstance(item, Evidence) else type(item).__name__ for item in news]


@pytest.mark.parametrize(
    ("signs", "guilty"),
    [
        # rank 1 is killed; rank 0's collective fails first, then mpirun ends rank 2 and itself
        ([("consequence", 0), ("rank_lost", 1), ("rank_lost", 2), ("launcher_exit", None)], ("rank_lost", 1)),
        # rank 2 raises; its end breaks rank 0's connection before its traceback is read
        ([("rank_lost", 0), ("rank_error", 2), ("launcher_exit", None)], ("rank_error", 2)),
        # somebody kills mpirun: every rank ends, none is to blame
        ([("rank_lost", 0), ("rank_lost", 1), ("launcher_killed", None)], ("launcher_killed", None)),
        # a stopped rank was silent; what happens in the moment after that explains nothing
        ([("silent", 1), ("rank_lost", 0), ("launcher_exit", None)], ("silent", 1)),
        ([("launcher_exit", None)], ("launcher_exit", None)),
    ],
)
def test_the_sign_that_explains_the_others_is_blamed(
    signs: list[tuple[FailureKind, int | None]], guilty: tuple[FailureKind, int | None]
) -> None:
    sign = blame([Evidence(kind, rank, "") for kind, rank in signs])
    assert (sign.kind, sign.rank) == guilty


@pytest.mark.parametrize(
    ("kind", "rank", "node", "expected"),
    [
        ("rank_lost", 1, "there", True),
        ("rank_error", 1, "there", True),
        ("stalled", 1, "here", True),
        ("stalled", None, None, False),  # all wait in the same place: a link
        ("silent", 1, "here", True),
        ("silent", 1, "there", False),  # a node or a link
        ("consequence", 1, "here", False),
        ("launcher_killed", None, None, False),
        ("launcher_exit", None, None, False),
        ("load_stalled", 1, "here", False),
        ("refused", 1, "here", False),
    ],
)
def test_which_failures_a_request_may_have_caused(
    kind: FailureKind, rank: int | None, node: str | None, expected: bool
) -> None:
    assert by_a_request(JobFailure(kind, "", Culprit(rank, node)), "here") is expected


def test_which_node_makes_room_for_a_spare() -> None:
    """One that fell silent, at once; one that three failures in a row name."""

    listed: dict[str | None, str] = {"c": "c-ib"}

    def of(*failures: tuple[FailureKind, str | None]) -> str | None:
        return bad_node(
            [JobFailure(kind, "", Culprit(0, node), host=listed.get(node)) for kind, node in failures], "here"
        )

    assert of(("silent", "c")) == "c-ib", "as it is listed, so that a spare can replace it"
    assert of(("silent", "a")) == "a"
    assert of(("silent", "here")) is None, "a stopped process, not a lost node"
    assert of(("rank_lost", "a"), ("rank_lost", "a")) is None
    assert of(("rank_lost", "a"), ("rank_error", "a"), ("stalled", "a")) == "a"
    assert of(("rank_lost", "a"), ("rank_lost", "b"), ("rank_lost", "a")) is None
    assert of(("launch", None), ("launch", None), ("launch", None)) is None


def test_one_hostname_on_two_machines_is_refused_at_the_second_hello() -> None:
    """Cloned machines: the last rank has not even connected."""
    board = RankBoard(World(3), JobTimeouts(), began=0.0)
    assert kinds(board.heard(0, Hello(0, 0, "gpu", 1, 1, "boot-a", __version__, ("10.0.0.1",)), 1.0)) == ["Loading"]
    news = board.heard(1, Hello(1, 0, "gpu", 1, 1, "boot-b", __version__, ("10.0.0.2",)), 1.0)
    assert kinds(news) == ["mismatch", "Loading"]
    failure = board.judge(None, (), {})
    assert (failure.kind, failure.culprit.rank) == ("mismatch", 1)
    assert "the hostname gpu: 10.0.0.1 (rank 0) and 10.0.0.2 (rank 1); " in failure.reason


@pytest.mark.parametrize(
    ("silent", "said"), [(0.0, []), (2.9, []), (3.1, ["Suspect"]), (9.9, ["Suspect"]), (10.1, ["silent"])]
)
def test_liveness_by_silence(silent: float, said: list[str]) -> None:
    assert kinds(ready_board(1, JobTimeouts(suspect_s=3.0, dead_s=10.0)).look(10.0 + silent)) == said


def test_a_long_prefill_is_no_hang_and_a_long_decode_step_is_one() -> None:
    """Decode steps of 8 tokens take 50 ms, prefills of 2048 tokens 4 s: 30 s are fine for the one, not the other."""
    watch = StepWatch(first_s=120, floor_s=10, factor=20)
    assert watch.allowance(8) == 120
    watch.learn(8, 0.05)
    assert watch.allowance(8) == 10
    assert watch.allowance(2048) == 120  # never measured: the most that anything unknown gets
    watch.learn(2048, 4.0)
    assert watch.allowance(2048) == 80
    assert watch.allowance(8) == 10
    assert watch.allowance(4096) == 120  # twice what 2048 take, but never beyond the unknown's


def test_slow_steps_are_forgotten_slowly() -> None:
    """One step of 5 s raises the allowance; a thousand fast ones later it is the floor again."""
    watch = StepWatch(floor_s=10, factor=20)
    watch.learn(1, 5.0)
    assert watch.allowance(1) == 100
    for _ in range(1000):
        watch.learn(1, 0.01)
    assert watch.allowance(1) == 10


def test_the_rank_that_the_others_wait_for() -> None:
    waits, computes = "all_reduce 41", ""
    step, late = Beat(step=5, collective=41, waiting=waits), Beat(step=5, collective=40, waiting="all_reduce 40")
    assert behind({0: step, 1: late, 2: step}) == 1
    assert behind({0: step, 1: step, 2: Beat(step=5, collective=41, waiting=computes)}) == 2
    assert behind({0: step, 1: Beat(step=4, collective=41, waiting=waits)}) == 1
    assert behind({0: step, 1: step}) is None, "all wait in the same place: a link"
    assert behind({0: step}) == 0


def test_the_stage_that_the_others_wait_for() -> None:
    """Stages are steps apart without being late: the one that waits for no other is. Two groups that are at work at
    once blame nobody yet."""
    rows = Beat(step=9, collective=90, busy_s=20.0, waiting="hidden rows from stage 0 (rank 1)")
    ids = Beat(step=2, collective=40, busy_s=20.0, waiting="what the last stage drew from stage 2 (rank 4)")
    works, reduces = Beat(step=8, collective=7, busy_s=20.0), Beat(step=8, collective=8, busy_s=20.0, waiting="reduce")
    assert behind({0: ids, 1: ids, 2: works, 3: reduces, 4: rows, 5: rows}, World(2, 3)) == 2
    assert behind({0: works, 1: rows, 2: rows}, World(1, 3)) == 0
    assert behind({0: ids, 1: ids, 2: reduces, 3: reduces, 4: rows, 5: rows}, World(2, 3)) is None, (
        "a link inside stage 1"
    )
    assert behind({0: works, 1: works, 2: rows}, World(1, 3)) is None


def test_differing_digests_name_the_odd_rank() -> None:
    same = {"config": "a", "weights": "b"}
    assert differing({0: same, 1: same}) is None
    found = differing({0: same, 1: same, 2: {"config": "a", "weights": "x"}})
    assert found is not None
    assert found[0] == 2
    assert "weights is x there and b elsewhere" in found[1]
    found = differing({0: {"weights": "x"}, 1: same, 2: {**same}})
    assert found is not None
    assert found[0] == 0
    found = differing({0: same, 1: {**same, "weights": "x"}})
    assert found is not None
    assert found[0] == 1, "in a tie the lowest rank is taken to be right"


def test_what_is_installed_on_one_host_only_is_named() -> None:
    """A host without FlashInfer computes and records otherwise than the rest; one without a GPU has no use for it, and
    is refused for what it lacks."""
    whole = {"config": "a", "flashinfer": "0.7.2", "torch": "2.13.0+cu128", "triton": "usable"}
    unused = whole | {"flashinfer": "", "triton": ""}
    assert differing({0: whole, 1: unused, 2: whole}) is None
    assert differing({0: unused, 1: unused}) is None
    unnamed = differing({0: whole, 1: whole, 2: whole | {"torch": ""}})
    assert unnamed == (2, "torch is missing there and 2.13.0+cu128 elsewhere: install the same on every host")
    for name, value in (("flashinfer", "missing"), ("flashinfer", "0.7.3"), ("triton", "without a compiler")):
        found = differing({0: whole, 1: unused, 2: whole, 3: whole | {name: value}})
        assert found == (3, f"{name} is {value} there and {whole[name]} elsewhere: install the same on every host")


def test_the_fourth_failure_without_progress_is_final() -> None:
    policy = RestartPolicy(limit=3)
    assert [policy.after_failure(False) for _ in range(4)] == [0.0, 1.0, 2.0, None]


def test_progress_forgives() -> None:
    policy = RestartPolicy(limit=3, longest_s=1.5)
    assert [policy.after_failure(p) for p in (False, False, False, True, False, False)] == [0, 1, 1.5, 0, 1, 1.5]
    assert policy.after_failure(False) is None
    assert RestartPolicy(limit=0).after_failure(True) is None, "restart: false"


# the board


def test_ready_once_every_rank_is_loaded_and_all_agree() -> None:
    board = RankBoard(World(2), JobTimeouts(), 0.0)
    assert board.heard(0, hello(0), 1.0) == [Loading(0.0, "")]
    board.heard(1, hello(1), 1.0)
    assert board.heard(0, Loading(0.5, "layers"), 2.0) == [Loading(0.0, "layers")]
    assert board.heard(1, Loading(0.25, "layers"), 2.0) == [Loading(0.25, "layers")]
    for rank in (0, 1):
        assert board.heard(rank, Announce({"weights": "feed"}), 3.0) == []
    assert board.heard(0, Ready(LIMITS), 4.0) == []
    assert board.heard(1, Ready(LIMITS), 4.0) == [Ready(LIMITS)]


def test_ranks_that_differ_never_get_ready() -> None:
    board = RankBoard(World(2), JobTimeouts(), 0.0)
    for rank in (0, 1):
        board.heard(rank, hello(rank), 1.0)
        board.heard(rank, Ready(LIMITS), 1.0)
    board.heard(0, Announce({"weights": "a"}), 1.0)
    (sign,) = board.heard(1, Announce({"weights": "b"}), 1.0)
    assert isinstance(sign, Evidence)
    assert (sign.kind, sign.rank) == ("mismatch", 1)
    failure = board.judge(None, (), {})
    assert failure.reason.startswith("rank 1 (node node-1, pid 101): weights is b there and a elsewhere")


def test_another_version_is_a_mismatch() -> None:
    news = RankBoard(World(1), JobTimeouts(), 0.0).heard(0, hello(0, "0.0.9"), 1.0)
    assert kinds(news) == ["mismatch", "Loading"]


def test_a_silent_rank_is_suspect_then_dead_and_may_recover() -> None:
    """Ranks 0 and 2 go on; rank 1 is silent: suspect after 3 s, well again by one beat, silent again, dead after 10."""
    board = ready_board()

    def others(now: float) -> None:
        for rank in (0, 2):
            assert board.heard(rank, Beat(), now) == []

    others(12.9)
    assert board.look(12.9) == []
    others(13.1)
    (suspect,) = board.look(13.1)
    assert isinstance(suspect, Suspect)
    assert suspect.rank == 1
    others(14.0)
    assert board.look(14.0) == [], "said once"
    assert board.heard(1, Beat(), 15.0) == [Recovered()]
    others(24.0)
    assert kinds(board.look(24.0)) == ["Suspect"]
    others(25.0)
    (dead,) = board.look(25.0)
    assert isinstance(dead, Evidence)
    assert (dead.kind, dead.rank) == ("silent", 1)
    assert board.judge(None, (), {}).culprit.node == "node-1"


def test_a_rank_that_ended_because_of_something_else_is_not_blamed() -> None:
    """mpirun lost a node and ended the ranks on the others; the daemon stood still, so that its ranks ended
    themselves; a short pause explains nothing."""
    board = ready_board()
    board.gone(0, "")
    lost = ("PRTE has lost communication with a remote daemon.", "HNP daemon : prterun on node a")
    failure = board.judge(1, lost, {})
    assert (failure.kind, failure.culprit.rank) == ("launcher_exit", None)
    assert "lost a node" in failure.reason
    named = (*lost, "Remote daemon: [prterun-a-7@0,2] on node node-2")
    failure = board.judge(1, named, {})
    assert (failure.kind, failure.culprit.rank, failure.culprit.node) == ("silent", 2, "node-2")
    failure = board.judge(1, (), {}, stood_still=12.0)
    assert (failure.kind, failure.culprit.rank) == ("consequence", None)
    assert "was suspended for 12 s" in failure.reason
    assert board.judge(1, (), {}, stood_still=5.0).culprit.rank == 0


def test_the_culprit_is_named_in_full() -> None:
    """Rank, node, stage, device and collective, as far as they were heard of; without a rank none of them."""
    board = RankBoard(World(2, 2), JobTimeouts(), 0.0)
    board.heard(3, hello(3), 1.0)
    row = MetricRow("rank_info", ("cuda", "avx2", "1"), 1.0)
    board.heard(3, Beat(collective=41, waiting="all_reduce 41", rows=(row,)), 2.0)
    board.gone(3, "")
    assert board.judge(None, (), {}).culprit == Culprit(3, "node-3", 1, "cuda:3", "all_reduce 41")
    board.sign(Evidence("launcher_killed", None, "mpirun was ended by signal 9"))
    assert board.judge(None, (), {}).culprit == NOBODY


def test_a_failure_has_the_listed_name_of_its_host() -> None:
    """By order of ranks until they report; of ranks that never did, if all are on one host."""
    board = RankBoard(World(4), JobTimeouts(launch_s=120.0), 0.0, seats=("a-ib", "a-ib", "b-ib", "b-ib"))
    board.heard(0, hello(0), 1.0)
    board.heard(1, hello(1), 1.0)
    (late,) = [item for item in board.look(121.0, {0: 121.0, 1: 121.0}) if isinstance(item, Evidence)]
    assert late.text == "rank 2, 3 on b-ib did not start within 120 s"
    failure = board.judge(None, (), {})
    assert (failure.kind, failure.host, failure.reason) == ("launch", "b-ib", late.text)
    board = RankBoard(World(2), JobTimeouts(launch_s=120.0), 0.0, seats=("a-ib", "b-ib"))
    (late,) = [item for item in board.look(121.0) if isinstance(item, Evidence)]
    assert late == Evidence("launch", None, "rank 0, 1 on a-ib, b-ib did not start within 120 s")
    # mpirun waits for b, and starts nothing on a either
    board.notes["b-ib"] = "ssh b-ib did not answer within 12 s"
    (late,) = [item for item in board.look(121.0) if isinstance(item, Evidence)]
    assert late == Evidence("launch", 1, f"rank 1 on b-ib did not start within 120 s; {board.notes['b-ib']}")


@pytest.mark.parametrize(
    ("words", "limit", "says"),
    [
        (
            "prterun noticed that process rank 1 with PID 101 on node b exited on|signal 9 (Killed).",
            160 << 20,
            "160 MiB",
        ),
        ("YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)", 0, "dmesg"),
        ("noticed that process rank 1 with PID 101 on node b exited on|signal 11.", 160 << 20, ""),
    ],
)
def test_a_rank_that_was_killed_may_have_been_out_of_memory(words: str, limit: int, says: str) -> None:
    board = RankBoard(World(2), JobTimeouts(), 0.0)
    board.heard(0, hello(0), 1.0)
    board.heard(1, replace(hello(1), memory_limit=limit), 1.0)
    board.gone(1, "")
    reason = board.judge(1, tuple(words.split("|")), {}).reason
    assert says in reason
    assert ("memory" in reason) == bool(says)


def test_another_model_is_named_by_its_file_though_digests_differ_too() -> None:
    """The file is known from the owner's model as soon as one rank has read it, the digests once all have."""
    board = RankBoard(World(2), JobTimeouts(), 0.0, identity=ModelIdentity("feed", {"config.json": "a"}, {}))
    for rank in (0, 1):
        board.heard(rank, hello(rank), 1.0)
    board.heard(1, Announce({"config.json": ""}), 1.0)
    board.heard(0, Announce({"config.json": "a"}), 1.0)
    failure = board.judge(None, (), {})
    assert failure.kind == "model_changed"
    assert failure.culprit.rank == 1


def test_a_supervisor_that_was_held_up_blames_nobody() -> None:
    """The daemon itself was stopped for a minute: it has not read what the ranks sent."""
    board = ready_board()
    board.held_up(60.0)
    assert board.look(71.0) == []
    assert "silent" in kinds(board.look(80.5))


def test_what_ranks_said_while_the_supervisor_was_busy_is_no_silence() -> None:
    """Short stalls add up: nothing was taken from the ranks for a minute, but their words lie there."""
    board = ready_board()
    spoke = {0: 69.5, 1: 69.5, 2: 60.5}
    assert kinds(board.look(70.0, spoke)) == ["Suspect"]
    (dead,) = board.look(70.6, spoke)
    assert isinstance(dead, Evidence)
    assert (dead.kind, dead.rank) == ("silent", 2)


def test_a_stalled_step_names_the_late_rank_and_the_collective() -> None:
    """Steps took 50 ms. Now ranks 0 and 2 wait in an all-reduce that rank 1 has not started."""
    board = ready_board()
    for rank in range(3):
        board.heard(rank, Beat(step=1, last_tokens=8, last_s=0.05), 11.0)
        collective, waiting = (40, "") if rank == 1 else (41, "all_reduce 41 (layer 3, mlp)")
        beat = Beat(2, 9.9, 8, 8, 0.05, collective, waiting)
        board.heard(rank, beat, 21.0)
    assert board.look(21.05) == []
    (sign,) = board.look(21.2)
    assert isinstance(sign, Evidence)
    assert (sign.kind, sign.rank) == ("stalled", 1)
    failure = board.judge(None, (), {})
    assert "the others wait in all_reduce 41 (layer 3, mlp)" in failure.reason
    assert failure.culprit.collective == "collective 40"


def test_when_every_rank_waits_in_one_place_the_link_is_suspected() -> None:
    board = ready_board()
    for rank in range(3):
        board.heard(rank, Beat(1, 121.0, 8, collective=7, waiting="all_reduce 7"), 131.0)
    (sign,) = board.look(131.1)
    assert isinstance(sign, Evidence)
    assert sign.rank is None
    assert sign.text.endswith("all ranks wait in all_reduce 7: suspect the link")


def test_a_thread_that_hangs_between_two_steps_is_found() -> None:
    """Steps took 50 ms. Rank 0 has been neither in a step nor waiting for work for ten seconds: nobody else is late,
    the others wait for its plan. It is blamed; had the others begun a step without it, it would be behind them."""
    board = ready_board()
    for rank in range(3):
        board.heard(rank, Beat(step=5, last_tokens=8, last_s=0.05, collective=40), 11.0)
        board.heard(rank, Beat(6, 9.9 if rank == 0 else 0.0, 0, 8, 0.05, 48), 21.0)
    assert board.look(21.05) == []
    (sign,) = board.look(21.2)
    assert isinstance(sign, Evidence)
    assert (sign.kind, sign.rank) == ("stalled", 0)
    assert sign.text == "no progress for 10.1 s at step 6 (10.0 s allowed); the others wait for the next step"
    board = ready_board()
    for rank in range(3):
        board.heard(rank, Beat(step=5, last_tokens=8, last_s=0.05, collective=40), 11.0)
        ahead = Beat(6, 9.9, 8, 8, 0.05, 49, "all_reduce 49")
        board.heard(rank, Beat(6, 9.9, 0, 8, 0.05, 48) if rank == 0 else ahead, 21.0)
    (sign,) = board.look(21.2)
    assert isinstance(sign, Evidence)
    assert (sign.kind, sign.rank) == ("stalled", 0)


def test_a_rank_on_its_own_is_compared_with_nobody() -> None:
    board = ready_board(1)
    board.heard(0, Beat(step=1, last_tokens=8, last_s=0.05), 11.0)
    board.heard(0, Beat(2, 9.9, 8, 8, 0.05), 21.0)
    (sign,) = board.look(21.2)
    assert isinstance(sign, Evidence)
    assert (sign.rank, sign.text) == (0, "no progress for 10.1 s in step 2 (8 tokens; 10.0 s allowed)")


def test_idle_ranks_never_stall() -> None:
    board = ready_board()
    for second in range(11, 300):
        for rank in range(3):
            board.heard(rank, Beat(step=1), float(second))
        assert board.look(second + 0.1) == []


def test_ranks_that_never_come_up_and_loading_that_stands_still() -> None:
    timeouts = JobTimeouts(launch_s=30, load_stall_s=60)
    board = RankBoard(World(3), timeouts, 0.0)
    board.heard(1, hello(1), 29.0)
    assert board.look(29.5) == []
    board.heard(1, Beat(), 30.0)
    (sign,) = board.look(30.5)
    assert isinstance(sign, Evidence)
    assert sign.text == "rank 0, 2 did not start within 30 s"

    board = RankBoard(World(2), timeouts, 0.0)
    for rank, fraction in ((0, 0.5), (1, 0.25)):
        board.heard(rank, hello(rank), 1.0)
        board.heard(rank, Loading(fraction), 10.0)
    for second in range(11, 70):
        for rank, fraction in ((0, 0.5), (1, 0.25)):
            board.heard(rank, Loading(fraction), float(second))
        assert board.look(float(second)) == []
    (sign,) = board.look(70.5)
    assert isinstance(sign, Evidence)
    assert (sign.kind, sign.rank) == ("load_stalled", 1)


def test_a_host_that_acknowledges_nothing_is_named_and_makes_room_for_a_spare() -> None:
    board = ready_board(2)
    (sign,) = board.gone(1, UNREACHABLE)
    assert isinstance(sign, Evidence)
    assert (sign.kind, sign.rank) == ("silent", 1)
    assert board.gone(1, "reset") == []
    failure = board.judge(None, (), {})
    assert failure.culprit.node == "node-1"
    assert f"{UNREACHABLE}, from node-1 to its owner" in failure.reason
    assert bad_node((failure,), "node-0") == "node-1"


def test_a_rank_that_gives_up_waiting_is_not_named_but_the_one_that_is_silent() -> None:
    """Rank 1 is stopped; rank 0's collective times out before rank 1 is given up. A lost rank outranks both."""
    board = ready_board(3, JobTimeouts(suspect_s=3.0, dead_s=15.0))
    for rank in (0, 2):
        board.heard(rank, Beat(), 14.0)
    board.look(14.0)
    assert kinds(board.heard(0, Failure("CollectiveTimeout", consequence=True), 20.0)) == ["consequence", "silent"]
    failure = board.judge(None, (), {})
    assert (failure.kind, failure.culprit.rank) == ("silent", 1)
    assert "no heartbeat for 10.0 s" in failure.reason
    board.gone(2, "")
    assert board.judge(None, (), {}).culprit.rank == 2


def test_a_rank_that_said_why_is_not_also_lost() -> None:
    board = ready_board()
    (sign,) = board.heard(1, Failure("Traceback ...\nZeroDivisionError"), 11.0)
    assert isinstance(sign, Evidence)
    assert sign.kind == "rank_error"
    assert board.gone(1, "") == []
    assert kinds(board.gone(0, "reset")) == ["rank_lost"]
    assert board.judge(1, (), {}).reason.endswith("ZeroDivisionError")


def test_a_failing_launch_never_recovers() -> None:
    """Rank 0 is silent, so suspect; rank 1 dies, which ends the launch; then rank 0 speaks again. It is heard, but
    nothing says that the launch is well: it would be ready for the moment that its end takes."""
    board = ready_board(2, JobTimeouts(suspect_s=3.0, dead_s=15.0))
    board.heard(1, Beat(), 14.0)
    assert kinds(board.look(14.0)) == ["Suspect"]
    assert kinds(board.gone(1, "reset")) == ["rank_lost"]
    assert board.heard(0, Beat(), 14.5) == []
    assert not board.ranks[0].suspect
    calm = ready_board(2, JobTimeouts(suspect_s=3.0, dead_s=15.0))
    calm.heard(1, Beat(), 14.0)
    assert kinds(calm.look(14.0)) == ["Suspect"]
    assert kinds(calm.heard(0, Beat(), 14.5)) == ["Recovered"]


@pytest.mark.parametrize("first", [0, 1])
def test_whom_mpirun_saw_end_is_named_however_their_ends_were_read(first: int) -> None:
    """mpirun ends the others when one has ended, and a process that is late reads both ends at once. Without such
    words, or with words on a rank whose connection stands, the first that was read is named."""
    noticed = (
        "prterun noticed that process rank 1 with PID 4711 on node",
        "node-1 exited on signal 9 (Killed).",
    )
    for output, named in ((noticed, 1), ((), first), (("process rank 2 with PID 7 on node x",), first)):
        board = ready_board()
        for rank in (first, 1 - first):
            board.gone(rank, "")
        assert board.judge(137, output, {}).culprit.rank == named
