"""A layer's mixture of experts: the parameters of this rank, and what the forward pass calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .cuda.fp8 import StoredProducts
from .experts import Biased, Choice, ExpertProduct
from .layers import Linear, Scale, prepare
from .ops import Norm, Product, TorchOps
from .packed import Packed, packed_of, release
from .stages import RankShard


@dataclass(frozen=True, slots=True)
class Mixture:
    """norm: residual -> what router and experts read; product: of that, the router's logits, where `wide` in fp32."""

    wide: bool
    norm: Product
    product: Product
    choice: Choice
    experts: ExpertProduct
    shared: Product | None
    """This rank's share of the shared experts, of the same rows."""
    identities_from: int | None = None
    """The first expert that returns its input; None on ranks that do not add these."""

    def __call__(self, residual: Tensor, on_chosen: Callable[[Tensor], None]) -> Tensor:
        """residual [T, D] -> partial sum [T, D]; on_chosen is called with the experts of each row, [T, k]."""
        x = self.norm(residual)
        chosen, numbers, weight = self.choice(self.product(x.float() if self.wide else x))
        on_chosen(chosen)
        partial = self.experts(x, numbers, weight)
        if self.identities_from is not None:
            own = weight.masked_fill(chosen < self.identities_from, 0.0).sum(-1, keepdim=True)
            partial = (partial.float() + x.float() * own).to(x.dtype)
        return partial if self.shared is None else partial + self.shared(x)


class MixtureWeights(nn.Module):
    """The router, and one matrix of all experts for each product: their rows follow one another."""

    def __init__(self, shard: RankShard, dtype: torch.dtype) -> None:
        super().__init__()
        experts, d, self._held = shard.config.experts, shard.config.hidden_size, shard.expert_ids
        assert experts is not None
        self._experts = experts

        def matrix(rows: int, columns: int, kind: torch.dtype = dtype) -> Linear:
            return Linear(torch.empty((rows, columns), dtype=kind), None)

        count, ffn, shared = len(self._held), len(shard.expert_ffn), len(shard.shared_ffn)
        self._adds_identities = experts.identities > 0 and shard.rank == 0
        self.router = matrix(experts.routed, d, torch.float32 if experts.router.wide else dtype)
        self.gate_up, self.down = matrix(count * 2 * ffn, d), matrix(count * d, ffn)
        if experts.router.offset:
            self.router = Linear(self.router.weight.detach(), torch.empty(experts.routed, dtype=dtype))
        if experts.clamped is not None:
            adds = shard.spread or shard.rank == 0  # a cut expert's bias is added once
            self.gate_up = Linear(self.gate_up.weight.detach(), torch.empty(count * 2 * ffn, dtype=dtype))
            self.down = Linear(self.down.weight.detach(), torch.empty(count * d, dtype=dtype) if adds else None)
        self.bias = Scale(experts.routed, dtype=torch.float32) if experts.router.biased else None
        self.shared_gate_up: Linear | None = None
        if shared:
            self.shared_gate_up, self.shared_down = matrix(2 * shared, d), matrix(d, shared)

    def prepare(self, ops: TorchOps, norm: Norm, stored: StoredProducts | None = None) -> Mixture:
        """Hands the weights to the operators; they are given up where those hold a repacked copy. stored: as in
        layers.prepare."""
        owned = self._held
        local = torch.full((self._experts.routed,), -1, dtype=torch.int32)
        local[owned.start : owned.stop : owned.step] = torch.arange(len(owned), dtype=torch.int32)
        gate_up, down = (self._apart(part) for part in (self.gate_up, self.down))
        router, shared = self.router.weight.detach(), self._shared(ops, stored)
        bias = None if self.bias is None else self.bias.weight.detach()
        e, local = self._experts, local.to(router.device)
        experts = ops.experts(gate_up, down, e.routed, self._biased())
        offset = None if self.router.bias is None else self.router.bias.detach()
        mixture = Mixture(
            e.router.wide,
            ops.normed(norm),
            ops.exact.product(router, offset),
            ops.choice(e.router, e.chosen, bias, local),
            experts,
            shared,
            e.count if self._adds_identities else None,
        )
        if ops.repacks:
            for part in (self.router, self.gate_up, self.down):
                release(part)
        return mixture

    def _biased(self) -> Biased | None:
        if self._experts.clamped is None or self.gate_up.bias is None:
            return None
        up, down = self.gate_up.bias.detach(), None if self.down.bias is None else self.down.bias.detach()
        count = len(self._held)
        return Biased(up.view(count, -1), None if down is None else down.view(count, -1), self._experts.clamped)

    def _apart(self, part: Linear) -> Tensor | Packed:
        """The matrices [E, rows, columns] of this rank's experts."""
        if (packed := packed_of(part)) is not None:
            return packed.apart(len(self._held))
        return part.weight.detach().view(len(self._held), -1, part.weight.shape[1])

    def _shared(self, ops: TorchOps, stored: StoredProducts | None) -> Product | None:
        if self.shared_gate_up is None:
            return None
        up = prepare(self.shared_gate_up, ops, gated=True, stored=stored)
        down = prepare(self.shared_down, ops, stored=stored)
        return ops.joined(up, down)
