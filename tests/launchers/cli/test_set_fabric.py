"""`--set launch.fabric=FILE`, on every command that takes a CONFIG for a job."""

from __future__ import annotations

from pathlib import Path

import pytest
from laddertron.launchers.cli.__main__ import main
from laddertron.topology.hardware.presets import preset

LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "RANK", "SLURM_STEP_ID", "SLURM_JOB_NODELIST")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """tp 16 on node0 and node1, as a deployment that names another fabric; the working directory is empty."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    file = tmp_path / "deploy.yaml"
    text = "model: {path: ./model}\nparallel: {tensor_parallel_size: 16}\n"
    file.write_text(text + "launch: {launcher: openmpi, fabric: ./old.json, hosts: ['node0:8', 'node1:8']}\n")
    return file


def test_a_job_is_laid_out_over_the_file_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """launch --dry-run: seats and HCAs of that fabric, and the started command is told of it, too."""
    preset("2x8xH100").save(Path("new.json"))
    assert (
        main(
            [
                "launch",
                str(config),
                "run",
                "--set",
                f"launch.fabric={Path.cwd()}/new.json",
                "-i",
                "a",
                "-o",
                "b",
                "--dry-run",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "LADDERTRON_SEATS=node0:8,node1:8" in out
    assert "mlx5_7:1" in out
    assert f"--set launch.fabric={Path.cwd()}/new.json" in out


@pytest.mark.parametrize(
    ("command", "more"),
    [("check", ()), ("run", ("-i", "in", "-o", "out")), ("serve", ()), ("launch", ()), ("preflight", ()),
     ("bench latency", ())],
)  # fmt: skip
def test_a_file_that_is_missing_starts_nothing(
    command: str, more: tuple[str, ...], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), str(config), *more, "--set", "launch.fabric=absent.json"]) == 2
    assert f"{Path.cwd()}/absent.json: no such file" in capsys.readouterr().err
