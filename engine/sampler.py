"""logits -> ids: the same function on every rank, over one small all-gather a step.

Every rank brings a few numbers about its vocabulary shard (engine/shard.py), and decides alone what all decide alike
(engine/sampling_rule.py). Order of a row's edits: penalties, logit_bias, min_tokens, grammar mask, temperature, top_k,
top_p, min_p. Log-probabilities are those of the untouched logits at temperature 1. What crosses the network is
O(rows x candidates): rows whose filters keep more than the candidates show are settled by further small gathers, about
one id a row at a time (`_walk`). Knows the runner's slots, nothing of schedules, text or transport.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import sampling_rule as rule
from .batch import NewSequence
from .logprobs import Scorer, pick
from .penalties import SlotEdits, apply
from .request import MAX_CANDIDATES, SamplingParams, TokenLogprob
from .sampling_rule import CANDIDATE, MAIN, NO_ID, WALK, Array
from .shard import LIMIT, MASS, NOISE, ROW, Logits, Rows, make_shard

Gather = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]
"""payload [n] of this rank -> [tp, n] of all ranks, in rank order, the same on every rank."""

MIN_TEMPERATURE = 1e-5
"""Below it a temperature means greedy, as in vLLM."""
FEWEST_CANDIDATES = 32


class Grammars(Protocol):
    """Structured output (engine/grammar.py), by slot."""

    def admit(self, slot: int, spec: str, output: Sequence[int]) -> None:
        """A sequence of grammar `spec` that has put out `output` so far."""

    def release(self, slot: int) -> None: ...

    def allowed(self, slot: int, ids: range) -> npt.NDArray[np.bool_]:
        """Which of these global ids may come next."""

    def advance(self, slot: int, token: int) -> None: ...


class DesyncError(RuntimeError):
    """Ranks drew different ids. `ranks` are those to blame (all, if no majority says which), `step` the sampling
    step, counted from 0, whose ids differ."""

    def __init__(self, ranks: tuple[int, ...], majority: bool, step: int, tp: int) -> None:
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        if majority:
            what = f"{who} of {tp} drew other ids than the majority"
        else:
            what = f"{who} disagree with one another about the ids drawn, with no majority"
        super().__init__(f"sampling step {step}: {what}; nothing of this step may be released: restart the job")
        self.ranks, self.step = ranks, step


@dataclass(frozen=True)
class Sampled:
    """Of the rows of one step, in order. `nonfinite`: the row's logits held NaN or +inf, or nothing above -inf (also:
    its masks left no id); its id is 0 and means nothing."""

    ids: npt.NDArray[np.int32]
    logprobs: list[TokenLogprob | None]
    nonfinite: npt.NDArray[np.bool_]


_SLOT = np.dtype(
    [
        ("live", "?"),
        ("filtered", "?"),
        ("edited", "?"),
        ("position", "<i8"),
        ("top_k", "<i8"),
        ("top_p", "<f8"),
        ("log_min_p", "<f8"),
        ("candidates", "<i8"),
        ("logprobs", "<i8"),
    ]
)


class Sampler:
    """One rank's sampler. `shard`: global ids of this rank's columns; those >= vocab_size are padding and never seen.
    Every rank must make the same calls with the same sequences and slots."""

    def __init__(
        self,
        vocab_size: int,
        shard: range,
        max_slots: int,
        gather: Gather,
        device: torch.device,
        grammars: Grammars | None = None,
    ) -> None:
        self.vocab_size, self.first = vocab_size, shard.start
        self.columns = max(0, min(shard.stop, vocab_size) - shard.start)
        self.gather, self.grammars = gather, grammars
        self.step = 0
        self._shard = make_shard(shard.start, device)
        self._scorer = Scorer(vocab_size, self.first, self.columns, self._shard, self._together)
        self._rows: Rows = np.zeros(max_slots, ROW)
        self._slots = np.zeros(max_slots, _SLOT)
        self._edits: dict[int, SlotEdits] = {}
        self._grammatical: set[int] = set()
        self._digest = np.zeros(8, np.uint8)

    # ---- slots ----

    def admit(self, sequence: NewSequence) -> None:
        """Fills a slot. Raises ValueError if it is taken, or its grammar cannot be."""
        slot, params = sequence.slot, sequence.params
        if self._slots["live"][slot]:
            raise ValueError(f"slot {slot} is taken: release it before admitting another sequence")
        if params.grammar is not None:
            if self.grammars is None:
                raise ValueError("a request with a grammar, but no grammar library: install laddertron[grammar]")
            self.grammars.admit(slot, params.grammar, sequence.tokens[sequence.prompt_len :])
            self._grammatical.add(slot)
        row, state = self._rows[slot : slot + 1], self._slots[slot : slot + 1]
        settle(params, self.vocab_size, row, state)
        row["choice"] = sequence.choice
        state["position"] = len(sequence.tokens) - sequence.prompt_len
        state["edited"] |= params.grammar is not None
        if params.penalised or params.logit_bias or params.min_tokens > 0:
            self._edits[slot] = SlotEdits(sequence, self.first, self.columns)

    def release(self, slot: int) -> None:
        """Empties a slot (an empty one stays empty)."""
        self._slots[slot] = np.zeros((), _SLOT)
        self._edits.pop(slot, None)
        if slot in self._grammatical and self.grammars is not None:
            self._grammatical.discard(slot)
            self.grammars.release(slot)

    # ---- a step ----

    def flush(self) -> None:
        """The empty gather after the last step: proves that its ids agree. Raises DesyncError."""
        self._exchange([])

    def score(self, logits_TV: Tensor, targets: npt.ArrayLike, top: int) -> list[TokenLogprob]:
        """Log-probabilities of targets [T] under logits [T, len(shard)], and of the `top` likeliest ids of each row;
        NaN for a row of non-finite logits. Memory is bounded whatever T is."""
        return self._scorer.score(logits_TV[:, : self.columns], np.asarray(targets, np.int64), top)

    def sample(self, logits_BV: Tensor, slots: Sequence[int]) -> Sampled:
        """Draws one id for each row of logits [B, len(shard)] (model dtype or fp32, rows in the order of `slots`) and
        appends it to the slot's state. Raises DesyncError if the ranks' last ids differ."""
        at = np.asarray(slots, np.int64)
        if logits_BV.shape[0] != len(at):
            raise ValueError(f"{logits_BV.shape[0]} rows of logits for {len(at)} slots: one row a slot")
        return _Step(self, logits_BV[:, : self.columns], at).run()

    def _commit(self, at: Array, ids: npt.NDArray[np.int32], nonfinite: npt.NDArray[np.bool_]) -> None:
        self._slots["position"][at] += 1
        for row in np.flatnonzero(self._slots["edited"][at]).tolist():
            slot, token = int(at[row]), int(ids[row])
            if slot in self._edits:
                self._edits[slot].append(token)
            if slot in self._grammatical and self.grammars is not None and not nonfinite[row]:
                self.grammars.advance(slot, token)
        drawn = np.concatenate([[self.step, len(at)], at, ids]).astype("<i8")
        self._digest = np.frombuffer(blake2b(drawn.tobytes(), digest_size=8).digest(), np.uint8)
        self.step += 1

    def _exchange(self, parts: list[Array]) -> list[Array]:
        """The step's gather, headed by the digest of the last ids: parts [...] -> [tp, ...]. Raises DesyncError."""
        digests, *rest = self._together([self._digest, *parts])
        found = rule.disagreement(np.ascontiguousarray(digests).view("<u8")[:, 0])
        if found is not None:
            raise DesyncError(*found, step=self.step - 1, tp=len(digests))
        return rest

    def _together(self, parts: list[Array]) -> list[Array]:
        """One gather of several arrays: each part [...] comes back as [tp, ...]."""
        flat = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
        everyone = self.gather(np.concatenate(flat))
        out, at = [], 0
        for part, piece in zip(parts, flat, strict=True):
            own = np.ascontiguousarray(everyone[:, at : at + len(piece)])
            out.append(own.view(part.dtype).reshape(len(everyone), *part.shape))
            at += len(piece)
        return out


