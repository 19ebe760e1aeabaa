"""Chooses tokens from the gathered arrays: pure functions, the same on every rank. Every filter keeps a prefix of the
ids in order of falling logit (of equal ones, rising id): top_k the first k; top_p the ids before which the sum of the
(top_k-filtered) probabilities is less than top_p; min_p the ids with at least min_p times the best one's probability.
The sampled id is the kept one with the largest x / T + Gumbel(id). So a prefix of the merged candidates is sufficient,
or the number of ids and the probability before one id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
NO_ID = -1
_SENTINEL = np.int64(2**62)

MAIN = np.dtype([("best", "<f8"), ("peak", "<f8"), ("mass", "<f8"), ("best_id", "<i4"), ("bad", "<i4")])
"""A row's part of the gather: the rank's best score (with noise) and its id, its peak, its mass relative to that
peak."""
CANDIDATE = np.dtype([("x", "<f4"), ("raw", "<f4"), ("id", "<i4")])
"""One of a rank's largest logits: processed, unprocessed, and its global id (NO_ID: the shard has no more)."""
RAW = np.dtype([("peak", "<f8"), ("mass", "<f8"), ("best", "<f4"), ("unused", "<f4")])
"""For log-probabilities: peak and mass of the unprocessed logits, and the unprocessed logit of MAIN's best_id."""
WALK = np.dtype([("best", "<f8"), ("mass", "<f8"), ("count", "<i8"), ("x", "<f4"), ("raw", "<f4"), ("best_id", "<i8")])
"""About the ids before a limit: the best score among them, its id and logits; their number and mass."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of R rows: 1 / T, top_k (0: all), top_p, and log(min_p) (-inf: off)."""

    inv_temperature: Array
    top_k: Array
    top_p: Array
    log_min_p: Array

    def take(self, rows: Array) -> Filters:
        return Filters(self.inv_temperature[rows], self.top_k[rows], self.top_p[rows], self.log_min_p[rows])


def winner(score: Array, ids: Array) -> tuple[Array, Array]:
    """Over axis 0 (ranks): the id of the best score, the lowest of equals, and the rank that has it."""
    top = score == score.max(0)
    best_ids = np.where(top & (ids >= 0), ids.astype(np.int64), _SENTINEL)
    rank = best_ids.argmin(0)
    return best_ids[rank, np.arange(best_ids.shape[1])], rank


def total_mass(peak: Array, mass: Array, scale: Array) -> tuple[Array, Array]:
    """(peak, mass) of the whole vocabulary from each rank's [tp, R]. Masses are sums of exp((x - peak) * scale), added
    in one binary tree, so that a subtree may have been added on a rank before."""
    if len(peak) == 1:
        return peak[0], mass[0]
    odd = len(peak) % 2
    left, right = slice(0, len(peak) - odd, 2), slice(1, None, 2)
    top = np.maximum(peak[left], peak[right])
    with np.errstate(invalid="ignore"):
        both = [np.where(mass[i] > 0.0, mass[i] * np.exp((peak[i] - top) * scale), 0.0) for i in (left, right)]
    rest = slice(len(peak) - odd, None)
    return total_mass(np.concatenate([top, peak[rest]]), np.concatenate([both[0] + both[1], mass[rest]]), scale)


def tree_sum(parts: Array) -> Array:
    """The sum over axis 0 in the tree of `total_mass`."""
    return total_mass(np.zeros_like(parts), parts, np.ones(1))[1]


def merge(lists: Array) -> tuple[Array, Array, Array]:
    """Merges candidates [tp, R, K], each list in falling order, to [R, tp * K] in falling order. Also returns how many
    of them are certainly the first of the vocabulary (up to the end of the first list that its rank truncated), and
    whether they are the whole vocabulary."""
    tp, rows, k = lists.shape
    flat = lists.transpose(1, 0, 2).reshape(rows, tp * k)
    order = np.lexsort((np.where(flat["id"] < 0, _SENTINEL, flat["id"]), -flat["x"]), axis=-1)
    merged = np.take_along_axis(flat, order, 1)
    cut_short = (order % k == k - 1) & (merged["id"] >= 0)
    complete = ~cut_short.any(1)
    safe = np.where(complete, tp * k, cut_short.argmax(1) + 1)
    return merged, safe, complete


