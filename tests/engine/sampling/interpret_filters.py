"""What test_filters.py starts with TRITON_INTERPRET=1: the search of filters on the CPU against the host's rule, from
memory that holds NaN. Prints one JSON list, of each case its name and the rows whose kept ids differ. Not a test
module."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from laddertron.engine.sampling import decide as rule
from sampling_ranks import Array
from torch import Tensor

Filtered = Callable[[Tensor, Tensor, int, int, bool, bool], Tensor]
ROWS = 7


def rows(dice: np.random.Generator, vocab: int) -> Array:
    """Usual logits, ties, one value throughout, few ids left, one left, zeros of both signs, tiny differences."""
    x = (dice.standard_normal((ROWS, vocab)) * dice.choice([0.3, 2.0, 8.0])).astype(np.float32)
    x[1] = x[1].round()
    x[2] = dice.choice([-1.5, 0.0, 700.0])
    x[3, dice.permutation(vocab)[: vocab - vocab // 5]] = -np.inf
    x[4] = -np.inf
    x[4, dice.integers(vocab)] = -3.0
    x[5] = np.where(dice.random(vocab) < 0.5, 0.0, -0.0)
    x[6] = 5.0 + dice.integers(0, 3, vocab) * np.float32(4.8e-7)
    found: Array = x
    return found


def limits(dice: np.random.Generator, vocab: int, top_k: bool, top_p: bool) -> rule.Filters:
    def some(values: list[float]) -> Array:
        found: Array = dice.choice(values, ROWS)
        return found

    k = np.minimum(some([0, 1, 3, vocab // 2, vocab - 1]), vocab - 1).astype(np.int64)
    return rule.Filters(
        1.0 / some([0.2, 1.0, 1.7]),
        k if top_k else np.zeros(ROWS, np.int64),
        some([1.0, 0.02, 0.5, 0.9, 0.999]) if top_p else np.ones(ROWS),
        some([-np.inf, -np.inf, math.log(0.05), 0.0]),
    )


def host_keeps(x: Array, filters: rule.Filters) -> Array:
    """Which ids [R, V] decide.prefix keeps of candidates that are the vocabulary."""
    order = np.stack([np.lexsort((np.arange(x.shape[1]), -row)) for row in x])
    ordered = np.take_along_axis(x, order, 1)
    peak = ordered[:, 0].astype(np.float64)
    mass = np.exp((ordered - peak[:, None]) * filters.inv_temperature[:, None]).cumsum(1)[:, -1]
    all_of_it = np.full(len(x), x.shape[1]), np.ones(len(x), np.bool_)
    count, _ = rule.prefix(ordered, peak, mass, filters, *all_of_it)
    kept: Array = np.zeros(x.shape, np.bool_)
    np.put_along_axis(kept, order, np.arange(x.shape[1])[None] < count[:, None], 1)
    return kept


def differing(filtered: Filtered, seed: int, vocab: int, top_k: bool = True, top_p: bool = True) -> list[int]:
    """Rows of which `filtered`, called for two ranks' halves, does not leave what the host keeps, as it was."""
    dice = np.random.default_rng(seed)
    x, filters = rows(dice, vocab), limits(dice, vocab, top_k, top_p)
    columns = (filters.inv_temperature, filters.top_k.astype(np.float64), filters.top_p, filters.log_min_p)
    given, half = (torch.from_numpy(x), torch.from_numpy(np.stack(columns, 1))), -(-vocab // 2)
    parts = [filtered(*given, first, n, top_k, top_p) for first, n in ((0, half), (half, vocab - half))]
    wanted = np.where(host_keeps(x, filters), x, np.float32(-np.inf))
    got = torch.cat(parts, 1).numpy()
    return np.flatnonzero((got.view(np.int32) != wanted.view(np.int32)).any(1)).tolist()


def broken(filtered: Filtered) -> list[int]:
    """Rows whose fault can no longer be seen: NaN, +inf, nothing at all."""
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    x[0, 39], x[1, 20], x[2] = torch.nan, torch.inf, -torch.inf
    filters = torch.tensor([[1.0, 2.0, 0.5, -1.0]] * 3, dtype=torch.float64)
    peak = filtered(x, filters, 0, 40, True, True).amax(1)
    return (
        torch.nonzero(~torch.stack([peak[0].isnan(), peak[1] == torch.inf, peak[2] == -torch.inf])).flatten().tolist()
    )


def main(seed: int) -> None:
    from laddertron.engine.sampling import filter_triton

    def never_clean(shape: tuple[int, ...], **of: Any) -> Tensor:
        return torch.full(shape, torch.nan, **of)

    own: Any = torch
    own.empty = never_clean
    filter_triton.CHUNK, filter_triton.TILE = 64, 32  # several programs a row, several tiles a program
    found: list[tuple[str, list[int]]] = [("broken", broken(filter_triton.filtered))]
    for vocab, top_k, top_p in ((90, True, True), (64, False, True), (150, True, False), (1, False, False)):
        faults = differing(filter_triton.filtered, seed, vocab, top_k, top_p)
        found.append((f"{vocab} ids, top_k {top_k}, top_p {top_p}", faults))
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
