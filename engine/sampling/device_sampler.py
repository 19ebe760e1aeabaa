"""Samples rows on the device, so that ids feed the next step without passing through the host. A small gather between
devices finds the winner by engine/sampling/decide.py's rule. Rows with log-probabilities are gathered whole, rows with
filters or edits (device_rule.py) as the columns that may be sampled. The host gets a copy later, with the digests of
the gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...models.transfer import Arriving, stage, upload
from .decide import NO_ID
from .device_rule import DeviceEdits, filter_rule, filters_of, report
from .logits_shard import NOISE, TorchShard
from .penalties import SlotEdits
from .slots import SamplingPlan

Gathered = Callable[[Tensor], Tensor]
"""int64 [n] of this rank -> [tp, n] of all, on the device; the host does not wait."""
Fetch = Callable[[Tensor], Arriving]
"""models/transfer.py's download, or a test's."""

Replay = Callable[[], None]
Record = Callable[[Callable[[], None]], Replay]
"""CudaRecorder.record of engine/step/cuda_graphs.py."""

_SENTINEL = 2**62
_FIELDS = 9
"""Fields of a recorded row: seed, position, choice, no limit; 1 / T, no reference, no limit, as bits; slot, whether it
has noise."""


def feed(ids: Tensor, latest: Tensor) -> Tensor:
    """Resolves ids [T], in which -1 - slot refers to the last id sampled for that slot, in latest [slots]."""
    return torch.where(ids < 0, latest.index_select(0, (-1 - ids).clamp(min=0)), ids)


def fed_by(slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """References to the last ids sampled for these slots, see `feed`."""
    return -1 - slots


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Tensors on the device that all steps of a plan share. `noisy`: indices of the rows with noise; `searched`:
    whether any row has a top_k, a top_p."""

    plan: SamplingPlan
    slots: Tensor
    seed: Tensor
    choice: Tensor
    zero: Tensor
    reals: Tensor
    noisy: Tensor
    filtered: Tensor
    filters: Tensor
    searched: tuple[bool, bool]
    scored: Tensor
    top: int
    edited: Tensor
    edits: DeviceEdits | None


