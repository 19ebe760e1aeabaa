"""A real Prometheus over a daemon with four ranks on two nodes: every expression finds its series, every alert fires at
its fault, made for real, and at no other time. `make monitoring-test`; needs root and Debian's prometheus.

The tests are one story and run in order; each begins when the daemon serves and its alerts are quiet. Rules run thirty
times as fast (rule_scale.py); live.py says what here is not as it ships."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from monitoring_queries import panel_queries, rule_selectors
from rule_scale import scaled_expression
from served_daemon import ask, wait_until

from cluster.live import DAEMON, DEADLY_TOKEN, FACTOR, NAN_TOKEN, PROMETHEUS, Live, held_back, living, send_batch
from cluster.live_parts import MONITORING, query

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)"),
]
ALERTS = {
    rule["alert"]
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
CONDITIONS = (" > 0", " == 0", " == 1")
"""Panels of what should not be there are empty while it is not."""
RELAUNCH = frozenset(f"Laddertron{name}" for name in ("Restarts", "RankDown", "NotReady", "NoSteps"))
"""May fire while ranks come up again: a relaunch takes as long as it does, whatever the rules' durations are."""
GREEDY: dict[str, Any] = {"temperature": 0}
"""What is sampled freely may be the token that is poison here."""


@pytest.fixture(scope="module")
def live(possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    began = time.monotonic()
    with living(tmp_path_factory.mktemp("live")) as live:
        yield live
    print(f"\n{len(live.fired)} alerts, {time.monotonic() - began:.0f} s in all")


def test_every_expression_finds_its_series_and_all_is_quiet(live: Live) -> None:
    """A batch and interactive requests run on. After half a minute every panel has a series; what is empty is a
    condition that does not hold, over series that are there. So have all rules. Nothing fires."""
    send_batch(DAEMON, 50_000, **GREEDY)
    with live.traffic(**GREEDY):
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            assert live.firing() == set()
            time.sleep(1.0)  # that nothing happens can only be waited for
        empty = live.look()
        for board, text in empty:
            if "ALERTS{" in text:  # of which there are none
                continue
            assert text.rstrip().endswith(CONDITIONS), (board, text)
            assert query(PROMETHEUS, text.rpartition(" ")[0].rpartition(" ")[0]), (board, text)
        fast = [(rule, scaled_expression(text, FACTOR)) for rule, text in rule_selectors()]
        assert not [(rule, text) for rule, text in fast if not query(PROMETHEUS, text)]
        ranks = query(PROMETHEUS, "count by (node) (laddertron_rank_up == 1)")
        assert {found["metric"]["node"]: found["value"][1] for found in ranks} == {"n0": "2", "n1": "2"}
    took = query(PROMETHEUS, 'scrape_duration_seconds{instance="127.0.0.1:8000"}')[0]["value"][1]
    print(f"\n{len(live.seen)} expressions with series, {len(empty)} conditions that do not hold; scrape {took} s")


def test_a_slow_link_is_exposed_communication(live: Live) -> None:
    """The switch delays every frame by 20 ms: most of a step is waiting now, of which there was less before."""
    share = float(query(PROMETHEUS, "laddertron:exposed_share_of_step:rate5m")[0]["value"][1])
    print(f"\nexposed before: {share:.2f}")
    live.cluster.control.link(delay_s=0.02)
    try:
        live.fires("LaddertronExposedCommunication")
    finally:
        live.cluster.control.link()


def test_a_slow_rank_is_named(live: Live) -> None:
    """The last rank, on the second node, runs a tenth of the time: the alert names it and no other; nobody is
    killed."""
    live.quiet()
    before = live.ranks(0), live.ranks(1)
    slow = before[1][-1]
    with held_back(slow):
        live.fires("LaddertronStraggler", beside=frozenset({"LaddertronExposedCommunication"}))
        named = {(found["rank"], found["node"]) for found in live.labels("LaddertronStraggler")}
    assert named == {(live.rank_number(slow), "n1")}
    assert (live.ranks(0), live.ranks(1)) == before


def test_ports_and_gpus_tell_their_faults(live: Live) -> None:
    """A hundred symbol errors on one node's port; the other node's goes down. A GPU is too hot and finds errors in its
    memory: those are told by a second target, for there is none here."""
    live.quiet()
    live.ports.set(0, "counters/symbol_error", "100")
    live.ports.set(1, "state", "1: DOWN")
    live.gpus.throttled, live.gpus.ecc = 1.0, 2.0
    try:
        live.fires(*(f"Laddertron{name}" for name in ("LinkErrors", "LinkDown", "GpuThrottled", "GpuEccErrors")))
        assert {found["node"] for found in live.labels("LaddertronLinkDown")} == {"n1"}
        assert {found["node"] for found in live.labels("LaddertronLinkErrors")} == {"n0"}
        live.look()
    finally:
        live.ports.set(1, "state", "4: ACTIVE")
        live.gpus.throttled = 0.0


def test_more_sequences_than_the_cache_holds(live: Live) -> None:
    """Sixteen long answers at once want some 200 blocks of 113: sequences are preempted over and over."""
    live.quiet("LaddertronKvPressure")
    with live.traffic(2, n=8, max_tokens=200, ignore_eos=True, **GREEDY):
        live.fires("LaddertronKvPressure", seconds=150.0)


def test_nan_logits_are_told_and_counted_as_errors(live: Live) -> None:
    """Prompts with the token whose embedding is NaN, among others: only they end in numerical_error."""
    live.quiet("LaddertronNonfiniteLogits", "LaddertronErrorRatio")
    with live.traffic(2, prompt=[5, 6, NAN_TOKEN, 7], **GREEDY):
        live.fires("LaddertronNonfiniteLogits", "LaddertronErrorRatio")
    assert ask(f"{DAEMON}/v1/completions", {"model": "demo", "prompt": "Once", "max_tokens": 4, **GREEDY})["choices"]
    assert ask(f"{DAEMON}/ready")


def test_another_token_on_one_rank(live: Live) -> None:
    """Rank 1 draws another id once: the step is given up and the job launched anew."""
    live.quiet("LaddertronDesync", *RELAUNCH)
    with live.fault("desync"), live.traffic(**GREEDY):
        live.fires("LaddertronDesync", beside=RELAUNCH)


def test_a_request_that_kills_is_given_up(live: Live) -> None:
    """A prompt at which rank 1 dies, sent by a client who waits: after some launches it alone is refused."""
    live.quiet("LaddertronQuarantine", *RELAUNCH)
    answers: list[int] = []

    def send() -> None:
        body = {"model": "demo", "prompt": [5, DEADLY_TOKEN], "max_tokens": 4, **GREEDY}
        try:
            ask(f"{DAEMON}/v1/completions", body, 180.0)
        except urllib.error.HTTPError as error:
            answers.append(error.code)

    client = threading.Thread(target=send)
    client.start()
    try:
        live.fires("LaddertronQuarantine", seconds=180.0, beside=RELAUNCH | {"LaddertronCrashLoop"})
    finally:
        client.join(180.0)
    assert len(answers) == 1
    assert answers[0] >= 500


def test_a_rank_is_killed_again_and_again(live: Live) -> None:
    """SIGKILL of a rank on the second node: the relaunch is told by its reason. As each launch's first rank is killed
    too, it is a crash loop. Left alone, the daemon serves again."""
    live.quiet(*RELAUNCH, "LaddertronCrashLoop")
    before = live.restarts("rank_lost")
    os.kill(live.ranks(1)[0], signal.SIGKILL)
    end = threading.Event()

    def strike() -> None:
        struck = 0
        while not end.wait(0.2) and struck < 3:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError, IndexError):
                os.kill(live.ranks(1)[0], signal.SIGKILL)
                struck += 1
                end.wait(2.0)  # for the launch to be given up: another blow would fall on the same

    live.fires("LaddertronRestarts", beside=RELAUNCH)
    striker = threading.Thread(target=strike)
    striker.start()
    try:
        live.fires("LaddertronCrashLoop", beside=RELAUNCH)
    finally:
        end.set()
        striker.join()
    assert live.restarts("rank_lost") > before


