"""What is decided from gathered numbers, without ranks or noise: prefixes of merged candidates, and single ids."""

from __future__ import annotations

import numpy as np
import pytest
from laddertron.engine.sampling import decide as rule
from sampling_ranks import Array

V = 60


def lists(x: Array, tp: int, k: int) -> Array:
    """What tp ranks would send about one row [V]: their k largest, equals by rising id."""
    out: Array = np.zeros((tp, 1, k), rule.CANDIDATE)
    out["x"], out["id"] = -np.inf, rule.NO_ID
    each = -(-len(x) // tp)
    for rank in range(tp):
        ids = np.arange(rank * each, min((rank + 1) * each, len(x)))
        best = ids[np.lexsort((ids, -x[ids]))][:k]
        out["x"][rank, 0, : len(best)], out["id"][rank, 0, : len(best)] = x[best], best
    return out


def filters(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> rule.Filters:
    log = np.log(min_p) if min_p else -np.inf
    return rule.Filters(np.array([1.0]), np.array([top_k]), np.array([top_p]), np.array([log]))


def true_order(x: Array) -> Array:
    order: Array = np.lexsort((np.arange(len(x)), -x))
    return order


def true_kept(x: Array, f: rule.Filters) -> int:
    """How many ids the definition keeps, over the whole row."""
    weight = np.exp(x[true_order(x)].astype(np.float64) - x.max())
    weight = weight[: int(f.top_k[0]) or None]
    before = np.cumsum(weight) - weight
    keep = (before < f.top_p[0] * weight.sum()) | (f.top_p[0] >= 1)
    keep &= np.log(weight) >= f.log_min_p[0]
    keep[0] = True
    assert (np.diff(keep.astype(int)) <= 0).all()
    return int(keep.sum())


def random_row(rng: np.random.Generator) -> Array:
    x = (rng.standard_normal(V) * rng.choice([0.1, 1.0, 4.0])).astype(np.float32)
    row: Array = x.round() if rng.random() < 0.5 else x
    return row


def random_filters(rng: np.random.Generator) -> rule.Filters:
    return filters(
        int(rng.choice([0, 0, 1, 3, 10, 25, V - 1])),
        float(rng.choice([1.0, 0.05, 0.5, 0.9, 0.99])),
        float(rng.choice([0.0, 0.0, 0.01, 0.3, 1.0])),
    )


def test_certain_prefixes_are_right_and_sure_ones_are_certain(run_seed: int) -> None:
    """3,000 random rows (half of them full of equals), tp 1 to 8, 1 to 60 candidates: the part called safe is the
    vocabulary's true beginning, what is called certain is what the definition keeps, and it is certain where all ids
    were sent or the candidates show one id more than is kept. Every tenth row is sent whole, and every tenth is flat,
    with one candidate of the many that are kept."""
    rng = np.random.default_rng(run_seed)
    certains = 0
    for number in range(3_000):
        x, f = random_row(rng), random_filters(rng)
        tp, k = int(rng.choice([1, 2, 4, 8])), int(rng.choice([1, 2, 5, 8, 16, V]))
        if number % 10 == 0:
            k = V
        elif number % 10 == 1:
            x, f, k = np.zeros(V, np.float32), filters(top_p=0.5), 1
        merged, safe, complete = rule.merge(lists(x, tp, k))
        order = true_order(x)
        sure = V if complete[0] else int(safe[0])
        assert merged["id"][0, :sure].tolist() == order[:sure].tolist()
        mass = np.exp(x.astype(np.float64) - x.max()).sum(keepdims=True)
        peak = np.array([x.max()], np.float64)
        kept, certain = rule.prefix(merged["x"], peak, mass, f, safe, complete)
        truth = true_kept(x, f)
        if certain[0]:
            assert min(int(kept[0]), V) == truth
            certains += 1
        either = f.top_k[0] == 0 or f.top_p[0] >= 1.0 or f.top_k[0] <= safe[0]
        assert certain[0] or not (complete[0] or (either and truth < safe[0]))
    assert 300 <= certains <= 2_700


def test_a_single_id_is_judged_by_what_comes_before_it(run_seed: int) -> None:
    """Every id of 300 random rows: kept by its count, its mass before and its logit exactly when it is in the kept
    prefix (rows where top_p's sum lies within 1e-9 of p are left out)."""
    rng = np.random.default_rng(run_seed)
    for _ in range(300):
        x, f = random_row(rng), random_filters(rng)
        if f.top_k[0] and f.top_p[0] < 1.0:
            continue
        order = true_order(x)
        weight = np.exp(x[order].astype(np.float64) - x.max())
        before = np.cumsum(weight) - weight
        if np.abs(before / weight.sum() - f.top_p[0]).min() < 1e-9:
            continue
        truth = true_kept(x, f)
        repeated = rule.Filters(*(np.repeat(a, V) for a in (f.inv_temperature, f.top_k, f.top_p, f.log_min_p)))
        inside = rule.passes_filters(
            x[order], np.arange(V), before, np.full(V, float(x.max())), np.full(V, weight.sum()), repeated
        )
        assert inside.tolist() == [True] * truth + [False] * (V - truth)


def test_winner_is_the_lowest_id_of_the_best() -> None:
    score = np.array([[1.0, 5.0, -np.inf], [1.0, 2.0, 3.0], [1.0, 5.0, 3.0]])
    ids = np.array([[7, 9, -1], [3, 0, 50], [4, 2, 40]])
    best, rank = rule.winner(score, ids)
    assert best.tolist() == [3, 2, 40]
    assert rank.tolist() == [1, 2, 2]


@pytest.mark.parametrize(
    ("digests", "found"),
    [
        ([7, 7, 7], None),
        ([7, 8, 7], ((1,), True)),
        ([1, 7, 7, 2, 7], ((0, 3), True)),
        ([7, 8], ((0, 1), False)),
        ([7, 7, 8, 8], ((0, 1, 2, 3), False)),
    ],
)
def test_who_disagrees(digests: list[int], found: tuple[tuple[int, ...], bool] | None) -> None:
    assert rule.disagreement(np.array(digests, np.uint64)) == found
