"""The choice of experts against a loop over rows, and the portable product against one over rows and slots."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laddertron.models.config.experts import Router
from laddertron.models.cpu.kernels import Kernels
from laddertron.models.cpu.ops import CpuOps
from laddertron.models.experts import TorchExperts
from laddertron.models.llama import LlamaModel
from laddertron.models.ops import TorchOps
from torch import Tensor
from torch.nn.functional import silu

ROUTERS = {
    "qwen3_moe": Router("softmax", rounds=True),
    "plain": Router("softmax", normalises=False),
    "mixtral": Router("softmax"),
    "groups": Router("sigmoid", True, biased=True, groups=4, chosen_groups=2, epsilon=1e-20, scale=2.5),
}
Choose = Callable[[Router, int, Tensor, Tensor | None], tuple[Tensor, Tensor]]


@pytest.fixture(params=("torch", "kernel"))
def choose(request: pytest.FixtureRequest) -> Choose:
    """The chosen experts and their weights; this rank holds the odd experts."""
    kernels = Kernels.find()
    if request.param == "kernel" and kernels is None:
        pytest.skip("the C kernels were not built (no compiler)")

    def chooser(router: Router, k: int, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        number = torch.arange(logits.shape[1], dtype=torch.int32)
        local = torch.where(number % 2 == 1, number // 2, -1)
        if request.param == "torch":
            ops: TorchOps = TorchOps()
        else:
            ops = CpuOps(kernels)
        choice = ops.choice(router, k, bias, local)
        chosen, numbers, weight = choice(logits)
        assert torch.equal(numbers, local[chosen.long()])
        return chosen, weight

    return chooser


def by_hand(router: Router, k: int, logits: list[float], bias: list[float] | None) -> tuple[list[int], list[float]]:
    """One row in Python's own numbers."""
    if router.score == "softmax":
        each = [math.exp(x - max(logits)) for x in logits]
        scores = [x / sum(each) for x in each]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    ranked = [s + b for s, b in zip(scores, bias or [0.0] * len(scores), strict=True)]
    size = len(ranked) // router.groups
    groups = [ranked[i * size : (i + 1) * size] for i in range(router.groups)]
    best = sorted(range(router.groups), key=lambda g: (-sum(sorted(groups[g])[-2:]), g))[: router.chosen_groups]
    open_ = [e for e in range(len(ranked)) if e // size in best]
    chosen = sorted(open_, key=lambda e: (-ranked[e], e))[:k]
    weight = [scores[e] for e in chosen]
    total = sum(weight) + router.epsilon if router.normalises else 1.0
    return chosen, [w / total * router.scale for w in weight]


@pytest.mark.parametrize("name", ROUTERS)
def test_choices_are_those_of_a_loop(name: str, choose: Choose) -> None:
    """Random logits on a coarse grid, so that many scores are equal: the lower index first, groups included."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator, router, ties = torch.Generator().manual_seed(seed), ROUTERS[name], 0
    for _ in range(20):
        logits = torch.randint(-3, 4, (7, 16), generator=generator) / 2
        bias = torch.randint(-2, 3, (16,), generator=generator) / 8 if router.biased else None
        chosen, weight = choose(router, 3, logits.float(), bias)
        assert (chosen.shape, weight.shape, weight.dtype) == ((7, 3), (7, 3), torch.float32)
        for row in range(7):
            want = by_hand(router, 3, logits[row].tolist(), None if bias is None else bias.tolist())
            assert chosen[row].tolist() == want[0]
            assert weight[row].tolist() == pytest.approx(want[1], rel=1e-5)
            ties += len(set(logits[row].tolist())) < 16
    assert ties > 100


def test_weights_are_rounded_where_the_family_does(choose: Choose) -> None:
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    _, rounded = choose(ROUTERS["qwen3_moe"], 2, logits, None)
    _, kept = choose(ROUTERS["mixtral"], 2, logits, None)
    assert torch.equal(rounded, kept.bfloat16().float())
    assert not torch.equal(rounded, kept)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_rows_choice_does_not_depend_on_the_other_rows(name: str, choose: Choose) -> None:
    logits = torch.randn(1025, 8, generator=torch.Generator().manual_seed(2))  # of the kernel, on several threads
    bias = torch.zeros(8) if ROUTERS[name].biased else None
    together = choose(ROUTERS[name], 2, logits, bias)
    alone = [choose(ROUTERS[name], 2, row, bias) for row in logits.split(1)]  # type: ignore[no-untyped-call]
    for number, part in enumerate(together):
        assert torch.equal(part, torch.cat([each[number] for each in alone]))


def test_a_bias_chooses_and_does_not_weigh(choose: Choose) -> None:
    router = replace(ROUTERS["groups"], groups=1, chosen_groups=1, normalises=False, scale=1.0)
    chosen, weight = choose(router, 1, torch.tensor([[4.0, 0.0]]), torch.tensor([0.0, 9.0]))
    assert (chosen.item(), weight.item()) == (1, 0.5)


def test_logits_that_are_not_finite_choose_experts_that_exist(choose: Choose) -> None:
    """The row's output is not finite either, which the sampler finds; nothing is read out of bounds."""
    logits = torch.full((3, 8), torch.nan)
    logits[1, :4], logits[2] = torch.inf, -torch.inf
    for router in ROUTERS.values():
        chosen, weight = choose(router, 2, logits, torch.zeros(8) if router.biased else None)
        assert 0 <= int(chosen.min()) <= int(chosen.max()) < 8
        assert weight[0].isnan().all()


def test_an_expert_whose_logit_is_nan_is_chosen(choose: Choose) -> None:
    """A broken row of the router's weight shows in the output."""
    logits = torch.zeros(2, 8)
    logits[1, 5] = torch.nan
    chosen, weight = choose(Router("sigmoid", True, biased=True), 2, logits, torch.arange(8.0) / 8)
    assert chosen.tolist() == [[7, 6], [5, 7]]
    assert weight[1].isnan().all()


def test_logits_of_another_router_are_refused() -> None:
    if (kernels := Kernels.find()) is None:
        pytest.skip("the C kernels were not built (no compiler)")
    choice = CpuOps(kernels).choice(Router("softmax"), 2, None, torch.arange(8).int())
    with pytest.raises(ValueError, match="9 logits a row: they must be 8"):
        choice(torch.zeros(1, 9))


def experts(count: int, width: int = 12, inner: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    gate_up = torch.randn((count, 2 * inner, width), generator=generator)
    return gate_up, torch.randn((count, width, inner), generator=generator)


def skewed(kind: str, rows: int, count: int, k: int) -> Tensor:
    """Local experts, -1 where another rank holds one."""
    generator = torch.Generator().manual_seed(rows)
    if kind == "one":
        return torch.tensor([[0, *[-1] * (k - 1)]] * rows, dtype=torch.int32)
    if kind == "none":
        return torch.full((rows, k), -1, dtype=torch.int32)
    if kind == "own":
        return torch.stack([(torch.arange(rows) + i) % count for i in range(k)], 1).int()
    each = [torch.randperm(count + 2, generator=generator)[:k] for _ in range(rows)]
    chosen = torch.stack(each)
    return torch.where(chosen < count, chosen, -1).int()


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("kind", ["one", "none", "own", "mixed"])
def test_the_portable_product_is_that_of_a_loop(kind: str, rows: int) -> None:
    """All rows to one expert, each to its own, to none of this rank's, and mixed."""
    (gate_up, down), k = experts(5), 3
    chosen = skewed(kind, rows, 5, k)
    generator = torch.Generator().manual_seed(9)
    x, weight = torch.randn(rows, 12, generator=generator), torch.rand(rows, k, generator=generator)
    want = torch.zeros(rows, 12, dtype=torch.float64)
    for row in range(rows):
        for number, w in zip(chosen[row].tolist(), weight[row].double(), strict=True):
            if number >= 0:
                gate, up = (gate_up[number].double() @ x[row].double()).chunk(2)
                want[row] += w * (down[number].double() @ (silu(gate) * up))
    got = TorchExperts(gate_up, down)(x, chosen, weight)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_the_digest_of_a_gpu_tells_experts_apart_that_differ_in_proportion() -> None:
    """In a row's first two places, by amounts that cancel out where a place counts by its number."""

    def digest(*chosen: int) -> int:
        model: Any = SimpleNamespace(routing=torch.zeros(1, dtype=torch.int64))
        LlamaModel.follow_routing(model, torch.tensor(chosen, dtype=torch.int32))
        return int(model.routing)

    assert digest(2, 9, 4) == digest(2, 9, 4)
    assert len({digest(2, 9, 4), digest(5, 8, 4), digest(4, 8, 4), digest(9, 2, 4), digest(2, 14, 1)}) == 5