def test_a_stopped_rank(live: Live) -> None:
    """SIGSTOP: requests run and no step ends, until the rank is taken for lost."""
    live.quiet(*RELAUNCH, "LaddertronCrashLoop")
    before = live.restarts("silent")
    with live.traffic(**GREEDY):
        os.kill(live.ranks(1)[-1], signal.SIGSTOP)
        live.fires("LaddertronNoSteps", beside=RELAUNCH)
        wait_until("the relaunch", lambda: live.restarts("silent") > before, 60)


def test_the_link_is_cut(live: Live) -> None:
    """No frame passes between the nodes: the ranks beyond are lost for longer than a relaunch takes, and no replica
    takes requests until it is fixed."""
    live.quiet(*RELAUNCH)
    live.cluster.control.cut(0, 1)
    try:
        live.fires("LaddertronNotReady", "LaddertronRankDown", beside=RELAUNCH)
        live.look()
    finally:
        live.cluster.control.fix(0, 1)


def test_a_window_that_cannot_be_kept(live: Live) -> None:
    """A batch that wants thousands of answers within two minutes, beside another of tens of thousands."""
    live.quiet(*RELAUNCH, "LaddertronQueueTooOld")
    batch = send_batch(DAEMON, 20_000, "2m", **GREEDY)
    live.fires("LaddertronQueueTooOld")
    ask(f"{DAEMON}/v1/batches/{batch}/cancel", {})


