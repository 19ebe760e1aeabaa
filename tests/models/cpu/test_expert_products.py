"""The experts' products from packed weights against plain torch, in every tier that this processor can play."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_tiers import NEEDS_KERNELS, kernels, seed, tier
from laddertron.models.config.experts import Clamped
from laddertron.models.cpu.experts import SPACE, PackedExperts
from laddertron.models.cpu.kernels import Kernels, OddInputsError
from laddertron.models.cpu.ops import CpuOps
from laddertron.models.experts import Biased, TorchExperts, gated
from laddertron.models.pages import HeldPages, HugePages
from torch import Tensor
from torch.nn import functional

FORMS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.bfloat16}
Rows = tuple[Tensor, Tensor, Tensor]
"""x, chosen, weight."""
Product = Callable[[Tensor, Tensor, Tensor], Tensor]

__all__ = ["kernels", "seed", "tier"]
pytestmark = NEEDS_KERNELS


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, kernels: Kernels) -> str:
    name: str = request.param
    if name == "int8" and not kernels.int8:
        pytest.skip(f"no int8 in tier {kernels.tier}")
    return name


def weights(form: str, experts: int, hidden: int, inner: int) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn(experts, 2 * inner, hidden) / hidden**0.5
    return gate_up.to(FORMS[form]), (torch.randn(experts, hidden, inner) / inner**0.5).to(FORMS[form])


def routed(form: str, rows: int, hidden: int, experts: int, k: int) -> Rows:
    """Distinct experts, about a fifth of them another rank's."""
    chosen = torch.rand(rows, experts).argsort(1)[:, :k].int()
    chosen[torch.rand(rows, k) < 0.2] = -1
    return torch.randn(rows, hidden).to(FORMS[form]), chosen, torch.rand(rows, k)


def packed(kernels: Kernels, form: str, gate_up: Tensor, down: Tensor, space: int = SPACE) -> PackedExperts:
    return PackedExperts(kernels, HugePages(), form == "int8", gate_up, down, space=space)


def want(form: str, gate_up: Tensor, down: Tensor, rows: Rows, biased: Biased | None = None) -> Tensor:
    """Products and the sum over slots in fp32, rounded where transformers rounds."""
    x, chosen, weight = rows
    dtype, wide = FORMS[form], [gate_up.float(), down.float()]
    if form == "int8":
        units = [w.abs().amax(-1, keepdim=True) / 127 for w in wide]
        wide = [(w / unit).round() * unit for w, unit in zip(wide, units, strict=True)]
    total, (up_bias, down_bias, gate) = torch.zeros(x.shape), biased or (torch.zeros(len(down), 1), None, None)
    for slot in range(chosen.shape[1]):
        for expert in range(len(down)):
            at = torch.where(chosen[:, slot] == expert)[0]
            inner = gated((functional.linear(x[at].float(), wide[0][expert]) + up_bias[expert].float()).to(dtype), gate)
            out = functional.linear(inner.float(), wide[1][expert]) + (0 if down_bias is None else down_bias[expert])
            total[at] += weight[at, slot, None] * out.to(dtype).float()
    return total.to(dtype)


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Within a few roundings of the largest value: sums in another order may round to a neighbour."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    tolerance = {torch.float32: 2e-5, torch.float16: 3e-3}.get(got.dtype, 2e-2)
    largest = expected.float().abs().max().item() if expected.numel() else 0.0
    assert ((got.float() - expected.float()).abs() <= tolerance * largest).all()


