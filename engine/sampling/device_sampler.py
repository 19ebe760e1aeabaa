"""Plain rows drawn on the device: ids that feed the next step without having been on the host.

Greedy rows and rows of plain temperature leave nothing to decide but whose best is the best: each rank's best goes
through one small gather between the devices, and the winner is found there, by engine/sampling/decide.py's rule in
torch. The host gets a copy later, with the digests that the gather carried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...models.transfer import Arriving, upload
from .decide import NO_ID
from .logits_shard import NOISE, TorchShard
from .slots import SamplingPlan

Gathered = Callable[[Tensor], Tensor]
"""int64 [n] of this rank -> [tp, n] of all, on the device; the host does not wait."""
Fetch = Callable[[Tensor], Arriving]
"""models/transfer.py's download, or a test's."""

_FAR = 2**62


def feed(ids: Tensor, latest: Tensor) -> Tensor:
    """ids [T], where -1 - slot stands for the id that was drawn last for that slot: latest [slots] has it."""
    return torch.where(ids < 0, latest.index_select(0, (-1 - ids).clamp(min=0)), ids)


def fed_by(slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What stands for the ids drawn last for these slots, see `feed`."""
    return -1 - slots


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What a plan's steps have in common, on the device. `noisy`: indices of the rows that take noise."""

    plan: SamplingPlan
    slots: Tensor
    seed: Tensor
    choice: Tensor
    zero: Tensor
    reals: Tensor
    noisy: Tensor


class DeviceDraw:
    """One rank's. `latest` [max_slots] int64: of each slot the id drawn here last."""

    def __init__(
        self, columns: int, max_slots: int, shard: TorchShard, device: torch.device, gather: Gathered, fetch: Fetch
    ) -> None:
        """columns: those of the shard that are in the vocabulary."""
        self.latest = torch.zeros(max_slots, dtype=torch.int64, device=device)
        self._columns, self._shard, self._device = columns, shard, device
        self._gather, self._fetch = gather, fetch
        self._last: _Fixed | None = None

    def start(
        self, raw: Tensor, plan: SamplingPlan, position: npt.NDArray[np.int64], digest: npt.NDArray[np.uint8]
    ) -> Arriving:
        """Draws for raw logits [B, columns] of a plain plan, `position` [max_slots] output ids being there already.
        What arrives: the digests that all ranks brought [tp], ids [B], whether each row was not finite [B]; int64."""
        fixed = self._fixed(plan)
        changing = upload(np.concatenate([digest.view(np.int64), position[plan.at]]), self._device)
        score, at, peak = self._best(raw, fixed, changing[1:])
        ids = torch.where(score > -torch.inf, at + self._shard.first, NO_ID)
        mine = torch.cat([changing[:1], score.view(torch.int64), ids, peak.view(torch.int64)])
        every = self._gather(mine)
        drawn, bad = _winner(every[:, 1:].view(len(every), 3, len(plan.at)))
        self.latest.index_copy_(0, fixed.slots, drawn)
        return self._fetch(torch.cat([every[:, 0], drawn, bad.long()]))

    def _fixed(self, plan: SamplingPlan) -> _Fixed:
        if self._last is None or self._last.plan is not plan:
            rows, device, count = plan.rows, self._device, len(plan.at)
            noisy = np.zeros(0, np.int64) if plan.noisy is None else np.flatnonzero(plan.noisy)
            ints = np.stack([plan.at, rows["seed"].astype(np.int64), rows["choice"].astype(np.int64)])
            slots, seed, choice = upload(ints, device)
            # No reference and no limit: neither masses nor what comes before an id is asked for.
            reals = np.stack([rows["inv_temperature"], np.full(count, np.nan), np.zeros(count)])
            zero = torch.zeros_like(slots)
            self._last = _Fixed(plan, slots, seed, choice, zero, upload(reals, device), upload(noisy, device))
        return self._last

    def _best(self, raw: Tensor, fixed: _Fixed, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row this shard's best score, noise added where it takes noise (float64), its column, and the peak of
        the logits (float64, NaN where one is NaN)."""
        count = len(position)
        if self._columns == 0:
            none = torch.full((count,), -torch.inf, dtype=torch.float64, device=self._device)
            return none, torch.zeros_like(position), none
        keys = torch.stack([fixed.seed, position, fixed.choice, fixed.zero])
        if len(fixed.noisy) == count:
            peak, _, best, best_at = self._measure(raw, keys, fixed.reals, NOISE)
            return best, best_at.long(), peak
        peak, at, *_ = self._measure(raw, keys, fixed.reals, 0)
        if len(fixed.noisy) == 0:
            return peak, at.long(), peak
        some = fixed.noisy
        _, _, best, best_at = self._measure(raw[some], keys[:, some], fixed.reals[:, some], NOISE)
        return peak.index_copy(0, some, best), at.index_copy(0, some, best_at).long(), peak

    def _measure(self, raw: Tensor, keys: Tensor, reals: Tensor, flags: int) -> Tensor:
        """Peaks, their columns, bests, their columns: float64 [4, R]."""
        step = self._shard.at_once(self._columns, flags) or len(raw)
        parts = [
            self._shard.measure(raw[i : i + step].float(), keys[:, i : i + step], reals[:, i : i + step], flags)[:4]
            for i in range(0, len(raw), step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _winner(every: Tensor) -> tuple[Tensor, Tensor]:
    """Scores, ids and peaks of all ranks, [tp, 3, B], the floats as their bits -> the ids [B] of the best scores, the
    lowest of equals, and which rows have no finite peak; their ids are 0."""
    score, ids, peak = every[:, 0].view(torch.float64), every[:, 1], every[:, 2].view(torch.float64)
    held = torch.where((score == score.amax(0)) & (ids >= 0), ids, _FAR).amin(0)
    bad = (~(peak < torch.inf)).any(0) | (peak.amax(0) == -torch.inf)
    return torch.where(bad, 0, held), bad
