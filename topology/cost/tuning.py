"""The tuning file of preflight, by which the engine chooses a strategy per message size. A file of another fabric is
refused with the differences; `chooser` then falls back to untuned prices with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .. import json_codec
from ..hardware.fabric import Fabric, differences
from ..json_codec import ReadError, layered, unbuild, write_file
from .cost import Backend, Costs, Shape, Strategy, candidates, choose, possible, untuned
from .fit import Fit, Point
from .prices import reference

KIND, VERSION = "laddertron.tuning", 1

_UNTUNED = (
    "collectives go by untuned prices: measure this fabric with `laddertron preflight CONFIG --save FILE` and name the "
    "file as parallel.tuning_file"
)
_MARGIN = 0.03  # a strategy takes over from the one chosen for the next smaller size only if it is this much faster


class TuningError(ValueError):
    """The file is for another fabric, or none; the message names what differs."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`strategy` for messages of up to `up_to_bytes`; None: for all larger ones."""

    up_to_bytes: int | None
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class Measured:
    strategy: Strategy
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """Measured `points` on `shape`, for the fabric's digest and node traits, with library `versions`."""

    backend: Backend
    fabric: str
    traits: tuple[dict[str, str], ...]
    versions: dict[str, str]
    shape: Shape
    choices: tuple[Choice, ...]
    costs: Costs
    points: tuple[Measured, ...] = ()

    def __post_init__(self) -> None:
        bounds = [c.up_to_bytes for c in self.choices]
        sizes = [b for b in bounds[:-1] if b is not None]
        if not bounds or bounds[-1] is not None or None in bounds[:-1] or sizes != sorted(set(sizes)):
            raise ValueError(f"choices: sizes must rise and the last be null, got {bounds}")

    def save(self, path: Path) -> None:
        write_file(path, layered({"kind": KIND, "version": VERSION, **unbuild(self)}) + "\n")


def load(path: Path) -> Tuning:
    """The tuning in the file at `path`. Raises as json_codec.load."""
    return json_codec.load(Tuning, path, KIND, VERSION)


def make(fabric: Fabric, shape: Shape, fitted: Fit, versions: Mapping[str, str]) -> Tuning:
    """A sweep over `shape` as a Tuning: measured choices, prices beyond. Raises ValueError without a point."""
    points = [r.point for r in fitted.residuals if r.point.shape == shape and r.point.strategy != "p2p"]
    if not points:
        raise ValueError(f"none of {len(fitted.residuals)} points is an all-reduce over {shape}")
    return Tuning(
        backend=fitted.costs.backend,
        fabric=fabric.digest,
        traits=tuple(n.traits() for n in fabric.nodes),
        versions=dict(versions),
        shape=shape,
        choices=choices(points),
        costs=fitted.costs,
        points=tuple(Measured(p.strategy, p.nbytes, p.seconds) for p in points),
    )


def choices(points: Sequence[Point]) -> tuple[Choice, ...]:
    """The fastest measured strategy of each size; the border between two sizes is their geometric mean."""
    by_size: dict[int, dict[Strategy, float]] = {}
    for p in points:
        row = by_size.setdefault(p.nbytes, {})
        row[p.strategy] = min(p.seconds, row.get(p.strategy, p.seconds))
    borders: list[Choice] = []
    last: tuple[int, Strategy] | None = None
    for size, row in sorted(by_size.items()):
        best = min(row, key=lambda s: row[s])
        if last is not None and last[1] in row and row[best] > row[last[1]] * (1 - _MARGIN):
            best = last[1]
        if last is not None and best != last[1]:
            borders.append(Choice(int((last[0] * size) ** 0.5), last[1]))
        last = (size, best)
    if last is None:
        raise ValueError("no points: nothing was measured")
    return (*borders, Choice(None, last[1]))


