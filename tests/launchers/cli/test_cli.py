"""The command line's front door: what it lists, how it answers mistakes, and how quickly."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import struct
import subprocess
import sys
import textwrap
import tomllib
from math import prod
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner, Result
from laddertron import __version__
from laddertron.engine.config.load import load, read
from laddertron.engine.run.progress import Snapshot
from laddertron.launchers.cli import __main__ as cli
from laddertron.launchers.cli.commands.check import summary
from laddertron.launchers.cli.errors import ENGINE, FAILED, UsageError, ended_by
from laddertron.launchers.cli.run_view import RunView, progress_console, say_error
from laddertron.models.config.model_config import from_folder
from laddertron.models.weights.slices import expected_shapes
from tiny_text import byte_level

CONFIGS = Path(__file__).parents[3] / "configs"


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli.group, list(words))


def write_model(folder: Path, **changes: object) -> None:
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "architectures": ["LlamaForCausalLM"],
    }
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    byte_level().save(str(folder / "tokenizer.json"))
    with contextlib.suppress(ValueError):
        write_weights(folder)


def write_weights(folder: Path) -> None:
    """Zeros in the shapes that config.json asks for. Raises ValueError where it is no model's."""
    header, at = {}, 0
    for name, shape in expected_shapes(from_folder(folder)).items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at := at + 4 * prod(shape)]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))


def test_help_teaches_by_role_and_lists_only_what_exists() -> None:
    """Commands stand under what they are for, each with its module; no other module is a command."""
    text = invoke("--help").output
    assert "laddertron check deploy.yaml" in text
    assert "Plan and deploy" in text
    assert "check" in text
    root = Path(cli.__file__).parents[2]
    folders = {name: root / "tools" / tool / "commands" for tool, names in cli.TOOLS.items() for name in names}
    for names in cli.ROLES.values():
        for name in names:
            folder = folders.get(name, root / "launchers" / "cli" / "commands")
            assert (folder / f"{name.replace('-', '_')}.py").exists()
    assert cli.group.get_command(None, "os") is None  # type: ignore[arg-type]


def test_every_command_teaches() -> None:
    """Each command has a help text of its own, of at most 80 columns with its examples, which click does not wrap."""
    paths: list[list[str]] = [[], *([name] for name in cli.group.list_commands(None))]  # type: ignore[arg-type]
    for path in paths:
        command = cli.group.get_command(None, path[0]) if path else None  # type: ignore[arg-type]
        if isinstance(command, click.Group) and len(path) == 1:
            paths += [[*path, part] for part in command.commands]
        done = invoke(*path, "--help")
        assert done.exit_code == 0, done.output
        assert len(done.output) > (150 if len(path) < 2 else 100)
        assert [line for line in done.output.splitlines() if len(line) > 80] == [], path


def test_version_and_misspelling(capsys: pytest.CaptureFixture[str]) -> None:
    """--version says which; a slip of the finger is answered with its neighbour and exit code 2."""
    assert __version__ in invoke("--version").output
    assert cli.main(["chekc"]) == 2
    assert "Did you mean 'check'?" in capsys.readouterr().err
    for name, advice in cli.REMOVED.items():
        assert cli.group.get_command(None, name) is None  # type: ignore[arg-type]
        assert cli.main([name, "--any"]) == 2
        assert f"error: {name}: this command was removed: {advice}" in capsys.readouterr().err
    assert cli.main(["xyzzy"]) == 2
    assert "No such command 'xyzzy'" in capsys.readouterr().err