def settle(params: SamplingParams, vocab_size: int, row: Rows, state: Array) -> None:
    """How a request's rows are drawn, written into its entries of the slot tables."""
    row[:] = np.zeros(1, ROW)
    state[:] = np.zeros(1, _SLOT)
    top_k = 0 if params.top_k >= vocab_size else max(0, params.top_k)
    greedy = params.temperature < MIN_TEMPERATURE or top_k == 1
    filtered = not greedy and (top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
    row["inv_temperature"] = 0.0 if greedy else 1.0 / params.temperature
    row["seed"] = params.seed
    row["reference"] = np.nan
    wanted = FEWEST_CANDIDATES
    while wanted < min(top_k, MAX_CANDIDATES):
        wanted *= 2
    if not greedy and not filtered:
        row["flags"] = NOISE
    elif filtered and params.top_p < 1.0 and (top_k == 0 or top_k > wanted):
        row["flags"] = MASS
    state["live"], state["filtered"] = True, filtered
    state["edited"] = params.penalised or bool(params.logit_bias) or params.min_tokens > 0
    state["top_k"], state["top_p"] = top_k, params.top_p
    state["log_min_p"] = math.log(params.min_p) if params.min_p > 0.0 else -np.inf
    state["candidates"] = wanted
    state["logprobs"] = -1 if params.logprobs is None else params.logprobs


class _Step:
    """One call of `sample`: its rows, what was gathered about them, what is decided."""

    def __init__(self, sampler: Sampler, raw: Tensor, at: Array) -> None:
        self.sampler, self.at = sampler, at
        self.state = sampler._slots[at]
        self.rows: Rows = sampler._rows[at]
        self.rows["position"] = self.state["position"]
        self.all = np.arange(len(at))
        self.logits = self._edited(raw)
        self.scored = np.flatnonzero(self.state["logprobs"] >= 0)
        self.ids = np.zeros(len(at), np.int64)
        self.raw = np.zeros(len(at), np.float64)  # the untouched logit of the id, of rows that want it

    def run(self) -> Sampled:
        sampler = self.sampler
        main = self._main()
        groups = self._groups()
        parts = [main, *(self._candidates(rows, k) for rows, k in groups)]
        if len(self.scored):
            parts += self._raw_parts(main)
        main, *rest = sampler._exchange(parts)

        bad = main["bad"].any(0) | (main["peak"].max(0) == -np.inf)
        best, rank = rule.winner(main["best"], main["best_id"])
        self.ids[:] = best
        self.peak, self.mass = rule.total_mass(main["peak"], main["mass"], self.rows["inv_temperature"])
        logprobs: list[TokenLogprob | None] = [None] * len(self.at)
        if len(self.scored):
            head, tops = rest[-2:]
            self.raw[self.scored] = head["best"][rank[self.scored], np.arange(len(self.scored))]
        for (rows, k), lists in zip(groups, rest, strict=False):
            self._filter(rows, k, lists, bad)
        self.ids[bad] = 0
        if len(self.scored):
            self._report(logprobs, head, tops, bad)
        ids = self.ids.astype(np.int32)
        sampler._commit(self.at, ids, bad)
        return Sampled(ids, logprobs, bad)

    # ---- before the gather ----

    def _edited(self, raw: Tensor) -> Logits:
        edited = np.flatnonzero(self.state["edited"])
        if len(edited) == 0:
            return Logits(raw)
        sampler = self.sampler
        changed = raw[torch.from_numpy(edited).to(raw.device)].float()
        slots = self.at[edited].tolist()
        (held,) = np.nonzero([slot in sampler._edits for slot in slots])
        if len(held):
            some = changed if len(held) == len(slots) else changed[torch.from_numpy(held)]
            positions = self.state["position"][edited[held]].tolist()
            apply(some, [sampler._edits[slots[i]] for i in held], positions)
            if some is not changed:
                changed[torch.from_numpy(held)] = some
        if sampler.grammars is not None:
            ids = range(sampler.first, sampler.first + sampler.columns)
            for i, slot in enumerate(slots):
                if slot in sampler._grammatical:
                    allowed = torch.from_numpy(sampler.grammars.allowed(slot, ids)).to(raw.device)
                    changed[i].masked_fill_(~allowed, -torch.inf)
        where = np.full(len(self.at), -1, np.int64)
        where[edited] = np.arange(len(edited))
        return Logits(raw, changed, where)

    def _main(self) -> Array:
        """[B] of MAIN."""
        sampler, rows = self.sampler, self.rows
        main = np.zeros(len(rows), MAIN)
        if sampler.columns == 0:
            main["best"] = main["peak"] = -np.inf
            main["best_id"] = NO_ID
            return main
        sampler._shard.scan(self.logits, self.all, rows)
        noisy = (rows["flags"] & NOISE) != 0
        main["peak"], main["mass"], main["bad"] = rows["peak"], rows["mass"], rows["bad"]
        main["best"] = np.where(noisy, rows["best"], rows["peak"])
        main["best_id"] = np.where(noisy, rows["best_id"], rows["peak_id"])
        if self.logits.where is not None:
            # Masks must not hide what is wrong with a row.
            hidden = np.flatnonzero(self.logits.where >= 0)
            untouched = np.zeros(len(hidden), ROW)
            sampler._shard.scan(Logits(self.logits.raw), hidden, untouched)
            main["bad"][hidden] |= untouched["bad"]
        return main

    def _groups(self) -> list[tuple[Array, int]]:
        """Filtered rows, by the number of candidates each rank sends."""
        filtered = np.flatnonzero(self.state["filtered"])
        wanted = self.state["candidates"][filtered]
        return [(filtered[wanted == k], int(k)) for k in np.unique(wanted)]

    def _candidates(self, rows: Array, k: int) -> Array:
        """[R, K] of CANDIDATE."""
        out = np.zeros((len(rows), k), CANDIDATE)
        out["x"], out["id"] = -np.inf, NO_ID
        held = min(k, self.sampler.columns)
        if held and len(rows):
            columns = self.sampler._shard.top(self.logits, rows, held)
            x, raw = self._values(rows, columns)
            out["x"][:, :held], out["raw"][:, :held] = x, raw
            out["id"][:, :held] = columns + self.sampler.first
        return out

    def _values(self, rows: Array, columns: Array) -> tuple[Array, Array]:
        """Processed and untouched logits of columns [R, K]."""
        raw = pick(self.logits.raw, rows, columns)
        if self.logits.changed is None or self.logits.where is None:
            return raw, raw
        x = raw.copy()
        (hit,) = np.nonzero(self.logits.where[rows] >= 0)
        if len(hit):
            x[hit] = pick(self.logits.changed, self.logits.where[rows[hit]], columns[hit])
        return x, raw

    def _raw_parts(self, main: Array) -> list[Array]:
        """[S] of RAW and [S, top] of CANDIDATE, about the untouched logits of the rows that want log-probabilities."""
        sampler, scored = self.sampler, self.scored
        head, tops = sampler._scorer.summary(self.logits.raw, scored, int(self.state["logprobs"].max()))
        own = main["best_id"][scored] - sampler.first
        (held,) = np.nonzero(own >= 0)
        if len(held):
            head["best"][held] = self._values(scored[held], own[held, None])[1][:, 0]
        return [head, tops]

    # ---- after the gather ----

    def _filter(self, rows: Array, k: int, lists: Array, bad: Array) -> None:
        """Settles the filtered rows, whose candidates are lists [tp, R, K]."""
        fine = ~bad[rows]
        rows, lists = rows[fine], lists[:, fine]
        walkers = []
        while len(rows):
            filters = self._filters(rows)
            merged, safe, complete = rule.merge(lists)
            kept, certain = rule.prefix(merged["x"], self.peak[rows], self.mass[rows], filters, safe, complete)
            self._draw(rows[certain], merged[certain], kept[certain])
            # Without top_k, or without top_p, an id can be judged alone; with both, the k-th must be seen.
            both = (filters.top_k > 0) & (filters.top_p < 1.0)
            walkers.append(rows[~certain & ~both])
            rows = rows[~certain & both]
            k *= 2
            if len(rows):
                (lists,) = self.sampler._together([self._candidates(rows, k)])
        if walkers:
            self._walk(np.concatenate(walkers))

    def _filters(self, rows: Array) -> rule.Filters:
        state = self.state[rows]
        return rule.Filters(self.rows["inv_temperature"][rows], state["top_k"], state["top_p"], state["log_min_p"])

    def _draw(self, rows: Array, merged: Array, kept: Array) -> None:
        """The best of each row's first `kept` merged candidates, noise added."""
        if len(rows) == 0:
            return
        merged = merged[:, : kept.max()]
        ids = merged["id"].astype(np.int64)
        noise = self.sampler._shard.gumbel(self.rows[rows], ids)
        score = merged["x"].astype(np.float64) * self.rows["inv_temperature"][rows][:, None] + noise
        score[np.arange(merged.shape[1])[None] >= kept[:, None]] = -np.inf
        score[ids < 0] = -np.inf
        self.ids[rows], at = rule.winner(score.T, ids.T)
        self.raw[rows] = merged["raw"][np.arange(len(rows)), at]

    def _walk(self, rows: Array) -> None:
        """Settles rows whose kept set is too large to send. The kept set is a prefix: if the best of all ids (noise
        added) is in it, that is the drawn one; if not, the drawn one is the best of those that come before it, and so
        on. Each round asks the shards about the ids before a limit; it ends at the first id at the latest."""
        limit: Array = np.full(len(rows), -np.inf, np.float32)
        limit_id: Array = np.full(len(rows), np.iinfo(np.int32).max)
        best_id: Array = np.full(len(rows), NO_ID, np.int64)
        raw: Array = np.zeros(len(rows))
        first = True
        while len(rows):
            (found,) = self.sampler._together([self._before(rows, limit, limit_id)])
            if first:
                inside = np.zeros(len(rows), bool)
            else:
                inside = rule.kept_there(
                    limit,
                    found["count"].sum(0),
                    found["mass"].sum(0),
                    self.peak[rows],
                    self.mass[rows],
                    self._filters(rows),
                )
            self.ids[rows[inside]], self.raw[rows[inside]] = best_id[inside], raw[inside]
            best_id, rank = rule.winner(found["best"], found["best_id"])
            held = rank, np.arange(len(rows))
            limit, limit_id, raw = found["x"][held], best_id, found["raw"][held]
            go_on = ~inside
            rows, limit, limit_id = rows[go_on], limit[go_on], limit_id[go_on]
            best_id, raw = best_id[go_on], raw[go_on]
            first = False

    def _before(self, rows: Array, limit: Array, limit_id: Array) -> Array:
        """[R] of WALK, about this shard's ids that come before (limit, limit_id)."""
        sampler = self.sampler
        out = np.zeros(len(rows), WALK)
        out["best"], out["best_id"] = -np.inf, NO_ID
        if sampler.columns == 0:
            return out
        work = self.rows[rows]
        work["flags"] = NOISE | MASS | LIMIT
        work["limit"], work["limit_id"], work["reference"] = limit, limit_id, self.peak[rows]
        sampler._shard.scan(self.logits, rows, work)
        for name in ("best", "best_id", "mass", "count"):
            out[name] = work[name]
        (held,) = np.nonzero(work["best_id"] >= 0)
        if len(held):
            columns = work["best_id"][held].astype(np.int64)[:, None] - sampler.first
            x, raw = self._values(rows[held], columns)
            out["x"][held], out["raw"][held] = x[:, 0], raw[:, 0]
        return out

    def _report(self, logprobs: list[TokenLogprob | None], head: Array, tops: Array, bad: Array) -> None:
        entries = self.sampler._scorer.report(
            head, tops, self.ids[self.scored], self.raw[self.scored], self.state["logprobs"][self.scored]
        )
        for row, entry in zip(self.scored.tolist(), entries, strict=True):
            logprobs[row] = None if bad[row] else entry
