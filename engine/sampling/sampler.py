"""Samples ids from logits: the same function on every rank, after one small all-gather per step. Every rank contributes
a few numbers about its vocabulary shard (logits_shard.py), and decides by itself from those of all ranks (decide.py).
Order of a row's edits: penalties, logit_bias, min_tokens, grammar mask, temperature, top_k, top_p, min_p. The gather
sends O(rows x candidates); rows whose filters keep more ids than the candidates need further small gathers (step.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...models.transfer import Arriving, download
from ..batch import NewSequence
from ..request import TokenLogprob
from . import decide as rule
from .decide import Array
from .device_sampler import DeviceDraw, Fetch, Gathered, Record, Replay
from .digest import Digests, row_digests
from .grammar import Grammars
from .logits_shard import SharedShard, TorchShard, make_shard
from .logprobs import Scorer
from .penalties import SlotEdits
from .slots import Sampled as Sampled
from .slots import SamplingPlan, SlotTable
from .step import NOTHING_LEFT, Step, StepContext

Gather = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]
"""Gathers this rank's payload [n] into [tp, n], in rank order."""


class DesyncError(RuntimeError):
    """Ranks sampled different ids. `ranks`: those that differ from the majority (all ranks without a majority). `step`:
    the sampling step, counted from 0, whose ids differ."""

    def __init__(
        self, ranks: tuple[int, ...], majority: bool, step: int, tp: int, per_node: int = 0, stage: int | None = None
    ) -> None:
        """per_node: ranks of a node, if nodes chose different experts; 0 if ids differ. stage: the pipeline stage of
        these ranks."""
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        if per_node:
            nodes = sorted({rank // per_node for rank in ranks})
            last = f" to {{}} of {tp}" if per_node > 1 else f" of {tp}"
            named = [f"node {n} (rank {n * per_node}{last.format((n + 1) * per_node - 1)})" for n in nodes]
            chose = "chose other experts or positions for the same rows"
            what = f"{' and '.join(named)} {chose} {'than the others' * majority}".rstrip()
            what = what if stage is None else f"of stage {stage}, {what}"
        elif majority:
            what = f"{who} of {tp} drew other ids than the majority"
        else:
            what = f"{who} disagree with one another about the ids drawn, with no majority"
        super().__init__(f"sampling step {step}: {what}; nothing of this step may be released: restart the job")
        self.ranks, self.step = ranks, step


@dataclass(frozen=True, slots=True)
class OnDevice:
    """How to sample on the device: the gather between devices, and how results are copied to the host."""

    gather: Gathered
    fetch: Fetch = download


@dataclass(frozen=True, slots=True)
class _Draw:
    """The ids of sampling step `step`, in flight to the host."""

    step: int
    plan: SamplingPlan
    edits: list[SlotEdits]
    """The edits of its rows: their slots may be reused before the ids arrive."""
    fed: Array | None
    read: Arriving


class Sampler:
    """One rank's sampler. `shard`: global ids of this rank's columns; ids >= vocab_size are padding and are ignored.
    Every rank must make the same calls with the same sequences and slots."""

    def __init__(
        self,
        vocab_size: int,
        shard: range,
        max_slots: int,
        gather: Gather,
        device: torch.device,
        grammars: Grammars | None = None,
        on_device: OnDevice | None = None,
        shares: int = 0,
    ) -> None:
        """on_device: how `start` samples; None: sampling always runs on the host. shares: divides the shard into so
        many shares that are summed separately, so that results do not depend on the number of ranks; 0: no shares."""
        self.columns = max(0, min(shard.stop, vocab_size) - shard.start)
        self.step, self.grammars = 0, grammars
        self._routed: Callable[[], bytes] = bytes
        self._routing: Tensor | None = None
        self._seen = b""  # result of `_routed` for the last step
        self._per_node = 1
        self.gather = gather
        self.slots = SlotTable(vocab_size, shard.start, self.columns, max_slots, grammars)
        one = shares < 2
        work = make_shard(shard.start, device) if one else SharedShard(shard.start, len(shard), shares, device)
        scorer = Scorer(vocab_size, shard.start, self.columns, work, self.exchange)
        self._tools = StepContext(work, scorer, self.slots, self._first_exchange, self.exchange, shares > 0)
        self._digest = np.zeros(8, np.uint8)
        self._under_way: _Draw | None = None
        self._on_device: DeviceDraw | None = None
        if on_device is not None and isinstance(work, TorchShard):
            self._on_device = DeviceDraw(
                vocab_size, len(shard), max_slots, work, device, on_device.gather, on_device.fetch
            )

    @property
    def latest(self) -> Tensor | None:
        """The id that `start` sampled last for each slot, int64 on the device; None without sampling on the device."""
        return None if self._on_device is None else self._on_device.latest

    def follow(self, routed: Callable[[], bytes], routing: Tensor | None, per_node: int) -> None:
        """Makes each gather also compare the experts that the ranks chose. routed: returns their digest of eight bytes;
        routing: the digest on a GPU, int64 [1]; per_node: ranks of a node."""
        self._routed, self._routing, self._per_node = routed, routing, per_node

    def admit(self, sequence: NewSequence) -> None:
        """Fills a slot; the noise continues at output position len(tokens) - prompt_len. Raises ValueError if the slot
        is in use, or the sequence needs a grammar and grammars are unavailable."""
        self.slots.admit(sequence)

    def release(self, slot: int) -> None:
        """Empties a slot; no effect on an empty one."""
        self.slots.release(slot)

    def sample(self, logits_BV: Tensor, slots: Sequence[int], fed: Array | None = None) -> Sampled:
        """Samples one id for each row of logits [B, len(shard)] (model dtype or fp32, rows in the order of `slots`) and
        appends it to the slot's state. fed [B]: with drafts, the input id of each row. A draft's row counts if the
        previous row counts and sampled the draft's id. Raises DesyncError if the ranks' last ids differ."""
        if logits_BV.shape[0] != len(slots):
            raise ValueError(f"{logits_BV.shape[0]} rows of logits for {len(slots)} slots: one id a row")
        plan = self.slots.sampling_plan(slots)
        if self._on_device is not None:
            self._on_device.forget()
        sampled = Step(self._tools, plan, logits_BV[:, : self.columns], fed).run()
        if fed is not None:
            sampled = replace(sampled, taken=rule.taken(plan.offset, fed, sampled.ids, sampled.nonfinite))
        self.slots.append(plan, sampled)
        self._add_digests(sampled, logits_BV, slots)
        self._seen = self._routed()
        self._digest = _digest(self.step, plan.at, sampled.ids, fed, self._seen)
        self.step += 1
        return sampled

    def drafted(self, slot: int, drafts: list[int]) -> list[int]:
        """The drafts before the first that the slot's grammar refuses."""
        if slot not in self.slots.grammatical or self.grammars is None:
            return drafts
        return drafts[: self.grammars.state(slot).accepts(drafts)]

    def record(self, logits_BV: Tensor, sizes: Sequence[int], record: Record) -> dict[int, Replay]:
        """Calls DeviceDraw.record; {} without sampling on the device."""
        draw = self._on_device
        return {} if draw is None else draw.record(logits_BV[:, : self.columns], sizes, record, self._routing)

    def start(self, logits_BV: Tensor, slots: Sequence[int], recorded: bool = False, fed: Array | None = None) -> bool:
        """Starts `sample` on the device; `finish` returns the result, and `latest` has the ids for the next step,
        unless there are drafts: which ids are the last ones is known after `finish`. recorded: the rows are the first
        rows of the logits that `record` was called with. False, without effect, if a row needs the host (a grammar, bad
        words, a digest of its logits) or this sampler has no device: call `sample` instead."""
        if self._on_device is None or self._under_way is not None:
            return False
        plan = self.slots.sampling_plan(slots)
        if len(plan.masked) or not self.slots.digested.isdisjoint(slots):
            return False
        edits = self.slots.edits_of(plan, plan.edited.tolist(), fed)
        if any(e.bad_words for e in edits):
            return False
        if fed is not None:
            self._on_device.forget()
        logits, position = logits_BV[:, : self.columns], self.slots.position[plan.at] + plan.offset
        read = self._on_device.start_recorded(plan, position, self._digest) if recorded else None
        if read is None:
            read = self._on_device.start(logits, plan, position, self._digest, edits, self._routing)
        if fed is None:
            self.slots.advance(plan)
        self._under_way = _Draw(self.step, plan, edits, fed, read)
        self.step += 1
        return True

    def finish(self) -> Sampled:
        """Waits for the result of `start`. Must be called before the next `start` or `sample`. Raises DesyncError as
        `sample`, RuntimeError without `start`."""
        draw, self._under_way = self._under_way, None
        if draw is None:
            raise RuntimeError("finish without start: no draw is under way")
        plan, gathered = draw.plan, draw.read()
        count, top = len(plan.at), plan.most_logprobs
        ranks = len(gathered) - 2 * count - len(plan.scored) * (1 + 2 * top)
        digests, *routings = gathered[:ranks].reshape(-1, 1 if self._routing is None else 2).T.copy()
        self._agreed(digests.view("<u8"), draw.step)
        for routing in routings:
            self._routed_alike(routing, draw.step)
        drawn, bad, scores = np.split(gathered[ranks:], [count, 2 * count])
        ids = drawn.astype(np.int32)
        self._digest, self._seen = _digest(draw.step, plan.at, ids, draw.fed), b""
        logprobs: list[TokenLogprob | None] = [None] * count
        for row, values in zip(plan.scored.tolist(), scores.view(np.float64).reshape(-1, 1 + 2 * top), strict=True):
            if not bad[row]:
                best = zip(values[1 : 1 + top].astype(int).tolist(), values[1 + top :].tolist(), strict=True)
                logprobs[row] = TokenLogprob(int(ids[row]), float(values[0]), tuple(best)[: plan.logprobs[row]])
        failures = {row: NOTHING_LEFT for row in plan.edited.tolist() if bad[row] == 2}
        sampled = Sampled(ids, logprobs, bad != 0, failures)
        if draw.fed is not None and self._on_device is not None:
            self._on_device.forget()  # its counts include rejected drafts
            sampled = replace(sampled, taken=rule.taken(plan.offset, draw.fed, ids, sampled.nonfinite))
            self.slots.append(plan, sampled)
            return sampled
        for row, edits in zip(plan.edited.tolist(), draw.edits, strict=True):
            edits.append(int(ids[row]))
        return sampled

    def score(self, logits_TV: Tensor, targets: Array, top: int) -> list[TokenLogprob]:
        """Log-probabilities of targets [T] for logits [T, len(shard)], and of the `top` most likely ids of each row;
        NaN for a row of non-finite logits. Memory does not depend on T. Raises ValueError for a target outside the
        vocabulary."""
        return self._tools.scorer.score(logits_TV[:, : self.columns], targets.astype(np.int64), top)

    def _add_digests(self, sampled: Sampled, logits_BV: Tensor, slots: Sequence[int]) -> None:
        digested = [row for row, slot in enumerate(slots) if slot in self.slots.digested]
        if not digested:
            return
        for row, digest in zip(digested, self.digests(logits_BV[digested]).tolist(), strict=True):
            item = sampled.logprobs[row]
            if item is not None:
                sampled.logprobs[row] = item._replace(digest=digest)

    def digests(self, logits_TV: Tensor) -> Digests:
        """Digests of rows of logits over the whole vocabulary, from this rank's [T, len(shard)]; the same on every
        rank. Takes one gather."""
        own = row_digests(logits_TV[:, : self.columns], self.slots.first)
        summed: Digests = self.exchange([own])[0].sum(0)
        return summed

    def flush(self) -> None:
        """Verifies the ids of the last step by an empty gather. Raises DesyncError."""
        self._first_exchange([])

    def _first_exchange(self, parts: list[Array]) -> list[Array]:
        """The first gather of a step, which also contains the digest of the last step."""
        if self._under_way is not None:
            raise RuntimeError("a draw is under way, its digest is not known yet: finish it first")
        digests, *rest = self.exchange([self._digest, *parts])
        self._agreed(digests.view("<u8")[:, 0], self.step)
        return rest

    def _agreed(self, digests: Array, step: int) -> None:
        """digests [tp]: from the gather of sampling step `step`, of the previous step. If they differ, all ranks see it
        and gather once more to find the cause. Raises DesyncError."""
        disagreement = rule.disagreement(digests)
        if disagreement is None:
            return
        if self._seen:
            (routed,) = self.exchange([np.frombuffer(self._seen, "<u8")])
            for number, routing in enumerate(routed.T):
                self._routed_alike(routing, step - 1, number if len(routed.T) > 1 else None)
        raise DesyncError(*disagreement, step=step - 1, tp=len(digests))

    def _routed_alike(self, routed: Array, step: int, stage: int | None = None) -> None:
        """routed [tp]: digests of the experts chosen in a step, in one pipeline stage. Raises DesyncError."""
        if (disagreement := rule.disagreement(routed)) is not None:
            raise DesyncError(*disagreement, step, len(routed), self._per_node, stage)

    def exchange(self, parts: list[Array]) -> list[Array]:
        """Gathers several arrays at once: each part [...] is returned as [tp, ...]."""
        return exchanged(self.gather, parts)


def exchanged(gather: Callable[[Array], Array], parts: list[Array]) -> list[Array]:
    """Gathers several arrays at once from the ranks of `gather`: each part [...] is returned as [ranks, ...]."""
    flat = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
    everyone = gather(np.concatenate(flat))
    out, at = [], 0
    for part, piece in zip(parts, flat, strict=True):
        own = np.ascontiguousarray(everyone[:, at : at + len(piece)])
        out.append(own.view(part.dtype).reshape(len(everyone), *part.shape))
        at += len(piece)
    return out


def _digest(
    step: int, slots: Array, ids: npt.NDArray[np.int32], fed: Array | None = None, routed: bytes = b""
) -> npt.NDArray[np.uint8]:
    """Digest of a step's sampled ids, of its input ids with drafts, and of the chosen experts: ranks where these differ
    did not compute the same rows."""
    behind = b"" if fed is None else fed.tobytes()
    drawn = b"".join((step.to_bytes(8, "little"), slots.tobytes(), ids.tobytes(), behind, routed))
    return np.frombuffer(blake2b(drawn, digest_size=8).digest(), np.uint8)
