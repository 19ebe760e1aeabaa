"""`laddertron run`'s driver: every line answered once, whole lines only, whatever interrupts it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_job import FakeJob
from folders import FOLDERS
from laddertron.engine.config.load import Deployment
from laddertron.engine.config.schema import ModelSection
from laddertron.engine.daemon import line_flights
from laddertron.engine.job import JobListener, JobState
from laddertron.engine.openai import prefetch
from laddertron.engine.openai.answers import Answer
from laddertron.engine.request import ModelLimits, TokensEvent
from laddertron.engine.run.files import LineFile, RunFiles, open_run
from laddertron.engine.run.past import RunFileError
from laddertron.engine.run.progress import RankKind, Snapshot, Summary
from laddertron.engine.run.run import BatchRun
from laddertron.engine.sampling import grammar
from laddertron.engine.text import worker
from laddertron.engine.text.pool import Encoder
from laddertron.engine.text.tokenizer import TextModel
from tiny_text import write_folder
from waiting import HANG_S

LIMITS = ModelLimits(max_model_len=256, vocab_size=300, max_num_seqs=4, kv_tokens=4096)
DEPLOYMENT = Deployment(ModelSection("tiny"))


class Direct(Encoder):
    """A text pool's face on this very process."""

    def __init__(self, model: TextModel) -> None:
        self.model = model

    async def ask(self, payload: dict[str, Any], size: int, blob: bytes | memoryview = b"") -> dict[str, Any]:
        await asyncio.sleep(0)
        return worker.answer(self.model, payload, 1 << 20)

    async def check_grammar(self, spec: str) -> tuple[str, tuple[str, ...]]:
        return grammar.validate(spec)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.from_folder(write_folder(tmp_path_factory.mktemp("tiny")))


class Bench:
    """A folder with the three files, and runs over them."""

    def __init__(self, folder: Path, text: TextModel) -> None:
        self.input, self.output, self.errors = (folder / f"{n}.jsonl" for n in ("in", "out", "out.errors"))
        self.text = text
        self.snapshots: list[Snapshot] = []

    def write(self, *lines: dict[str, Any] | bytes) -> None:
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        self.input.write_bytes(b"".join(line + b"\n" for line in raw))

    def open(self, **kind: Any) -> RunFiles:
        return open_run(self.input, self.output, self.errors, **kind)

    def run(self, make: Callable[[], FakeJob], deployment: Deployment = DEPLOYMENT, **kind: Any) -> Summary:
        async def go() -> Summary:
            self.job = make()
            return await BatchRun(
                [self.job], self.text, Direct(self.text), self.open(**kind), deployment, self.update
            ).run()

        return asyncio.run(go())

    def update(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def answers(self) -> dict[str, dict[str, Any]]:
        lines = [json.loads(line) for line in self.output.read_bytes().splitlines()]
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines), "an answer stands twice"
        return found

    def faults(self) -> list[dict[str, Any]]:
        """Empty where there is no errors file: one without lines is removed."""
        if not self.errors.exists():
            return []
        return [json.loads(line) for line in self.errors.read_bytes().splitlines()]


@pytest.fixture
def bench(tmp_path: Path, text: TextModel) -> Bench:
    return Bench(tmp_path, text)


