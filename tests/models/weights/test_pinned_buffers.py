"""Weights on their way to a GPU, with buffers, events and copies that need none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from laddertron.models.weights import tensor_reader
from laddertron.models.weights.checkpoint import StoredTensor
from laddertron.models.weights.tensor_reader import PinnedBuffers, Reader
from torch import Tensor


class Copies(PinnedBuffers):
    """Copies that end when they are waited for, and not before: a buffer that is written to earlier loses its values.
    `log`: what happened, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self._under_way: list[tuple[Tensor, Tensor]] = []

    @staticmethod
    def allocate(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        taken = super().take(size)
        self.log.append(f"take {self._turn}")
        return taken

    def send(self, source: Tensor, target: Tensor) -> None:
        self.log.append(f"send {self._turn}")
        own = self

        class Event:
            def synchronize(self) -> None:
                own.log.append("wait")
                target.copy_(source)

        self._sent[self._turn] = Event()

    def finish(self) -> None:
        for event in self._sent:
            if event is not None:
                event.synchronize()


class OnGpu(torch.Tensor):
    """A tensor in the host's memory that says that it is a GPU's."""

    is_cuda = True


@pytest.mark.parametrize(("column", "columns"), [(0, 8), (2, 4)])
def test_two_buffers_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: int, columns: int) -> None:
    """Whole rows and columns of a bf16 tensor in pieces of two rows: each piece is read while the one before travels,
    no buffer is written to before its copy has ended, and all values arrive."""
    whole = torch.randn(10, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    path = tmp_path / "weights"
    path.write_bytes(b"head" * 4 + whole.view(torch.uint8).numpy().tobytes())
    stored = StoredTensor("w", path, "BF16", (10, 8), 16, 16 + whole.nbytes)
    monkeypatch.setattr(tensor_reader, "CHUNK_BYTES", 2 * columns * 2)
    target: Any = torch.zeros(10, columns, dtype=torch.bfloat16).as_subclass(OnGpu)
    copies = Copies()
    with Reader() as reader:
        reader._pinned = copies
        reader.read(stored, 0, column, target)
    copies.finish()
    assert torch.equal(target.as_subclass(torch.Tensor), whole[:, column : column + columns])
    assert copies.log[:6] == ["take 1", "send 1", "take 0", "send 0", "wait", "take 1"]
    assert copies.log.count("wait") == copies.log.count("send 0") + copies.log.count("send 1")
