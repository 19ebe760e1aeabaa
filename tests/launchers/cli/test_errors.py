"""Errors of all commands look alike: one prefix, one line each, and the exit codes of one table."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from laddertron.engine.config.load import load
from laddertron.launchers.cli import __main__ as cli
from laddertron.launchers.cli.commands import verify
from laddertron.launchers.cli.commands.batch import print_table
from laddertron.launchers.cli.errors import FAILED, INTERRUPTED, OK, USAGE, UsageError, report

DOCS = Path(__file__).parents[3] / "docs"
EXIT_CODES = {
    OK: "done",
    FAILED: "the work failed: ranks, requests, a measurement, or the daemon refused",
    USAGE: "the command line, the deployment file or the input is wrong; nothing was launched",
    INTERRUPTED: "interrupted by ^C",
    143: "ended by SIGTERM",
}
MISSING = "/dev/null/none.yaml"
BAD_INPUT: dict[str, tuple[tuple[str, ...], int]] = {
    "run": ((MISSING, "-i", "i.jsonl", "-o", "o.jsonl"), USAGE),
    "batch submit": (("/dev/null/i.jsonl",), USAGE),
    "batch status": (("batch_1",), FAILED),
    "batch wait": (("batch_1", "-o", "/dev/null/o.jsonl"), USAGE),
    "batch cancel": (("batch_1",), FAILED),
    "batch fetch": (("batch_1", "-o", "o.jsonl"), FAILED),
    "batch delete": (("batch_1",), FAILED),
    "batch list": (("--limit", "0"), USAGE),
    "files list": (("--limit", "0"), USAGE),
    "files delete": (("file-1",), FAILED),
    "bench latency": ((MISSING,), USAGE),
    "bench throughput": ((MISSING,), USAGE),
    "bench sweep": ((MISSING,), USAGE),
    "bench paper": (("--model", "no-such"), USAGE),
    "serve": ((MISSING,), USAGE),
    "reload": ((MISSING,), USAGE),
    "keys add": (("/dev/null/keys.json", "a"), USAGE),
    "keys list": (("/dev/null/keys.json",), USAGE),
    "keys rotate": (("/dev/null/keys.json", "a", "--old-for", "soon"), USAGE),
    "keys revoke": (("/dev/null/keys.json", "a"), USAGE),
    "keys limit": (("/dev/null/keys.json", "a"), USAGE),
    "keys adopt": (("/dev/null/keys.json", "a"), USAGE),
    "monitoring metrics": (("--no-such",), USAGE),
    "monitoring export": (("--no-such",), USAGE),
    "bundle": ((MISSING,), USAGE),
    "config": (("no-such",), USAGE),
    "check": ((MISSING,), USAGE),
    "check-store": ((MISSING,), USAGE),
    "plan": ((MISSING,), USAGE),
    "launch": ((MISSING,), USAGE),
    "topo": ((MISSING,), USAGE),
    "verify": ((MISSING,), USAGE),
    "acceptance": ((MISSING,), USAGE),
    "preflight": ((MISSING,), USAGE),
    "train": (("--layers", "x"), USAGE),
    "scan": (("/dev/null", "--text", "."), USAGE),
    "adapt": (("/dev/null", "-o", "/dev/null/out", "--text", "."), USAGE),
    "evaluate": (("/dev/null", "--text", "."), USAGE),
    "convert": (("/dev/null", "/dev/null/out", "--format", "hf"), USAGE),
    "manifest": (("/dev/null",), USAGE),
    "shard": ((MISSING,), USAGE),
}


def leaves() -> list[str]:
    """Every command, and every subcommand of a group."""
    found = []
    for name in cli.group.list_commands(click.Context(cli.group)):
        command = cli.group.get_command(click.Context(cli.group), name)
        below = command.list_commands(click.Context(command)) if isinstance(command, click.Group) else []
        found += [f"{name} {sub}" for sub in below] or [name]
    return found


def test_every_command_is_walked() -> None:
    """A new command fails here until a bad input of its own is named."""
    assert set(leaves()) == set(BAD_INPUT)


@pytest.mark.parametrize("name", BAD_INPUT)
def test_a_bad_input_is_one_error_of_one_form(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """stderr holds lines with the prefix and nothing else: no usage, no traceback; the exit code is the table's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "laddertron.launchers.cli.batch_client.time.sleep", lambda seconds: None
    )  # between tries of a read
    words, code = BAD_INPUT[name]
    group, *sub = name.split()
    at = ["--url", "http://127.0.0.1:9/v1"] if group in ("batch", "files") else []
    assert cli.main([group, *at, *sub, *words]) == code
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines
    assert [line for line in lines if not line.startswith(("error: ", "warning: no answer, asking again: "))] == []
    assert code in EXIT_CODES


