"""Products with quantised weights against plain torch with the same values, in every tier that this processor can
play."""

from __future__ import annotations

import pytest
import torch
from kernel_tiers import NEEDS_KERNELS, kernels, seed, tier
from laddertron.models.cpu.experts import PackedExperts
from laddertron.models.cpu.kernels import Kernels, OddInputsError
from laddertron.models.cpu.ops import CpuOps
from laddertron.models.ops import Norm, TorchOps, Tree, tree_product
from laddertron.models.packed import Packed
from laddertron.models.pages import HugePages
from test_expert_products import assert_near, differing_row, routed, want

FORMS = ("int4", "int4 zeros", "e2m1", "e4m3")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

__all__ = ["kernels", "seed", "tier"]
pytestmark = NEEDS_KERNELS


def matrix(form: str, *rows: int, columns: int, width: int, scales: torch.dtype = torch.float32) -> Packed:
    """Random codes, all 16 or (but for NaN) 256 among them."""
    shape, groups = (*rows, columns // (1 if form == "e4m3" else 2)), (*rows, columns // width)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    if form == "e4m3":
        codes = torch.where(codes & 0x7F == 0x7F, codes - 1, codes).view(torch.float8_e4m3fn)
    unit = (columns**-0.5 / {"e4m3": 100, "e2m1": 2}.get(form, 4)) * (0.5 + torch.rand(groups))
    zero = torch.randint(-8, 8, groups, dtype=torch.int8) if form == "int4 zeros" else None
    return Packed(codes, unit.to(scales), zero, "int4" if form.startswith("int4") else form)  # type: ignore[arg-type]


def ops_of(kernels: Kernels, dtype: str) -> CpuOps:
    return CpuOps(kernels, pages=HugePages(), dtype=DTYPES[dtype])


SHAPES = [(5, 48, 16, 1), (34, 64, 64, 2), (96, 264, 8, 3), (70, 128, 32, 13), (64, 32, 32, 1)]
"""Rows, columns, columns that share a scale; tokens: no block, tile or word is filled evenly by all of them."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "width", "tokens"), SHAPES)
def test_packed_products_mean_what_torch_means(
    kernels: Kernels, form: str, dtype: str, rows: int, columns: int, width: int, tokens: int
) -> None:
    """With bias; behind a norm; gated; scales of each type; and a row alone has the bits that it has among others."""
    scales = {16: torch.bfloat16, 64: torch.float16}.get(width, torch.float32) if form != "e4m3" else torch.float32
    weight = matrix(form, rows, columns=columns, width=width, scales=scales)
    wide, x = weight.widened(torch.float32), torch.randn(tokens, columns).to(DTYPES[dtype])
    bias, norm = torch.randn(rows).to(x.dtype), Norm(torch.rand(columns).to(x.dtype), 1e-5)
    ops, plain = ops_of(kernels, dtype), TorchOps()
    product = ops.packed_product(weight, bias, None)
    assert_near(product(x), (x.float() @ wide.t() + bias.float()).to(x.dtype))
    assert torch.equal(torch.cat([product(x[i : i + 1]) for i in range(tokens)]), product(x))
    normed = plain.normed(norm)(x).float()
    assert_near(ops.packed_product(weight, None, norm)(x), (normed @ wide.t()).to(x.dtype))
    if rows % 2 == 0:
        gate, up = (normed @ wide.t()).to(x.dtype).chunk(2, 1)
        gated = ops.packed_product(weight, None, norm, gated=True)(x)
        assert_near(gated, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_experts_mean_what_torch_means(kernels: Kernels, form: str, dtype: str) -> None:
    """And a row's bits do not depend on the other rows."""
    up, down = matrix(form, 6, 2 * 40, columns=64, width=32), matrix(form, 6, 64, columns=40, width=8)
    product = PackedExperts(kernels, HugePages(), False, up, down, dtype=DTYPES[dtype])
    rows = routed(dtype, 41, 64, 6, 2)
    expected = want(dtype, up.widened(torch.float32), down.widened(torch.float32), rows)
    assert_near(product(*rows), expected)
    assert differing_row(product, rows) is None


def test_leaves_of_a_tree_are_whole_groups_or_refused(kernels: Kernels) -> None:
    weight = matrix("int4", 40, columns=256, width=16)
    x, bias, tree = torch.randn(3, 256), torch.randn(40), Tree(8, 0.5)
    got = ops_of(kernels, "fp32").packed_product(weight, bias, None, tree=tree)(x)
    assert_near(got, tree_product(weight.widened(torch.float32), bias, tree)(x))
    with pytest.raises(OddInputsError, match=r"256 inputs on this rank / 8 shares = 32, not a multiple of the 64"):
        ops_of(kernels, "fp32").packed_product(matrix("int4", 40, columns=256, width=64), None, None, tree=tree)


def test_a_nan_among_fp8_codes_reaches_the_output(kernels: Kernels) -> None:
    """The kernel widens its code to a number: the scale of its group carries it."""
    weight = matrix("e4m3", 33, columns=64, width=32)
    weight.codes.view(torch.uint8)[7, 40] = 0xFF
    out = ops_of(kernels, "bf16").packed_product(weight, None, None)(torch.ones(2, 64).bfloat16())
    assert out[:, 7].isnan().all()
    assert not out[:, [*range(7), *range(8, 33)]].isnan().any()


def test_filled_pages_are_used_as_they_are(kernels: Kernels) -> None:
    taken: dict[int, torch.Tensor] = {}

    class Pages(HugePages):
        def take(self, size: int) -> torch.Tensor:
            return taken.setdefault(size, super().take(size))

    weight, x, pages = matrix("int4 zeros", 40, columns=64, width=32), torch.randn(2, 64), Pages()
    first = CpuOps(kernels, pages=pages, dtype=torch.float32).packed_product(weight, None, None)(x)
    pages.filled = True
    nothing = Packed(weight.codes * 0, weight.scale * 0, weight.zero, "int4")
    assert torch.equal(CpuOps(kernels, pages=pages, dtype=torch.float32).packed_product(nothing, None, None)(x), first)
