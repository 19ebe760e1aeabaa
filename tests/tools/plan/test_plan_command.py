"""`plan` as it is asked and answers: folders, names, options, refusals; the first screen, JSON and Markdown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from laddertron.engine.config.load import ConfigError
from laddertron.launchers.cli.__main__ import group, main
from laddertron.models.config.known_models import by_folder
from laddertron.tools.plan.answer import basis, headline
from laddertron.tools.plan.estimate import make_plan
from laddertron.tools.plan.tables import as_json, markdown, sheets
from test_plan import FIXTURES, ROOT, deployed, planned, run

BARE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "mpi4py", "megatron", "safetensors", "tokenizers",
                                      "fastapi", "jinja2", "prometheus_client", "transformers", "pynvml", "uvicorn"}:
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Absent())
from laddertron.launchers.cli.__main__ import main
code = main(sys.argv[1:])
print("loaded:", sorted({"torch", "numpy", "mpi4py"} & set(sys.modules)))
sys.exit(code)
"""


@pytest.mark.parametrize("args", [["plan"], ["plan", "--json"]], ids=" ".join)
def test_it_needs_neither_torch_nor_numpy_nor_mpi(args: list[str], tmp_path: Path) -> None:
    """With every heavy package hidden, 405B on two nodes is planned."""
    words = [*args, "--model", "llama-3.1-405b", "--nodes", "2x8xH100"]
    done = subprocess.run(
        [sys.executable, "-c", BARE, *words], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "loaded: []" in done.stdout


def test_a_folder_that_is_not_here_is_known_by_its_name() -> None:
    """fp8, ladder and hybrid are read off it; what is assumed is said."""
    question = deployed(FIXTURES / "llama-3.1-405b-fp8-tp8.yaml")
    assert question.stored.weights == "fp8"
    assert any("taken for llama-3.1-405b" in note for note in question.notes)
    guess = by_folder("Meta-Llama-3.1-405B-Instruct-hybrid-ladder")
    assert guess is not None
    assert guess.config.wiring.name == "hybrid"
    assert by_folder("llama-3.1-405binary") is None


def test_an_unknown_folder_is_refused_with_its_line(tmp_path: Path) -> None:
    """Neither weights nor a known name: the fault stands at model.path."""
    file = tmp_path / "d.yaml"
    file.write_text("model:\n  path: /models/mystery\n")
    with pytest.raises(ConfigError, match=r"d\.yaml:2: model\.path: /models/mystery: no such folder"):
        deployed(file)


def test_shapes_that_do_not_split_are_refused_with_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    """12 ranks for 405B: exit 2, one line, sizes that would do."""
    assert (
        main(["plan", "--model", "llama-3.1-405b", "--nodes", "3x4xH100", "--set", "parallel.tensor_parallel_size=12"])
        == 2
    )
    said = capsys.readouterr().err
    assert "128 heads % 12 = 8" in said
    assert len(said.splitlines()) == 1


def test_misspelt_names_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """A model and a fabric with a letter wrong."""
    assert main(["plan", "--model", "llama-3.1-450b"]) == 2
    assert "did you mean llama-3.1-405b?" in capsys.readouterr().err
    assert main(["plan", "--model", "llama-3.1-8b", "--nodes", "2x8xH10"]) == 2
    assert "2x8xH100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "give a CONFIG or --model"),
        (["x.yaml", "--model", "llama-3.1-8b"], "give a CONFIG or --model"),
    ],
)
def test_usage_errors_say_what_to_do(args: list[str], said: str) -> None:
    """Exit 2 and the fix."""
    result = run(*args)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "llama-3.1-405b", "--nodes", "2x8xH100"),
        ("--model", "llama-3.1-8b"),
        (str(ROOT / "configs" / "demo.yaml"),),
        (str(ROOT / "configs/405b/ladder.yaml"),),
        ("--model", "llama-3.1-405b"),
    ],
)
def test_the_answer_comes_first_in_80_columns(words: tuple[str, ...]) -> None:
    """What was assumed, the verdict, the advice, three tables that nothing is cut from; the rest with --all."""
    said = CliRunner().invoke(group, ["plan", *words], env={"COLUMNS": "80"}).output.splitlines()
    assert max(map(len, said)) <= 80
    assert not any("…" in line for line in said)
    assert ("assumed; name yours with --fabric" in said[0]) == ("--nodes" not in words)
    text = " ".join(said)
    assert [text.find(word) for word in ("Predicted", "fits:" if "fits:" in text else "does not fit", "Memory of")] == (
        sorted(text.find(word) for word in ("Predicted", "fits:" if "fits:" in text else "does not fit", "Memory of"))
    )
    assert "Assumptions" not in text
    assert "Assumptions" in run(*words, "--all").output


def test_how_far_off_predictions_were_is_what_validation_says() -> None:
    page = " ".join((ROOT / "docs" / "plans" / "validation.md").read_text().split())
    assert "### Tokens/s" in page
    assert "mean error 3.3%, worst 24.9%" in page.partition("### Tokens/s")[2].partition("###")[0]
    assert "3.3% in tokens/s, 24.9% at most" in basis(planned("llama-3.1-8b", "1x8xH100"))
    assert "missed by 4.0 % on average and by 14.0 % at most" in page
    assert "4.0 %, 14.0 % at most" in basis(make_plan(deployed(ROOT / "configs" / "demo.yaml")))


def test_json_holds_what_the_tables_show() -> None:
    """The command's JSON parses and agrees with the plan."""
    plan = planned("llama-3.1-405b", "2x8xH100")
    data = json.loads(run("--model", "llama-3.1-405b", "--nodes", "2x8xH100", "--json").output)
    assert data == json.loads(json.dumps(as_json(plan)))
    assert data["fits"] is True
    assert len(data["ranks"]) == 16
    assert data["memory"]["kv_tokens"] == plan.memory.kv_tokens
    assert {row["wiring"] for row in data["decoding"]} == set(plan.wirings)


def test_markdown_and_headline() -> None:
    """A table's rows have as many cells as its head, and the headline says whether it fits."""
    plan = planned("llama-3.1-70b", "1x8xH100")
    assert "fits" in headline(plan)
    rows = [line for line in markdown(plan).splitlines() if line.startswith("|")]
    assert len(rows) > 60
    for sheet in sheets(plan):
        assert all(len(row) == len(sheet.columns) for row in sheet.rows), sheet.title


def test_a_saved_fabric_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    """`--fabric FILE`: ranks stand on its hosts, each with its HCA."""
    fabric = str(ROOT / "configs" / "fabrics" / "2x8xH100.json")
    config = str(FIXTURES / "llama-3.1-405b-tp16.yaml")
    assert main(["plan", config, "--fabric", fabric, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["hca"] for row in data["ranks"]} == {f"mlx5_{i}" for i in range(8)}
