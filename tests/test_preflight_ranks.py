"""What a rank of preflight does before and after the measuring: whom it blames, how it ends. No other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from laddertron.engine.config_schema import Deployment, Engine, Model, Parallel
from laddertron.launchers import preflight
from laddertron.launchers.commands import preflight as door
from laddertron.topology.identity import Identity, IdentityError

SECOND = Identity(2, 1, 0, 1, "n1", "openmpi")


class Gathered:
    """Rank 1 of two; rank 0 says what this one says, changed."""

    rank, size = 1, 2

    def __init__(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.change = change

    def all_gather(self, payload: bytes) -> list[bytes]:
        said = json.loads(payload)
        return [json.dumps({**said, "rank": 0, "hostname": "n0", **self.change(said)}).encode(), payload]

    def close(self) -> None:
        pass


class Exited(BaseException):
    """os._exit was called: its code."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr("os._exit", leave)


def deployment(size: int = 2) -> Deployment:
    return Deployment(
        model=Model(path="nowhere"), parallel=Parallel(tensor_parallel_size=size), engine=Engine(device="cpu")
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda said: {"config": "c0ffee"}, "on the others c0ffee: start all ranks with one file"),
        (lambda said: {"versions": {**said["versions"], "torch": "1.0"}}, "on the others 1.0: install one torch"),
    ],
    ids=["config", "torch"],
)
def test_other_ranks_are_judged_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]], words: str
) -> None:
    """Even where the file also has another size of the job in it: what differs is named with rank and host, and nothing
    was connected."""
    monkeypatch.setattr(preflight, "bootstrap_for", lambda _: Gathered(change))
    monkeypatch.setattr(preflight, "connect", None)
    with pytest.raises(preflight.UnlikeRanks, match=r"^error: rank 1 on n1: ") as caught:
        preflight.run_preflight(deployment(4), SECOND)
    assert words in str(caught.value)


def test_ranks_alike_and_too_few_each_say_so(
    monkeypatch: pytest.MonkeyPatch, exits: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file on all, and it wants four: every rank says that with its host, and ends with 2."""
    monkeypatch.setattr(preflight, "bootstrap_for", lambda _: Gathered(lambda said: {}))
    with pytest.raises(IdentityError):
        preflight.run_preflight(deployment(4), SECOND)
    with pytest.raises(Exited, match="2"):
        door.be_rank(deployment(4), SECOND, None)
    assert "error: rank 1 on n1: openmpi started 2 ranks, tensor_parallel_size=4 needs 4" in capsys.readouterr().err


def test_a_file_that_one_rank_cannot_read_is_named_with_the_rank(
    monkeypatch: pytest.MonkeyPatch, exits: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(door, "identify", lambda: SECOND)
    with pytest.raises(Exited, match="2"):
        click.Context(door.command).invoke(door.command, config=str(tmp_path / "gone.yaml"), save=None, overrides=())
    assert "error: rank 1 on n1: " in (said := capsys.readouterr().err)
    assert "gone.yaml" in said
