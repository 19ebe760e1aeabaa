"""Int8 weights on a CPU: the kernel against the arithmetic it stands for, what is refused, and what a model loses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import loaded_reference as reference
import pytest
import torch
from laddertron.engine.config.load import ConfigError, read
from laddertron.models.cpu.kernels import Kernels
from laddertron.models.cpu.ops import CpuOps
from laddertron.models.ops import Norm, TorchOps
from laddertron.models.ops_choice import WeightsError, make_ops
from laddertron.tools.plan.layouts import Work
from laddertron.tools.plan.memory import memory
from laddertron.tools.plan.plan_source import Asked, from_deployment
from safetensors.torch import save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
KERNELS = Kernels.find()
needs_int8 = pytest.mark.skipif(
    KERNELS is None or not KERNELS.int8, reason="needs the C kernels and a tier from avx2 on"
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def rounded(weight: Tensor) -> Tensor:
    """The weights that int8 with a scale a row stands for, in fp32."""
    wide = weight.float()
    unit = wide.abs().amax(1, keepdim=True) / 127
    codes = torch.where(unit > 0, wide / unit, 0.0)
    return (codes.abs() + 0.5).floor().clamp(max=127).copysign(codes) * unit


def assert_near(got: Tensor, want: Tensor) -> None:
    """Within bf16's rounding of the largest value: weights are equal, sums in another order."""
    assert got.shape == want.shape
    assert (got.float() - want.float()).abs().max() <= 8e-3 * want.float().abs().max()


@needs_int8
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (70, 66), (16, 2), (10, 34), (1, 130), (34, 2050)])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 100])
def test_products_are_those_of_the_rounded_weights(outputs: int, inputs: int, tokens: int) -> None:
    """Plain, with a bias, behind a norm, gated; rows that fill no block, tokens that fill no tile."""
    fast, plain = CpuOps(KERNELS, int8=True), TorchOps()
    weight, bias, x = normal(outputs, inputs), normal(outputs), normal(tokens, inputs)
    wide = rounded(weight)
    norm = Norm(normal(inputs), 1e-5)
    assert_near(fast.product(weight, None)(x), (x.float() @ wide.T))
    assert_near(fast.product(weight, bias)(x), (x.float() @ wide.T + bias.float()))
    normed = plain.product(torch.eye(inputs).to(torch.bfloat16), None, norm)(x).float()
    assert_near(fast.product(weight, None, norm)(x), normed @ wide.T)
    if outputs % 2 == 0:
        gate, up = (normed @ wide.T).chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
        assert_near(fast.gated_product(weight, None, norm)(x), want)


@needs_int8
def test_every_code_is_widened_to_itself() -> None:
    """A row that holds 0 to 127 and one of their negatives, times one token at a time: nothing is rounded."""
    weight = torch.zeros(2, 128)
    weight[0], weight[1] = torch.arange(128), -torch.arange(128)
    got = CpuOps(KERNELS, int8=True).product(weight.to(torch.bfloat16), None)(torch.eye(128).to(torch.bfloat16))
    assert torch.equal(got.float().T, weight)


@needs_int8
def test_a_token_does_not_notice_its_neighbours() -> None:
    """Alone, among 5, among 40: the same bits."""
    product = CpuOps(KERNELS, int8=True).gated_product(normal(96, 64), None, Norm(normal(64), 1e-5))
    x = normal(40, 64)
    together = product(x)
    assert all(torch.equal(product(x[row : row + 1])[0], together[row]) for row in range(40))
    assert torch.equal(product(x[3:8]), together[3:8])


@needs_int8
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen(value: float) -> None:
    """In a token or a weight row it makes that token or that output NaN, and no other."""
    weight, x = normal(40, 64), normal(3, 64)
    x[1, 5] = value
    got = CpuOps(KERNELS, int8=True).product(weight, None)(x)
    assert not got[1].isfinite().any()
    assert got[[0, 2]].isfinite().all()
    weight[7, 3] = value
    got = CpuOps(KERNELS, int8=True).product(weight, None)(normal(2, 64))
    assert got[:, 7].isnan().all()
    assert got[:, :7].isfinite().all()
    assert got[:, 8:].isfinite().all()


