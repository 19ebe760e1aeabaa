"""What a rank logs as a warning is seen by whoever launched it, at its level, with rank and node, once."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from job_tools import fake_mpirun, story
from laddertron.launchers.job.rank_logs import REMEMBERED, RankFormatter, RankWords
from laddertron.launchers.rank import load_tuning as tuned
from laddertron.topology.cost.cost import Shape
from laddertron.topology.cost.fit import Point, fit
from laddertron.topology.cost.tuning import make
from laddertron.topology.hardware.discover import discover
from laddertron.topology.hardware.fabric import Fabric
from waiting import HANG_S

ROOT = Path(__file__).parents[3]


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What comes out of ranks, from INFO on."""
    with caplog.at_level(logging.INFO, logger="laddertron.ranks"):
        yield caplog


def written(level: int, text: str, rank: int = 3, node: str = "n1", fault: BaseException | None = None) -> list[str]:
    """The lines of one record."""
    traceback = None if fault is None else (type(fault), fault, fault.__traceback__)
    record = logging.LogRecord("laddertron.launchers.rank.load_tuning", level, __file__, 1, "%s", (text,), traceback)
    return RankFormatter(rank, node).format(record).split("\n")


def loud(records: list[logging.LogRecord]) -> list[tuple[str, str]]:
    found = [r for r in records if r.name == "laddertron.ranks" and r.levelno >= logging.WARNING]
    return [(r.levelname, r.getMessage()) for r in found]


def test_what_is_written_is_read_again(heard: pytest.LogCaptureFixture) -> None:
    """Every line of a record has its head, a traceback's too; a launcher's tag is passed over; other words are INFO."""

    def read(*lines: str) -> list[tuple[int, str]]:
        heard.clear()
        words = RankWords()
        for line in lines:
            words.take(line, 0)
        return [(record.levelno, record.getMessage()) for record in heard.records]

    for level in (logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        said = [(level, "rank 3 on n1: no: file"), (level, "rank 3 on n1: nor link")]
        assert read(*written(level, "no: file\nnor link")) == said
    try:
        raise ValueError("made for another fabric")
    except ValueError as fault:
        lines = read(*written(logging.ERROR, "not used", fault=fault))
    assert {level for level, _ in lines} == {logging.ERROR}
    assert lines[-1] == (logging.ERROR, "rank 3 on n1: ValueError: made for another fabric")
    (line,) = written(logging.WARNING, "slow")
    assert read(f"[1,3]<stderr>: {line}") == [(logging.WARNING, "rank 3 on n1: slow")]
    other = "mpirun: WARNING rank 3 on n1 x: slow"
    assert read(other) == [(logging.INFO, other)]


def test_a_warning_comes_through_once(heard: pytest.LogCaptureFixture) -> None:
    """Of four ranks that say the same the first is quoted; the others' lines, INFO and printed words stay at INFO."""
    words = RankWords()
    for rank in range(4):
        for line in written(logging.WARNING, "tuning file not used", rank):
            words.take(line, 1)
    for line in (*written(logging.INFO, "ready"), "printed WARNING", *written(logging.ERROR, "lost")):
        words.take(line, 1)
    assert loud(heard.records) == [("WARNING", "rank 0 on n1: tuning file not used"), ("ERROR", "rank 3 on n1: lost")]
    assert [r.levelname for r in heard.records] == ["WARNING", *["INFO"] * 5, "ERROR"]
    assert heard.records[0].__dict__.items() >= {"rank": 0, "node": "n1", "replica": 1}.items()


def test_only_so_much_is_remembered(heard: pytest.LogCaptureFixture) -> None:
    """A warning with another figure every time does not grow without end; the one said again and again stays known."""
    words = RankWords()
    for number in range(2 * REMEMBERED):
        for line in (*written(logging.WARNING, "always"), *written(logging.WARNING, f"took {number} s")):
            words.take(line, 0)
    assert len(loud(heard.records)) == 1 + 2 * REMEMBERED
    for line in written(logging.WARNING, "took 0 s"):
        words.take(line, 0)
    assert len(loud(heard.records)) == 2 + 2 * REMEMBERED


def test_a_rank_warns_once_however_often_it_is_launched(heard: pytest.LogCaptureFixture) -> None:
    """Both ranks of two replicas warn of the same; a rank is killed, its replica's ranks start and warn again: one
    warning, the rest at INFO."""
    config, words = {"warns": {"0": "untuned prices", "1": "untuned prices"}}, RankWords()

    async def run() -> None:
        async with (
            asyncio.timeout(2 * HANG_S),
            story(fake_mpirun(), config, words=words) as first,
            story(fake_mpirun(), config, words=words, replica=1) as second,
        ):
            await first.phase("ready")
            await second.phase("ready")
            os.kill(await first.pid(1), signal.SIGKILL)
            await first.listener.until(lambda: first.listener.phases.count("ready") == 2)

    asyncio.run(run())
    ((level, text),) = loud(heard.records)
    assert (level, text.partition(" ")[0], text[6:]) == ("WARNING", "rank", " on n0: untuned prices")
    assert len([r for r in heard.records if r.name == "laddertron.ranks" and "untuned" in r.getMessage()]) == 6


def test_run_names_a_tuning_file_of_another_fabric(tmp_path: Path) -> None:
    """Two real ranks: the run is done, and on its terminal rank 0 says, once, why the file was not used."""
    fabric, shape = Fabric((discover(None).node,)), Shape(1, 2)
    points = [Point("exchange", n, 1e-5 + n * 1e-9, shape) for n in (1 << 10, 4 << 10, 16 << 10, 64 << 10)]
    tuning = make(fabric, shape, fit(points, "native"), tuned.versions())
    replace(tuning, fabric="0" * 32).save(tmp_path / "tuning.json")
    prompts = tmp_path / "in.jsonl"
    prompts.write_text((ROOT / "configs" / "demo" / "prompts.jsonl").read_text().splitlines(True)[0])
    keys = {
        "parallel.backend": "native",
        "parallel.collective": "auto",
        "parallel.emulated_delay": "0s",
        "parallel.tuning_file": tmp_path / "tuning.json",
        "daemon.data_dir": tmp_path / "data",
    }
    words = ["run", ROOT / "configs" / "demo.yaml", "-i", prompts, "-o", tmp_path / "out.jsonl"]
    words += [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "laddertron.launchers.cli", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.jsonl").read_text())["error"] is None
    said = " ".join(done.stderr.split())  # the terminal's lines are folded
    assert f"WARNING rank 0 on {socket.gethostname()}: tuning file" in said
    assert said.count("made for another fabric") == 1
    assert "WARNING rank 1" not in said
