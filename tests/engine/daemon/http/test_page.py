"""The daemon's page: what it is made from, to whom it says it, and how a browser draws it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import select
import shutil
import socket
import sqlite3
import subprocess
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon_tools import NAME, deployment, line, served, submit, wait_batch
from laddertron.engine.daemon.http.page import MAX_OF_KEY, MAX_VIEWERS, Overview, page_of_daemon
from laddertron.engine.daemon.keys import add_key, revoke_key
from laddertron.engine.daemon.overview import (
    HISTORY_POINTS,
    RECENT_SECONDS,
    SAMPLE_SECONDS,
    Sample,
    Samples,
    engine_view,
    history,
    take_sample,
)
from laddertron.engine.daemon.store.records import error_codes
from laddertron.engine.daemon.store.schema import Rows, make_tables
from laddertron.engine.job import JobState
from laddertron.engine.metrics.observer import Figures, Observer
from prometheus_client import CollectorRegistry
from test_probes import get
from tiny_text import write_folder
from waiting import HANG_S, until

RANK = ("0", "1", "node-b")
FIGURES: Figures = {
    "generation_tokens_total": {("0",): 500.0},
    "collective_seconds_total": {
        (*RANK, "all_reduce", "net", "hidden"): 6.0,
        (*RANK, "all_reduce", "net", "exposed"): 2.0,
        ("0", "0", "node-a", "gather", "net", "exposed"): 1.0,
    },
    "collective_bytes_total": {(*RANK, "all_reduce", "net"): 4000.0},
    "num_requests_running": {("0",): 3.0},
    "kv_cache_usage_ratio": {("0",): 0.25},
    "rank_up": {RANK: 1.0, ("0", "0", "node-a"): 0.0, ("1", "0", "node-c"): 1.0},
    "rank_resident_memory_bytes": {RANK: 1e9},
    "last_step_timestamp_seconds": {RANK: 90.0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


def test_rates_are_of_the_last_seconds_and_shares_of_the_hour_too() -> None:
    newest = take_sample(FIGURES, 100.0)
    recent = Sample(90.0, {"0": 400.0}, {"net": (5.0, 2.5, 3000.0)})
    oldest = Sample(50.0, {}, {})
    view = engine_view(FIGURES, [JobState("ready")], newest, recent, oldest, 100.0)
    assert (view["tokens_per_second"], view["running"], view["kv_use"]) == (10.0, 3, 0.25)
    want = {"link": "net", "bytes_per_second": 100.0, "hidden": 1.0 / 1.5, "hidden_hour": 6.0 / 9.0}
    assert view["links"] == [want]
    ranks = view["replicas"][0]["ranks"]
    assert [(rank["rank"], rank["up"], rank["step_age"]) for rank in ranks] == [(0, False, None), (1, True, 10.0)]
    fresh = engine_view(FIGURES, [JobState("ready")], newest, newest, newest, 100.0)
    assert (fresh["tokens_per_second"], fresh["links"][0]["bytes_per_second"]) == (0.0, 0.0)
    assert fresh["links"][0]["hidden"] is None


def test_an_hour_of_samples_is_kept() -> None:
    samples, looked = Samples(), []

    def figures() -> dict[str, Any]:
        looked.append(1)
        return {}

    assert samples.before(7.0) == (Sample(7.0, {}, {}),) * 2
    for second in range(5000):
        samples.take(figures, float(second))
    assert len(looked) == 5000 / SAMPLE_SECONDS
    recent, oldest = samples.before(5000.0)
    assert (recent.at, oldest.at) == (5000.0 - RECENT_SECONDS, 1400.0)


def test_causes_are_counted() -> None:
    def refused(code: str) -> str:
        return json.dumps({"error": None, "response": {"body": {"error": {"code": code}}}})

    lost = json.dumps({"error": {"code": "batch_expired"}, "response": None})
    db = sqlite3.connect(":memory:")
    make_tables(db)
    rows = Rows(db)
    for number, out in enumerate((refused("a"), lost, refused("b"), refused("b"), refused("late"))):
        row = {"batch_id": "1", "custom_id": str(number), "number": number, "epoch": 0, "ok": 0, "line": out}
        rows.insert("results", row)
    assert list(error_codes(db, "1", 4).items()) == [("b", 2), ("a", 1), ("batch_expired", 1)]


def test_what_it_shows_and_to_whom(folder: Path, tmp_path: Path) -> None:
    """The page itself is open, small and bound by a policy; figures need a client's key and show its own batches."""
    keys = tmp_path / "keys.json"
    alice, bob = add_key(keys, "alice")[1], add_key(keys, "bob")[1]
    observer = Observer(CollectorRegistry())
    with served(deployment(tmp_path), folder, keys=keys, observer=observer) as daemon:
        client = daemon.client(alice)
        done = wait_batch(client, submit(client, line("a") + line("b", model="<script>")).id)
        status, text = get(daemon, "/")
        assert (status, len(text) < 100_000, "src=" in text) == (200, True, False)
        assert get(daemon, "/v1/overview")[0] == 401
        status, body = get(daemon, "/v1/overview", alice)
        view = json.loads(body)
        assert (status, view["model"], view["status"]) == (200, NAME, "ready")
        counts = {"total": 2, "completed": 1, "failed": 1, "errors": {"model_not_found": 1}}
        [batch] = view["batches"]
        shown = {"id": done.id, "status": "completed", **counts, "failure": None, "unanswered": 0}
        assert batch | shown == batch
        assert json.loads(get(daemon, "/v1/overview", bob)[1])["batches"] == []


