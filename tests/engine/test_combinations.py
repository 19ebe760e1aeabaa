"""What combines with split steps and with speculation: a test for each cell of the table in docs/step.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import predictors
import pytest
import torch
from laddertron.engine.config.load import ConfigError, load
from laddertron.engine.config.schema import ParallelConfig
from laddertron.engine.schedule.split import SplitRule
from laddertron.engine.step.build import split_rule
from laddertron.models.config.known_models import known
from laddertron.models.config.model_config import from_folder
from laddertron.models.config.wiring import WiringError, check_split
from laddertron.models.cpu.kernels import Kernels

Ranks = Callable[..., list[Any]]

needs_kernels = pytest.mark.skipif(Kernels.find() is None, reason="the C kernels were not built here")


def answers(run_seed: int, ranks: Ranks, folder: Path, **how: Any) -> dict[str, Any]:
    args = {"folder": str(folder), "seed": run_seed % 1000, "most": 30} | how
    told: dict[str, Any] = ranks(2, "split_cases:answers", args, timeout_s=240.0)[0]
    return told


SPLIT: dict[str, Any] = {"split": "always"}
NGRAM: dict[str, Any] = {"speculation": "ngram"}
MODEL: dict[str, Any] = {"speculation": "model"}
MTP: dict[str, Any] = {"speculation": "mtp"}
LATENT = {"deepseek_v3": (SPLIT, NGRAM, SPLIT | NGRAM, MODEL), "longcat_flash": (NGRAM, MODEL)}
LATENT |= {"glm_moe_dsa": (SPLIT | NGRAM, MODEL)}


@needs_kernels
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", SPLIT),
        ("parallel", SPLIT),
        pytest.param("llama", NGRAM, marks=pytest.mark.slow),
        pytest.param("parallel", NGRAM, marks=pytest.mark.slow),
        pytest.param("ladder", NGRAM, marks=pytest.mark.slow),
        pytest.param("hybrid", NGRAM, marks=pytest.mark.slow),
        ("delay2", NGRAM),
        ("desync2_tp2", NGRAM),
        ("llama", SPLIT | NGRAM),
        pytest.param("llama", SPLIT | MODEL, marks=pytest.mark.slow),
        ("parallel", SPLIT | MODEL),
        pytest.param("ladder", MODEL, marks=pytest.mark.slow),
        pytest.param("llama", NGRAM | {"overlap": False}, marks=pytest.mark.slow),
        ("llama", MODEL | {"overlap": False}),
        ("glm4_moe", SPLIT | MTP),
        pytest.param("deepseek_v3", MTP | {"overlap": False}, marks=pytest.mark.slow),
        *[pytest.param(family, how, marks=pytest.mark.slow) for family, pairs in LATENT.items() for how in pairs],
    ],
    ids=str,
)
def test_a_pair_that_works(ranks: Ranks, family: str, how: dict[str, Any], tmp_path: Path, run_seed: int) -> None:
    """It is at work, and no answer is another. DeepSeek's draft model has latents as well."""
    save = predictors.save if how.get("speculation") == "mtp" else checkpoints.save
    folder = save(tmp_path / "m", family)
    drafts = "deepseek_v3_plain" if family == "deepseek_v3" else "llama"
    if how.get("speculation") == "model":
        how = how | {"draft": str(checkpoints.save(tmp_path / "d", drafts))}
    plain, paired = answers(run_seed, ranks, folder), answers(run_seed, ranks, folder, **how)
    assert paired["answers"] == plain["answers"]
    assert paired["split"] >= paired["large"] > 0 if "split" in how else paired["split"] == 0
    assert ("speculation" in how) == (paired["drafts"] > 0)


@pytest.mark.parametrize("family", ["ladder", "hybrid", "delay2", "desync2_tp2"])
def test_wirings_that_overlap_by_themselves_are_not_split(family: str, tmp_path: Path) -> None:
    config = from_folder(checkpoints.save(tmp_path / "m", family))
    check_split(config.wiring, "auto")
    assert not config.wiring.waits
    with pytest.raises(WiringError, match="split_steps=always"):
        check_split(config.wiring, "always")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ("engine: {speculation: auto, draft_model: d, device: cuda}", "needs engine.device: cpu"),
        ("parallel: {split_steps: always, tensor_parallel_size: 2, overlap: false}", "always needs overlap: true"),
        ("parallel: {split_steps: always}", "tensor_parallel_size is 1"),
    ],
)
def test_a_pair_that_is_refused(keys: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_text(f"model: {{path: m}}\n{keys}\n")
    with pytest.raises(ConfigError, match=says):
        load(file)


def test_on_gpus_steps_are_split_where_that_is_asked_for_alone() -> None:
    """Nobody has measured it there: `auto` leaves all whole, `always` those that are not recorded."""
    config, group = known("llama-3.1-8b"), SimpleNamespace(layout=SimpleNamespace(nodes=["a", "b"]), size=2)
    graphs: Any = SimpleNamespace(sizes=(1, 8))

    def rule(device: str, graphs: Any = None, **keys: Any) -> SplitRule | None:
        parallel = ParallelConfig(tensor_parallel_size=2, **keys)
        return split_rule(parallel, group, config, torch.device(device), graphs)  # type: ignore[arg-type]

    assert rule("cuda") is None
    assert (asked := rule("cuda", graphs, split_steps="always")) is not None
    assert (asked.always, asked.whole_decodes) == (True, 8)
    assert (measured := rule("cpu")) is not None
    assert not measured.always
    assert rule("cpu", overlap=False) is None
