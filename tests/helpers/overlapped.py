"""Engines whose steps overlap, on a CPU that plays the device: ids are drawn "there", gathers between devices go by way
of the ranks' own, and a result may be read when it is asked for, which is noted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from laddertron.engine.sampling.logits_shard import TorchShard
from laddertron.engine.sampling.sampler import OnDevice, Sampler
from laddertron.engine.step.build import Built
from laddertron.engine.step.runner import Runner
from laddertron.topology.comm.groups import Communicator
from torch import Tensor

CPU = torch.device("cpu")
FORWARD, START, READ, HOST, JOINED = "forward", "start", "read", "host", "joined"
_READS = {"cpu", "numpy", "item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__"}


class Remote(Tensor):
    """A tensor that, like all that is made from it, the host may not look at."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            raise AssertionError(f"{func.__name__} makes the host wait for the device")
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def here(x: Tensor) -> Tensor:
    """What a Remote holds, for stand-ins of what crosses."""
    return x.as_subclass(Tensor)


def device_gather(gather: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    """Over a gather of bytes."""

    def on_device(x: Tensor) -> Tensor:
        everyone = gather(here(x).contiguous().numpy().view(np.uint8))
        return torch.from_numpy(np.ascontiguousarray(everyone).view(np.int64)).as_subclass(type(x))

    return on_device


def noted(notes: list[str]) -> Callable[[Tensor], Callable[[], Any]]:
    """A fetch that notes when a result is set off and when the host reads it."""

    def fetch(x: Tensor) -> Callable[[], Any]:
        notes.append(START)
        there = here(x).numpy().copy()

        def read() -> Any:
            notes.append(READ)
            return there

        return read

    return fetch


def sampler(built: Built, communicator: Communicator, notes: list[str]) -> Sampler:
    """Built's, but drawing on the device where it can."""
    shard, slots = built.runner.model.shard, built.runner.sampler.slots
    on_device = OnDevice(device_gather(communicator.gather), noted(notes))
    with patch("laddertron.engine.sampling.sampler.make_shard", lambda first, device: TorchShard(first)):
        most = len(slots.position)
        return Sampler(built.config.vocab_size, shard.vocab, most, communicator.gather, CPU, slots.grammars, on_device)


class NotingRunner(Runner):
    """Notes when a step's forward pass has been set off, and draws that the host makes."""

    notes: list[str]

    def _forward(self, *args: Any) -> Tensor:
        logits = super()._forward(*args)
        self.notes.append(FORWARD)
        return logits

    def _draw(self, *args: Any) -> Any:
        self.notes.append(HOST)
        return super()._draw(*args)


def overlap(
    built: Built, communicator: Communicator, notes: list[str] | None = None, **more: Any
) -> tuple[Built, list[str]]:
    """The same rank with steps that overlap, and what will be noted. more: other arguments of its Runner, among them
    perhaps a sampler that takes its own notes there."""
    old, notes = built.runner, [] if notes is None else notes
    arguments: dict[str, Any] = {
        "attention": old.attention,
        "cache": old.cache,
        "max_slots": len(old.length),
        "max_model_len": built.limits.max_model_len,
    }
    arguments |= more
    arguments.setdefault("sampler", sampler(built, communicator, notes))
    runner = NotingRunner(old.model, **arguments)
    runner.notes = notes
    return replace(built, runner=runner), notes


def told(notes: Iterable[str]) -> dict[str, int]:
    """`late`: results that were read when the next step's forward pass had been set off; `waited`: those that the host
    waited for with nothing else for the device to do; `host`: steps whose ids the host waited for or drew; `joined`:
    recorded steps in which the rows of a sequence with drafts were one prompt."""
    found: Counter[str] = Counter(late=0, waited=0, host=0, joined=0)
    ahead = False
    for note in notes:
        if note == READ:
            found["late" if ahead else "waited"] += 1
        elif note in (HOST, JOINED):
            found[note] += 1
        ahead = note == FORWARD or (ahead and note != START)
    return dict(found)
