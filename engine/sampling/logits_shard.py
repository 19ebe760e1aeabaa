"""Scans of one rank's shard of the logits: peaks, masses, best ids with noise, candidate lists. Two implementations
with the same results: C for CPUs (engine/sampling/noise.c), torch for any device and builds without a compiler.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...topology.hardware.cuda_stack import triton_missing
from ...topology.transport import native
from ...topology.transport.native import bind
from .decide import NO_ID, total_mass, tree_sum, winner
from .philox import gumbel as torch_gumbel

NOISE, MASS, LIMIT = 1, 2, 4

ROW = np.dtype(
    [
        ("logits", "<u8"),
        ("seed", "<u8"),
        ("inv_temperature", "<f8"),
        ("reference", "<f8"),
        ("position", "<u4"),
        ("choice", "<u4"),
        ("dtype", "<i4"),
        ("flags", "<i4"),
        ("limit", "<f4"),
        ("limit_id", "<i4"),
        ("peak", "<f8"),
        ("mass", "<f8"),
        ("best", "<f8"),
        ("count", "<i8"),
        ("peak_id", "<i4"),
        ("best_id", "<i4"),
        ("bad", "<i4"),
        ("unused", "<i4"),
    ]
)
"""One row of a scan; row_t of engine/sampling/noise.c. Inputs: seed, inv_temperature, position, choice, flags;
`reference` of the mass (NaN: the row's own peak); with LIMIT only ids before (limit, limit_id) in order of falling
logit, rising id. Outputs: peak and its id (the lowest of equals; -1: none), bad (a NaN or +inf); with MASS the sum of
exp((x - reference) / T); with NOISE the best x / T + Gumbel and its id; with LIMIT the number of ids before it."""

Rows = npt.NDArray[Any]
SCAN_LOGITS = 1 << 22
"""Logits for which TorchShard computes noise and masses at once, with some 40 bytes of scratch space each."""
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True, slots=True)
class Logits:
    """The rows of one step. `raw` [B, n]: the model's logits (each row contiguous). `changed` [C, n]: fp32 copies of
    the rows that penalties, biases or masks changed. `where` [B]: the index into `changed`; -1 for an unchanged row."""

    raw: Tensor
    changed: Tensor | None = None
    where: npt.NDArray[np.int64] | None = None

    def take(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """The processed rows, fp32, [len(rows), n]."""
        everything = len(rows) == self.raw.shape[0] and bool((rows == np.arange(len(rows))).all())
        picked = (self.raw if everything else self.raw[torch.from_numpy(rows).to(self.raw.device)]).float()
        if self.changed is not None and self.where is not None:
            source = self.where[rows]
            (hit,) = np.nonzero(source >= 0)
            if len(hit):
                device = self.raw.device
                at = torch.from_numpy(hit).to(device), torch.from_numpy(source[hit]).to(device)
                picked = picked.index_copy(0, at[0], self.changed[at[1]])
        return picked


class LogitsShard(Protocol):
    """A rank's shard. Results do not depend on the implementation: ids and noise are bitwise equal, masses within
    1e-12."""

    def scan(self, logits: Logits, picked: npt.NDArray[np.int64], rows: Rows) -> None:
        """Fills the outputs of `rows` (ROW) for the processed logits of the rows `picked`."""

    def top(self, logits: Logits, picked: npt.NDArray[np.int64], k: int) -> npt.NDArray[np.int64]:
        """Local columns [R, k] of the k largest logits of each picked row, best first, the lowest id of equals first;
        1 <= k <= n."""

    def gumbel(self, rows: Rows, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The noise of global ids [R, C] for the seeds, positions and choices of `rows` [R]."""


class TorchShard:
    """The implementation for any device, with which tests compare the C code. `first`: the global id of column 0."""

    _needs_scratch = NOISE | MASS

    def __init__(self, first: int) -> None:
        self.first = first

    def scan(self, logits: Logits, picked: npt.NDArray[np.int64], rows: Rows) -> None:
        for flags in set(rows["flags"].tolist()):
            same = np.flatnonzero(rows["flags"] == flags)
            step = self.at_once(logits.raw.shape[1], flags) or len(same)
            for start in range(0, len(same), step):
                some = same[start : start + step]
                part = rows[some]
                self._scan(logits.take(picked[some]), part, flags)
                rows[some] = part

    def at_once(self, columns: int, flags: int) -> int | None:
        """The most rows per call of `measure`, limited by scratch space; None: no limit."""
        return max(1, SCAN_LOGITS // max(1, columns)) if flags & self._needs_scratch else None

    def _scan(self, x: Tensor, rows: Rows, flags: int) -> None:
        # One copy to the device for each type and one back: on a GPU copies are the cost of a small scan.
        ints = np.stack([rows[name].astype(np.int64) for name in ("seed", "position", "choice", "limit_id")])
        reals = np.stack([rows[name].astype(np.float64) for name in ("inv_temperature", "reference", "limit")])
        measured = self.measure(x, torch.from_numpy(ints).to(x.device), torch.from_numpy(reals).to(x.device), flags)
        peak, at, best, best_at, mass, count = measured.cpu().numpy()
        rows["peak"], rows["best"], rows["count"] = peak, best, count
        rows["bad"] = ~(peak < np.inf)
        rows["peak_id"] = np.where(peak > -np.inf, at + self.first, -1)
        rows["best_id"] = np.where(best > -np.inf, best_at + self.first, -1)
        rows["mass"] = np.where(rows["peak_id"] >= 0, mass, 0.0)

    def measure(self, x: Tensor, keys: Tensor, reals: Tensor, flags: int) -> Tensor:
        """Scans rows x [R, n], fp32. Returns float64 [6, R] on the same device: peaks and their columns, bests and
        their columns, masses, counts. keys: seeds, positions, choices and limit_ids, int64 [4, R]. reals:
        inv_temperature, reference and limit, float64 [3, R]."""
        limit_id = keys[3, :, None]
        scale, reference, limit = reals[:, :, None]
        ids = torch.arange(self.first, self.first + x.shape[1], device=x.device)[None]
        count = mass = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        if flags & LIMIT:
            before = (x > limit) | ((x == limit) & (ids < limit_id))
            count = before.sum(1).double()
            x = torch.where(before, x, -torch.inf)
        peak, at = x.max(1)
        best, best_at = torch.full_like(mass, -torch.inf), at
        if flags & MASS:
            reference = torch.where(reference.isnan(), peak[:, None].double(), reference)
            mass = ((x.double() - reference) * scale).exp().sum(1)
        if flags & NOISE:
            best, best_at = self._noisiest(x, scale, keys[:3], ids)
        return torch.stack([peak.double(), at.double(), best, best_at.double(), mass, count])

    def _noisiest(self, x: Tensor, scale: Tensor, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The largest x [R, n] * scale [R, 1] + Gumbel of each row, float64, and its column. keys: seeds, positions and
        choices [3, R]; ids [1, n]."""
        seed, position, choice = keys[:, :, None]
        best, at = (x.double() * scale + torch_gumbel(seed, position, choice, ids)).max(1)
        return best, at

    def top(self, logits: Logits, picked: npt.NDArray[np.int64], k: int) -> npt.NDArray[np.int64]:
        columns: npt.NDArray[np.int64] = largest(logits.take(picked), k).cpu().numpy()
        return columns

    def gumbel(self, rows: Rows, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        seed, position, choice = (torch.from_numpy(rows[name].astype(np.int64))[:, None] for name in _KEYS)
        noise: npt.NDArray[np.float64] = torch_gumbel(seed, position, choice, torch.from_numpy(ids)).numpy()
        return noise


_KEYS = ("seed", "position", "choice")


def largest(x: Tensor, k: int) -> Tensor:
    """Columns of the k largest values of each row of x [R, n], fp32, the first of equals first; int64 [R, k]."""
    bits = (x + 0.0).view(torch.int32)  # turns -0 into +0
    # An int64 ordered as (x, -column): no two are equal, so the result of topk is unique.
    ordered = torch.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits).long() << 32
    keys = ordered | (0x7FFFFFFF - torch.arange(x.shape[1], device=x.device))
    return torch.topk(keys, k, dim=1).indices


class TritonShard(TorchShard):
    """The implementation for GPUs: one kernel computes the noise (engine/sampling/noise_triton.py), for which torch
    writes some 40 bytes per logit. Raises ImportError without Triton or its compiler."""

    _needs_scratch = MASS

    def __init__(self, first: int) -> None:
        super().__init__(first)
        if fault := triton_missing():
            raise ImportError(fault)
        from .noise_triton import noisiest

        self._kernel = noisiest

    def _noisiest(self, x: Tensor, scale: Tensor, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernel(x if x.stride(1) == 1 else x.contiguous(), scale.flatten(), keys.contiguous(), self.first)


class NativeShard:
    """The implementation for CPUs: engine/sampling/noise.c over float32 and bfloat16 logits in host memory; other
    dtypes are converted to float32 first."""

    def __init__(self, library: ctypes.CDLL, first: int) -> None:
        self.first = first
        size, pointer = ctypes.c_long, ctypes.c_void_p
        self._scan = bind(library.laddertron_scan, None, pointer, size, size, size)
        self._top = bind(library.laddertron_top, ctypes.c_int, pointer, ctypes.c_int, size, size, pointer)
        self._gumbel = bind(library.laddertron_gumbel, None, *[pointer] * 5, size)

    def _point(self, logits: Logits, picked: npt.NDArray[np.int64]) -> tuple[Logits, Any, Any]:
        """The address and dtype of each picked row; they are valid as long as the returned Logits exist."""
        raw = logits.raw
        if raw.dtype not in _DTYPES or (raw.shape[1] > 1 and raw.stride(1) != 1):
            logits = Logits(raw.float().contiguous(), logits.changed, logits.where)
            raw = logits.raw
        address = raw.data_ptr() + picked * (raw.stride(0) * raw.element_size())
        kind = np.full(len(picked), _DTYPES[raw.dtype])
        if logits.changed is not None and logits.where is not None:
            source, changed = logits.where[picked], logits.changed
            hit = source >= 0
            address = np.where(hit, changed.data_ptr() + source * (changed.stride(0) * 4), address)
            kind[hit] = 0
        return logits, address, kind

    def scan(self, logits: Logits, picked: npt.NDArray[np.int64], rows: Rows) -> None:
        logits, rows["logits"], rows["dtype"] = self._point(logits, picked)
        self._scan(rows.ctypes.data, len(rows), logits.raw.shape[1], self.first)

    def top(self, logits: Logits, picked: npt.NDArray[np.int64], k: int) -> npt.NDArray[np.int64]:
        logits, address, kind = self._point(logits, picked)
        out = np.empty((len(picked), k), np.int32)
        for row, (at, dtype) in enumerate(zip(address.tolist(), kind.tolist(), strict=True)):
            if self._top(at, dtype, logits.raw.shape[1], k, out.ctypes.data + row * k * 4) != 0:
                raise MemoryError(f"no memory for {k} candidates of one row")
        return out.astype(np.int64)

    def gumbel(self, rows: Rows, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        repeat = ids.shape[1]
        seed, position, choice = (np.repeat(rows[name], repeat) for name in _KEYS)
        flat = np.ascontiguousarray(ids, np.uint32).ravel()
        out = np.empty(ids.shape, np.float64)
        arrays = [a.ctypes.data for a in (seed, position, choice, flat, out)]
        self._gumbel(*arrays, out.size)
        return out


class SharedShard:
    """A shard divided into equal shares that are summed separately, so that the sum over all shares of the vocabulary
    does not depend on how many a rank has. `columns`: the shard's, including padding; the last share may be shorter."""

    def __init__(self, first: int, columns: int, shares: int, device: torch.device) -> None:
        self._whole, self._each = make_shard(first, device), -(-columns // shares)
        self._shares = [make_shard(first + at * self._each, device) for at in range(shares)]
        self.top, self.gumbel = self._whole.top, self._whole.gumbel

    def scan(self, logits: Logits, picked: npt.NDArray[np.int64], rows: Rows) -> None:
        scans = np.stack([rows] * len(self._shares))
        scans["peak"], scans["best"], scans["peak_id"], scans["best_id"] = -np.inf, -np.inf, NO_ID, NO_ID
        for name in ("mass", "count", "bad"):
            scans[name] = 0
        for at, (shard, part) in enumerate(zip(self._shares, scans, strict=True)):
            own = slice(at * self._each, min((at + 1) * self._each, logits.raw.shape[1]))
            if own.start < own.stop:
                changed = None if logits.changed is None else logits.changed[:, own]
                shard.scan(Logits(logits.raw[:, own], changed, logits.where), picked, part)
        own_peak = np.isnan(rows["reference"])
        _, relative = total_mass(scans["peak"], scans["mass"], rows["inv_temperature"])
        rows["mass"] = np.where(own_peak, relative, tree_sum(scans["mass"]))
        for value in ("peak", "best"):
            ids, share = winner(scans[value], scans[f"{value}_id"])
            rows[f"{value}_id"] = np.where(ids > np.iinfo(np.int32).max, NO_ID, ids)
            rows[value] = scans[value][share, np.arange(len(rows))]
        rows["count"], rows["bad"] = scans["count"].sum(0), scans["bad"].any(0)


def make_shard(first: int, device: torch.device) -> LogitsShard:
    """The fastest implementation of this device and build."""
    if device.type == "cpu":
        library = native.load("laddertron.engine.sampling._noise")
        return TorchShard(first) if library is None else NativeShard(library, first)
    try:
        return TritonShard(first)
    except ImportError:
        return TorchShard(first)