def test_lines_that_a_cancelled_batch_left_unanswered_are_not_shown_as_done(folder: Path, tmp_path: Path) -> None:
    """And its name, its age, and why batches pause."""
    with served(deployment(tmp_path), folder) as daemon:
        client = daemon.client()
        daemon.on_loop(daemon.jobs[0].hold)
        lines = line("bad", model="other") + b"".join(line(f"r{n}") for n in range(30))
        batch = submit(client, lines, metadata={"name": "night"})
        until(lambda: daemon.jobs[0].submitted)
        client.batches.cancel(batch.id)
        daemon.on_loop(daemon.jobs[0].release)
        wait_batch(client, batch.id)
        view = json.loads(get(daemon, "/v1/overview")[1])
        [shown] = view["batches"]
        assert (shown["name"], shown["status"], view["batches_paused"]) == ("night", "cancelled", "")
        assert shown["completed"] + shown["failed"] == shown["total"] == 31
        assert shown["unanswered"] == 31 - shown["completed"] - shown["errors"].get("model_not_found", 0) > 0
        assert shown["created_at"] <= view["now"]


def test_the_hours_curve_has_its_restarts() -> None:
    samples = [Sample(5.0 * n, {"0": 10.0 * n}, {}, float(n > 700)) for n in range(720)]
    points = history(samples, samples[-1].at)
    assert len(points) <= HISTORY_POINTS
    assert {point["tokens_per_second"] for point in points} == {2.0}
    assert [point["ago"] for point in points if point["restarted"]] == [samples[-1].at - 5.0 * 702]


def test_why_a_batch_failed_is_shown(folder: Path, tmp_path: Path) -> None:
    """The first of its file's errors in the overview, and on the page, which draws all of an overview's keys."""
    with served(deployment(tmp_path), folder) as daemon:
        client = daemon.client()
        wait_batch(client, submit(client, line("a") + b"{}\n[]\n").id)
        wait_batch(client, submit(client, b"[]\n").id)
        one, two = json.loads(get(daemon, "/v1/overview")[1])["batches"]
        assert one["failure"] == "line 1: a line must be a JSON object"
        assert two["failure"].startswith("line 2: ")
        assert two["failure"].endswith(" (and 1 more)")


