"""Connections with a request are shared fairly between keys: none takes them all, and those of a revoked key end."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon_tools import LIMITS, NAME, Served, deployment, line, lines_of, read_keys_at_once, served, submit, wait_batch
from fake_job import FakeJob
from laddertron.engine.config.schema import LimitsConfig
from laddertron.engine.daemon import service
from laddertron.engine.daemon.http.connections import spare
from laddertron.engine.daemon.http.exchanges import Exchanges, Place
from laddertron.engine.daemon.http.guard import Guard
from laddertron.engine.daemon.keys import Key, KeyRing, add_key, read_keys, revoke_key, rotate_key
from laddertron.engine.daemon.store import records
from laddertron.engine.openai.errors import ApiError
from test_connections import ask
from test_uploads_in_flight import begun
from tiny_text import write_folder
from waiting import FOR_EVER_S, HANG_S, until

PATIENT = replace(LimitsConfig(), header_timeout=FOR_EVER_S, body_timeout=FOR_EVER_S)
FEW = replace(PATIENT, max_connections=32, max_connections_per_address=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    read_keys_at_once(monkeypatch)
    monkeypatch.setattr(service, "_WATCH_SECONDS", 0.02)
    return tmp_path / "keys.json"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until the daemon has looked for revoked keys again."""
    count, end = [0], Guard.end_revoked

    def counted(self: Guard, keys: KeyRing) -> None:
        end(self, keys)
        count[0] += 1

    def wait() -> None:
        before = count[0]
        until(lambda: count[0] > before + 2)

    monkeypatch.setattr(Guard, "end_revoked", counted)
    return wait


