"""logits -> ids: the same function on every rank, over one small all-gather a step.

Every rank brings a few numbers about its vocabulary shard (engine/shard.py), and decides alone what all decide alike
(engine/sampling_rule.py). Order of a row's edits: penalties, logit_bias, min_tokens, grammar mask, temperature, top_k,
top_p, min_p. Log-probabilities are those of the untouched logits at temperature 1. What crosses the network is
O(rows x candidates); rows whose filters keep more than the candidates show are settled by further small gathers
(engine/sampling_step.py). Knows the runner's slots, nothing of schedules, text or transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import sampling_rule as rule
from .batch import NewSequence
from .logprobs import Scorer
from .request import TokenLogprob
from .sampling_rule import Array
from .sampling_slots import Grammars, SlotTable
from .sampling_step import Sampled, Step, Tools
from .shard import make_shard

__all__ = ["DesyncError", "Gather", "Grammars", "Sampled", "Sampler"]

Gather = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]
"""payload [n] of this rank -> [tp, n] of all ranks, in rank order, the same on every rank."""


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
        self.columns = max(0, min(shard.stop, vocab_size) - shard.start)
        self.step = 0
        self._gather = gather
        self._slots = SlotTable(vocab_size, shard.start, self.columns, max_slots, grammars)
        work = make_shard(shard.start, device)
        scorer = Scorer(vocab_size, shard.start, self.columns, work, self._exchange)
        self._tools = Tools(work, scorer, self._slots, self._first_exchange, self._exchange)
        self._digest = np.zeros(8, np.uint8)

    def admit(self, sequence: NewSequence) -> None:
        """Fills a slot; the noise goes on at output position len(tokens) - prompt_len. Raises ValueError if the slot is
        taken, or it wants a grammar and there are none."""
        self._slots.admit(sequence)

    def release(self, slot: int) -> None:
        """Empties a slot (an empty one stays empty)."""
        self._slots.release(slot)

    def sample(self, logits_BV: Tensor, slots: Sequence[int]) -> Sampled:
        """Draws one id for each row of logits [B, len(shard)] (model dtype or fp32, rows in the order of `slots`) and
        appends it to the slot's state. Raises DesyncError if the ranks' last ids differ."""
        if logits_BV.shape[0] != len(slots):
            raise ValueError(f"{logits_BV.shape[0]} rows of logits for {len(slots)} slots: one row a slot")
        plan = self._slots.plan(slots)
        sampled = Step(self._tools, plan, logits_BV[:, : self.columns]).run()
        self._slots.append(plan, sampled.ids, sampled.nonfinite)
        drawn = b"".join((self.step.to_bytes(8, "little"), plan.at.tobytes(), sampled.ids.tobytes()))
        self._digest = np.frombuffer(blake2b(drawn, digest_size=8).digest(), np.uint8)
        self.step += 1
        return sampled

    def score(self, logits_TV: Tensor, targets: npt.ArrayLike, top: int) -> list[TokenLogprob]:
        """Log-probabilities of targets [T] under logits [T, len(shard)], and of the `top` likeliest ids of each row;
        NaN for a row of non-finite logits. Memory is bounded whatever T is. Raises ValueError for a target outside the
        vocabulary."""
        ids = targets.cpu().numpy() if isinstance(targets, Tensor) else targets
        return self._tools.scorer.score(logits_TV[:, : self.columns], np.asarray(ids, np.int64), top)

    def flush(self) -> None:
        """The empty gather after the last step: proves that its ids agree. Raises DesyncError."""
        self._first_exchange([])

    def _first_exchange(self, parts: list[Array]) -> list[Array]:
        """A step's own gather, headed by the digest of the last ids."""
        digests, *rest = self._exchange([self._digest, *parts])
        found = rule.disagreement(digests.view("<u8")[:, 0])
        if found is not None:
            raise DesyncError(*found, step=self.step - 1, tp=len(digests))
        return rest

    def _exchange(self, parts: list[Array]) -> list[Array]:
        """One gather of several arrays: each part [...] comes back as [tp, ...]."""
        flat = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
        everyone = self._gather(np.concatenate(flat))
        out, at = [], 0
        for part, piece in zip(parts, flat, strict=True):
            own = np.ascontiguousarray(everyone[:, at : at + len(piece)])
            out.append(own.view(part.dtype).reshape(len(everyone), *part.shape))
            at += len(piece)
        return out