def completion(name: str, prompt: Any = "hello", **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def chat(name: str, said: str = "hello", **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": said}], "max_tokens": 8, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def plain() -> FakeJob:
    return FakeJob(LIMITS)


def test_every_line_is_answered_in_the_batch_apis_form(bench: Bench) -> None:
    """Both endpoints in one file; usage, ids and texts are there; the window bounds what is in flight."""
    bench.write(*[chat(f"c{i}", f"say {i}") for i in range(30)], *[completion(f"t{i}", f"go {i}") for i in range(30)])
    summary = bench.run(plain)
    assert (summary.requests, summary.ok, summary.failed, summary.reason) == (60, 60, 0, None)
    answers = bench.answers()
    body = answers["t3"]["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["usage"]["completion_tokens"] == 8
    assert answers["c7"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert answers["c7"]["error"] is None
    assert summary.tokens == sum(a["response"]["body"]["usage"]["completion_tokens"] for a in answers.values())
    assert bench.job.most_waiting <= 4 * LIMITS.max_num_seqs
    assert bench.job.closed
    assert bench.snapshots[-1].done == bench.snapshots[-1].total == 60
    assert summary.hidden_seconds is not None
    assert summary.hidden_seconds == 2 * (summary.exposed_seconds or 0) > 0
    assert [(each.layer, each.link) for each in summary.layers] == [("ladder mlp", "net"), ("ladder attention", "net")]
    assert sum(each.hidden_seconds for each in summary.layers) == pytest.approx(summary.hidden_seconds)
    assert summary.layers[0].exposed_seconds == pytest.approx(0.75 * (summary.exposed_seconds or 0))
    assert summary.computed == (RankKind(1, "cpu", "avx2", "1"),)


def test_a_bad_line_is_an_error_line_with_its_number_and_the_rest_runs(bench: Bench) -> None:
    long = completion("long", "x" * 300)
    lines: list[dict[str, Any] | bytes] = [
        completion("ok-1"),
        b"{not json",
        b'{"custom_id": "bad-utf8", "body": "\xff\xfe"}',
        completion("nan") | {"body": {"model": "tiny", "prompt": "x", "temperature": float("nan")}},
        completion("ok-1", "again"),
        completion("url") | {"url": "/v1/embeddings"},
        completion("field", temprature=1),
        long,
        completion("model", model="gpt-4"),
        b"",
        completion("ok-2"),
    ]
    bench.write(*lines)
    summary = bench.run(plain)
    assert (summary.ok, summary.failed) == (2, 8)
    assert [(cause.count, cause.code) for cause in summary.causes][:1] == [(3, "invalid_json_line")]
    assert sum(cause.count for cause in summary.causes) == 8
    assert set(bench.answers()) == {"ok-1", "ok-2"}
    seen = {}
    for fault in bench.faults():
        error = fault["response"]["body"]["error"]
        seen[error["line"]] = (fault["custom_id"], fault["response"]["status_code"], error["code"])
    assert seen == {
        2: (None, 400, "invalid_json_line"),
        3: (None, 400, "invalid_json_line"),
        4: (None, 400, "invalid_json_line"),
        5: ("ok-1", 400, "duplicate_custom_id"),
        6: ("url", 400, "invalid_url"),
        7: ("field", 400, "unknown_parameter"),
        8: ("long", 400, "context_length_exceeded"),
        9: ("model", 404, "model_not_found"),
    }


def test_with_no_line_left_for_the_model_it_is_not_started(bench: Bench) -> None:
    """Resumed with nothing left, with a bad line found again, and with lines that are all wrong: the job is never
    started, and the counts and error lines are those that a run with a model has."""
    bench.write(completion("a"), completion("bad", n=10**9), completion("c"))
    assert bench.run(plain).ok == 2
    summary = bench.run(lambda: FakeJob(LIMITS, refuse="started"), resume=True)
    assert (summary.requests, summary.skipped, summary.failed, summary.reason) == (3, 2, 1, None)
    assert bench.job.state.phase == "starting"
    assert [fault["custom_id"] for fault in bench.faults()] == ["bad"]
    bench.write(completion("x", model="other"), b"{not json", completion("y", max_tokens=-1))
    summary = bench.run(lambda: FakeJob(LIMITS, refuse="started"), overwrite=True)
    assert (summary.ok, summary.failed, summary.reason) == (0, 3, None)
    assert len(bench.faults()) == 3


def test_byte_order_marks_carriage_returns_and_files_that_hold_no_request(bench: Bench) -> None:
    """UTF-8 with a mark and CRLF is read; UTF-16, an empty file and one of blank lines are refused, and what
    --overwrite would empty is kept."""
    bench.write(completion("a"), completion("b"))
    bench.input.write_bytes(b"\xef\xbb\xbf" + bench.input.read_bytes().replace(b"\n", b"\r\n"))
    summary = bench.run(plain)
    assert (summary.ok, summary.failed) == (2, 0)
    assert bench.run(plain, resume=True).skipped == 2
    before, asked = bench.output.read_bytes(), json.dumps(completion("a"))
    for data, text in (
        (asked.encode("utf-16"), "is UTF-16: .*iconv"),
        (asked.encode("utf-16-le"), "is UTF-16: .*iconv"),
        (asked.encode("utf-16-be"), "is UTF-16: .*iconv"),
        (b"", "has no lines"),
        (b"\n  \r\n", "has no lines"),
        (b"\xef\xbb\xbf\r\n \n", "has no lines"),
    ):
        bench.input.write_bytes(data)
        with pytest.raises(RunFileError, match=text):
            bench.open(overwrite=True)
        assert bench.output.read_bytes() == before


def test_a_job_that_cannot_start_ends_the_run_with_its_reason(bench: Bench) -> None:
    bench.write(completion("a"))
    summary = bench.run(lambda: FakeJob(LIMITS, refuse="model.safetensors is truncated"))
    assert summary.reason == "model.safetensors is truncated"
    assert (summary.requests, summary.ok) == (1, 0)  # of the file, though none of it was read
    assert bench.job.closed
    assert bench.output.read_bytes() == b""
    assert not bench.errors.exists()


def test_a_job_that_fails_after_the_last_answer_fails_no_run(bench: Bench) -> None:
    """The run still waits for the ranks' last counters then."""
    bench.write(*[completion(f"t{i}") for i in range(5)])
    summary = bench.run(lambda: FakeJob(LIMITS, die_after=5))
    assert bench.job.state.phase == "failed"
    assert (summary.ok, summary.lost, summary.reason) == (5, 0, None)


def test_stop_strings_cut_text_and_usage_and_end_the_sequence(bench: Bench, text: TextModel) -> None:
    """The stop string spans three tokens; the engine runs ahead by one token before it hears of it."""
    prompt = tuple(text.encode("go"))
    script = {prompt: tuple(text.encode("one STOP two three four", add_special_tokens=False))}
    bench.write(
        completion("cut", "go", stop=["TOP"], max_tokens=30),
        completion("kept", "go", stop="TOP", include_stop_str_in_output=True, max_tokens=30),
    )
    bench.run(lambda: FakeJob(LIMITS, script=script))
    cut = bench.answers()["cut"]["response"]["body"]
    assert cut["choices"][0]["text"] == "one S"
    assert (cut["choices"][0]["finish_reason"], cut["choices"][0]["stop_reason"]) == ("stop", "TOP")
    assert cut["usage"]["completion_tokens"] == len("one STOP")
    assert bench.answers()["kept"]["response"]["body"]["choices"][0]["text"] == "one STOP"
    assert {n for _, _, n in bench.job.stops} == {len("one STOP")}


def test_cancelling_the_run_leaves_whole_lines_and_a_closed_job(bench: Bench) -> None:
    bench.write(*[completion(f"t{i}") for i in range(200)])

    async def go() -> None:
        bench.job = FakeJob(LIMITS)
        task = asyncio.create_task(
            BatchRun([bench.job], bench.text, Direct(bench.text), bench.open(), DEPLOYMENT, bench.update).run()
        )
        while len(bench.snapshots) < 60:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    assert bench.job.closed
    done = len(bench.answers())
    assert 0 < done < 200
    assert bench.run(plain, resume=True).skipped == done
    assert len(bench.answers()) == 200


def stopped(bench: Bench, job: FakeJob, when: Callable[[], bool], drain_s: float = 30.0, **kind: bool) -> Summary:
    """A run that is told to stop once `when` holds."""
    bench.snapshots.clear()

    async def go() -> Summary:
        bench.job, stop = job, asyncio.Event()
        deployment = replace(DEPLOYMENT, daemon=replace(DEPLOYMENT.daemon, drain_timeout=drain_s))
        task = asyncio.create_task(
            BatchRun([bench.job], bench.text, Direct(bench.text), bench.open(**kind), deployment, bench.update).run(
                stop
            )
        )
        async with asyncio.timeout(HANG_S):
            while not (when() or task.done()):
                await asyncio.sleep(0)
        stop.set()
        return await task

    return asyncio.run(go())


def test_told_to_stop_it_ends_what_is_under_way_and_takes_nothing_more(bench: Bench) -> None:
    """1. Stopped in the middle: every line that was submitted has its answer, none was thrown away. 2. Resumed, only
    the rest runs. 3. Stopped when the last lines are under way it simply finishes. 4. What goes on for too long is
    given up after drain_s, and counted."""
    bench.write(*[completion(f"t{i}") for i in range(200)])
    summary = stopped(bench, FakeJob(LIMITS), lambda: len(bench.snapshots) > 60)
    assert (summary.stopped, summary.reason, summary.lost) == (True, None, 0)
    assert 0 < summary.ok == len(bench.job.submitted) == len(bench.answers()) < 200
    assert bench.job.closed
    assert bench.snapshots[-1].phase == "draining"
    resumed = bench.run(plain, resume=True)
    assert (resumed.skipped, resumed.stopped, len(bench.answers())) == (summary.ok, False, 200)

    bench.write(*[completion(f"t{i}") for i in range(4)])
    job = FakeJob(LIMITS)
    summary = stopped(bench, job, lambda: len(job.submitted) == 4, overwrite=True)
    assert (summary.ok, summary.stopped) == (4, False)
    held = FakeJob(LIMITS, hold=True)
    summary = stopped(bench, held, lambda: len(held.submitted) == 4, drain_s=0.05, overwrite=True)
    assert (summary.ok, summary.stopped, summary.lost, summary.reason) == (0, True, 4, None)


def test_a_full_disk_leaves_whole_lines_and_ends_the_run(bench: Bench) -> None:
    """The file may grow to 20,000 bytes: the write that would pass this is undone, the run ends saying why."""
    program = textwrap.dedent(f"""
        import asyncio, resource, signal, sys
        sys.path[:0] = {FOLDERS!r}
        from pathlib import Path
        from test_batchrun import *
        import laddertron.engine.run.files as batchfiles
        batchfiles._GROUP_BYTES = 3000
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
        bench = Bench(Path({str(bench.input.parent)!r}), TextModel.from_folder(Path(sys.argv[1])))
        summary = bench.run(plain)
        print(summary.reason, f"{{summary.ok}} ok")
    """)
    bench.write(*[completion(f"t{i}") for i in range(200)])
    folder = write_folder(bench.input.parent / "tiny")
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)
    assert "output cannot be written: File too large" in done.stdout
    assert bench.output.read_bytes().endswith(b"\n")
    assert 0 < len(bench.answers()) < 200
    assert f"{len(bench.answers())} ok" in done.stdout
    assert bench.run(plain, resume=True).reason is None
    assert len(bench.answers()) == 200


def test_killed_at_any_moment_nothing_is_lost_torn_or_doubled(bench: Bench) -> None:
    """A run is killed by SIGKILL over and over, after so many written bytes (seeded by the loop), and resumed."""
    program = textwrap.dedent(f"""
        import os, sys
        sys.path[:0] = {FOLDERS!r}
        from pathlib import Path
        from test_batchrun import *
        import laddertron.engine.run.files as batchfiles
        bench = Bench(Path({str(bench.input.parent)!r}), TextModel.from_folder(Path(sys.argv[1])))
        left = [int(sys.argv[2])]
        batchfiles._GROUP_BYTES = 3000
        write = os.write
        def torn(descriptor, data):
            if descriptor > 2:
                if len(data) > left[0]:
                    write(descriptor, data[:left[0]])
                    os.kill(os.getpid(), 9)
                left[0] -= len(data)
            return write(descriptor, data)
        batchfiles.os.write = torn
        bench.run(plain, resume=True)
    """)
    bench.write(*[completion(f"t{i}") for i in range(60)])
    folder = write_folder(bench.input.parent / "tiny")
    codes = []
    for size in (100, 4000, 9000, 10**9):
        codes.append(subprocess.run([sys.executable, "-c", program, str(folder), str(size)]).returncode)
    assert codes == [-signal.SIGKILL] * 3 + [0]
    assert len(bench.answers()) == 60


def test_replicas_share_the_lines_and_one_failure_ends_all(bench: Bench) -> None:
    """Two replicas take about half each; when one dies the run stops and can resume."""
    bench.write(*[completion(f"t{i}", n=1 + i % 2) for i in range(60)])
    jobs: list[FakeJob] = []

    async def go(die_after: int | None, **kind: bool) -> Summary:
        jobs[:] = [FakeJob(LIMITS), FakeJob(LIMITS, die_after=die_after)]
        return await BatchRun(jobs, bench.text, Direct(bench.text), bench.open(**kind), DEPLOYMENT, bench.update).run()

    summary = asyncio.run(go(12))
    assert summary.reason == "replica 1: rank 1 on node-b was killed"
    assert all(job.closed for job in jobs)
    done = len(bench.answers())
    assert 0 < done < 60
    summary = asyncio.run(go(None, resume=True))
    assert (summary.skipped, summary.ok, summary.reason) == (done, 60 - done, None)
    taken = [len(job.submitted) for job in jobs]
    assert abs(taken[0] - taken[1]) <= 0.3 * sum(taken)
    assert len(bench.answers()) == 60


class Unstarted(FakeJob):
    """As a launched job: stopped until it is told to start, and it says so when it does."""

    def __init__(self, limits: ModelLimits) -> None:
        super().__init__(limits)
        self.state = JobState("stopped")

    async def start(self, listener: JobListener) -> None:
        self.listener = listener
        self.report_state("starting")
        await super().start(listener)


def test_replicas_start_one_after_another(bench: Bench) -> None:
    """While the first replica starts the second is still "stopped": that does not end the run."""
    bench.write(*[completion(f"t{i}") for i in range(8)])

    async def go() -> Summary:
        group = [Unstarted(LIMITS), Unstarted(LIMITS)]
        return await BatchRun(group, bench.text, Direct(bench.text), bench.open(), DEPLOYMENT, bench.update).run()

    summary = asyncio.run(go())
    assert (summary.ok, summary.reason) == (8, None)


def test_options_reach_the_engine(bench: Bench) -> None:
    """The engine's seats bound n, the run's id makes the seeds."""
    bench.write(completion("a", n=LIMITS.max_num_seqs + 1), completion("b"))
    summary = bench.run(plain)
    assert (summary.ok, summary.failed) == (1, 1)
    first = bench.job.submitted[0].params.seed
    bench.run(plain, replace(DEPLOYMENT, engine=replace(DEPLOYMENT.engine, seed=1)), overwrite=True)
    assert bench.job.submitted[0].params.seed != first


def peak_rss_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_memory_does_not_grow_with_the_file(bench: Bench) -> None:
    """5,000 lines after 500 of the same: less than 12 MB more (a custom_id's 16 bytes and the flights are all)."""
    for count in (500, 5000):
        bench.write(*[completion(f"t{i}", "x" * 100, max_tokens=1) for i in range(count)])
        before = peak_rss_kb()
        assert bench.run(lambda: FakeJob(replace(LIMITS, max_num_seqs=64)), overwrite=True).ok == count
        bench.snapshots.clear()
    assert peak_rss_kb() - before < 12_000


def test_line_file_undoes_a_short_write(tmp_path: Path) -> None:
    """A write that fails half way leaves the file at the last whole line."""
    path = tmp_path / "f"
    file = LineFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND))
    file.append(b"one\n")
    file.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))
        file.append(b"two\n")
        with pytest.raises(OSError, match=re.escape(str(path))):
            file.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert path.read_bytes() == b"one\n"
    file.close()
    assert path.read_bytes() == b"one\ntwo\n"