def differing_row(product: Product, rows: Rows) -> int | None:
    """The determinism check: a row whose bits are others alone than among all rows, or than in a shuffled half."""
    together = product(*rows)
    some = torch.randperm(len(together))[: len(together) // 2 + 1]
    halved = product(*(part[some] for part in rows))
    for number in range(len(together)):
        if not torch.equal(product(*(part[number : number + 1] for part in rows))[0], together[number]):
            return number
    unlike = (halved != together[some]).any(1).nonzero().flatten()
    return int(some[unlike[0]]) if len(unlike) else None


SHAPES = [  # experts, hidden, inner, k; rows: no block, tile, run or part is filled evenly by all of them
    (4, 64, 32, 2, 5),
    (5, 70, 46, 3, 41),
    (3, 2048, 34, 2, 33),
    (32, 96, 22, 4, 1),
    (6, 34, 2, 6, 131),
]


@pytest.mark.parametrize(("experts", "hidden", "inner", "k", "rows"), SHAPES)
def test_packed_experts_mean_what_torch_means(
    kernels: Kernels, form: str, experts: int, hidden: int, inner: int, k: int, rows: int
) -> None:
    """Random routes, then all rows to one expert, each row to its own, and all experts another rank's."""
    held = weights(form, experts, hidden, inner)
    product = packed(kernels, form, *held)
    x, chosen, weight = routed(form, rows, hidden, experts, k)
    alone = torch.full_like(chosen, -1)
    skewed, own, none = alone.clone(), alone.clone(), alone
    skewed[:, -1] = experts - 1
    own[:, 0] = torch.arange(rows) % experts
    for routes in (chosen, skewed, own, none):
        assert_near(product(x, routes, weight), want(form, *held, (x, routes, weight)))
    assert not product(x, none, weight).any()
    assert product(x[:0], chosen[:0], weight[:0]).shape == (0, hidden)


@pytest.mark.parametrize("adds", [True, False], ids=["down's bias", "another rank's"])
def test_clamped_experts_add_their_biases(kernels: Kernels, form: str, adds: bool) -> None:
    """Gates and ups on both sides of the limit; without its own bias, a rank adds none."""
    held, rows = weights(form, 5, 66, 46), routed(form, 41, 66, 5, 3)
    up, down = (torch.randn(5, size).to(FORMS[form]) for size in (2 * 46, 66))
    biased = Biased(up, down if adds else None, Clamped(1.702, 0.5))
    got = PackedExperts(kernels, HugePages(), form == "int8", *held, biased=biased)(*rows)
    assert_near(got, want(form, *held, rows, biased))
    assert (got - packed(kernels, form, *held)(*rows)).abs().max() > 0.1, "the biases and the limit count"


def test_a_row_does_not_depend_on_the_rows_that_share_its_experts(kernels: Kernels, form: str) -> None:
    """Alone, in halves, among all, however many threads compute it and in whichever chunks: the same bits."""
    held, rows = weights(form, 5, 66, 46), routed(form, 60, 66, 5, 3)
    rows[1][20:50, 0] = 2  # one popular expert
    product = packed(kernels, form, *held)
    assert differing_row(product, rows) is None
    together = product(*rows)
    for threads in (1, 2, 3):
        kernels.threads = threads
        assert torch.equal(packed(kernels, form, *held)(*rows), together)
    for space in (1, 20_000):
        assert torch.equal(packed(kernels, form, *held, space=space)(*rows), together)
    many = tuple(part.repeat(6, 1) for part in rows)
    assert torch.equal(packed(kernels, form, *held)(*many), together.repeat(6, 1))


def test_a_planted_dependence_on_the_row_count_is_found(kernels: Kernels) -> None:
    """From 7 rows of an expert on, the last bit of what it adds is another."""
    held, rows = weights("fp32", 4, 64, 32), routed("fp32", 30, 64, 4, 1)
    product = packed(kernels, "fp32", *held)

    def planted(x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        y = product(x, chosen, weight)
        crowded = [expert for expert in range(4) if (chosen == expert).sum() >= 7]
        hit = torch.isin(chosen[:, 0], torch.tensor(crowded, dtype=torch.int32))
        return torch.where(hit.unsqueeze(1), y.view(torch.int32).bitwise_xor(1).view(torch.float32), y)

    rows[1][:8] = 3
    found = differing_row(planted, rows)
    assert found is not None
    assert (rows[1] == rows[1][found]).sum() >= 7


def test_non_finite_rows_reach_no_other(kernels: Kernels, form: str) -> None:
    held, (x, chosen, weight) = weights(form, 3, 64, 32), routed(form, 9, 64, 3, 2)
    chosen[:] = torch.tensor([0, 2])
    x[4, 7] = float("nan")
    y = packed(kernels, form, *held)(x, chosen, weight)
    assert y[4].isnan().all()
    assert y[torch.arange(9) != 4].isfinite().all()


def limited(room: int, call: Callable[[], object]) -> None:
    """Calls with `room` bytes of address space beyond what the process has now."""
    gc.collect()
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + room, hard))
    try:
        call()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_skewed_router_is_bounded_in_memory() -> None:
    """160,000 assignments to one expert, which would take 340 MB at once, are computed in chunks of 64 MiB at most; the
    allocator may keep one that was freed, and reserves 128 MiB where another thread first allocates."""
    kernels = Kernels.find(deterministic=True)
    assert kernels is not None
    kernels.threads = 1
    held = weights("bf16", 2, 32, 1024)
    x, chosen, weight = torch.ones(20_000, 32, dtype=torch.bfloat16), torch.ones(20_000, 8).int(), torch.rand(20_000, 8)
    product, whole = packed(kernels, "bf16", *held), packed(kernels, "bf16", *held, space=1 << 40)
    limited(4 * SPACE, lambda: product(x, chosen, weight))
    with pytest.raises(MemoryError, match="could not allocate its scratch space, 20000 rows"):
        limited(4 * SPACE, lambda: whole(x, chosen, weight))