def test_watchers_are_bounded_and_end_with_the_daemon(folder: Path, tmp_path: Path) -> None:
    with served(deployment(tmp_path), folder) as daemon:
        streams = []
        for _ in range(MAX_VIEWERS):
            stream = urllib.request.urlopen(f"{daemon.url}/v1/overview?stream=true", timeout=HANG_S)
            streams.append(stream)
            assert json.loads(stream.readline().removeprefix(b"data: "))["model"] == NAME
        status, body = get(daemon, "/v1/overview?stream=true")
        assert (status, "pages are open" in body) == (503, True)
        streams.pop().close()
        until(lambda: get(daemon, "/v1/overview")[0] == 200)
        assert daemon.stop() == 0
        for stream in streams:
            stream.read()
            stream.close()


def test_a_key_has_few_places_and_loses_them_when_it_is_revoked(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    alice, bob = add_key(keys, "alice")[1], add_key(keys, "bob")[1]
    with served(deployment(tmp_path), folder, keys=keys) as daemon, contextlib.ExitStack() as stack:

        def watch(key: str) -> Any:
            headers = {"authorization": f"Bearer {key}"}
            request = urllib.request.Request(f"{daemon.url}/v1/overview?stream=true", headers=headers)
            stream = stack.enter_context(urllib.request.urlopen(request, timeout=HANG_S))
            assert json.loads(stream.readline().removeprefix(b"data: "))["model"] == NAME
            return stream

        streams = [watch(alice) for _ in range(MAX_OF_KEY)]
        assert get(daemon, "/v1/overview?stream=true", alice)[0] == 503
        other = watch(bob)
        revoke_key(keys, "alice")
        for stream in streams:
            stream.read()
        assert other.readline() == b"\n"
        assert other.readline().startswith(b"data: ")


def test_watchers_that_come_at_once_are_counted_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty of one key, before the first view is made: four are admitted, and their places are free again later."""
    keys = tmp_path / "keys.json"
    alice = add_key(keys, "alice")[1]
    go, view = threading.Event(), Overview.view

    async def late(self: Overview, owner: str) -> dict[str, Any]:
        while not go.is_set():
            await asyncio.sleep(0.01)
        return await view(self, owner)

    monkeypatch.setattr(Overview, "view", late)
    with served(deployment(tmp_path), folder, keys=keys) as daemon:
        head = f"GET /v1/overview?stream=true HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {alice}\r\n\r\n"
        with contextlib.ExitStack() as stack:

            def opened() -> socket.socket:
                one = stack.enter_context(socket.create_connection(("127.0.0.1", daemon.port), HANG_S))
                one.sendall(head.encode())
                return one

            made = [opened() for _ in range(30)]
            until(lambda: len(select.select(made, [], [], 0)[0]) >= 30 - MAX_OF_KEY)
            go.set()
            firsts = [one.recv(1 << 16).split(b" ", 2)[1] for one in made]
            assert (firsts.count(b"200"), firsts.count(b"503")) == (MAX_OF_KEY, 30 - MAX_OF_KEY)
            for one in made:
                one.close()
            until(lambda: opened().recv(1 << 16).split(b" ", 2)[1] == b"200")


def test_the_policy_covers_the_page_whole() -> None:
    """One style, one script, both by their digest; no handler or style in an element would run."""
    body, policy = page_of_daemon()
    text = body.decode()
    assert policy.count("sha256-") == 2
    assert "unsafe" not in policy
    assert not re.search(r"<[^>]+ (on\w+|style)=", text)
    assert "innerHTML" not in text
    assert "http://" not in text
    assert "https://" not in text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_draws_it(folder: Path, tmp_path: Path) -> None:
    """In headless Chromium: figures arrive, and a name that would be markup stays text."""
    config = deployment(tmp_path)
    config = replace(config, model=replace(config.model, served_model_name="<img src=x onerror=alert(1)>"))
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    words += ["--virtual-time-budget=3000", "--dump-dom"]  # virtual time does not wait for the answer: asked again
    with served(config, folder, observer=Observer(CollectorRegistry())) as daemon:

        def drawn() -> bool:
            done = subprocess.run(
                [*words, f"{daemon.url}/"], capture_output=True, text=True, timeout=HANG_S, check=True
            )
            shown = re.search(r'id="status"[^>]*class="good"[^>]*>ready<', done.stdout)
            return shown is not None and "&lt;img src=x onerror=alert(1)&gt;" in done.stdout

        until(drawn)