@pytest.mark.parametrize(
    "words",
    [
        ("manifest", "."),
        ("manifest", ".", "--check"),
        ("train", "-o", "out", "--text", "."),
    ],
    ids=" ".join,
)
def test_a_folder_or_file_of_another_kind_is_wrong_input(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path exists and is not what the command reads: exit code 2, as for one that is missing."""
    monkeypatch.chdir(tmp_path)
    assert (cli.main([*words]), capsys.readouterr().err.startswith("error: ")) == (USAGE, True)


def test_the_documented_exit_codes_are_the_tables() -> None:
    page = (DOCS / "operating.md").read_text(encoding="utf-8")
    for code, meaning in EXIT_CODES.items():
        assert f"| {code} | {meaning} |\n" in page


@pytest.mark.parametrize("output", ["-", "/dev/null", "."])
def test_answers_go_to_a_regular_file(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not to a file named -, and nobody is told to remove a device."""
    assert cli.main(["batch", "wait", "batch_1", "-o", output]) == USAGE
    assert capsys.readouterr().err == f"error: {output} is not a regular file: name one for the answers\n"


@pytest.mark.parametrize("words", [(), ("batch",), ("files",), ("keys",), ("bench",), ("monitoring",)])
def test_a_group_without_a_command_prints_its_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """As click does: wrapped lines, not one line of an error."""
    assert cli.main([*words]) == USAGE
    text = capsys.readouterr().err
    assert text.startswith("Usage: laddertron")
    assert "error:" not in text
    assert text.count("\n") > 8


def test_messages_of_an_unreachable_or_wrong_address(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
    assert cli.main(["batch", "--url", url, "cancel", "batch_1"]) == FAILED
    text = capsys.readouterr().err
    assert all(word in text for word in ("laddertron serve", "--url", "OPENAI_BASE_URL"))


def test_a_model_that_is_no_section_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.yaml").write_text("model: my-llama\n")
    assert cli.main(["check", str(tmp_path / "m.yaml")]) == USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert "'my-llama' is not a section" in line


def test_check_refuses_what_a_start_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A port in use, a launcher that is not installed, a wiring for which the weights are not trained."""
    demo = str(DOCS.parent / "configs" / "demo-standard.yaml")
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        keys = {
            f"daemon.port={port}": "is in use",
            "launch.mpirun=/dev/null/mpirun": "no openmpi or mpich found",
            "model.wiring=ladder": "declare standard",
        }
        for key, message in keys.items():
            sets = ("--set", key, "--set", f"daemon.data_dir={tmp_path}")
            assert cli.main(["check", demo, *sets]) == USAGE
            assert message in capsys.readouterr().err


def test_monitoring_scrapes_the_targets_that_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "m")
    assert cli.main(["monitoring", "export", folder, "--target", "http://node1:8000"]) == USAGE
    assert cli.main(["monitoring", "export", folder, "--target", "node1:8000", "--target", "[::1]:9"]) == OK
    assert 'targets: ["node1:8000", "[::1]:9"]' in (tmp_path / "m" / "prometheus.yml").read_text()


def test_kinds_of_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """An error of several lines has the prefix on each; ^C is no error; a defect keeps its traceback."""
    assert report(UsageError("one\ntwo")) == USAGE
    assert capsys.readouterr().err == "error: one\nerror: two\n"
    assert report(click.ClickException("why")) == FAILED
    assert report(click.Abort()) == 130
    assert report(ModuleNotFoundError("torch", name="torch")) == USAGE
    assert "pip install 'laddertron[engine]'" in capsys.readouterr().err
    assert report(ModuleNotFoundError("laddertron.no", name="laddertron.no")) is None
    assert report(KeyError("x")) is None
    assert report(PermissionError(13, "Permission denied", "there")) == FAILED
    assert capsys.readouterr().err.endswith("error: there cannot be written or read: Permission denied\n")
    assert report(ConnectionResetError(104, "Connection reset by peer")) is None
    assert report(FileNotFoundError("model/config.json: no such file")) is None  # not the current folder
    assert OK == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("serve", "d.yaml", "--port", "8080"), "Use --set daemon.port=VALUE"),
        (("serve", "d.yaml", "--tensor-parallel-size=2"), "Use --set parallel.tensor_parallel_size=VALUE"),
        (("shard", "d.yaml", "--tp", "2"), "Use --set parallel.tensor_parallel_size=VALUE"),
        (("run", "d.yaml", "--max_num_seqs", "8"), "Use --set engine.max_num_seqs=VALUE"),
        (("serve", "d.yaml", "--no-such", "8"), "No such option '--no-such'. (laddertron serve --help)"),
    ],
)
def test_an_option_that_is_a_key_is_answered_with_set(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(list(words)) == USAGE
    assert says in capsys.readouterr().err


def test_a_second_key_of_a_name_is_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`keys revoke NAME` would refuse afterwards; the key is made all the same."""
    file = str(tmp_path / "keys.json")
    assert cli.main(["keys", "add", file, "alice"]) == OK
    assert "warning: " not in capsys.readouterr().err
    assert cli.main(["keys", "add", file, "alice"]) == OK
    said = capsys.readouterr()
    assert "warning: alice has 1 other valid key: use their ids" in said.err
    assert said.out.startswith("sk-")


def test_a_model_path_that_is_no_folder_is_named_as_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for path, says in (
        (tmp_path / "config.json", f"a model's config.json: name its folder, {tmp_path}"),
        (__file__, "a file: name the model's folder"),
        ("meta-llama/Llama-3.1-8B", "models are not downloaded by name: hf download NAME"),
        (tmp_path / "none", "no such folder (check --no-model"),
    ):
        (tmp_path / "d.yaml").write_text(f"model: {{path: {path}}}", encoding="utf-8")
        assert cli.main(["check", str(tmp_path / "d.yaml")]) == USAGE
        assert says in capsys.readouterr().err


def test_a_plan_of_a_models_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """`--model FOLDER` takes what a known name takes."""
    folder = DOCS.parent / "configs" / "demo" / "demo-standard"
    words = f"plan --model {folder} --set parallel.tensor_parallel_size=2 --nodes 1x16xcpu --json"
    assert cli.main(words.split()) == OK
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["tensor_parallel_size"]) == ("demo-standard", 2)


@pytest.mark.parametrize(("deterministic", "advised"), [("false", True), ("true", False)])
def test_verify_names_the_key_that_would_have_helped(
    deterministic: str,
    advised: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(verify, "_run", lambda *_: (True, []))
    monkeypatch.setattr(verify, "read_model", load)
    file = tmp_path / "d.yaml"
    file.write_text(f"model: {{path: m}}\nparallel: {{deterministic: {deterministic}}}\n", encoding="utf-8")
    assert cli.main(["verify", str(file)]) == FAILED
    assert ("set parallel.deterministic: true" in " ".join(capsys.readouterr().out.split())) == advised


def test_lists_print_what_servers_and_users_write_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Brackets are no markup, and an escape sequence does not reach the terminal."""
    print_table(("id", "name"), [("file-1", "[/b].jsonl"), ("file-12", "\x1b[31mred", "why: \n[/b]")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["id      name", "file-1  [/b].jsonl", "file-12  [31mred   why:  [/b]"]
    keys = str(tmp_path / "keys.json")
    for words in (("add", keys, "[/b]"), ("list", keys)):
        result = CliRunner().invoke(cli.group, ["keys", *words], standalone_mode=False)
        assert (result.exit_code, "[/b]" in result.output) == (OK, True)
