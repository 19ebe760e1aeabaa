"""`--resume`: the same answers, interrupted or not; what runs again, and which files are refused."""

from __future__ import annotations

import fcntl
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from fake_job import FakeJob
from laddertron.engine.config.load import Deployment
from laddertron.engine.config.schema import EngineConfig, ModelSection, ParallelConfig
from laddertron.engine.run.files import open_run
from laddertron.engine.run.past import RunFileError, model_digest
from laddertron.engine.text.tokenizer import TextModel
from test_batchrun import LIMITS, Bench, completion, plain
from tiny_text import write_folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.from_folder(write_folder(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def bench(tmp_path: Path, text: TextModel) -> Bench:
    return Bench(tmp_path, text)


def test_the_same_file_gives_the_same_answers_interrupted_or_not(bench: Bench, tmp_path: Path, text: TextModel) -> None:
    """The job dies three times on the way; resumed each time, the answers are those of a run left alone."""
    lines = [completion(f"t{i}", f"go {i}", n=1 + i % 3) for i in range(40)] + [completion("bad", n=10**9)]
    bench.write(*lines)
    for k in range(3):
        summary = bench.run(lambda: FakeJob(LIMITS, die_after=10), resume=k > 0)
        assert summary.reason == "rank 1 on node-b was killed"
        assert summary.lost > 0
    done = len(bench.answers())
    assert 0 < done < 40
    last = bench.run(plain, resume=True)
    assert (last.skipped, last.ok, last.reason) == (done, 40 - done, None)
    alone = Bench(tmp_path, text)
    alone.output, alone.errors = tmp_path / "alone.jsonl", tmp_path / "alone.errors.jsonl"
    alone.run(plain)

    def said(b: Bench) -> dict[str, list[str]]:
        return {name: [c["text"] for c in a["response"]["body"]["choices"]] for name, a in b.answers().items()}

    assert said(bench) == said(alone)
    assert len(bench.faults()) == 1, "the bad line is found once, however often the run was resumed"


def test_resume_cuts_a_torn_last_line_and_refuses_a_bad_one_before_it(bench: Bench) -> None:
    bench.write(*[completion(f"t{i}") for i in range(5)])
    bench.run(plain)
    whole = bench.output.read_bytes()
    bench.output.write_bytes(whole[:-40])
    assert bench.run(plain, resume=True).skipped == 4
    assert len(bench.answers()) == 5
    whole = bench.output.read_bytes()  # the last answer has another second in it, perhaps
    bench.output.write_bytes(whole + b"\0" * 40)
    assert bench.run(plain, resume=True).skipped == 5
    assert bench.output.read_bytes() == whole
    for other in (b"garbage\n" + whole, whole + b"garbage\n", b"someone's notes"):
        bench.output.write_bytes(other)
        with pytest.raises(RunFileError, match=r"out.jsonl:\d: .*--overwrite"):
            bench.open(resume=True)
        assert bench.output.read_bytes() == other, "what is not a run's output is left alone"


def test_error_lines_of_transient_faults_run_again_lasting_ones_do_not(bench: Bench) -> None:
    bench.write(completion("nan", [7, 7]), completion("slow", "x"), completion("ok", "y"))
    summary = bench.run(lambda: FakeJob(LIMITS, fail=frozenset({7})))
    assert (summary.ok, summary.failed) == (2, 1)
    fault = bench.faults()[0]
    assert fault["response"]["body"]["error"]["code"] == "numerical_error"
    assert fault["response"]["status_code"] == 500
    timeout = {"id": "x", "custom_id": "slow", "response": None, "error": {"code": "request_timeout", "message": "m"}}
    with bench.errors.open("a") as file:
        file.write(json.dumps(timeout) + "\n")
    kept = [line for line in bench.output.read_bytes().splitlines() if b'"slow"' not in line]
    bench.output.write_bytes(b"".join(line + b"\n" for line in kept))
    again = bench.run(plain, resume=True)
    assert (again.skipped, again.ok, again.failed) == (2, 1, 0)
    assert [f["custom_id"] for f in bench.faults()] == ["nan"]


def test_resume_redoes_the_lines_that_changed_and_keeps_their_old_answers_apart(bench: Bench) -> None:
    """A prompt and a parameter changed, a line moved, one is gone, one came: only what changed and what is new runs.
    The same for a lasting error line."""
    lines = [completion(f"t{i}", f"go {i}") for i in range(8)] + [completion("nan", [7, 7])]
    bench.write(*lines)
    assert bench.run(lambda: FakeJob(LIMITS, fail=frozenset({7}))).ok == 8
    before = bench.answers()
    bench.output.chmod(0o600)
    changed = [completion("t0", "go elsewhere"), completion("t1", "go 1", max_tokens=3), completion("nan", "words")]
    bench.write(completion("new"), *lines[3:7], *changed, lines[2])
    bench.input.write_bytes(bench.input.read_bytes().replace(b"\n", b" \r\n"))  # white space is no change
    summary = bench.run(plain, resume=True)
    assert (summary.skipped, summary.ok, summary.failed, summary.changed) == (5, 4, 0, 3)
    after = bench.answers()
    assert after.keys() == {*before, "new", "nan"}, "the answer whose line is gone stays"
    assert {name for name in before if after[name] != before[name]} == {"t0", "t1"}
    assert after["t1"]["response"]["body"]["usage"]["completion_tokens"] == 3
    outdated = bench.output.with_name("out.outdated.jsonl")
    assert [path.stat().st_mode & 0o777 for path in (bench.output, outdated)] == [0o600, 0o600]
    aside = [json.loads(line) for line in outdated.read_bytes().splitlines()]
    assert aside == [before["t0"], before["t1"]]
    again = bench.run(plain, resume=True)
    assert (again.skipped, again.ok, again.changed) == (9, 0, 0)
    bench.output.chmod(0o640)
    bench.write(completion("t2", "go elsewhere"))
    assert bench.run(plain, resume=True).changed == 1
    assert [path.stat().st_mode & 0o777 for path in (bench.output, outdated)] == [0o640, 0o600]


def test_answers_of_another_model_are_not_mixed(bench: Bench) -> None:
    """Refused with both digests, every file being what it was; so are answers that do not say their model."""
    bench.write(completion("a"), completion("bad", n=10**9), completion("c"))
    bench.run(lambda: FakeJob(LIMITS, die_after=1), model="a" * 10)
    before = bench.output.read_bytes(), bench.errors.read_bytes()
    with pytest.raises(RunFileError, match=r"out.jsonl:1: .*digest aaaaaaaaaa, now bbbbbbbbbb.*--overwrite"):
        bench.open(resume=True, model="b" * 10)
    assert (bench.output.read_bytes(), bench.errors.read_bytes()) == before
    assert bench.run(plain, resume=True, model="a" * 10).reason is None
    assert len(bench.answers()) == 2
    bench.output.write_bytes(re.sub(rb"-a{10}", b"", bench.output.read_bytes()))
    with pytest.raises(RunFileError, match=r"out.jsonl:1: its id does not say .*--overwrite"):
        bench.open(resume=True, model="a" * 10)


def test_the_models_digest_follows_what_decides_an_answer(tmp_path: Path) -> None:
    """Weights in the middle of a file, config.json, the chat template, a type or the seed change it; the
    number of ranks does not."""
    folder = write_folder(tmp_path / "tiny")
    weights = bytearray(3 << 20)
    (folder / "model.safetensors").write_bytes(weights)
    here = Deployment(ModelSection(path=str(folder)))
    digests = [model_digest(here)]
    assert len(digests[0]) == 10
    assert digests[0] == model_digest(replace(here, parallel=ParallelConfig(tensor_parallel_size=4)))
    digests.append(model_digest(replace(here, model=replace(here.model, dtype="float32"))))
    digests.append(model_digest(replace(here, engine=EngineConfig(seed=3))))
    retrained = bytes(len(weights) // 3) + bytes([1]) * (len(weights) // 3) + bytes(len(weights) // 3)
    (folder / "model.safetensors").write_bytes(retrained)
    digests.append(model_digest(here))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    digests.append(model_digest(here))
    (folder / "config.json").write_text("{}")
    digests.append(model_digest(here))
    assert len({*digests}) == len(digests)


def test_a_resume_that_replaces_the_output_is_seen_by_the_run_that_opened_it_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run opens the output, a first one replaces it and ends, then the second one locks: it must not write
    to a file that has no name any more."""
    bench.write(completion("a"))
    bench.run(plain)
    lock = fcntl.flock

    def replaced(descriptor: int, how: int) -> None:
        monkeypatch.undo()
        part = bench.output.with_name("part")
        part.write_bytes(bench.output.read_bytes())
        part.replace(bench.output)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", replaced)
    with pytest.raises(RunFileError, match="another run"):
        bench.open(resume=True)


def test_files_that_would_be_lost_or_confused_are_refused(bench: Bench) -> None:
    bench.write(completion("a"))
    with pytest.raises(RunFileError, match="three files"):
        open_run(bench.input, bench.input, bench.errors)
    with pytest.raises(RunFileError, match="'-' cannot be used"):
        open_run(Path("-"), bench.output, bench.errors)
    with pytest.raises(RunFileError, match="missing"):
        open_run(bench.input.with_name("nowhere"), bench.output, bench.errors)
    bench.run(plain)
    with pytest.raises(RunFileError, match="--resume"):
        bench.open()
    assert bench.run(plain, overwrite=True).ok == 1
    files = bench.open(resume=True)
    try:
        with pytest.raises(RunFileError, match="another run"):
            bench.open(resume=True)
    finally:
        files.close()