def test_a_full_disk_holds_batches_up(live: Live) -> None:
    """Half a gigabyte is left: less than batches want. The queue stands still until there is room again."""
    live.quiet("LaddertronDiskLow", "LaddertronQueueStuck")
    live.room("500m")
    try:
        live.fires("LaddertronDiskLow", "LaddertronQueueStuck", seconds=120.0)
    finally:
        live.room("40g")


def test_a_slow_store_and_a_broken_one(live: Live) -> None:
    """Every fsync takes 0.7 s; then none works: the store takes no more writes, until they work again."""
    live.quiet("LaddertronStoreSlow", "LaddertronStoreReadOnly", "LaddertronQueueStuck")
    with live.fault("slow"):
        live.fires("LaddertronStoreSlow", beside=frozenset({"LaddertronQueueStuck"}))
    with live.fault("broken"):
        live.fires("LaddertronStoreReadOnly", beside=frozenset({"LaddertronNotReady", "LaddertronQueueStuck"}))
    live.quiet("LaddertronStoreReadOnly")


def test_a_stored_byte_changes(live: Live) -> None:
    """The first byte of an uploaded file changes on the disk: the file is refused when it is read."""
    live.quiet("LaddertronStoredDataDamaged")
    name = ask(f"{DAEMON}/v1/batches/{send_batch(DAEMON, 1, **GREEDY)}")["input_file_id"]
    path = live.folder / "data" / "files" / name
    done = live.cluster.run(0, ["sh", "-c", f"printf X | dd of={path} bs=1 conv=notrunc"])
    assert done.returncode == 0, done.stderr
    with pytest.raises(urllib.error.HTTPError, match="500"):
        ask(f"{DAEMON}/v1/files/{name}/content")
    live.fires("LaddertronStoredDataDamaged", seconds=120.0)


def test_the_clock_jumps(live: Live) -> None:
    """Two hours ahead, then back."""
    live.quiet("LaddertronClockJump")
    live.world.step_clock(7200)
    live.fires("LaddertronClockJump", seconds=120.0)
    live.world.step_clock(-7200)
    live.quiet("LaddertronClockJump")


def test_the_daemon_is_killed(live: Live) -> None:
    """SIGKILL: nothing answers the scrape. By then every alert there is has fired, and every panel had a series."""
    live.quiet("LaddertronDaemonDown")
    live.look()
    live.daemon.send_signal(signal.SIGKILL)
    os.killpg(live.daemon.pid, signal.SIGKILL)
    live.fires("LaddertronDaemonDown", beside=RELAUNCH)
    assert set(live.fired) == ALERTS

    assert {text for _, text in panel_queries()} - live.seen == set()
