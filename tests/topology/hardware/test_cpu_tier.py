"""CPU tiers: which one a processor has, that it can be forced downwards alone, and that torch's libraries follow."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_cases import deployment
from laddertron.engine.step.build import build
from laddertron.launchers.cli import __main__ as cli
from laddertron.topology.hardware.cpu_tier import (
    TIERS,
    VARIABLE,
    Tier,
    TierError,
    cpu_flags,
    current,
    described,
    detect,
    limit_libraries,
    limits,
    lowered,
    own,
)
from laddertron.topology.hardware.fabric import Fabric, Node, NumaNode
from test_cli import write_model

HASWELL = "fpu sse sse2 sse4_1 sse4_2 avx fma f16c avx2"
SKYLAKE = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
GENOA = f"{SKYLAKE} avx512_vnni avx512vbmi avx512_bf16"
SAPPHIRE = f"{GENOA} avx512_fp16 amx_bf16 amx_tile amx_int8"


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this run plays; and what a command line puts there is put back."""
    monkeypatch.delenv(VARIABLE, raising=False)
    for name in limits("generic", "amx"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.mark.parametrize(
    ("flags", "machine", "tier"),
    [
        (SAPPHIRE, "x86_64", "amx"),
        (SAPPHIRE.replace("amx_tile", ""), "x86_64", "avx512_bf16"),
        (GENOA, "x86_64", "avx512_bf16"),
        (SKYLAKE, "x86_64", "avx512"),
        (SKYLAKE.replace("avx512vl", ""), "x86_64", "avx2"),
        (HASWELL, "x86_64", "avx2"),
        (HASWELL.replace("fma", ""), "x86_64", "generic"),
        ("", "x86_64", "generic"),
        ("fp asimd bf16 sve", "aarch64", "generic"),
        (SAPPHIRE, "aarch64", "generic"),
    ],
)
def test_the_best_tier_whose_instructions_are_all_there(flags: str, machine: str, tier: Tier) -> None:
    assert detect(frozenset(flags.split()), machine) == tier


def test_the_first_processor_speaks_for_all(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nflags\t\t: {HASWELL}\n\nprocessor\t: 1\nflags\t\t: {GENOA}\n")
    assert cpu_flags(file) == frozenset(HASWELL.split())
    file.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert cpu_flags(file) == cpu_flags(tmp_path / "absent") == frozenset()


def test_a_tier_is_forced_downwards_alone() -> None:
    assert [lowered(tier, "amx") for tier in TIERS] == list(TIERS)
    assert lowered("generic", "generic") == "generic"
    with pytest.raises(TierError, match="'avx512' is above this processor's tier: it can play avx2, generic"):
        lowered("avx512", "avx2")
    with pytest.raises(
        TierError, match=r"LADDERTRON_CPU_TIER='AVX2' is no CPU tier: .* avx2, generic: set one of them, or unset it"
    ):
        lowered("AVX2", "avx2")


def test_the_variable_decides_where_it_is_set() -> None:
    assert current({}) == current({VARIABLE: ""}) == own()
    assert current({VARIABLE: "generic"}) == "generic"
    with pytest.raises(TierError):
        current({VARIABLE: "sse9"})


def test_limits_stand_for_what_is_below_the_machine_alone() -> None:
    assert limits("avx512_bf16", "avx512_bf16") == {}
    assert limits("avx2", "amx") == {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
    environ = {"ATEN_CPU_CAPABILITY": "avx512"}
    limit_libraries(environ)
    assert environ == {"ATEN_CPU_CAPABILITY": "avx512"}


def test_the_command_line_refuses_a_tier_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "avx1024")
    assert cli.main(["topo"]) == 2
    assert "LADDERTRON_CPU_TIER='avx1024' is no CPU tier: this processor can play" in capsys.readouterr().err


PROBE = """
import os, torch
from laddertron.topology.hardware.cpu_tier import limit_libraries
limit_libraries(os.environ)
print(torch.backends.cpu.get_cpu_capability(), torch.ops.mkldnn._is_mkldnn_bf16_supported())
"""


@pytest.mark.parametrize("tier", ["avx2", pytest.param("generic", marks=pytest.mark.slow)])
def test_torch_and_its_libraries_follow_even_when_it_is_imported_already(tier: Tier) -> None:
    """What a rank does, whose modules import torch before it knows its environment."""
    if tier not in TIERS[TIERS.index(own()) :]:
        pytest.skip(f"this machine's tier is {own()}, below {tier}")
    clean = {k: v for k, v in os.environ.items() if k not in limits("generic", "amx")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env={**clean, VARIABLE: tier}, capture_output=True, text=True, check=True
    )
    capability, bf16 = done.stdout.split()
    assert capability == {"avx2": "AVX2", "generic": "DEFAULT"}[tier]
    assert own() == tier or bf16 == "False"


def saved(folder: Path, *tiers: Tier | None) -> str:
    """A fabric file of hosts a, b, … with these tiers."""
    numa = (NumaNode(0, "0-3"),)
    Fabric(tuple(Node(name, numa, 1 << 30, cpu_tier=tier) for name, tier in zip("abcd", tiers, strict=False))).save(
        folder / "f.json"
    )
    return str(folder / "f.json")


def check(folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, str]:
    """Exit code and stderr of `check` on a small model."""
    if not (folder / "m").exists():
        write_model(folder / "m")
    (folder / "d.yaml").write_text("model: {path: ./m}\n", encoding="utf-8")
    words = [word for override in overrides for word in ("--set", override)]
    return cli.main(["check", str(folder / "d.yaml"), *words]), capsys.readouterr().err


def test_check_refuses_what_a_host_of_the_fabric_cannot_compute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fabric = f"launch.fabric={saved(tmp_path, 'avx512', None, 'generic', 'generic')}"
    code, said = check(tmp_path, capsys, fabric, "model.weights=int8")
    assert code == 2
    assert said.count("\n") == 1
    assert "model.weights: c: int8 weights are computed in the CPU tiers amx, avx512_bf16, avx512, avx2" in said
    assert "this is generic: use stored" in said
    for dtype in ("float32", "bfloat16", "float16"):
        assert check(tmp_path, capsys, fabric, f"model.dtype={dtype}") == (0, "")


def test_check_refuses_a_tier_that_a_host_cannot_play(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fabric = f"launch.fabric={saved(tmp_path, 'avx512', 'avx2')}"
    code, said = check(tmp_path, capsys, fabric, f"launch.env.{VARIABLE}=avx512")
    assert code == 2
    assert said.count("\n") == 1
    assert f"b: {VARIABLE}='avx512' is above this processor's tier: it can play avx2, generic" in said
    assert check(tmp_path, capsys, fabric, f"launch.env.{VARIABLE}=avx2", "model.weights=int8") == (0, "")


def test_check_judges_this_host_as_it_is_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "generic")
    code, said = check(tmp_path, capsys, "model.weights=int8")
    assert code == 2
    assert "this host: int8 weights are computed in" in said
    assert check(tmp_path, capsys, "model.weights=int8", "launch.hosts=[far, away]")[0] == 0  # theirs are not known


def test_a_fabric_file_that_is_none_is_a_fault_of_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f.json").write_text("[]")
    code, said = check(tmp_path, capsys, f"launch.fabric={tmp_path / 'f.json'}")
    assert code == 2
    assert "launch.fabric: " in said


def test_topo_says_each_hosts_own_tier_and_what_is_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = saved(tmp_path, "avx512", "avx2")
    assert cli.main(["topo", "--fabric", file]) == 0
    out = capsys.readouterr().out
    assert "CPU tier avx512 " in out
    assert "CPU tier avx2 " in out
    assert VARIABLE not in out
    monkeypatch.setenv(VARIABLE, "generic")
    assert cli.main(["topo"]) == 0
    out = capsys.readouterr().out
    assert f"CPU tier {own()} " in out
    assert f"note: {VARIABLE}: ranks are limited to the CPU tier generic" in out
    assert cli.main(["topo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["forced_cpu_tier"] == "generic"
    assert found["fabric"]["nodes"][0]["cpu_tier"] == own()


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_zeros_start_log_names_the_tier_and_what_forces_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Before anything of the checkpoint is read: here there is none. At INFO, which the daemon's log shows."""
    monkeypatch.setenv(VARIABLE, "generic")
    communicator: Any = SimpleNamespace(rank=rank, pipeline=None, layout=SimpleNamespace(per_node=1, nodes=("n",)))
    with caplog.at_level(logging.INFO, "laddertron"), pytest.raises(FileNotFoundError, match="absent"):
        build(deployment(str(tmp_path / "absent"), 1), communicator, torch.device("cpu"))
    line = f"CPU tier: {described('generic', own())}"
    assert [r.getMessage() for r in caplog.records if "CPU tier" in r.getMessage()] == [line] * (rank == 0)
