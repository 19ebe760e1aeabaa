"""Training text as a mapped file of ids, and batches that depend on the step alone, so that a run resumes by its step
number.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

UNTAUGHT = 1 << 31
"""Set in an id that is read but not learned to say: a prompt's, in a conversation."""
Piece = tuple[list[int], list[bool] | None]
"""A document's ids, and which of them are taught (None: all)."""


def write_tokens(path: Path, pieces: Iterable[Piece], limit: int | None = None) -> int:
    """Writes documents until `limit` ids, one in memory at a time; returns the number of ids."""
    count = 0
    with path.with_suffix(".part").open("wb") as stream:
        for ids, taught in pieces:
            if limit is not None and count >= limit:
                break
            packed = np.asarray(ids, dtype=np.uint32)
            if taught is not None:
                packed = packed | np.where(np.asarray(taught, dtype=bool), 0, UNTAUGHT).astype(np.uint32)
            stream.write(packed.tobytes())
            count += len(ids)
    path.with_suffix(".part").rename(path)
    return count


def read_tokens(path: Path) -> np.ndarray:
    """The file, mapped: [N] uint32. Raises ValueError for one with no ids."""
    if path.stat().st_size < 8:
        raise ValueError(f"{path}: the text is too short: fewer than two tokens")
    return np.memmap(path, dtype=np.uint32, mode="r")


class Batches:
    """step -> rows of [batch, context + 1]; each epoch cuts the text at a new offset and shuffles the pieces."""

    def __init__(self, ids_N: np.ndarray, batch: int, context: int, seed: int) -> None:
        self.ids_N, self.batch, self.context, self.seed = ids_N, batch, context, seed
        self.per_epoch = (len(ids_N) - context - 1) // context // batch
        if self.per_epoch < 1:
            needed = context * (batch + 1) + 1
            raise ValueError(
                f"the text has {len(ids_N)} tokens, a step needs {needed}: use more text, or less batch or context"
            )

    def rows(self, step: int) -> tuple[Tensor, Tensor]:
        """This step's batch: ids [batch, context + 1] int64, and which of the ids after the first are taught."""
        epoch, place = divmod(step, self.per_epoch)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        offset = int(torch.randint(self.context, (1,), generator=generator))
        order = torch.randperm((len(self.ids_N) - offset - 1) // self.context, generator=generator)
        chosen = order[place * self.batch : (place + 1) * self.batch]
        starts = [int(start) * self.context + offset for start in chosen]
        return unpacked(np.stack([self.ids_N[start : start + self.context + 1] for start in starts]))


def unpacked(packed: np.ndarray) -> tuple[Tensor, Tensor]:
    """uint32 [R, T + 1] -> ids [R, T + 1] int64 and taught [R, T] bool, of the ids after the first."""
    ids = torch.from_numpy((packed & (UNTAUGHT - 1)).astype(np.int64))
    return ids, torch.from_numpy(packed[:, 1:] < UNTAUGHT)
