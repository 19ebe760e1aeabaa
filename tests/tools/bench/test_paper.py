"""`laddertron bench paper`: the sweep on real ranks, its rows beside the published ones, its refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from laddertron.launchers.cli.__main__ import main
from laddertron.models.config.known_models import known
from laddertron.models.config.shapes import check_shapes
from laddertron.tools.bench.paper import SWEEPS, WIRINGS, Compared, compared, paper_plot, paper_table, scaled, wired
from laddertron.tools.plan.published import TOKENS
from laddertron.tools.plan.step_simulator import law
from rich.console import Console
from waiting import HANG_S

BIN = Path(sys.executable).parent


def on_two_ranks(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """A sweep of a scaled 8B under mpirun."""
    if not (BIN / "mpirun").exists():
        pytest.skip("no mpirun next to this Python")
    paper = ["bench", "paper", "--model", "8b", "--scale", "64", "--set", "engine.device=cpu"]
    command = [BIN / "mpirun", "--oversubscribe", "-np", "2", BIN / "laddertron", *paper, *words]
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "NO_COLOR": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)


@pytest.mark.slow  # ranks of a sweep: test_bench.py
def test_the_sweep_under_mpirun(tmp_path: Path) -> None:
    """Every wiring of a scaled model on two ranks; the picture; the file's other rows stay."""
    pytest.importorskip("matplotlib")
    out, old = tmp_path / "rows.json", rows_of("8B", 8, True, {"ladder": 12.0}, 4)
    out.write_text(json.dumps(old))
    done = on_two_ranks("-o", out, "--repeats", "1", "--batch", "2", "--plot", tmp_path / "p.svg")
    assert done.returncode == 0, done.stderr
    kept, *rows = json.loads(out.read_text())
    assert [kept] == old
    assert [row["wiring"] for row in rows] == list(WIRINGS)
    for row in rows:
        assert (row["model"], row["tp"], row["peer"], row["prompt"], row["generate"]) == ("8B", 2, True, 16, 8)
        assert row["decode_tok_s"][0] > 0
    assert "desync-4" in done.stdout
    assert (tmp_path / "p.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.slow
def test_a_path_that_the_backend_has_not_cannot_be_disabled(tmp_path: Path) -> None:
    refused = on_two_ranks("-o", tmp_path / "rows.json", "--p2p", "off")
    assert refused.returncode != 0
    assert "--p2p off disables a path of NCCL, and backend native has none: leave it out" in refused.stderr
    assert "Traceback" not in refused.stderr


def rows_of(model: str, tp: int, peer: bool, rates: dict[str, float], batch: int) -> list[dict[str, Any]]:
    base = {"model": model, "tp": tp, "peer": peer, "batch": batch, "scale": 1, "prompt": 1024, "generate": 512}
    return [base | {"wiring": name, "decode_tok_s": [rate] * 3} for name, rate in rates.items()]


def ladder_of(rows: list[dict[str, Any]], model: str) -> Compared:
    return next(one for one in compared(rows, SWEEPS[model]) if one.row["wiring"] == "ladder")


def test_a_row_like_the_paper_s_has_its_gain_and_the_law_beside() -> None:
    one = ladder_of(rows_of("70B", 8, True, TOKENS["70B", "p2p", 1], 1), "70b")
    own, said, made = one.rates
    gain = 101.2 / 77.4
    assert own == said == 101.2
    assert made == pytest.approx(101.2, rel=0.2)
    assert list(one.gains) == pytest.approx([gain] * 3, rel=0.1)
    assert one.gains[0] == one.gains[1] == pytest.approx(gain)
    assert one.ratio == pytest.approx(110.6 / 77.4 - 1)
    assert one.law == pytest.approx(law(1.0, 110.6 / 77.4 - 1))
    assert gain < law(1.0, 110.6 / 77.4 - 1), "the law is the bound"


@pytest.mark.parametrize(
    ("model", "tp", "peer", "batch", "said"),
    [
        ("405b", 16, True, 8, (228.0, 228.0 / 163.6)),
        ("405b", 16, False, 4, (None, 1.57)),
        ("70b", 8, False, 4, (271.8, 271.8 / 173.6)),
        ("8b", 8, True, 4, (None, 1.46)),
        ("8b", 8, False, 4, (None, 1.40)),
        ("8b", 8, True, 16, (None, None)),
        ("8b", 4, True, 4, (None, None)),
    ],
)
def test_published_figures_stand_at_their_own_rows_alone(
    model: str, tp: int, peer: bool, batch: int, said: tuple[float | None, float | None]
) -> None:
    one = ladder_of(rows_of(SWEEPS[model].name, tp, peer, {"standard": 10.0, "ladder": 12.0}, batch), model)
    assert (one.rates[1], one.gains[1]) == said
    assert one.ratio is None
    assert one.law is None
    small = [row | {"scale": 16} for row in rows_of(SWEEPS[model].name, tp, peer, {"ladder": 12.0}, batch)]
    assert ladder_of(small, model).rates[1] is None


def test_the_table_fits_80_columns(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [r for batch in (1, 64) for r in rows_of("70B", 8, True, TOKENS["70B", "p2p", batch], batch)]
    found, console = list(compared(rows, SWEEPS["70b"])), Console(width=80)
    with console.capture() as said:
        console.print(paper_table(found))
    assert "…" not in said.get()
    assert "2,242" in said.get()
    paper_plot(found, tmp_path / "p.png")


@pytest.mark.parametrize("model", SWEEPS)
@pytest.mark.parametrize("scale", [1, 16, 64])
def test_every_variant_splits(model: str, scale: int) -> None:
    config = scaled(known(SWEEPS[model].architecture), scale)
    for wiring in WIRINGS:
        wired(wiring, config.num_layers, 2)
    check_shapes(config, 2)
    if scale == 1:
        check_shapes(config, max(8, SWEEPS[model].least))
        assert config.num_parameters == known(SWEEPS[model].architecture).num_parameters


@pytest.mark.parametrize(
    ("world", "words", "said"),
    [
        (None, [], "start it on every rank: mpirun -np 8 laddertron bench paper --model 70b"),
        ("2", [], "2 ranks: --tp must divide them, and 70b needs 4 ranks or --scale"),
        ("8", ["--tp", "3"], "8 ranks: --tp must divide them"),
        ("8", ["--tp", "8"], "Expecting value"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    world: str | None, words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if world is not None:
        for name, value in (("RANK", "0"), ("SIZE", world), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", world)):
            monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    (tmp_path / "rows.json").write_text("no rows")
    assert main(["bench", "paper", "--model", "70b", "-o", str(tmp_path / "rows.json"), *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
