"""A run's journal: a changed byte of an answer is noticed and the line computed again; it is no copy of the answers."""

from __future__ import annotations

import fcntl
import json
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_job import FakeJob
from laddertron.engine.run.journal import (
    ANSWERS,
    ERRORS,
    Journal,
    LineCheck,
    Marks,
    damaged_lines,
    file_of,
    journal_of,
    read_journal,
)
from laddertron.engine.run.past import RunFileError
from laddertron.engine.text.tokenizer import TextModel
from laddertron.launchers.cli.__main__ import main
from test_batchrun import LIMITS, Bench, completion, plain
from tiny_text import write_folder

COUNT = 12


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.from_folder(write_folder(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def bench(tmp_path: Path, text: TextModel) -> Bench:
    """After a run of COUNT lines, one of which fails for good."""
    bench = Bench(tmp_path, text)
    bench.write(*[completion(f"t{i}", f"go {i}") for i in range(COUNT)], completion("nan", [7, 7]))
    assert bench.run(lambda: FakeJob(LIMITS, fail=frozenset({7}))).ok == COUNT
    return bench


def choices(bench: Bench) -> dict[str, Any]:
    return {name: entry["response"]["body"]["choices"] for name, entry in bench.answers().items()}


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def test_a_bit_of_an_answer_that_flips_is_noticed(bench: Bench, run_seed: int) -> None:
    """Anywhere in the output, line breaks too: resumed, every answer is what it was, each once; the bytes are kept."""
    rng = random.Random(run_seed)
    want, whole, aside = choices(bench), bench.output.read_bytes(), bench.output.with_name("out.outdated.jsonl")
    log = journal_of(bench.output)
    kept = log.read_bytes()
    breaks = [at for at, byte in enumerate(whole) if byte == 10]
    for round_ in range(40):
        aside.unlink(missing_ok=True)
        log.write_bytes(kept)
        bench.output.write_bytes(whole)
        if round_ < 4:
            data = bytearray(whole)
            data[rng.choice(breaks[:-1])] ^= 1 << rng.randrange(8)
            bench.output.write_bytes(data)
        else:
            flip(bench.output, rng)
        assert damaged_lines(bench.output)[1]
        summary = bench.run(plain, resume=True)
        assert (summary.requests, summary.reason) == (COUNT + 1, None)
        assert summary.ok in (1, 2), (run_seed, round_)
        assert choices(bench) == want, (run_seed, round_)
        assert damaged_lines(bench.output) == (COUNT + 1, [])
        assert aside.exists() or bench.output.read_bytes()[: len(whole) - 200] == whole[: len(whole) - 200]


def test_a_bit_of_an_error_line_or_of_the_journal_that_flips(bench: Bench, run_seed: int) -> None:
    rng = random.Random(run_seed)
    want, log = choices(bench), journal_of(bench.output)
    kept, errors, whole = log.read_bytes(), bench.errors.read_bytes(), bench.output.read_bytes()
    for _ in range(10):
        flip(bench.errors, rng)
        assert bench.run(lambda: FakeJob(LIMITS, fail=frozenset({7})), resume=True).failed == 1
        assert [fault["custom_id"] for fault in bench.faults()] == ["nan"]
        bench.errors.write_bytes(errors)
        bench.output.write_bytes(whole)
        log.write_bytes(kept)
        flip(log, rng)
        assert bench.run(lambda: FakeJob(LIMITS, fail=frozenset({7})), resume=True).reason is None
        assert choices(bench) == want
        assert damaged_lines(bench.output) == (COUNT + 1, [])


def test_lines_that_the_user_moved_removed_or_added_are_no_damage(bench: Bench) -> None:
    """Sorted, some removed: what is left is taken as it is. Without its journal too, as of an earlier version."""
    lines = sorted(bench.output.read_bytes().splitlines(True), reverse=True)
    bench.output.write_bytes(b"".join(lines[3:]))
    assert bench.run(plain, resume=True).ok == 3
    assert not bench.output.with_name("out.outdated.jsonl").exists()
    journal_of(bench.output).unlink()
    assert bench.run(plain, resume=True).skipped == COUNT + 1
    assert damaged_lines(bench.output) == (COUNT + 1, [])


def test_the_journal_contains_no_answer_and_is_small(bench: Bench) -> None:
    log = journal_of(bench.output).read_bytes()
    assert len(log) < bench.output.stat().st_size / 5
    for entry in bench.answers().values():
        assert json.dumps(entry["response"]["body"]["choices"][0]["text"]).encode() not in log
    marks = read_journal(journal_of(bench.output))
    assert marks is not None
    assert [len(marks.answers), len(marks.errors)] == [COUNT, 1]


def test_a_run_that_answered_nothing_is_not_in_the_way_of_the_corrected_one(bench: Bench, tmp_path: Path) -> None:
    """Its error lines and journal are replaced; an error file with another's lines, and answers, are not."""
    for path in (bench.output, bench.errors, journal_of(bench.output)):
        path.unlink()
    bench.write(completion("a", model="other"))
    assert bench.run(plain).failed == 1
    assert bench.errors.stat().st_size
    bench.write(completion("a"))
    assert bench.run(plain).ok == 1
    assert not bench.errors.exists()
    with pytest.raises(RunFileError, match="--resume"):
        bench.open()
    bench.output.unlink()
    bench.errors.write_text("my notes\n")
    with pytest.raises(RunFileError, match=r"out.errors.jsonl exists"):
        bench.open()
    assert bench.errors.read_text() == "my notes\n"


def test_a_file_that_is_no_journal_is_left_alone(bench: Bench) -> None:
    log = journal_of(bench.output)
    log.write_text("my journal\n")
    for kind in ("resume", "overwrite"):
        with pytest.raises(RunFileError, match="is not the journal of a run"):
            bench.open(**{kind: True})
    log.unlink()
    os.mkfifo(log)
    with pytest.raises(RunFileError, match="not a regular file"):
        bench.open(overwrite=True)
    log.unlink()
    log.hardlink_to(bench.input)
    with pytest.raises(RunFileError, match="keeps its journal"):
        bench.open(overwrite=True)
    assert bench.output.stat().st_size


def test_check_store_reads_the_output_of_a_run(bench: Bench, run_seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-store", str(bench.output)]) == 0
    assert f"{COUNT + 1} lines: intact" in capsys.readouterr().out
    with bench.output.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["check-store", str(bench.output)]) == 1
        assert "is being written by a run" in capsys.readouterr().err.replace("\n", " ")
    flip(bench.output, random.Random(run_seed))
    assert main(["check-store", str(bench.output)]) == 1
    assert "is not what the run wrote" in capsys.readouterr().err.replace("\n", " ")


def test_lines_that_were_written_at_the_second_try_are_no_damage(bench: Bench) -> None:
    """They are in the journal twice; a line that the user added is not moved aside for that."""
    log = Journal(journal_of(bench.output), Marks([], []))
    for _ in range(2):
        log.append({ANSWERS: bench.output.read_bytes().splitlines(keepends=True)})
    log.close()
    marks = read_journal(journal_of(bench.output))
    assert marks is not None
    assert len(marks.answers) == 2 * COUNT
    assert not LineCheck(bench.output, marks.answers).suspicious
    bench.output.write_bytes(bench.output.read_bytes().replace(b"t1", b"u1"))
    assert LineCheck(bench.output, marks.answers).suspicious


def test_no_two_outputs_share_a_file(tmp_path: Path) -> None:
    """The journal, the errors and the outdated answers of each; but all paths of one output have the same."""
    outputs = [tmp_path / name for name in ("a", "a.jsonl", "a.jsonl.jsonl", "a.json", ".jsonl", "b/a")]
    files = [file for out in outputs for file in (out, journal_of(out), file_of(out, ERRORS), file_of(out, "outdated"))]
    assert len(set(files)) == len(files) == 24
    (link := tmp_path / "link").symlink_to("a.jsonl")
    (tmp_path / "folder").symlink_to(tmp_path)
    assert journal_of(link) == journal_of(tmp_path / "a.jsonl")
    assert file_of(link, ERRORS) == tmp_path / "a.errors.jsonl"
    assert journal_of(tmp_path / "folder" / "a.jsonl").resolve() == journal_of(link)


def test_two_runs_whose_outputs_differ_in_the_suffix_keep_their_journals(bench: Bench) -> None:
    """Also if the later one replaces its files; the errors of the first are elsewhere, where check-store reads them."""
    (folder := bench.output.with_name("elsewhere")).mkdir()
    bench.errors = folder / "e.jsonl"
    failing = partial(FakeJob, LIMITS, fail=frozenset({7}))
    bench.run(failing, overwrite=True)
    first = bench.output
    bench.output = first.with_name("out")
    bench.errors = file_of(bench.output, ERRORS)
    for _ in range(2):
        bench.run(failing, overwrite=True)
    for output in (first, bench.output):
        assert damaged_lines(output) == (COUNT + 1, [])
    flip(folder / "e.jsonl", random.Random(1))
    assert [str(folder) in wrong for wrong in damaged_lines(first)[1]] == [True, True]
    assert damaged_lines(bench.output) == (COUNT + 1, [])


def test_an_output_has_one_journal_by_whatever_path(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.output
    (link := real.with_name("link.jsonl")).symlink_to(real)
    monkeypatch.chdir(real.parent)
    for name in (link, Path("link.jsonl"), Path(real.name)):
        assert damaged_lines(name) == (COUNT + 1, [])
        bench.output = name
        assert bench.run(plain, resume=True).skipped == COUNT + 1
    assert len(list(real.parent.glob("*.journal"))) == 1
