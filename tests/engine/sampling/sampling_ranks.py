"""Tensor-parallel ranks of the sampler as threads of one process, their gather a barrier; and the sampler's oracle:
the same rule by brute force over whole vocabularies, in plain numpy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from laddertron.engine.batch import NewSequence
from laddertron.engine.request import SamplingParams
from laddertron.engine.sampling.grammar import Grammars
from laddertron.engine.sampling.philox import gumbel
from laddertron.engine.sampling.sampler import Gather, Sampler

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]


class Ranks:
    """tp threads. `gathers` are the payload sizes seen; `tamper` may change what one rank brings to a gather."""

    def __init__(self, tp: int, tamper: Callable[[int, int, Bytes], Bytes] | None = None) -> None:
        self.tp, self.tamper = tp, tamper
        self.gathers: list[int] = []
        self._barrier = threading.Barrier(tp, timeout=300)
        self._parts: list[Bytes] = [np.zeros(0, np.uint8)] * tp

    def _gather(self, rank: int) -> Gather:
        def gather(payload: Bytes) -> Bytes:
            number = len(self.gathers)
            self._parts[rank] = payload if self.tamper is None else self.tamper(rank, number, payload.copy())
            self._barrier.wait()
            everyone = np.stack(self._parts)
            if rank == 0:
                self.gathers.append(len(payload))
            self._barrier.wait()
            return everyone

        return gather

    def run(self, task: Callable[[int, Gather], T]) -> list[T]:
        """task(rank, gather) on every rank; raises what the first failing rank raised."""
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}

        def go(rank: int) -> None:
            try:
                results[rank] = task(rank, self._gather(rank))
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=go, args=(rank,)) for rank in range(self.tp)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[min(errors)]
        return [results[rank] for rank in range(self.tp)]


def width(vocab_size: int, tp: int) -> int:
    """Columns of a rank, as models/stages.py pads the vocabulary."""
    return -(-vocab_size // 16) * (16 // tp) if tp in (2, 4, 8, 16) else -(-vocab_size // tp)


def make(
    vocab_size: int,
    tp: int,
    rank: int,
    gather: Gather,
    slots: int,
    grammars: Grammars | None = None,
    shares: int = 0,
) -> Sampler:
    n = width(vocab_size, tp)
    shard = range(rank * n, (rank + 1) * n)
    return Sampler(vocab_size, shard, slots, gather, torch.device("cpu"), grammars, None, shares)


def cut(logits: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """A rank's columns; padding holds a logit that would win if it were looked at."""
    n = width(logits.shape[1], tp)
    return torch.nn.functional.pad(logits, (0, n * tp - logits.shape[1]), value=1e9)[:, rank * n : (rank + 1) * n]


def sequence(
    slot: int, params: SamplingParams, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = (), choice: int = 0
) -> NewSequence:
    return NewSequence(slot, choice, len(prompt), (*prompt, *output), params)


# ---- the oracle ----


def edited(logits: npt.NDArray[np.float32], new: NewSequence, output: Sequence[int]) -> npt.NDArray[np.float32]:
    """One row [V] after penalties, logit_bias, allowed_token_ids, bad words and min_tokens; `output`: all so far."""
    p, x, one = new.params, logits.copy(), np.float32
    counts = np.bincount(np.asarray(output, np.int64), minlength=len(x)).astype(np.float32)
    seen = counts > 0
    seen[list(new.tokens[: new.prompt_len])] = True
    by = one(p.repetition_penalty)
    x[seen] = np.where(x > 0, x / by, x * by)[seen]
    x -= one(p.frequency_penalty) * counts
    x -= one(p.presence_penalty) * (counts > 0)
    for token, bias in dict(p.logit_bias).items():
        x[token] += one(bias)
    if p.allowed_token_ids:
        x[np.setdiff1d(np.arange(len(x)), p.allowed_token_ids)] = -np.inf
    for *before, last in p.bad_word_ids:
        if list(output[len(output) - len(before) :]) == before:
            x[last] = -np.inf
    if len(output) < p.min_tokens:
        x[list(p.stop_token_ids)] = -np.inf
    return x


def kept(x: npt.NDArray[np.float32], p: SamplingParams) -> Array:
    """The ids [<= V] that the filters keep, likeliest first."""
    order = np.lexsort((np.arange(len(x)), -x))
    z = x[order].astype(np.float64) / p.temperature
    weight = np.exp(z - z[0])
    if 0 < p.top_k < len(x):
        order, weight = order[: p.top_k], weight[: p.top_k]
    before = np.cumsum(weight) - weight
    keep = np.ones(len(order), bool)
    if p.top_p < 1.0:
        keep &= before < p.top_p * weight.sum()
    keep &= weight >= p.min_p
    keep[0] = True
    return order[keep]


def noise(p: SamplingParams, position: int, choice: int, ids: Array) -> Array:
    """Gumbel noise [len(ids)]."""
    seed = torch.tensor(p.seed if p.seed < 2**63 else p.seed - 2**64)
    where = torch.from_numpy(np.asarray(ids, np.int64))
    out: Array = gumbel(seed, torch.tensor(position), torch.tensor(choice), where).numpy()
    return out


def draw(logits: npt.NDArray[np.float32], new: NewSequence, output: Sequence[int]) -> tuple[int, float]:
    """The id that the rule draws from one row [V], and how clearly: the smaller of the lead of its (noisy) score and
    the distance of a top_p boundary from p."""
    p = new.params
    x = edited(logits, new, output)
    if p.temperature == 0.0:
        first, second = np.lexsort((np.arange(len(x)), -x))[:2]
        return int(first), float(x[first] - x[second])
    ids = kept(x, p)
    score = x[ids].astype(np.float64) / p.temperature + noise(p, len(output), new.choice, ids)
    ranked = np.sort(score)[::-1]
    lead = float(ranked[0] - ranked[1]) if len(ids) > 1 else 1.0
    if p.top_p < 1.0:
        order = np.lexsort((np.arange(len(x)), -x))[: p.top_k or None]
        weight = np.exp((x[order].astype(np.float64) - x.max()) / p.temperature)
        lead = min(lead, float(np.abs(np.cumsum(weight) / weight.sum() - p.top_p).min()))
    return int(ids[score.argmax()]), lead
