"""Every CPU tier that this machine can play: operators, one oracle case for each type, and a run from the shell.

A tier is forced in processes of their own, since torch's libraries look at their limits once. The machine's own tier is
what all other tests run in.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import checkpoints
import pytest
from answering import run_says
from laddertron.topology.hardware.cpu_tier import TIERS, VARIABLE, Tier, own

HERE = Path(__file__).parents[2]
OPERATORS = ("models/cpu/test_cpu_ops.py", "models/cpu/test_int8.py")


def skip_unless_lower(tier: Tier) -> None:
    if os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE}={os.environ[VARIABLE]}: this whole run is in one tier already")
    if tier == own():
        pytest.skip(f"{tier} is this machine's own tier: the whole suite runs in it")
    if tier not in TIERS[TIERS.index(own()) :]:
        pytest.skip(f"{tier} is above this machine's tier, {own()}")


LOWER = TIERS[TIERS.index(own()) + 1 : -1][:1]
"""The next tier below this machine's that has kernels; the others are in `make slow-test`."""


@pytest.mark.parametrize(
    "tier", [tier if tier in LOWER else pytest.param(tier, marks=pytest.mark.slow) for tier in TIERS]
)
def test_operators_hold_in_every_tier(tier: Tier) -> None:
    play(tier, OPERATORS)


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_the_oracle_holds_in_every_tier(tier: Tier) -> None:
    play(tier, ("engine/test_oracle_dtypes.py",))


@pytest.mark.slow  # in `generic` every product is a plain loop
@pytest.mark.parametrize("tier", TIERS)
def test_a_row_is_a_row_in_every_tier(tier: Tier) -> None:
    """And the same row in every layout, of every wiring and type."""
    play(tier, ("engine/step/test_deterministic.py",), "-k", "not thousand and not hundreds and not family")


def play(tier: Tier, files: tuple[str, ...], *chosen: str) -> None:
    """chosen: pytest's words for which tests; none: those that are not slow."""
    skip_unless_lower(tier)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # One thread: hundreds of small operators would wait for each other's on a busy machine. More threads have a test.
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0",
            "--tb",
            "short",
            *(str(HERE / name) for name in files),
            *(chosen or ("-m", "not slow")),
        ],
        env={**clean, VARIABLE: tier, "OMP_NUM_THREADS": "1"},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, f"in tier {tier}:\n{done.stdout[-20000:]}{done.stderr[-2000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_a_bf16_llama_is_run_as_transformers_has_it(tier: Tier, tmp_path: Path) -> None:
    """`dtype: auto` from the shell: what the ranks compute is near. Half a unit at logits of a scale of ten
    is the tolerance of the oracle tests."""
    skip_unless_lower(tier)
    checkpoints.save(tmp_path / "model", dtype="bfloat16")
    furthest, _ = run_says(tmp_path, {VARIABLE: tier})
    print(f"{tier}: {furthest:.3f}")
    assert furthest < 0.5