class DeviceDraw:
    """Samples one rank's rows. `latest` [max_slots + 1] int64: the last id sampled here for each slot; the last entry
    belongs to no slot."""

    def __init__(
        self,
        vocab_size: int,
        width: int,
        max_slots: int,
        shard: TorchShard,
        device: torch.device,
        gather: Gathered,
        fetch: Fetch,
    ) -> None:
        """width: columns of every rank's shard, with padding."""
        columns = max(0, min(width, vocab_size - shard.first))
        self._vocab, self._width = vocab_size, width
        self.latest = torch.zeros(max_slots + 1, dtype=torch.int64, device=device)
        self._columns, self._shard, self._device = columns, shard, device
        self._gather, self._fetch, self._filter = gather, fetch, filter_rule(shard)
        self._last: _Fixed | None = None
        self._inputs = self._found = torch.zeros(0, dtype=torch.int64, device=device)
        self._replays: dict[int, Replay] = {}

    def record(self, logits: Tensor, sizes: Sequence[int], record: Record, routing: Tensor | None) -> dict[int, Replay]:
        """Records draws of greedy and plainly sampled rows from logits [most, columns], which stay where they are: of
        so many rows each. routing: as of `start`. Returns the recordings, for their owner to give up."""
        self._inputs = torch.zeros(_FIELDS * max(sizes) + 1, dtype=torch.int64, device=self._device)
        self._found = self._inputs.new_zeros(0)
        for size in sorted(sizes, reverse=True):
            rows = logits[:size, : self._columns]
            self._replays[size] = record(partial(self._compute, rows, max(sizes), routing))
        return self._replays

    def _compute(self, x: Tensor, most: int, routing: Tensor | None) -> None:
        count = len(x)
        fields = self._inputs[: _FIELDS * count].view(_FIELDS, count)
        if self._columns:
            measured = self._measure(x, fields[:4], fields[4:7].view(torch.float64), NOISE)
            noisy, peak = fields[8] > 0, measured[0]
            score, at = torch.where(noisy, measured[2:4], measured[:2])
        else:
            score = peak = torch.full((count,), -torch.inf, dtype=torch.float64, device=self._device)
            at = torch.zeros_like(peak)
        own = self._inputs[_FIELDS * count :][:1]
        parts = torch.cat(self._agreed(own, score, at.long(), peak, fields[7], routing))
        if not len(self._found):
            self._found = parts.new_zeros(len(parts) + 2 * (most - count))
        self._found[: len(parts)].copy_(parts)

    def start_recorded(
        self, plan: SamplingPlan, position: npt.NDArray[np.int64], digest: npt.NDArray[np.uint8]
    ) -> Arriving | None:
        """Like `start`, for the first rows of the recorded logits; None if rows are not plain or too many."""
        count, rows = len(plan.at), plan.rows
        size = min((size for size in self._replays if size >= count), default=0)
        if size == 0 or plan.groups or len(plan.scored) or len(plan.edited):
            return None
        self.forget()
        values = np.zeros(_FIELDS * size + 1, np.int64)
        fields = values[:-1].reshape(_FIELDS, size)
        fields[7] = len(self.latest) - 1  # padding draws for no slot
        fields[:3, :count] = rows["seed"].astype(np.int64), position, rows["choice"].astype(np.int64)
        reals = fields[4:6].view(np.float64)
        reals[0, :count], reals[1] = rows["inv_temperature"], np.nan
        fields[7, :count], fields[8, :count] = plan.at, 0 if plan.noisy is None else plan.noisy
        values[-1:] = digest.view(np.int64)
        stage(self._inputs[: len(values)], torch.from_numpy(values))
        self._replays[size]()
        ranks = len(self._found) - 2 * max(self._replays)
        read = self._fetch(self._found[: ranks + 2 * size])

        def without_padding() -> npt.NDArray[Any]:
            values = read()
            return np.concatenate([values[:ranks], *values[ranks:].reshape(2, size)[:, :count]])

        return without_padding

    def _agreed(
        self, own: Tensor, score: Tensor, at: Tensor, peak: Tensor, slots: Tensor, routing: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's digest, best scores, their columns and peaks -> of every rank the digest and, if there is one,
        the routing; the ids drawn, which are now the slots' latest; and which rows are bad."""
        ids = torch.where(score > -torch.inf, at + self._shard.first, NO_ID)
        heads = [own] if routing is None else [own, routing]
        every = self._gather(torch.cat([*heads, score.view(torch.int64), ids, peak.view(torch.int64)]))
        drawn, bad = best_of_ranks(every[:, len(heads) :].reshape(len(every), 3, len(slots)))
        self.latest.index_copy_(0, slots, drawn)
        return every[:, : len(heads)].flatten(), drawn, bad

    def start(
        self,
        raw: Tensor,
        plan: SamplingPlan,
        position: npt.NDArray[np.int64],
        digest: npt.NDArray[np.uint8],
        edits: Sequence[SlotEdits] = (),
        routing: Tensor | None = None,
    ) -> Arriving:
        """Draws for raw logits [B, columns] of a plan. position [B]: the number of output ids before each row's; edits:
        of its edited rows; routing: int64 [1], which is to be the same on every rank. What arrives, int64: the digest
        that each rank brought, followed by its routing [tp, 1 or 2], ids [B], whether each row was broken (1) or had
        nothing to draw (2) [B], and as bits of float64 device_rule.report's of the scored rows."""
        fixed = self._fixed(plan, edits)
        changing = upload(np.concatenate([digest.view(np.int64), position]), self._device)
        x, scored = self._processed(raw, fixed, changing[1:])
        score, at, peak = self._best(x, fixed, changing[1:])
        digests, drawn, bad = self._agreed(changing[:1], score, at, peak, fixed.slots, routing)
        if fixed.edits is not None:
            fixed.edits.note(drawn[fixed.edited] - self._shard.first)
        parts = [digests, drawn, bad]
        if len(fixed.scored):
            parts.append(report(scored, drawn[fixed.scored], fixed.top).view(torch.int64).flatten())
        return self._fetch(torch.cat(parts))

    def forget(self) -> None:
        """Discards the counts of the device, which are outdated because the host has sampled meanwhile."""
        self._last = None

    def _processed(self, raw: Tensor, fixed: _Fixed, position: Tensor) -> tuple[Tensor, Tensor]:
        """Applies edits and filters to the logits; returns them and the original logits of scored rows, [S, V]."""
        x = raw
        if fixed.edits is not None:
            x = raw.float().index_copy(
                0, fixed.edited, fixed.edits.apply(raw[fixed.edited].float(), position[fixed.edited])
            )
        filtered = len(fixed.filtered)
        if not filtered and not len(fixed.scored):
            return x, x
        gathered = self._whole(torch.cat([x[fixed.filtered].float(), raw[fixed.scored].float()]))
        if filtered:
            first = min(self._shard.first, self._vocab)
            some = self._filter(gathered[:filtered], fixed.filters, first, self._columns, *fixed.searched)
            x = x.float().index_copy(0, fixed.filtered, some)
        return x, gathered[filtered:]

    def _whole(self, x: Tensor) -> Tensor:
        """Gathers rows of the whole vocabulary, fp32 [R, V], from every rank's [R, columns]."""
        rows, width = len(x), self._width + self._width % 2  # two of them are an int64, which gathers carry
        padded = torch.nn.functional.pad(x, (0, width - x.shape[1]), value=-torch.inf)
        every = self._gather(padded.view(torch.int64).flatten()).view(torch.float32).view(-1, rows, width)
        shards = every[:, :, : self._width].transpose(0, 1)
        if len(every) == 1:
            return shards.flatten(1)[:, : self._vocab]
        # NOTE: of memory of its own: a view of one row has another stride, by which Triton would compile again.
        joined = shards.new_empty((rows, len(every) * self._width))
        joined.view(shards.shape).copy_(shards)
        return joined[:, : self._vocab]

    def _fixed(self, plan: SamplingPlan, edits: Sequence[SlotEdits]) -> _Fixed:
        if self._last is None or self._last.plan is not plan:
            rows, device, count = plan.rows, self._device, len(plan.at)
            filtered = np.concatenate([np.zeros(0, np.int64), *(some for some, _ in plan.groups)])
            taking = np.zeros(count, np.bool_) if plan.noisy is None else plan.noisy.copy()
            taking[filtered] = True
            noisy, filters = np.flatnonzero(taking), plan.filters.take(filtered)
            ints = np.stack([plan.at, rows["seed"].astype(np.int64), rows["choice"].astype(np.int64)])
            slots, seed, choice = upload(ints, device)
            # No reference and no limit: neither masses nor what comes before an id is asked for.
            reals = np.stack([rows["inv_temperature"], np.full(count, np.nan), np.zeros(count)])
            zero = torch.zeros_like(slots)
            self._last = _Fixed(
                plan, slots, seed, choice, zero, upload(reals, device), upload(noisy, device),
                filtered=upload(filtered, device),
                filters=filters_of(filters, device),
                searched=(bool((filters.top_k > 0).any()), bool((filters.top_p < 1.0).any())),
                scored=upload(plan.scored, device),
                top=plan.most_logprobs,
                edited=upload(plan.edited, device),
                edits=DeviceEdits.make(edits, self._columns, device) if edits else None,
            )  # fmt: skip
        return self._last

    def _best(self, raw: Tensor, fixed: _Fixed, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each row's best score in this shard, noise added where it takes noise (float64), its column, and the peak of
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


def best_of_ranks(every: Tensor) -> tuple[Tensor, Tensor]:
    """Scores, ids and peaks of all ranks, [tp, 3, B], the floats as their bits -> the ids [B] of the best scores, the
    lowest of equals, and which rows have a peak that is not finite (1) or none (2); their ids are 0."""
    score, ids, peak = every[:, 0].view(torch.float64), every[:, 1], every[:, 2].view(torch.float64)
    best_ids = torch.where((score == score.amax(0)) & (ids >= 0), ids, _SENTINEL).amin(0)
    bad = torch.where((~(peak < torch.inf)).any(0), 1, torch.where(peak.amax(0) == -torch.inf, 2, 0))
    return torch.where(bad > 0, 0, best_ids), bad