def test_experts_are_taken_from_held_pages(kernels: Kernels, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled pages hold what was packed: the weights given count for their shapes alone."""
    monkeypatch.setattr(HeldPages, "CHUNK", 4 << 20)
    held, rows = weights(form, 3, 70, 46), routed(form, 9, 70, 3, 2)
    pages = HeldPages()
    first = PackedExperts(kernels, pages, form == "int8", *held)
    expected = first(*rows)
    pages.seal([0])
    again = HeldPages(os.dup(pages.file))
    nothing = [torch.zeros_like(weight) for weight in held]
    second = PackedExperts(kernels, again, form == "int8", *nothing)
    assert torch.equal(second(*rows), expected)
    assert (pages.complete, again.complete) == (True, True)


def test_weights_that_the_kernels_do_not_serve_are_left_to_torch(kernels: Kernels) -> None:
    """Odd inputs, no kernels, and under `deterministic` a refusal."""
    odd, even = weights("bf16", 2, 64, 33), weights("bf16", 2, 64, 32)
    with pytest.raises(OddInputsError, match="an expert's product of 33 inputs on this rank, not an even number"):
        CpuOps(kernels).experts(*odd, 2)
    assert isinstance(CpuOps(kernels).experts(*even, 2), PackedExperts)
    kernels.deterministic = False
    for ops in (CpuOps(kernels), CpuOps(None)):
        assert isinstance(ops.experts(*odd, 2), TorchExperts)
        assert not ops.pages.complete


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": torch.tensor([[0, 3]], dtype=torch.int32)}, "chosen has 0 to 3: it must be -1 to 2"),
        ({"chosen": torch.tensor([[-2, 0]], dtype=torch.int32)}, "chosen has -2 to 0: it must be -1 to 2"),
        ({"chosen": torch.tensor([[0, 1]])}, r"chosen is \[1, 2\] torch.int64: it must be \[1, 2\] torch.int32"),
        ({"weight": torch.ones(1, 3)}, r"weight is \[1, 3\] torch.float32: it must be \[1, 2\]"),
        ({"x": torch.ones(2, 64)}, r"x is \[2, 64\] torch.float32: it must be \[1, 64\] torch.float32"),
    ],
)
def test_bad_routes_are_refused(change: dict[str, Any], message: str) -> None:
    kernels = Kernels.find(deterministic=True)
    assert kernels is not None
    product = packed(kernels, "fp32", *weights("fp32", 3, 64, 32))
    given = {"x": torch.ones(1, 64), "chosen": torch.zeros(1, 2).int(), "weight": torch.ones(1, 2), **change}
    with pytest.raises(ValueError, match=message):
        product(**given)
