"""A mixture of experts on one rank: which experts a token goes through, the same on every rank, and the portable
product, which yields this rank's part of the sum. models/cpu/experts.py keeps the product's signature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .config.experts import Clamped, Router

ExpertProduct = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [N, D], chosen [N, k] int32 (this rank's number of an expert, -1 where another rank holds it), weight [N, k] fp32
-> partial sum [N, D] in x's type, added up in fp32."""


Choice = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Logits [N, E] -> the k experts of each row, this rank's numbers of them, and their weights, as ExpertProduct takes
the last two; each [N, k]."""


@dataclass(frozen=True, slots=True)
class TorchChoice:
    """`choose`; local [E] int32: this rank's number of each expert, or -1."""

    router: Router
    k: int
    bias: Tensor | None
    local: Tensor

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chosen, weight = choose(self.router, self.k, logits, self.bias)
        return chosen, self.local[chosen], weight


def choose(router: Router, k: int, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """logits [N, E] in the type of the router's product -> the k experts [N, k] of each row and their weights [N, k] in
    fp32. Of equal scores the lower index comes first."""
    wide = logits.float()
    # NOTE: torch's fp32 sigmoid has other bits in a vector than behind the last whole one, by the number of rows.
    scores = wide.softmax(-1) if router.score == "softmax" else wide.double().sigmoid().float()
    ranked = scores if bias is None else scores + bias
    if router.groups > 1:
        grouped = ranked.view(len(ranked), router.groups, -1)  # [N, groups, E / groups]
        best_groups = _first(grouped.topk(2, -1).values.sum(-1), router.chosen_groups)
        others = torch.ones(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best_groups, False)
        ranked = grouped.masked_fill(others.unsqueeze(-1), -torch.inf).flatten(1)
    chosen = _first(ranked, k)
    weight = scores.gather(1, chosen)
    if router.normalises:
        weight = weight / (weight.sum(-1, keepdim=True) + router.epsilon)
    weight = weight * router.scale
    return chosen, weight.to(logits.dtype).float() if router.rounds else weight


def _first(scores: Tensor, count: int) -> Tensor:
    """The indices of the `count` highest of each row, ties by index: torch.topk breaks them in any order."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


class Biased(NamedTuple):
    """What experts with biases have besides their matrices: up [E, 2F], down [E, D] (None: another rank adds it), and
    the gate."""

    up: Tensor
    down: Tensor | None
    gate: Clamped

    def of(self, expert: int) -> tuple[Tensor, Tensor | None, Clamped]:
        return self.up[expert], None if self.down is None else self.down[expert], self.gate


def gated(gate_up: Tensor, clamped: Clamped | None) -> Tensor:
    """[T, 2F] -> [T, F]."""
    gate, up = gate_up.chunk(2, -1)
    if clamped is None:
        return functional.silu(gate) * up
    gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * clamped.alpha))


class TorchExperts:
    """Plain torch, on any device: an expert's rows are gathered, computed, weighed and added in fp32."""

    def __init__(self, gate_up: Tensor, down: Tensor, biased: Biased | None = None) -> None:
        """gate_up [E, 2F, D], down [E, D, F]: the experts that this rank holds, or its share of each."""
        self._gate_up, self._down = gate_up, down
        self._biased = biased

    def __call__(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        k, flat = chosen.shape[1], chosen.flatten()
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat + 1, minlength=len(self._down) + 1).cumsum(0).tolist()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, (begin, end) in enumerate(pairwise(ends)):
            if begin < end:
                places = order[begin:end]
                rows = places // k
                up, down, gate = (None, None, None) if self._biased is None else self._biased.of(expert)
                inner = gated(functional.linear(x[rows], self._gate_up[expert], up), gate)
                y = functional.linear(inner, self._down[expert], down)
                out.index_add_(0, rows, y.float() * weight.flatten()[places, None])
        return out.to(x.dtype)
