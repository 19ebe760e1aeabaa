"""The rule of engine/sampling/decide.py and penalties.py on a device's tensors (edits, filters, log-probabilities): the
same arithmetic over whole rows in place of candidates, without the host, so no gather depends on an earlier one's data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...models.transfer import upload
from .decide import Filters
from .logits_shard import LogitsShard, TritonShard, largest
from .penalties import Floats, Ints, SlotEdits

SORTED_LOGITS = 1 << 21
"""Sorted at once."""
NONE = np.zeros(0, np.int64)


def kept(x: Tensor, filters: Tensor) -> Tensor:
    """Which ids [R, V] the filters keep of the processed logits x [R, V]. filters float64 [R, 4]: 1 / T, top_k (0:
    all), top_p, log(min_p). As decide.prefix, where the candidates are the vocabulary."""
    inv_temperature, top_k, top_p, log_min_p = filters.t()[:, :, None]
    sorted_x, order = x.double().sort(dim=1, descending=True, stable=True)  # equals: rising id
    z = (sorted_x - sorted_x[:, :1]) * inv_temperature
    before = torch.cat([torch.zeros_like(z[:, :1]), z.exp().cumsum(1)], 1)
    vocab = x.shape[1]
    most = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab).long()
    total = before.gather(1, most)
    inside = torch.arange(vocab, device=x.device) < most
    inside &= (z >= log_min_p) & ((top_p >= 1.0) | (before[:, :-1] < top_p * total))
    inside[:, :1] = True
    return torch.zeros_like(inside).scatter_(1, order, inside)


def filtered(x: Tensor, filters: Tensor, first: int, columns: int, top_k: bool, top_p: bool) -> Tensor:
    """Logits x [R, V] of ids [first, first + columns), -inf where `kept` drops one. top_k, top_p: any row has one."""
    mine = slice(first, first + columns)
    return torch.where(in_turns(kept, x, filters)[:, mine], x[:, mine], -torch.inf)


def filter_rule(shard: LogitsShard) -> Callable[..., Tensor]:
    """`filtered` where this shard is: by a search without a sort where there is Triton."""
    if not isinstance(shard, TritonShard):
        return filtered
    from . import filter_triton

    return filter_triton.filtered


def filters_of(filters: Filters, device: torch.device) -> Tensor:
    columns = (filters.inv_temperature, filters.top_k, filters.top_p, filters.log_min_p)
    return upload(np.stack([column.astype(np.float64) for column in columns], 1), device)


def report(raw: Tensor, ids: Tensor, top: int) -> Tensor:
    """Log-probabilities at temperature 1 under untouched logits raw [S, V]: of ids [S], then the `top` likeliest ids of
    each row and theirs; float64 [S, 1 + 2 * top]."""

    def some(raw: Tensor, ids: Tensor) -> Tensor:
        wide = raw.double()
        peak = wide.amax(1, keepdim=True)
        total = peak + (wide - peak).exp().sum(1, keepdim=True).log()
        total = torch.where(peak.isfinite(), total, torch.nan)
        likeliest = largest(raw, top)
        best = wide.gather(1, torch.cat([ids[:, None], likeliest], 1)) - total
        return torch.cat([best[:, :1], likeliest.double(), best[:, 1:]], 1)

    return in_turns(some, raw, ids)


def in_turns(rule: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """rule(x, *others) of all rows [R, V], a bounded number at a time: it may take some 60 bytes a logit, and finds
    those that the layers have left."""
    step = max(1, SORTED_LOGITS // x.shape[1])
    parts = [rule(*(tensor[at : at + step] for tensor in (x, *others))) for at in range(0, len(x), step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(slots=True)
class DeviceEdits:
    """Edits of E rows on this rank's columns, as penalties.apply makes them. `seen` and `counts` [E, n] change with
    every id that is drawn; the rest is fixed."""

    terms: Tensor
    bias: Tensor
    allowed: Tensor
    stops: Tensor
    min_tokens: Tensor
    seen: Tensor
    counts: Tensor

    @staticmethod
    def make(slots: Sequence[SlotEdits], columns: int, device: torch.device) -> DeviceEdits:
        """The edits of these slots, as far as the host knows them: all that they drew before."""
        shape = len(slots), columns

        def dense(at: Sequence[Ints], values: Sequence[Floats] | None = None) -> Tensor:
            """[E, n] with these values, or True, at these columns of each row: what crosses is as long as they are."""
            rows = np.repeat(np.arange(len(at)), [len(columns) for columns in at])
            where = upload(np.stack([rows, np.concatenate(at)]), device)
            kind = torch.bool if values is None else torch.float32
            given = np.ones(len(rows), np.bool_) if values is None else np.concatenate(values)
            return torch.zeros(shape, dtype=kind, device=device).index_put_((where[0], where[1]), upload(given, device))

        terms = np.array([(e.repetition, e.frequency, e.presence) for e in slots], np.float32)
        free = upload(np.array([[e.allowed is None] for e in slots]), device)
        return DeviceEdits(
            terms=upload(np.ascontiguousarray(terms.T), device),
            bias=dense([e.bias_columns for e in slots], [e.bias for e in slots]),
            allowed=dense([NONE if e.allowed is None else e.allowed for e in slots]) | free,
            stops=dense([e.stops for e in slots]),
            min_tokens=upload(np.array([e.min_tokens for e in slots], np.int64), device),
            seen=dense([e.seen[0] for e in slots]),
            counts=dense([e.seen[0] for e in slots], [e.seen[1] for e in slots]),
        )

    def apply(self, x: Tensor, position: Tensor) -> Tensor:
        """Edits x [E, n], fp32; position [E]: ids that each row has put out."""
        repetition, frequency, presence = self.terms[:, :, None]
        scaled = torch.where(x > 0, x / repetition, x * repetition)
        penalised = scaled - frequency * self.counts - presence * (self.counts > 0)
        x = torch.where(self.seen, penalised, x) + self.bias
        x = torch.where(self.allowed, x, x + -torch.inf)  # added, so that NaN and +inf still show
        early = self.stops & (position < self.min_tokens)[:, None]
        return torch.where(early, x + -torch.inf, x)

    def note(self, columns: Tensor) -> None:
        """Counts the drawn ids, as columns [E] of this rank; others are ignored."""
        here = (columns >= 0) & (columns < self.seen.shape[1])
        at = columns.clamp(0, max(0, self.seen.shape[1] - 1))[:, None]
        if self.seen.shape[1]:
            self.counts.scatter_add_(1, at, here[:, None].float())
            self.seen.scatter_(1, at, self.seen.gather(1, at) | here[:, None])