def refuse_other_fabric(tuning: Tuning, fabric: Fabric, shape: Shape, backend: Backend) -> None:
    """Raises TuningError naming what differs between what the file was made for and this."""
    problems = [] if tuning.fabric == fabric.digest else differences(tuning.traits, fabric)
    if tuning.fabric != fabric.digest and not problems:
        problems.append(f"digest: {tuning.fabric} there, {fabric.digest} here")
    if tuning.backend != backend:
        problems.append(f"backend: {tuning.backend} there, {backend} here")
    if (tuning.shape.intra, tuning.shape.inter) != (shape.intra, shape.inter):
        problems.append(
            f"links: {tuning.shape.intra} and {tuning.shape.inter} there, {shape.intra} and {shape.inter} here"
        )
    if problems:
        raise TuningError(f"made for another fabric ({'; '.join(problems)}): run `laddertron preflight` here")


@dataclass(frozen=True, slots=True)
class Chooser:
    """The strategy for any size. `source`: measured on this layout, fitted on this fabric, or untuned. `measured`: the
    strategies of the tuning file."""

    shape: Shape
    costs: Costs
    choices: tuple[Choice, ...]
    source: Literal["measured", "fitted", "untuned"]
    measured: frozenset[Strategy] = frozenset()

    def strategy(self, nbytes: int) -> Strategy:
        """For messages of `nbytes`. A measured choice that the layout lacks is replaced by prices."""
        if self.source == "untuned":
            allowed = untuned(self.costs.backend, self.shape, nbytes)
        else:  # NCCL's prices, once measured, say nothing of one_shot
            listed = candidates(self.costs.backend, self.shape, nbytes)
            allowed = tuple(s for s in listed if s != "one_shot" or s in self.measured)
        for choice in self.choices:
            if choice.up_to_bytes is None or nbytes <= choice.up_to_bytes:
                if choice.strategy in allowed and possible(choice.strategy, self.shape):
                    return choice.strategy
                break
        return choose(self.costs, self.shape, nbytes, allowed)[0]


def chooser(
    path: Path | None, fabric: Fabric, shape: Shape, backend: Backend, versions: Mapping[str, str] | None = None
) -> tuple[Chooser, tuple[str, ...]]:
    """From the tuning file, or from untuned prices where there is none that fits; never raises for what the file is
    or is not: warnings say why choices are worse than they could be, and the fix. `versions` are those of the libraries
    here: differing ones are warned of, and the file used."""
    fallback = Chooser(shape, reference(backend, shape), (), "untuned")
    if path is None:
        return fallback, (_UNTUNED,)
    try:
        tuning = load(path)
        refuse_other_fabric(tuning, fabric, shape, backend)
    except (ReadError, OSError) as error:
        return fallback, (f"tuning file not used: {error}",)
    except TuningError as error:
        return fallback, (f"tuning file {path} not used: {error}",)
    warnings, names = [], frozenset(m.strategy for m in tuning.points)
    for name, version in (versions or {}).items():
        was = tuning.versions.get(name)
        if was != version:
            warnings.append(f"tuning file {path}: measured with {name} {was}, here is {version}")
    if replace(tuning.shape, intra_bytes_per_s=None, inter_bytes_per_s=None) == replace(
        shape, intra_bytes_per_s=None, inter_bytes_per_s=None
    ):
        return Chooser(shape, tuning.costs, tuning.choices, "measured", names), tuple(warnings)
    try:
        choose(tuning.costs, shape, 1 << 15, candidates(backend, shape, 1 << 15))
    except ValueError:
        why = f"tuning file {path} not used: it has no prices for {shape}: run `laddertron preflight` here"
        return fallback, (why,)
    why = f"tuning file {path}: measured on {tuning.shape}, prices carried over to {shape}"
    # A library's own strategy is kept where no other was measured.
    tuned = tuning.choices if names <= {"flat"} else ()
    return Chooser(shape, tuning.costs, tuned, "fitted", names), (*warnings, why)
