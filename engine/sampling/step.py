"""Samples the rows of one step: edits logits, scans the shard, gathers, decides (engine/sampling/decide.py), and
decides the remaining rows by further small gathers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..request import TokenLogprob
from . import decide as rule
from .decide import CANDIDATE, MAIN, NO_ID, WALK, Array
from .grammar import GrammarState
from .logits_shard import LIMIT, MASS, NOISE, ROW, Logits, LogitsShard
from .logprobs import Exchange, Scorer, pick
from .penalties import apply
from .slots import Sampled, SamplingPlan, SlotTable

NOTHING_LEFT = "grammar, allowed_token_ids and min_tokens together forbid every token"


@dataclass(frozen=True, slots=True)
class StepContext:
    """The objects that a step uses. `first_exchange` gathers once, with the digest of the last step; `exchange` gathers
    any number of times."""

    shard: LogitsShard
    scorer: Scorer
    slots: SlotTable
    first_exchange: Exchange
    exchange: Exchange
    nested: bool = False
    """Whether results must not depend on the number of ranks; the candidates are then the same for every number."""


class Step:
    """Samples the rows of one plan from raw logits [B, columns]. fed [B]: with drafts, the input id of each row."""

    def __init__(self, tools: StepContext, plan: SamplingPlan, raw: Tensor, fed: Array | None = None) -> None:
        self.tools, self.plan, self.fed = tools, plan, fed
        self.first, self.columns = tools.slots.first, tools.slots.columns
        self.rows = plan.rows
        self.rows["position"] = tools.slots.position[plan.at] + plan.offset
        self.logits = self._edited(raw)

    def run(self) -> Sampled:
        plan, scored = self.plan, self.plan.scored
        own = self._main()
        parts = [own, *(self._candidates(rows, k) for rows, k in plan.groups)]
        if len(scored):
            parts += self._raw_parts(own)
        main, *rest = self.tools.first_exchange(parts)

        bad: npt.NDArray[np.bool_] = main["bad"].any(0) | (main["peak"].max(0) == -np.inf)
        self.ids, rank = rule.winner(main["best"], main["best_id"])
        self.raw = np.zeros(len(plan.at))  # the unprocessed logit of the id, for rows with log-probabilities
        if len(scored):
            self.raw[scored] = rest[-2]["best"][rank[scored], np.arange(len(scored))]
        if plan.groups:
            self.peak, self.mass = rule.total_mass(main["peak"], main["mass"], self.rows["inv_temperature"])
            for (rows, k), lists in zip(plan.groups, rest, strict=False):
                fine = ~bad[rows]
                self._filter(rows[fine], k, lists[:, fine])
        if bad.any():
            self.ids[bad] = 0
        logprobs: list[TokenLogprob | None] = [None] * len(plan.at)
        if len(scored):
            head, tops = rest[-2:]
            entries = self.tools.scorer.report(head, tops, self.ids[scored], self.raw[scored], plan.logprobs[scored])
            for row, entry in zip(scored.tolist(), entries, strict=True):
                logprobs[row] = None if bad[row] else entry
        return Sampled(self.ids.astype(np.int32), logprobs, bad, self._failures(bad, main) if bad.any() else {})

    def _failures(self, bad: npt.NDArray[np.bool_], main: Array) -> dict[int, str]:
        """The reasons for which rows with finite logits have no allowed id: the request's own constraints."""
        slots, reasons = self.tools.slots, {}
        for row in np.flatnonzero(bad).tolist():
            slot = int(self.plan.at[row])
            grammar = slots.grammars.state(slot) if slots.grammars is not None and slot in slots.grammatical else None
            why = None if grammar is None else grammar.failure()
            if why is None and not main["bad"][:, row].any() and row in self.plan.edited:
                why = NOTHING_LEFT
            if why is not None:
                reasons[row] = why
        return reasons

    # ---- before the gather ----

    def _edited(self, raw: Tensor) -> Logits:
        edited, slots = self.plan.edited, self.tools.slots
        if len(edited) == 0:
            return Logits(raw)
        changed = raw[torch.from_numpy(edited).to(raw.device)].float()
        names = self.plan.at[edited].tolist()
        with_edits = np.flatnonzero([slot in slots.edits for slot in names])
        if len(with_edits):
            positions = self.rows["position"][edited[with_edits]].tolist()
            edits = slots.edits_of(self.plan, edited[with_edits].tolist(), self.fed)
            apply(changed, with_edits, edits, positions)
        where = np.full(len(self.plan.at), -1, np.int64)
        where[edited] = np.arange(len(edited))
        ids = range(self.first, self.first + self.columns)
        for row, grammar in self._grammars(self.plan.masked.tolist()):
            if grammar.ended:  # only its end is left, whatever the other parameters forbid
                changed[int(where[row])] = raw[row].float()
            allowed = torch.from_numpy(grammar.allowed(ids)).to(raw.device)
            changed[int(where[row])].masked_fill_(~allowed, -torch.inf)
        return Logits(raw, changed, where)

    def _grammars(self, rows: list[int]) -> Iterator[tuple[int, GrammarState]]:
        """The grammar state of each row: the slot's, advanced by the drafts before the row."""
        grammars = self.tools.slots.grammars
        if grammars is None:
            return
        for row in rows:
            if not self.plan.offset[row] or self.fed is None:
                grammar = grammars.state(int(self.plan.at[row]))
            else:
                grammar = grammar.fork() if self.plan.offset[row] == 1 else grammar
                grammar.advance(int(self.fed[row]))
            yield row, grammar

    def _main(self) -> Array:
        """This rank's MAIN entries [B]."""
        rows, noisy = self.rows, self.plan.noisy
        main: Array = np.zeros(len(rows), MAIN)
        if self.columns == 0:
            main["best"] = main["peak"] = -np.inf
            main["best_id"] = NO_ID
            return main
        self.tools.shard.scan(self.logits, np.arange(len(rows)), rows)
        main["peak"], main["mass"], main["bad"] = rows["peak"], rows["mass"], rows["bad"]
        if noisy is None:
            main["best"], main["best_id"] = rows["peak"], rows["peak_id"]
        else:
            main["best"] = np.where(noisy, rows["best"], rows["peak"])
            main["best_id"] = np.where(noisy, rows["best_id"], rows["peak_id"])
        if len(self.plan.masked):
            # A mask must not hide non-finite logits (adding -inf, as min_tokens does, hides none).
            untouched = np.zeros(len(self.plan.masked), ROW)
            self.tools.shard.scan(Logits(self.logits.raw), self.plan.masked, untouched)
            main["bad"][self.plan.masked] |= untouched["bad"]
        return main

    def _candidates(self, rows: Array, k: int) -> Array:
        """This rank's CANDIDATE entries [R, K]."""
        out: Array = np.zeros((len(rows), k), CANDIDATE)
        out["x"], out["id"] = -np.inf, NO_ID
        count = min(k, self.columns)
        if count and len(rows):
            columns = self.tools.shard.top(self.logits, rows, count)
            out["x"][:, :count], out["raw"][:, :count] = self._values(rows, columns)
            out["id"][:, :count] = columns + self.first
        return out

    def _values(self, rows: Array, columns: Array) -> tuple[Array, Array]:
        """Processed and unprocessed logits of columns [R, K]."""
        raw = pick(self.logits.raw, rows, columns)
        if self.logits.changed is None or self.logits.where is None:
            return raw, raw
        x = raw.copy()
        hit = np.flatnonzero(self.logits.where[rows] >= 0)
        if len(hit):
            x[hit] = pick(self.logits.changed, self.logits.where[rows[hit]], columns[hit])
        return x, raw

    def _raw_parts(self, main: Array) -> list[Array]:
        """RAW [S] and CANDIDATE [S, top] entries of the unprocessed logits of the rows with log-probabilities."""
        scored = self.plan.scored
        head, tops = self.tools.scorer.summary(self.logits.raw, scored, int(self.plan.logprobs.max()))
        own = main["best_id"][scored].astype(np.int64) - self.first
        owned = np.flatnonzero(own >= 0)
        if len(owned):
            head["best"][owned] = pick(self.logits.raw, scored[owned], own[owned, None])[:, 0]
        return [head, tops]

    # ---- after the gather ----

    def _filter(self, rows: Array, k: int, lists: Array) -> None:
        """Decides filtered rows from their candidates `lists` [tp, R, K]."""
        while len(rows):
            filters = self.plan.filters.take(rows)
            merged, safe, complete = rule.merge(lists)
            if self.tools.nested:
                merged, safe, complete = merged[:, :k], np.minimum(safe, k), merged["id"][:, k - 1] == NO_ID
            counts, certain = rule.prefix(merged["x"], self.peak[rows], self.mass[rows], filters, safe, complete)
            self._draw(rows[certain], merged[certain], counts[certain])
            # With only one of top_k and top_p an id can be decided by itself; with both, the k-th id must be known.
            both = (filters.top_k > 0) & (filters.top_p < 1.0)
            self._walk(rows[~certain & ~both])
            rows = rows[~certain & both]
            k *= 2
            if len(rows):
                (lists,) = self.tools.exchange([self._candidates(rows, k)])

    def _draw(self, rows: Array, merged: Array, counts: Array) -> None:
        """Samples the best of each row's first `counts` merged candidates, with noise added."""
        if len(rows) == 0:
            return
        merged = merged[:, : counts.max()]
        ids = merged["id"].astype(np.int64)
        noise = self.tools.shard.gumbel(self.rows[rows], ids)
        score = merged["x"].astype(np.float64) * self.rows["inv_temperature"][rows][:, None] + noise
        score[(np.arange(merged.shape[1])[None] >= counts[:, None]) | (ids < 0)] = -np.inf
        self.ids[rows], at = rule.winner(score.T, ids.T)
        self.raw[rows] = merged["raw"][np.arange(len(rows)), at]

    def _walk(self, rows: Array) -> None:
        """Decides rows whose kept set is too large to send. The kept set is a prefix of the ids by falling logit. If
        the best of all ids (noise added) is in it, that id is sampled; otherwise the best of the ids before that one is
        tried, and so on, at the latest down to the first id. Each round gathers about the ids before a limit. With
        top_p = p this takes 1 / p rounds on average, of some forty bytes per rank; a whole row of 128K ids is 1.5
        MB."""
        limit: Array = np.full(len(rows), -np.inf, np.float32)
        limit_id: Array = np.full(len(rows), np.iinfo(np.int32).max, np.int64)
        raw: Array = np.zeros(len(rows))
        judged = False
        while len(rows):
            (gathered,) = self.tools.exchange([self._before(rows, limit, limit_id)])
            inside: Array = np.zeros(len(rows), np.bool_)
            if judged:
                count, mass = gathered["count"].sum(0), rule.tree_sum(gathered["mass"])
                filters = self.plan.filters.take(rows)
                inside = rule.passes_filters(limit, count, mass, self.peak[rows], self.mass[rows], filters)
            self.ids[rows[inside]], self.raw[rows[inside]] = limit_id[inside], raw[inside]
            best, rank = rule.winner(gathered["best"], gathered["best_id"])
            winners = rank, np.arange(len(rows))
            limit, limit_id, raw = gathered["x"][winners], best, gathered["raw"][winners].astype(np.float64)
            rows, limit, limit_id, raw = rows[~inside], limit[~inside], limit_id[~inside], raw[~inside]
            judged = True

    def _before(self, rows: Array, limit: Array, limit_id: Array) -> Array:
        """WALK entries [R] of this shard's ids before (limit, limit_id)."""
        out: Array = np.zeros(len(rows), WALK)
        out["best"], out["best_id"] = -np.inf, NO_ID
        if self.columns == 0:
            return out
        work = self.rows[rows]
        work["flags"] = NOISE | MASS | LIMIT
        work["limit"], work["limit_id"], work["reference"] = limit, limit_id, self.peak[rows]
        self.tools.shard.scan(self.logits, rows, work)
        for name in ("best", "best_id", "mass", "count"):
            out[name] = work[name]
        nonempty = np.flatnonzero(work["best_id"] >= 0)
        if len(nonempty):
            columns = work["best_id"][nonempty].astype(np.int64)[:, None] - self.first
            x, raw = self._values(rows[nonempty], columns)
            out["x"][nonempty], out["raw"][nonempty] = x[:, 0], raw[:, 0]
        return out