@contextlib.contextmanager
def sent(port: int, data: bytes, count: int, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """Connections from `source` that send this and stay open."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            address = ("127.0.0.1", port)
            made.append(stack.enter_context(socket.create_connection(address, HANG_S, (source, 0))))
            with contextlib.suppress(ConnectionError):
                made[-1].sendall(data)
        yield made


def in_flight(daemon: Served) -> int:
    return sum(daemon.daemon.services.usage.in_progress.values())


@pytest.mark.parametrize("limits", [FEW, replace(PATIENT, max_connections=64, max_connections_per_address=16)])
def test_one_key_does_not_take_every_connection(folder: Path, tmp_path: Path, keys: Path, limits: LimitsConfig) -> None:
    """As many slow uploads as there are connections, from two addresses; and as many of a second key: a third is
    served, and so is /health, from all three addresses."""
    alice, bob, carol = (add_key(keys, name)[1] for name in ("alice", "bob", "carol"))
    config = deployment(tmp_path, limits, api_key_file=str(keys))
    most = limits.max_connections
    with served(config, folder, keys=keys) as daemon, contextlib.ExitStack() as stack:
        for key in (alice, bob):
            for source in ("127.0.0.1", "127.0.0.2"):
                stack.enter_context(sent(daemon.port, begun(key, declared=True, size=1000), most, source))
        for source in ("127.0.0.1", "127.0.0.3"):
            head = "GET {} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer {}\r\n\r\n"

            def status(path: str, key: str, source: str = source, head: str = head) -> bytes:
                request = head.format(path, key).encode()
                with contextlib.suppress(ConnectionError), sent(daemon.port, request, 1, source) as made:
                    return made[0].recv(1 << 16)[9:12]
                return b""

            until(lambda status=status: status("/health", "") == b"200")  # type: ignore[misc]
            until(lambda status=status: status("/v1/models", carol) == b"200")  # type: ignore[misc]
        say = daemon.client(carol, max_retries=9).completions.create
        for _ in range(5):
            assert say(model=NAME, prompt="x", max_tokens=2).choices[0].finish_reason


def test_without_keys_an_address_does_not_take_every_connection(folder: Path, tmp_path: Path) -> None:
    with served(deployment(tmp_path, FEW), folder) as daemon, contextlib.ExitStack() as stack:
        for source in ("127.0.0.1", "127.0.0.2"):
            stack.enter_context(sent(daemon.port, begun("", declared=True, size=1000), FEW.max_connections, source))

        def status(path: str, source: str) -> bytes:
            request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
            with contextlib.suppress(ConnectionError), sent(daemon.port, request, 1, source) as made:
                return made[0].recv(1 << 16)[9:12]
            return b""

        until(lambda: status("/health", "127.0.0.1") == b"200")
        until(lambda: status("/v1/models", "127.0.0.3") == b"200")


def test_a_key_has_half_of_the_connections(folder: Path, tmp_path: Path, keys: Path) -> None:
    """Unless it has another limit; without keys nobody has one."""
    alice = add_key(keys, "alice")[1]
    config = deployment(tmp_path, FEW, api_key_file=str(keys))
    with (
        served(config, folder, keys=keys) as daemon,
        sent(daemon.port, begun(alice, declared=True, size=1000), FEW.max_connections // 2),
    ):
        until(lambda: in_flight(daemon) == FEW.max_connections // 2)
        head = (
            f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {alice}\r\ncontent-length: 9\r\n\r\n"
        )
        answer = daemon.raw(head.encode())
        assert answer.startswith(b"HTTP/1.1 429")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["param"] == "concurrent_requests"
        assert ask(daemon.port, "/v1/files", key=alice)[0] == 200


def stream(daemon: Served, key: str) -> socket.socket:
    data = json.dumps({"model": NAME, "prompt": "x", "stream": True, "max_tokens": 400, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
    made = socket.create_connection(("127.0.0.1", daemon.port), timeout=HANG_S)
    made.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return made


def read_whole(made: socket.socket) -> bytes:
    out = b""
    while not (out.endswith((b"0\r\n\r\n", b"}}"))) and (part := made.recv(1 << 16)):
        out += part
    made.close()
    return out


@pytest.mark.parametrize("how", ["revoked", "rotated", "rotated with time left", "removed"])
def test_the_streams_of_a_secret_that_no_longer_works_end(
    folder: Path, tmp_path: Path, keys: Path, looks: Callable[[], None], how: str
) -> None:
    """With an authentication error as their last event; a request without an answer is 401, an upload ends; another
    key's stream, and one with the new secret, go on."""
    alice, bob = (add_key(keys, name)[1] for name in ("alice", "bob"))
    config = deployment(tmp_path, PATIENT, api_key_file=str(keys))
    with served(config, folder, lambda: [FakeJob(LIMITS)], keys=keys) as daemon:
        job: FakeJob = daemon.jobs[0]
        ring: KeyRing = daemon.daemon.parts.keys  # type: ignore[assignment]
        mine, other = stream(daemon, alice), stream(daemon, bob)
        first = mine.recv(1 << 16)
        assert first.startswith(b"HTTP/1.1 200")
        until(lambda: bool(job.submitted))
        daemon.on_loop(job.hold)
        waiting = stream(daemon, alice)
        until(lambda: len(job.submitted) == 3)
        upload = socket.create_connection(("127.0.0.1", daemon.port), timeout=HANG_S)
        upload.sendall(begun(alice, declared=False, size=1000))
        until(lambda: in_flight(daemon) == 4)
        if how == "revoked":
            revoke_key(keys, "alice")
        elif how == "removed":
            value = json.loads(keys.read_text())
            value["keys"] = [entry for entry in value["keys"] if entry["name"] != "alice"]
            keys.write_text(json.dumps(value))
        else:
            new = rotate_key(keys, "alice", 0 if how == "rotated" else 3600)[1]
            if how == "rotated with time left":
                looks()
                assert in_flight(daemon) == 4
                old_until = read_keys(keys)[0].old_until
                ring.wall = lambda: old_until + 1
            newer = stream(daemon, new)
            until(lambda: len(job.submitted) == 4)
        for ended in (mine, waiting):
            rest = read_whole(ended)
            assert b"invalid_api_key" in rest
            assert (b"[DONE]" in rest) == (ended is mine)
        assert read_whole(upload).startswith(b"HTTP/1.1 401")
        daemon.on_loop(job.release)
        assert b"invalid_api_key" not in read_whole(other)
        if how.startswith("rotated"):
            assert b"invalid_api_key" not in read_whole(newer)
        until(lambda: in_flight(daemon) == 0)
        assert not daemon.daemon.dispatcher.in_flight


def test_streams_outlive_a_key_file_that_cannot_be_read_for_a_while(
    folder: Path, tmp_path: Path, keys: Path, looks: Callable[[], None]
) -> None:
    alice = add_key(keys, "alice")[1]
    with served(deployment(tmp_path, api_key_file=str(keys)), folder, keys=keys) as daemon:
        job: FakeJob = daemon.jobs[0]
        mine = stream(daemon, alice)
        until(lambda: bool(job.submitted))
        good = keys.read_bytes()
        keys.write_bytes(b"{")
        until(lambda: ask(daemon.port, "/v1/models", key=alice)[0] == 401)
        looks()
        keys.write_bytes(good)
        until(lambda: ask(daemon.port, "/v1/models", key=alice)[0] == 200)
        assert b"invalid_api_key" not in read_whole(mine)


def test_the_batches_of_a_revoked_key_are_cancelled(folder: Path, tmp_path: Path, keys: Path) -> None:
    """Running, and open when the next daemon starts; what is finished stays; another key's goes on."""
    alice, bob = (add_key(keys, name)[1] for name in ("alice", "bob"))
    config = deployment(tmp_path, api_key_file=str(keys))
    many = b"".join(line(f"r{n}") for n in range(40))
    with served(config, folder, lambda: [FakeJob(LIMITS, hold=True)], keys=keys) as daemon:
        job: FakeJob = daemon.jobs[0]
        mine, other = submit(daemon.client(alice), many), submit(daemon.client(bob), many)
        until(lambda: len(job.submitted) > 10)
        revoke_key(keys, "alice")
        store = daemon.daemon.services.store

        def status(batch_id: str) -> Any:
            batch: Any = daemon.on_loop(store.read(lambda db: records.batch_of(db, batch_id)))
            return batch

        until(lambda: status(mine.id).status == "cancelled")
        assert daemon.client(bob).batches.retrieve(other.id).status == "in_progress"
        daemon.on_loop(job.release)
        done = wait_batch(daemon.client(bob), other.id)
        assert len(lines_of(daemon.client(bob), done.output_file_id)) == 40
        assert status(mine.id).failed == 40


class One:
    def __init__(self, waiting: bool = False) -> None:
        self.waiting, self.error, self.key, self.secret = waiting, "", None, ""

    key: Key | None

    def end(self, error: ApiError) -> None:
        self.error = error.message


def test_the_owner_with_the_most_gives_way() -> None:
    most = 32
    exchanges, made = Exchanges(most, 1000), list[tuple[str, One]]()

    def enter(owner: str, waiting: bool = False) -> One:
        one = One(waiting)
        exchanges.enter(one, Place(owner, owner))
        made.append((owner, one))
        return one

    cap = most - spare(most)
    for number in range(cap):
        enter("a", waiting=number == 7)
    with pytest.raises(ApiError, match=f"{cap} of a"):
        enter("a")
    assert len(list(exchanges)) == cap
    enter("b")
    assert made[7][1].error  # the one that waited for its body
    enter("b")
    assert made[cap - 1][1].error  # the newest
    while True:
        try:
            enter("b")
        except ApiError:
            break
    open_ones = [owner for owner, one in made if not one.error]
    assert len(open_ones) == cap
    assert abs(open_ones.count("a") - open_ones.count("b")) <= 1
    enter("c")
    assert len(list(exchanges)) == cap


def test_an_address_is_shared_by_its_keys() -> None:
    exchanges = Exchanges(1000, 4)
    made = [One() for _ in range(4)]
    for one in made:
        exchanges.enter(one, Place("a", "1.1.1.1"))
    exchanges.enter(One(), Place("a", "2.2.2.2"))
    exchanges.enter(One(), Place("b", "1.1.1.1"))
    assert [bool(one.error) for one in made] == [False, False, False, True]
    with pytest.raises(ApiError):
        exchanges.enter(One(), Place("a", "1.1.1.1"))
    for left in list(exchanges):
        exchanges.leave(left)
    assert not exchanges.addresses