@needs_int8
def test_the_head_keeps_its_weights() -> None:
    """`exact` multiplies by what it is given."""
    weight, x = normal(64, 64), normal(4, 64)
    ops = CpuOps(KERNELS, int8=True)
    assert torch.equal(ops.exact.product(weight, None)(x), CpuOps(KERNELS).product(weight, None)(x))
    assert not torch.equal(ops.product(weight, None)(x), CpuOps(KERNELS).product(weight, None)(x))


@needs_int8
@pytest.mark.parametrize("size", [1, 2])
def test_a_model_on_ranks_is_near_the_stored_one(ranks: Callable[..., list[Any]], tmp_path: Path, size: int) -> None:
    """Logits of every position on 1 and 2 ranks: as far from fp32 as bf16 is and what rounding to 8 bits adds, and not
    those of bf16."""
    folder = checkpoints.save(tmp_path / "m", "llama")
    prompts = checkpoints.prompts()[:6]
    model = reference.load(folder, dtype=torch.float32)
    want = torch.cat([reference.logits(model, torch.tensor([ids]))[0] for ids in prompts])
    save_file({"logits": want.contiguous()}, tmp_path / "want.safetensors")
    args: dict[str, Any] = {"folder": str(folder), "prompts": prompts, "expected": str(tmp_path / "want.safetensors")}
    off = {}
    for form in ("stored", "int8"):
        args["model"] = {"dtype": "bfloat16", "weights": form}
        off[form] = [r["distance"] / r["scale"] for r in ranks(size, "engine_cases:logits_distance", args)]
    assert off["int8"] != off["stored"]
    assert max(off["int8"]) < max(off["stored"]) + 0.05, off


def test_refused_where_it_cannot_be_computed(tmp_path: Path) -> None:
    """On a GPU, in fp32, without the processor's instructions: by the deployment where it says so, else by the rank."""
    config = tmp_path / "d.yaml"
    for dtype, engine, said in (
        ("auto", "engine: {device: cuda}", "int8 needs engine.device: cpu"),
        ("float32", "", "int8 needs dtype bfloat16"),
    ):
        config.write_text(f"model: {{path: /m, weights: int8, dtype: {dtype}}}\n{engine}\n", encoding="utf-8")
        with pytest.raises(ConfigError, match=f"model.weights: {said}"):
            read(config)
    with pytest.raises(WeightsError, match="computes in float32: use stored"):
        make_ops(CPU, torch.float32, "int8")
    with pytest.raises(WeightsError, match="computes on cuda: use stored"):
        make_ops(torch.device("cuda"), torch.bfloat16, "int8")


@pytest.mark.parametrize("found", [None, "old"])
def test_refused_without_kernels_or_instructions(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never bf16 in secret: the ranks of another machine would compute something else."""
    stub: Any = None
    if found:
        stub = type("Old", (), {"int8": False})()
    monkeypatch.setattr(Kernels, "find", lambda deterministic=False: stub)
    with pytest.raises(WeightsError, match="this rank's tier is " if found else "not built here"):
        make_ops(CPU, torch.bfloat16, "int8")


def test_a_plan_counts_a_byte_a_weight() -> None:
    """The layers' matrices take half as much, embedding and head what they took."""
    held = {}
    for form in ("stored", "int8"):
        keys = [f"model.weights={form}", "model.dtype=bfloat16"]
        q = from_deployment(read(ROOT / "configs" / "demo.yaml", keys), Asked(None, Work()))
        held[form] = memory(q.config, 2, q.stored, q.keys, 10**12).parts
    for part in ("weights: attention", "weights: MLP"):
        assert held["stored"][part] == 2 * held["int8"][part]
    for part in ("weights: embedding", "weights: head"):
        assert held["stored"][part] == held["int8"][part]
