"""Log-probabilities of drawn ids and of prompts, as OpenAI and vLLM report them: at temperature 1, before penalties,
biases, masks and filters. Each rank sums its shard in fp64; a gather adds the sums.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..request import TokenLogprob
from .decide import CANDIDATE, NO_ID, RAW, Array, merge, total_mass
from .logits_shard import MASS, ROW, Logits, LogitsShard

Exchange = Callable[[list[Array]], list[Array]]
"""One gather of several arrays: each [...] comes back as [tp, ...]."""

CHUNK_LOGITS = 1 << 23
"""Prompt rows scored at once: as many as together have this many logits over the whole vocabulary."""


class Scorer:
    """One rank's part; `columns` real columns from global id `first`."""

    def __init__(self, vocab_size: int, first: int, columns: int, shard: LogitsShard, exchange: Exchange) -> None:
        self.vocab_size, self.first, self.columns = vocab_size, first, columns
        self._shard, self._exchange = shard, exchange

    def summary(self, raw: Tensor, rows: npt.NDArray[np.int64], top: int) -> tuple[Array, Array]:
        """[S] of RAW (peak, mass; NaN peak where the shard's logits are not finite) and [S, top] of CANDIDATE, about
        rows [S] of the logits [B, columns]."""
        head = np.zeros(len(rows), RAW)
        head["peak"], head["best"] = -np.inf, -np.inf
        tops = np.zeros((len(rows), top), CANDIDATE)
        tops["x"], tops["id"] = -np.inf, NO_ID
        if self.columns == 0:
            return head, tops
        logits, work = Logits(raw), np.zeros(len(rows), ROW)
        work["flags"], work["inv_temperature"], work["reference"] = MASS, 1.0, np.nan
        self._shard.scan(logits, rows, work)
        head["peak"] = np.where(work["bad"] != 0, np.nan, work["peak"])
        head["mass"] = work["mass"]
        count = min(top, self.columns)
        if count:
            columns = self._shard.top(logits, rows, count)
            tops["x"][:, :count] = pick(raw, rows, columns)
            tops["id"][:, :count] = columns + self.first
        return head, tops

    def report(self, head: Array, tops: Array, ids: Array, raw: Array, top_counts: Array) -> list[TokenLogprob]:
        """From the gathered summaries [tp, S] and [tp, S, top]: of ids [S] with untouched logits raw [S], each with
        its `top_counts` likeliest. A row of non-finite logits has NaN and no likeliest."""
        peak, mass = total_mass(head["peak"], head["mass"], np.ones(1))
        with np.errstate(divide="ignore", invalid="ignore"):
            total = np.where(np.isfinite(peak), peak + np.log(mass), np.nan)
            own = raw - total
        best: list[list[tuple[int, float]]] = [[] for _ in ids]
        if tops.shape[2]:
            merged, *_ = merge(tops)
            likeliest = merged["x"] - total[:, None]
            counts = np.minimum(top_counts, (merged["id"] >= 0).sum(1))
            counts[np.isnan(total)] = 0
            best = [
                list(zip(merged["id"][i, :n].tolist(), likeliest[i, :n].tolist(), strict=True))
                for i, n in enumerate(counts.tolist())
            ]
        return [TokenLogprob(int(i), float(p), tuple(b)) for i, p, b in zip(ids, own, best, strict=True)]

    def score(self, logits_TV: Tensor, targets: npt.NDArray[np.int64], top: int) -> list[TokenLogprob]:
        """Log-probabilities of targets [T] under logits [T, columns], and of each row's `top` likeliest ids; NaN for a
        row of non-finite logits. In bounded chunks, one gather each. Raises ValueError for a target that is no id."""
        wrong = targets[(targets < 0) | (targets >= self.vocab_size)]
        if len(wrong):
            raise ValueError(f"token id {wrong[0]} is not in the vocabulary: ids are 0 to {self.vocab_size - 1}")
        if len(targets) != logits_TV.shape[0]:
            raise ValueError(f"{logits_TV.shape[0]} rows of logits for {len(targets)} targets: one row a target")
        out: list[TokenLogprob] = []
        step = max(1, CHUNK_LOGITS // self.vocab_size)
        for start in range(0, len(targets), step):
            out += self._score(logits_TV[start : start + step], targets[start : start + step], top)
        return out

    def _score(self, raw: Tensor, targets: npt.NDArray[np.int64], top: int) -> list[TokenLogprob]:
        head, tops = self.summary(raw, np.arange(len(targets)), top)
        own = targets - self.first
        (owned,) = np.nonzero((own >= 0) & (own < self.columns))
        if len(owned):
            head["best"][owned] = pick(raw, owned, own[owned, None])[:, 0]
        head, tops = self._exchange([head, tops])
        return self.report(head, tops, targets, head["best"].max(0).astype(np.float64), np.full(len(targets), top))


def pick(x: Tensor, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Values of x [B, n] at rows [R], columns [R, K], as float32."""
    at = torch.from_numpy(rows)[:, None].to(x.device), torch.from_numpy(columns).to(x.device)
    values: npt.NDArray[np.float32] = x[at].float().cpu().numpy()
    return values
