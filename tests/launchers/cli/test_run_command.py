"""`laddertron run` as its user meets it: refusals before anything is launched, what the terminal shows, and real ranks
interrupted, killed and resumed."""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from laddertron.engine.openai.batch_input import check_line
from laddertron.engine.run.progress import FailureCause, LayerTime, RankKind, Snapshot, Summary
from laddertron.launchers.cli.__main__ import main
from laddertron.launchers.cli.commands.run import (
    Arguments,
    report,
)
from laddertron.launchers.cli.run_view import ConsoleLog, RunView, clock, default_errors, plain_line, summary_table
from laddertron.launchers.job.bundle import newest
from rich.console import Console
from waiting import FOR_EVER_S, HANG_S, until

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "configs" / "demo.yaml"
MPIRUN = Path(sys.executable).with_name("mpirun")


def run(*words: object) -> int:
    return main(["run", *map(str, words)])


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"custom_id": "a"}\n')
    return path


def test_wrong_files_are_exit_2_with_the_mend(lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is launched, and without touching what is there."""
    out = tmp_path / "out.jsonl"
    assert run(DEMO, "-i", lines, "-o", lines) == 2
    assert "three files" in capsys.readouterr().err
    (linked := tmp_path / "linked.jsonl").hardlink_to(lines)
    assert run(DEMO, "-i", lines, "-o", linked, "--overwrite") == 2
    assert run(DEMO, "-i", lines, "-o", out, "--errors", linked, "--overwrite") == 2
    assert capsys.readouterr().err.count("three files") == 2
    linked.rename(aside := tmp_path / "out.outdated.jsonl")
    assert run(DEMO, "-i", aside, "-o", out, "--resume") == 2
    assert "puts answers to lines that changed" in capsys.readouterr().err
    aside.unlink()
    (loop := tmp_path / "loop").symlink_to(loop)
    assert run(DEMO, "-i", loop, "-o", out) == 2
    assert "loop is missing" in capsys.readouterr().err
    assert run(DEMO, "-i", "-", "-o", out) == 2
    assert "'-' cannot be used" in capsys.readouterr().err
    assert run(DEMO, "-i", tmp_path / "nowhere", "-o", out) == 2
    assert "missing" in capsys.readouterr().err
    out.write_text("precious\n")
    assert run(DEMO, "-i", lines, "-o", out) == 2
    assert "--resume" in capsys.readouterr().err
    assert run(DEMO, "-i", lines, "-o", out, "--resume") == 2
    assert "out.jsonl:1: not a line" in capsys.readouterr().err
    assert out.read_text() == "precious\n"
    assert lines.read_text() == '{"custom_id": "a"}\n'
    for other in (tmp_path, ".", "/dev/null"):
        assert run(DEMO, "-i", lines, "-o", other) == 2
        assert f"{other} is not a regular file" in capsys.readouterr().err
    lines.write_bytes(gzip.compress(b'{"custom_id": "a"}\n'))
    assert run(DEMO, "-i", lines, "-o", tmp_path / "other") == 2
    assert "compressed (gzip)" in capsys.readouterr().err


def test_wrong_configurations_are_exit_2_before_overwrite_empties_anything(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    files = ("-i", lines, "-o", out, "--overwrite")
    assert run(DEMO, *files, "--set", "engine.max_num_seq=8") == 2
    assert "did you mean max_num_seqs" in capsys.readouterr().err
    assert run(DEMO, *files, "--set", "parallel.tensor_parallel_size=3") == 2
    assert "parallel.tensor_parallel_size" in capsys.readouterr().err
    assert run(DEMO, *files, "--set", "engine.kv_cache_memory=4000TiB") == 2
    assert capsys.readouterr().err.count("engine.kv_cache_memory: 4194304000 MiB for each of 2 ranks") == 1
    assert run(DEMO, *files, "--set", "engine.kv_cache_memory=4000TiB", "--set", "launch.hosts=[localhost:2]") == 2
    assert "engine.kv_cache_memory: 4194304000 MiB" in capsys.readouterr().err
    assert run(DEMO, *files, "--set", f"model.tokenizer={tmp_path}") == 2
    assert "tokenizer.json is missing" in capsys.readouterr().err
    assert run(DEMO, *files, "--set", "launch.mpirun=/nowhere/mpirun") == 2
    assert run(DEMO, *files, "--set", "launch.hosts=[node-that-is-not-there:1]") == 2
    capsys.readouterr()
    assert out.read_text() == "precious\n"


def test_ranks_that_do_not_fit_are_exit_2_said_once(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks of an outer mpirun for a deployment of two, numbered on their node as Open MPI 5 does by core: rank 0
    says so, all leave."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "3")
    for rank, local_rank in enumerate((0, 2, 1)):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(local_rank))
        assert run(DEMO, "-i", lines, "-o", tmp_path / "out") == 2
        assert ("needs 2" in capsys.readouterr().err) == (rank == 0)


def test_replicas_in_one_job_need_all_their_ranks_and_no_torchrun(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas of two in an outer mpirun of two: four are needed. Under torchrun, whose store anyone may read, they
    are refused with the ways that work."""
    words = (DEMO, "-i", lines, "-o", tmp_path / "out", "--set", "parallel.replicas=2")
    with monkeypatch.context() as ranks:
        for name, value in (("SIZE", 2), ("LOCAL_SIZE", 2), ("RANK", 0), ("LOCAL_RANK", 0)):
            ranks.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
        assert run(*words) == 2
        assert "x replicas=2 needs 4" in capsys.readouterr().err
    for name, value in (("WORLD_SIZE", 4), ("LOCAL_WORLD_SIZE", 4), ("RANK", 0), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    assert run(*words) == 2
    assert "run `laddertron run` without torchrun" in capsys.readouterr().err


def test_the_resume_line_repeats_what_was_asked() -> None:
    output = Path("my out.jsonl")
    assert default_errors(output) == Path("my out.errors.jsonl")
    arguments = Arguments("d.yaml", Path("i"), output, default_errors(output), False, True, ("engine.seed=3",))
    want = "laddertron run d.yaml -i i -o 'my out.jsonl' --set engine.seed=3 --resume"
    assert arguments.resume_line() == want


def test_progress_and_table_say_what_matters() -> None:
    assert [clock(s) for s in (7, 754, 3723)] == ["0:07", "12:34", "1:02:03"]
    snapshot = Snapshot("ready", total=100, skipped=20, ok=18, failed=2, tokens=4000, seconds=10.0)
    want = "laddertron: ready: 40 of 100 lines, 20 done earlier, 2 failed, 400 tokens/s, 0:30 left"
    assert plain_line(snapshot) == want
    text = io.StringIO()
    with RunView(Console(file=text)) as view:
        for done in range(5):
            view.update(Snapshot("ready", 5, ok=done + 1))
        for seconds in (1.0, 2.0):  # says nothing new
            view.update(Snapshot("failed", 5, ok=5, seconds=seconds))
    assert text.getvalue().splitlines() == ["laddertron: ready: 1 of 5 lines", "laddertron: failed: 5 of 5 lines"]
    text = io.StringIO()
    with RunView(Console(file=text, force_terminal=True, width=100)) as view:
        view.update(snapshot)
    assert "400 tokens/s, 0:30 left" in text.getvalue()
    text = io.StringIO()
    with RunView(Console(file=text, force_terminal=True, width=100)) as view:
        for done in (0, 5):  # at once: the end is shown however soon it follows
            view.update(Snapshot("ready", 5, ok=done))
    assert "5/5" in text.getvalue()
    layers = (LayerTime("ladder mlp", "net", 2.0, 0.5), LayerTime("ladder attention", "net", 0.0, 0.0))
    computed = (RankKind(2, "cpu", "avx2", "1"), RankKind(1, "cuda", "amx", "8"))
    summary = Summary(80, 78, 2, 20, 1000, 4000, 10.0, 3.0, 1.0, layers, computed=computed)
    console = Console(file=(text := io.StringIO()), width=100)
    console.print(summary_table(summary))
    for words in ("80: 78 answered, 2 failed, 20 done earlier", "400.0 tokens/s", "3.00 s hidden (75%), 1.00 s"):
        assert words in text.getvalue()
    assert re.search(r"ladder mlp, net +2.00 s hidden \(80%\), 0.50 s exposed", text.getvalue())
    assert re.search(r"ladder attention, net +0.00 s hidden, 0.00 s exposed\n", text.getvalue())
    assert re.search(r"ranks +2 x cpu, tier avx2, 1 thread\n +1 x cuda, 8 threads\n", text.getvalue())
    console = Console(file=(text := io.StringIO()), width=100)
    console.print(summary_table(Summary(1, 1, 0, 0, 5, 30, 1.0, drafted=1200, accepted=900)))
    assert "1,200 verified, 900 accepted (75%)" in text.getvalue()
    console.print(summary_table(Summary(0, 0, 0, 0, 0, 0, 0.0)))
    assert "n/a" in text.getvalue()
    log = ConsoleLog(Console(file=(text := io.StringIO()), width=20))
    log.emit(logging.makeLogRecord({"msg": "one line, however [narrow] the terminal"}))
    assert text.getvalue() == "one line, however [narrow] the terminal\n"


@pytest.mark.parametrize(
    ("ok", "failed", "skipped", "strict", "code"),
    [(3, 0, 0, True, 0), (3, 2, 0, False, 0), (3, 2, 0, True, 1), (0, 2, 0, False, 1), (0, 2, 1, False, 0)],
)
def test_failed_lines_and_the_exit_code(ok: int, failed: int, skipped: int, strict: bool, code: int) -> None:
    """Nothing answered is a failure, with the reason; `--strict` makes one of any failed line."""
    causes = (FailureCause(failed, "model_not_found", "the model 'x' is not served: 'demo' is"),) * bool(failed)
    summary = Summary(ok + failed + skipped, ok, failed, skipped, 0, 0, 1.0, causes=causes)
    output = Path("out.jsonl")
    arguments = Arguments("d.yaml", Path("i"), output, default_errors(output), False, False, (), strict)
    console = Console(file=(text := io.StringIO()), width=80)
    assert report(summary, arguments, console) == code
    assert (f"{failed} x model_not_found: the model 'x' is not served" in text.getvalue()) == bool(failed)
    assert ("no line was answered" in text.getvalue()) == (failed > 0 and ok + skipped == 0)


def test_a_run_that_never_began_says_why_and_no_more() -> None:
    """No table of zeros, no way to resume what would be refused again; with something lost, both."""
    arguments = Arguments("d.yaml", Path("i"), Path("o"), Path("e"), False, False, (), False)
    for lost, more in ((0, False), (3, True)):
        console = Console(file=(text := io.StringIO()), width=80)
        summary = Summary(16, 0, 0, 0, 0, 0, 0.0, reason="a rank needs more memory", lost=lost)
        assert report(summary, arguments, console) == 1
        assert "error: a rank needs more memory\n" in text.getvalue()
        assert ("tokens" in text.getvalue(), "--resume" in text.getvalue()) == (more, more)


def workers(of: int) -> list[int]:
    """Ranks below a process, by /proc."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                rank = b"laddertron.launchers.rank.worker" in words and not any(b"mpirun" in word for word in words)
                if rank and _ancestor(int(folder.name), of):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def _ancestor(pid: int, of: int) -> bool:
    while pid > 1:
        if pid == of:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


class Asked:
    """A run of the demo model over a file of seeded lines, one of them bad; `delay` is its link's. Ranks that a slow
    machine keeps silent are waited for."""

    def __init__(self, folder: Path, count: int, delay: str = "0s") -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        body = {"model": "demo", "prompt": "class threading.Barrier\n", "max_tokens": 40, "ignore_eos": True}
        envelope = {"method": "POST", "url": "/v1/completions"}
        asked = [{"custom_id": f"r-{i}", **envelope, "body": {**body, "seed": i}} for i in range(count)]
        self.names = sorted(f"r-{i}" for i in range(count))
        self.input.write_text("".join(json.dumps(line) + "\n" for line in asked) + "{bad\n")
        self.words = ["run", str(DEMO), "-i", str(self.input), "-o", str(self.output)]
        patience = f"daemon.heartbeat_timeout={FOR_EVER_S:g}s"
        self.sets = (f"daemon.data_dir={folder / 'data'}", f"parallel.emulated_delay={delay}", patience)
        for key in self.sets:
            self.words += ["--set", key]

    def answers(self) -> list[str]:
        """custom_ids of the whole lines, sorted."""
        data = self.output.read_bytes() if self.output.exists() else b""
        return sorted(json.loads(line)["custom_id"] for line in data.splitlines(True) if line.endswith(b"\n"))

    def until_answered(self, process: subprocess.Popen[str]) -> None:
        def answered() -> bool:
            assert process.poll() is None, process.communicate()[1]
            return bool(self.answers())

        until(answered)


def verdicts(data_dir: Path) -> list[str]:
    """First lines of the bundles there."""
    found = []
    for path in newest(data_dir / "bundles"):
        with tarfile.open(path) as archive:
            readme = archive.extractfile(archive.getmembers()[0])
            assert readme is not None
            found.append(readme.readline().decode())
    return found


def start(command: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_killed_rank_ends_the_run_and_resume_under_mpirun_finishes_it(tmp_path: Path) -> None:
    """Two real ranks on a link that is too slow for all lines; after the first answers one is killed: exit 1, reason,
    resume line, no rank left, a bundle whose first line names the rank. Resumed under mpirun, on a quick link, it takes
    its place among the ranks and finishes. Each line has one answer, the bad one its error."""
    asked = Asked(tmp_path, 64, "5ms")
    command = [sys.executable, "-m", "laddertron.launchers.cli", *asked.words]
    first = start(command)
    asked.until_answered(first)
    ranks = workers(first.pid)
    assert len(ranks) >= 2
    os.kill(ranks[-1], signal.SIGKILL)
    said = first.communicate(timeout=HANG_S)[1]
    assert (first.returncode, "--resume" in said, "were lost" in said) == (1, True, True), said
    assert [pid for pid in ranks if Path(f"/proc/{pid}").exists()] == []
    assert 0 < len(asked.answers()) < 64
    (verdict,) = verdicts(tmp_path / "data")
    assert verdict.startswith("rank_lost: rank ")
    assert f"pid {ranks[-1]})" in verdict

    outer = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    second = start([*outer, *command, "--set", "parallel.emulated_delay=0s", "--resume"])
    said = second.communicate(timeout=2 * HANG_S)[1]
    assert second.returncode == 0, said
    assert asked.answers() == asked.names
    (fault,) = [json.loads(line) for line in default_errors(asked.output).read_bytes().splitlines()]
    assert fault["response"]["body"]["error"]["line"] == 65
    assert len(verdicts(tmp_path / "data")) == 1


@pytest.mark.slow
def test_four_ranks_that_mpirun_maps_as_it_likes(tmp_path: Path) -> None:
    """Open MPI 5 maps four ranks by core and numbers them so on their node, rank 1 as local rank 2: all lines are
    answered as by one rank. The summary counts the ranks."""
    answers = []
    for count in (4, 1):
        (folder := tmp_path / str(count)).mkdir()
        asked = Asked(folder, 4)
        outer = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "--map-by", "core", "-np", str(count)]
        size = ("--set", f"parallel.tensor_parallel_size={count}")
        process = start([*outer, sys.executable, "-m", "laddertron.launchers.cli", *asked.words, *size])
        said = process.communicate(timeout=2 * HANG_S)[1]
        assert process.returncode == 0, said
        assert sum(map(int, re.findall(r"(\d+) x cpu", said))) == count, said
        bodies = [json.loads(line) for line in asked.output.read_bytes().splitlines()]
        answers.append({line["custom_id"]: line["response"]["body"]["choices"] for line in bodies})
    assert answers[0] == answers[1]
    assert sorted(answers[0]) == ["r-0", "r-1", "r-2", "r-3"]


def test_a_rank_of_an_outer_mpirun_with_another_deployment_is_named(tmp_path: Path) -> None:
    """The run ends before a line is answered, and its reason comes before mpirun ends the ranks."""
    asked = Asked(tmp_path, 4)
    command = [sys.executable, "-m", "laddertron.launchers.cli", *asked.words]
    outer = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "1", *command]
    process = start([*outer, ":", "-np", "1", *command, "--set", "engine.max_num_seqs=7"])
    output = process.communicate(timeout=2 * HANG_S)[1]
    assert process.returncode == 1, output
    assert re.search(r"error: rank 1 \(node .*\): the deployment on .* is another than rank 0's: use the same", output)
    assert asked.answers() == []


INTERRUPTIBLE = """
import sys
sys.path.insert(0, sys.argv[1])
from fake_job import FakeJob
from laddertron.engine.openai.batch_input import check_line
from laddertron.engine.request import ModelLimits
from laddertron.launchers.cli import __main__ as cli
from laddertron.launchers.cli.commands import run
run.launched_jobs = lambda deployment: [FakeJob(ModelLimits(512, 100_000, 1, 4096))]
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_says_how_to_resume(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """^C (or SIGTERM) after the first answers: whole lines only, the line to type, its exit code."""
    asked = Asked(tmp_path, 20_000)
    process = start([sys.executable, "-c", INTERRUPTIBLE, str(ROOT / "tests" / "helpers"), *asked.words])
    asked.until_answered(process)
    process.send_signal(number)
    said = process.communicate(timeout=HANG_S)[1]
    assert process.returncode == code, said
    words = ["-o", str(asked.output), *(word for one in asked.sets for word in ("--set", one)), "--resume"]
    assert shlex.join(words) in said
    assert asked.output.read_bytes().endswith(b"\n")
    assert 0 < len(asked.answers()) < 20_000


ENDS_LATE = """
import asyncio, sys
from laddertron.launchers.cli import __main__ as cli
from laddertron.launchers.cli.commands import run
async def ends_late(*_):
    print("running", flush=True)
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            print("ending", flush=True)
run.launched_jobs, run.BatchRun.run = lambda deployment: [], ends_late
run.twice_within_s = lambda: 0.0  # the test's signals come one after the other, however soon
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_second_interrupt_still_says_how_to_resume(tmp_path: Path) -> None:
    """The first ^C waits for what it ends, and prints after it; the second one exits at once, and prints before."""
    asked = Asked(tmp_path, 4)
    command = [sys.executable, "-c", ENDS_LATE, *asked.words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for word in ("running", "ending"):
            assert process.stdout.readline().strip() == word
            process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=HANG_S)[1]
    assert process.returncode == 130, said
    assert said.count("--resume") == 1


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_the_readmes_recipe_makes_batch_lines(tmp_path: Path) -> None:
    """Plain lines through the jq command of the README are lines that `run` takes, each with an id of its own."""
    (tmp_path / "plain.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 3}\n', encoding="utf-8")
    [recipe] = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("jq -c ")]
    done = subprocess.run(["sh", "-c", recipe], cwd=tmp_path, capture_output=True, check=True)
    lines = [check_line(line) for line in done.stdout.splitlines()]
    assert [line.error for line in lines] == [None, None]
    assert len({line.custom_id for line in lines}) == 2