def prefix(x: Array, peak: Array, mass: Array, filters: Filters, safe: Array, complete: Array) -> tuple[Array, Array]:
    """How many of the merged candidates x [R, C] each row keeps, and whether that number is certain. mass [R]: of the
    whole vocabulary (not read if top_p is 1, or top_k <= safe)."""
    rows, width = x.shape
    at = np.arange(width)[None]
    with np.errstate(invalid="ignore"):
        z = (x.astype(np.float64) - peak[:, None]) * filters.inv_temperature[:, None]
    weight = np.exp(z)
    upto = np.cumsum(weight, 1)
    before = np.concatenate([np.zeros((rows, 1)), upto], 1)  # the last entry: mass before the first unknown id
    top_k = np.where(filters.top_k > 0, filters.top_k, _SENTINEL)

    by_p = filters.top_p < 1.0
    limit = np.minimum(np.minimum(top_k, safe), width)
    least = np.take_along_axis(before, limit[:, None], 1)[:, 0]
    most = np.where((top_k <= safe) | complete, least, np.maximum(mass, least))
    kept_least = _first(before >= (filters.top_p * least)[:, None], by_p)
    kept_most = _first(before >= (filters.top_p * most)[:, None], by_p)
    kept_min_p = _first((z < filters.log_min_p[:, None]) & (at < safe[:, None]), np.isfinite(filters.log_min_p))

    # The total is known for a row without top_k; with a large top_k only bounds of it are.
    low = np.where(filters.top_k > 0, kept_least, kept_most)
    counts = np.maximum(np.minimum(np.minimum(top_k, kept_min_p), kept_most), 1)
    kept_at_least = np.maximum(np.minimum(np.minimum(top_k, kept_min_p), low), 1)
    certain = (counts == kept_at_least) & (counts <= safe) | complete
    return np.minimum(counts, width), certain


def _first(dropped: Array, applies: Array) -> Array:
    """Index of the first True of each row; far beyond the end if there is none or the filter does not apply."""
    return np.where(applies & dropped.any(1), dropped.argmax(1), _SENTINEL)


def passes_filters(x: Array, count: Array, mass_before: Array, peak: Array, mass: Array, filters: Filters) -> Array:
    """Whether the filters keep an id of logit x [R] after `count` ids with the mass `mass_before`. Exact if top_k or
    top_p is off."""
    z = (x.astype(np.float64) - peak) * filters.inv_temperature
    inside: Array = (filters.top_k == 0) | (count < filters.top_k)
    inside &= (filters.top_p >= 1.0) | (mass_before < filters.top_p * mass)
    inside &= z >= filters.log_min_p
    inside |= count == 0
    return inside


def disagreement(digests: Array) -> tuple[tuple[int, ...], bool] | None:
    """The ranks whose digest differs from the majority's, and whether there is a majority (without one, all ranks);
    None if all digests are equal."""
    if bool((digests == digests[0]).all()):
        return None
    values, counts = np.unique(digests, return_counts=True)
    if (counts == counts.max()).sum() > 1:
        return tuple(range(len(digests))), False
    (minority,) = np.nonzero(digests != values[counts.argmax()])
    return tuple(int(r) for r in minority), True


def taken(offset: Array, fed: Array, ids: Array, bad: Array) -> Array:
    """Which rows [B] belong to their sequence: all with offset 0, and each draft's row that has finite logits and whose
    previous row belongs and sampled this row's input id."""
    agrees = np.ones(len(ids), np.bool_)
    agrees[1:] = (ids[:-1] == fed[1:]) & ~bad[1:]
    wrong = np.cumsum(~agrees & (offset > 0))
    sound: Array = wrong == wrong[np.arange(len(ids)) - offset]
    return sound
