"""`laddertron verify` on real ranks: equal bits, a planted fault with its layer and step, another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import pytest
from laddertron.launchers.cli.__main__ import main
from laddertron.launchers.cli.commands.verify import compare
from laddertron.models.cpu.kernels import Kernels

PLANTED = Path(__file__).parents[2] / "helpers" / "planted"


def deployment(
    folder: Path, name: str, size: int, deterministic: str, env: str = "{}", stages: int = 1, recipe: str = "ladder"
) -> str:
    if not (folder / "model").exists():
        checkpoints.save(folder / "model", recipe)
    layout = "spread" if recipe in checkpoints.MIXED else "auto"
    (folder / name).write_text(f"""\
model: {{path: ./model}}
parallel:
  tensor_parallel_size: {size}
  pipeline_parallel_size: {stages}
  deterministic: {deterministic}
  expert_layout: {layout}
launch: {{env: {env}}}
engine: {{device: cpu, threads: 1, max_num_seqs: 40, kv_cache_memory: 16MiB, block_size: 4}}
""")
    return str(folder / name)


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Any:
    """The command: its exit code, and what it printed, in one line."""

    def run(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        code, said = main(["verify", *words]), capsys.readouterr()
        assert all(len(line) <= 80 for line in said.out.splitlines()), said.out
        return code, " ".join((said.out + said.err).split())

    return run


SHORT = ("--requests", "4", "--longest", "40", "--cases", "3")


@pytest.mark.skipif(Kernels.find() is None, reason="the C kernels were not built here")
@pytest.mark.slow
def test_two_layouts_with_the_same_bits(verify: Any, tmp_path: Path) -> None:
    one, two = (deployment(tmp_path, f"{n}.yaml", n, "everywhere") for n in (1, 2))
    code, said = verify(one, "--against", two, *SHORT)
    assert code == 0, said
    assert "tp 1, deterministic everywhere, 3 mixes: all bits are equal" in said
    assert said.count("all bits are equal") == 2


@pytest.mark.slow
@pytest.mark.skipif(Kernels.find() is None, reason="the C kernels were not built here")
def test_stages_have_the_same_bits(verify: Any, tmp_path: Path) -> None:
    """Each stage checks its own layers; together they are the model's, by its numbers."""
    staged, whole = (deployment(tmp_path, f"{n}.yaml", 1, "true", stages=n) for n in (2, 1))
    code, said = verify(staged, "--against", whole, *SHORT)
    assert code == 0, said
    assert said.count("all bits are equal") == 2


@pytest.mark.slow
@pytest.mark.skipif(Kernels.find() is None, reason="the C kernels were not built here")
def test_a_planted_product_is_found_with_its_layer_and_step(verify: Any, tmp_path: Path) -> None:
    """An expert's, which depends on how many rows chose it."""
    planted = deployment(tmp_path, "planted.yaml", 2, "true", f"{{PYTHONPATH: '{PLANTED}'}}", recipe="moe_ladder")
    code, said = verify(planted, *SHORT, "--seed", "5")
    assert code == 1, said
    assert "bits differ in" in said
    assert ": layer 1 mlp of sequence" in said
    assert ", step " in said


def test_what_cannot_be_checked_is_said(verify: Any, tmp_path: Path) -> None:
    one = deployment(tmp_path, "one.yaml", 1, "true")
    code, said = verify(one, "--longest", "1000")
    assert code == 2
    assert "--longest 1000 is more than max_model_len=256" in said


def test_the_first_difference_is_the_lowest_layers() -> None:
    same: Any = [[("layer 0 mlp", [1, 2]), ("logits", [3, 4])]]
    assert compare(same, same) == ""
    other: Any = [[("layer 0 mlp", [1, 2]), ("logits", [3, 5])]]
    assert compare(same, other) == "request 0, position 1: logits differs"
    earlier: Any = [*other, [("layer 0 mlp", [7]), ("logits", [8])]]
    assert compare([*same, [("layer 0 mlp", [6]), ("logits", [8])]], earlier).startswith(
        "request 1, position 0: layer 0"
    )