class Deaf(FakeJob):
    """As a launched job: what its listener raises is not its affair, it goes on."""

    async def start(self, listener: JobListener) -> None:
        def heard(events: list[TokensEvent]) -> None:
            with contextlib.suppress(Exception):
                listener.on_tokens(events)

        rest = {name: getattr(listener, name) for name in ("on_state", "on_report", "on_lost", "on_running", "idle")}
        mine = SimpleNamespace(on_tokens=heard, **rest)
        await super().start(cast(JobListener, mine))


@pytest.mark.parametrize("where", ["take", "response"])
def test_an_answer_that_cannot_be_made_is_an_error_line(
    bench: Bench, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever raises while one answer is made, that line fails and the rest runs: nobody waits for it for ever."""
    real = getattr(Answer, where)

    def broken(self: Answer, *arguments: Any) -> Any:
        if self.requests[0].prompt == prompt:
            raise ArithmeticError("no answer")
        return real(self, *arguments)

    bench.write(*[completion(f"t{i}", f"go {i}") for i in range(6)])
    prompt = tuple(bench.text.encode("go 2"))
    monkeypatch.setattr(Answer, where, broken)

    async def go() -> Summary:
        job = Deaf(LIMITS)
        async with asyncio.timeout(HANG_S):
            return await BatchRun([job], bench.text, Direct(bench.text), bench.open(), DEPLOYMENT, bench.update).run()

    summary = asyncio.run(go())
    assert (summary.ok, summary.failed, summary.reason) == (5, 1, None)
    assert [f["custom_id"] for f in bench.faults()] == ["t2"]
    assert bench.faults()[0]["response"]["body"]["error"]["code"] == "engine_error"


@pytest.mark.parametrize("deduplicate", [True, False])
def test_equal_lines_are_computed_once_and_answered_each(bench: Bench, deduplicate: bool) -> None:
    """Greedy lines, and lines with one seed, of the same body: one request, an answer each with its own ids, whose
    prompt counts as cached. A line with another seed, the default one or tools is computed by itself. A line whose
    computation fails is an error in each of its equals."""
    same: dict[str, Any] = {"temperature": 0.0, "n": 2, "max_tokens": 5}
    lines = [completion(f"greedy{i}", "again and again", **same) for i in range(3)]
    lines += [chat(f"seeded{i}", "so", seed=4) for i in range(3)]
    lines += [completion("other", "again and again", **same, seed=9), chat("default0", "so"), chat("default1", "so")]
    lines += [completion(f"bad{i}", [7, 8], temperature=0) for i in range(2)]
    bench.write(*lines)
    deployment = replace(DEPLOYMENT, batch=replace(DEPLOYMENT.batch, deduplicate=deduplicate))
    summary = bench.run(lambda: FakeJob(LIMITS, fail=frozenset({7})), deployment)
    assert (summary.ok, summary.failed) == (9, 2)
    assert len(bench.job.submitted) == (5 if deduplicate else len(lines))
    answers = bench.answers()
    assert len({answer["response"]["body"]["id"] for answer in answers.values()}) == 9
    for group in (("greedy0", "greedy1", "greedy2", "other"), ("seeded0", "seeded1", "seeded2")):
        bodies = [answers[name]["response"]["body"] for name in group]
        if deduplicate or group[0] == "seeded0":
            assert all(body["choices"] == bodies[0]["choices"] for body in bodies)
        cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies]
        prompt = bodies[0]["usage"]["prompt_tokens"]
        assert sorted(cached) == ([0] + [prompt] * (len(group) - 1) if deduplicate else [0] * len(group))
    codes = {line["custom_id"]: line["response"]["body"]["error"]["code"] for line in bench.faults()}
    assert codes == dict.fromkeys(("bad0", "bad1"), "numerical_error")


class ChangingModel(FakeJob):
    """Serves another model from the 40th request on."""

    @property
    def state(self) -> JobState:
        return replace(self._state, model="second" if len(self.submitted) >= 40 else "first")

    @state.setter
    def state(self, state: JobState) -> None:
        self._state = state


def test_kept_answers_leave_the_loop_to_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many equal lines that a kept answer serves, each is followed by a turn of the event loop."""
    taken, most = [0, 0], 0
    take = BatchRun.take

    async def turns() -> None:
        while True:
            taken[1] = 0
            await asyncio.sleep(0)

    def counted(run: BatchRun, *line: Any) -> bool:
        nonlocal most
        at_once = take(run, *line)
        taken[0] += at_once
        taken[1] += at_once
        most = max(most, taken[1])
        return at_once

    others: asyncio.Task[None] | None = None

    class Watched(FakeJob):
        async def start(self, listener: Any) -> None:
            nonlocal others
            others = asyncio.create_task(turns())
            await super().start(listener)

        async def close(self) -> None:
            assert others is not None
            others.cancel()
            await super().close()

    monkeypatch.setattr(BatchRun, "take", counted)
    bench.write(*(completion(f"r{n}", "again and again", temperature=0.0, max_tokens=5) for n in range(3000)))
    assert bench.run(lambda: Watched(LIMITS)).ok == 3000
    assert taken[0] > 100
    assert most == 1


@pytest.mark.parametrize(
    "case", ["far apart", "few are kept", "few tokens are kept", "few bytes are kept", "large answers", "another model"]
)
def test_equal_lines_far_apart_are_computed_once(bench: Bench, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """When one ended long before the next is read: as many as are kept, of the model that still serves. A failed line
    is computed again."""
    monkeypatch.setattr(prefetch, "FIRST_LINES", 2)
    monkeypatch.setattr(prefetch, "READ_AHEAD_LINES", 2)
    monkeypatch.setattr(line_flights, "_PAST", 3 if case == "few are kept" else 1000)
    if case == "few tokens are kept":  # of prompts, as answers are short
        monkeypatch.setattr(line_flights, "_PAST_VALUES", 200)
    if case == "large answers":
        monkeypatch.setattr(line_flights, "LARGE_VALUES", 4)
    same: dict[str, Any] = {"temperature": 0.0, "max_tokens": 5}
    if case == "few bytes are kept":
        monkeypatch.setattr(line_flights, "_PAST_VALUES", 40_000)
        same["truncate_prompt_tokens"] = 20
    text = "x " * 1000 if case == "few bytes are kept" else ""
    lines = []
    for turn in range(3):
        lines += [completion(f"equal{turn}", "again and again", **same), completion(f"bad{turn}", [7, 8], **same)]
        lines += [completion(f"other{turn}-{i}", f"{text}number {turn} {i}", **same) for i in range(100)]
    bench.write(*lines)
    kind = ChangingModel if case == "another model" else FakeJob
    summary = bench.run(lambda: kind(LIMITS, fail=frozenset({7})))
    assert (summary.ok, summary.failed) == (303, 3)
    again = {"far apart": 0, "another model": 1}.get(case, 2)
    assert len(bench.job.submitted) == 300 + 3 + 1 + again
    bodies = [bench.answers()[f"equal{turn}"]["response"]["body"] for turn in range(3)]
    assert len({body["id"] for body in bodies}) == 3
    if not again:  # this job's answers depend on a request's id
        assert all(body["choices"] == bodies[0]["choices"] for body in bodies)
    prompt = bodies[0]["usage"]["prompt_tokens"]
    assert sum(b["usage"]["prompt_tokens_details"]["cached_tokens"] for b in bodies) == (2 - again) * prompt