def test_a_faulty_config_ends_with_two_and_one_line_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """stderr holds the faults and nothing else: no traceback, no usage."""
    file = tmp_path / "d.yaml"
    file.write_text("model: {}\nengine: {max_num_seqs: 0}\n", encoding="utf-8")
    assert cli.main(["check", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.split(": ")[2] for line in said.err.splitlines()] == ["model.path", "engine.max_num_seqs"]


@pytest.mark.parametrize("said", [{}, {"HOME": ""}])
def test_a_service_without_home_gets_the_users_own(said: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that is said stays."""
    cli.give_home(said)
    assert said == {"HOME": pwd.getpwuid(os.getuid()).pw_dir}
    kept = {"HOME": "/elsewhere"}
    cli.give_home(kept)
    assert kept == {"HOME": "/elsewhere"}

    def nobody(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    unknown: dict[str, str] = {}
    cli.give_home(unknown)
    assert os.path.isdir(unknown["HOME"])


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--model", "llama-3.1-8b"),
        ("check", "DEMO"),
        ("topo", "DEMO"),
        ("launch", "DEMO", "serve", "--dry-run"),
        ("keys", "add", "FOLDER/keys.json", "alice"),
        ("bundle", "DEMO", "-o", "FOLDER/b.tar.gz"),
        ("batch", "submit", "--help"),
        ("monitoring", "metrics"),
        ("serve", "DEMO"),
    ],
    ids=lambda words: words[0],
)
def test_planner_and_client_need_no_engine(words: tuple[str, ...], tmp_path: Path) -> None:
    """With the modules of the extra `engine` hidden the commands of planner and client run; another says what to
    install."""
    hidden = textwrap.dedent(f"""
        import sys
        sys.modules.update(dict.fromkeys({ENGINE!r}))  # as absent: not found, and not imported
        from laddertron.launchers.cli.__main__ import main
        sys.exit(main(sys.argv[1:]))
    """)
    given = [w.replace("DEMO", str(CONFIGS / "demo.yaml")).replace("FOLDER", str(tmp_path)) for w in words]
    done = subprocess.run(
        [sys.executable, "-c", hidden, *given], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    if words[0] == "serve":
        assert done.returncode == 2
        assert done.stderr.strip().endswith("pip install 'laddertron[engine]' (or [cuda])")
    else:
        assert done.returncode == 0, done.stderr


def test_the_shipped_files_come_with_the_command(tmp_path: Path) -> None:
    """The reference and every other deployment file by name; rules and dashboards as they stand, and all of it in the
    wheel."""
    names = invoke("config", "--list").output.split()
    assert {"reference", "demo", "405b/stock"} <= set(names)
    assert invoke("config").output == (CONFIGS / "reference.yaml").read_text()
    assert invoke("config", "demo").output == (CONFIGS / "demo.yaml").read_text()
    assert re.search(r"choose one of .*\bdemo, ", invoke("config", "nothing").output)
    out = tmp_path / "out"
    written = [Path(line) for line in invoke("monitoring", "export", str(out)).output.split()]
    assert {"alerts.yml", "overview.json", "prometheus.yml"} <= {path.name for path in written}
    assert "exists" in invoke("monitoring", "export", str(out)).output
    assert invoke("monitoring", "export", str(out), "--overwrite").exit_code == 0
    settings = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    packed = {path for glob in settings["package-data"]["laddertron"] for path in CONFIGS.parent.glob(glob)}
    page = CONFIGS.parent / "docs" / "runbook.md"
    for path in written:
        source = page if path.name == page.name else CONFIGS / "monitoring" / path.relative_to(out)
        assert source.read_text() == path.read_text().replace((out / page.name).as_uri(), "docs/runbook.md")
        assert source in packed
    assert (out / page.name).as_uri() + "#laddertronnotready" in (out / "alerts.yml").read_text()
    url = "https://wiki.example/run"
    assert invoke("monitoring", "export", str(out), "--overwrite", "--runbook", url).exit_code == 0
    rules = yaml.safe_load((out / "alerts.yml").read_text())["groups"]
    links = {rule["annotations"]["runbook_url"] for group in rules for rule in group["rules"] if "alert" in rule}
    assert all(link.startswith(f"{url}#laddertron") for link in links)
    assert f"{url}#laddertronrankdown" in (out / "grafana/overview.json").read_text()
    assert {CONFIGS / f"{name}.yaml" for name in names} <= packed


def test_a_models_folder_is_a_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every key at its default; --set works as with a file, and errors name the folder, in which nothing is written."""
    folder = str(CONFIGS / "demo" / "demo-standard")
    loaded = load(folder, ["engine.max_num_seqs=8"])
    assert loaded.model.path == folder
    monkeypatch.chdir(tmp_path)
    assert load(folder).daemon.data_dir == str(tmp_path / "laddertron-data")
    assert load(os.path.relpath(folder)).model.path == folder
    assert (loaded.parallel.tensor_parallel_size, loaded.engine.max_num_seqs) == (1, 8)
    assert cli.main(["check", folder]) == 0
    assert "OK: demo-standard, tp 1" in capsys.readouterr().out
    assert cli.main(["check", folder, "--set", "parallel.tensor_parallel_size=64"]) == 2
    assert "--set parallel.tensor_parallel_size" in capsys.readouterr().err
    assert cli.main(["check", str(CONFIGS / "monitoring")]) == 2
    assert "a folder without config.json" in capsys.readouterr().err


def test_an_interrupt_during_imports_is_one_line() -> None:
    """^C in the first moments, while the command line itself is still being imported."""
    program = """
        import builtins, sys
        from laddertron.launchers.cli import main
        real = builtins.__import__
        def interrupted(name, *rest):
            if name == "click":
                raise KeyboardInterrupt
            return real(name, *rest)
        builtins.__import__ = interrupted
        sys.exit(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_reader_that_has_gone_is_no_error_of_the_command() -> None:
    with pytest.raises(BrokenPipeError), ended_by(OSError):
        raise BrokenPipeError
    with pytest.raises(UsageError), ended_by(OSError):
        raise FileNotFoundError


@pytest.mark.parametrize("words", [("config",), ("monitoring", "metrics"), ("--version",), ("topo",)])
def test_a_full_disk_under_the_output_is_one_line(words: tuple[str, ...]) -> None:
    """Not a traceback, and not Python's exit code 120 for what it could not flush."""
    command = [sys.executable, "-m", "laddertron.launchers.cli", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "error: the output, or a file that it needs cannot be written or read: No space left on device\n"
    assert (done.returncode, done.stderr) == (FAILED, said)


def test_a_removed_current_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cli.main(["check", str(CONFIGS / "demo.yaml")]) == 2
    assert capsys.readouterr().err == "error: the current folder was removed: change to one that exists\n"


def test_no_file_gets_the_number_of_a_closed_stream() -> None:
    """`serve 2>&-` ended with 1, and the store could have been standard error."""
    program = """
        import os, sys
        from laddertron.launchers.cli.__main__ import main
        main(["--version"])
        print(*(os.readlink(f"/proc/self/fd/{n}") for n in (0, 2)), sys.stderr.isatty())
    """
    words = ["sh", "-c", 'exec "$0" -c "$1" <&- 2>&-', sys.executable, textwrap.dedent(program)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["/dev/null /dev/null False"])


def test_any_terminal_shows_something() -> None:
    """One of no width, and one whose encoding lacks a character."""
    for words in (("topo",), ("monitoring", "metrics"), ("plan", "--model", "llama-3.1-8b", "--nodes", "1xH100")):
        command = [sys.executable, "-m", "laddertron.launchers.cli", *words]
        environ = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "0", "TERM": "dumb"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_progress_that_cannot_be_shown_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of hours, whose log's disk is full or whose reader has exited, goes on."""
    read, write = os.pipe()
    os.close(read)
    with contextlib.suppress(OSError), open("/dev/full", "w") as full, open(write, "w") as broken:
        for stream in (full, broken):
            monkeypatch.setattr(sys, "stderr", stream)
            console = progress_console()
            with RunView(console) as view:
                view.update(Snapshot("ready", total=2, skipped=0, ok=1, failed=0, in_flight=1, tokens=5, seconds=1.0))
            say_error(console, "x")
    monkeypatch.setattr(sys, "stderr", None)
    say_error(progress_console(), "x")


@pytest.mark.parametrize(
    ("size", "hosts", "said"), [(1, "[a:8]", "= 1 rank on 1 host,"), (2, "[a, b]", "= 2 ranks on 2 hosts,")]
)
def test_the_summary_of_a_check_counts_in_singular_and_plural(size: int, hosts: str, said: str) -> None:
    sets = [f"parallel.tensor_parallel_size={size}", f"launch.hosts={hosts}"]
    assert said in summary(read(Path(__file__).parents[3] / "configs" / "demo.yaml", sets))
