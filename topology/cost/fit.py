"""Fits Costs to measured (strategy, bytes, seconds): robust, non-negative least squares on relative errors, up to three
regimes of size, and prices per strategy where one set does not explain all. Pure; numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from ..link_cost import LinkCost
from .cost import Backend, Costs, Regime, Shape, Strategy, price, terms

Array = NDArray[np.float64]

TOLERANCE = 0.25
"""The relative error that a point may have before the model is refined."""

_FASTEST = 1e15  # bytes/s of a link whose bytes were too cheap to see


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: the median of many all-reduces of `nbytes` on `shape`."""

    strategy: Strategy
    nbytes: int
    seconds: float
    shape: Shape

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and self.nbytes > 0):
            raise ValueError(f"{self.strategy}: {self.nbytes} bytes in {self.seconds} s: both must be more than 0")


@dataclass(frozen=True, slots=True)
class Residual:
    point: Point
    predicted_s: float

    @property
    def relative(self) -> float:
        return self.predicted_s / self.point.seconds - 1.0


@dataclass(frozen=True, slots=True)
class Fit:
    """`costs`, and how well they say again what was measured."""

    costs: Costs
    residuals: tuple[Residual, ...]

    @property
    def worst(self) -> float:
        return max(abs(r.relative) for r in self.residuals)

    @property
    def outliers(self) -> tuple[Residual, ...]:
        """Points that the model misses by more than TOLERANCE, worst first."""
        missed = [r for r in self.residuals if abs(r.relative) > TOLERANCE]
        return tuple(sorted(missed, key=lambda r: -abs(r.relative)))

    def report(self) -> str:
        """One line of summary and one for each point outside the tolerance."""
        relative = sorted(abs(r.relative) for r in self.residuals)
        head = (
            f"{len(relative)} points, median error {relative[len(relative) // 2]:.0%}, worst {relative[-1]:.0%}, "
            f"{len(self.outliers)} beyond {TOLERANCE:.0%}"
        )
        lines = [
            f"  {r.point.strategy} of {r.point.nbytes} bytes: measured {r.point.seconds * 1e6:.1f} us, "
            f"predicted {r.predicted_s * 1e6:.1f} us ({r.relative:+.0%})"
            for r in self.outliers
        ]
        return "\n".join([head, *lines])


def fit(points: Sequence[Point], backend: Backend) -> Fit:
    """Costs that explain the points. Raises ValueError with fewer than two points."""
    if len(points) < 2:
        raise ValueError(f"{len(points)} measurements: a fit needs at least two sizes")
    shared = _regimes(points, backend)
    single = _judge(Costs(backend, shared), points)
    if single.outliers:
        own = {}
        for name in dict.fromkeys(p.strategy for p in points):
            mine = [p for p in points if p.strategy == name]
            if len({p.nbytes for p in mine}) >= 2:
                own[str(name)] = _regimes(mine, backend)
        refined = _judge(Costs(backend, shared, own), points)
        if refined.worst < single.worst:
            return refined
    return single


def _judge(costs: Costs, points: Sequence[Point]) -> Fit:
    return Fit(costs, tuple(Residual(p, _price(costs.of(p.strategy), costs.backend, p)) for p in points))


def _price(regimes: Sequence[Regime], backend: Backend, point: Point) -> float:
    t = terms(backend, point.shape, point.strategy, point.nbytes)
    holding = (r for r in regimes if r.holds(point.nbytes))
    return min((p for r in holding if (p := price(r, t)) is not None), default=float("inf"))


def _regimes(points: Sequence[Point], backend: Backend) -> tuple[Regime, ...]:
    """One regime; or, while that leaves points outside the tolerance, two or three, parted at the sizes that leave the
    smallest worst error: libraries change their protocol at a size, and time may jump there."""
    sizes = sorted({p.nbytes for p in points})
    solved: dict[tuple[int, int], Regime] = {}

    def part(first: int, last: int) -> Regime:
        if (first, last) not in solved:
            among = set(sizes[first:last])
            above = 0 if first == 0 else _between(sizes, first)
            up_to = None if last == len(sizes) else _between(sizes, last)
            regime = _solve([p for p in points if p.nbytes in among], backend)
            solved[first, last] = replace(regime, above_bytes=above, up_to_bytes=up_to)
        return solved[first, last]

    best: tuple[Regime, ...] = (part(0, len(sizes)),)
    error = _error(best, points, backend)
    for cuts in (1, 2):
        if error <= TOLERANCE:
            break
        for inner in combinations(range(2, len(sizes) - 1), cuts):
            bounds = (0, *inner, len(sizes))
            if min(b - a for a, b in pairwise(bounds)) < 2:  # a line needs two sizes
                continue
            regimes = tuple(part(a, b) for a, b in pairwise(bounds))
            if (worse := _error(regimes, points, backend)) < error:
                best, error = regimes, worse
    return best


def _between(sizes: Sequence[int], index: int) -> int:
    """The border below sizes[index]: the geometric mean with the size before."""
    return int((sizes[index - 1] * sizes[index]) ** 0.5)


def _error(regimes: Sequence[Regime], points: Sequence[Point], backend: Backend) -> float:
    return max(abs(_price(regimes, backend, p) / p.seconds - 1.0) for p in points)


def _solve(points: Sequence[Point], backend: Backend) -> Regime:
    """One regime by iteratively reweighted non-negative least squares: a row per point, scaled to its seconds, so that
    errors are relative; a point that is far out pulls with the strength of one that is TOLERANCE / 2 out."""
    rows = []
    for p in points:
        t = terms(backend, p.shape, p.strategy, p.nbytes)
        rows.append([t.calls, t.intra_hops, t.intra_bytes, t.inter_hops, t.inter_bytes])
    matrix = np.asarray(rows, dtype=np.float64) / np.asarray([[p.seconds] for p in points])
    weights = np.ones(len(points))
    x = np.zeros(5)
    for _ in range(12):
        x = _nnls(matrix * weights[:, None], weights)
        misses = np.abs(matrix @ x - 1.0)
        weights = np.sqrt(np.minimum(1.0, (TOLERANCE / 2) / np.maximum(misses, 1e-12)))
    used = matrix.any(axis=0)
    links = [
        LinkCost(float(x[hop]), min(_FASTEST, 1.0 / float(x[hop + 1])) if x[hop + 1] > 0 else _FASTEST)
        if used[hop] or used[hop + 1]
        else None
        for hop in (1, 3)
    ]
    return Regime(float(x[0]), links[0], links[1])


def _nnls(matrix: Array, target: Array) -> Array:
    """x >= 0 that minimises |matrix x - target| (Lawson and Hanson's active sets)."""
    norms = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(norms > 0, norms, 1.0)
    count = matrix.shape[1]
    x, passive = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        gradient = scaled.T @ (target - scaled @ x)
        gradient[passive | (norms == 0)] = -np.inf
        entering = int(np.argmax(gradient))
        if gradient[entering] <= 1e-10:
            break
        passive[entering] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(scaled[:, passive], target, rcond=None)[0]
            negative = passive & (trial <= 0)
            if not negative.any():
                x = trial
                break
            step = float(np.min(x[negative] / np.maximum(x[negative] - trial[negative], 1e-300)))
            x = x + step * (trial - x)
            passive &= x > 1e-14
            x[~passive] = 0.0
            if not passive.any():
                break
    solution: Array = x / np.where(norms > 0, norms, 1.0)
    return solution
