"""Decode steps as recorded graphs, one for each padded size: a replay costs the host one call. A graph covers token ids
to logits, all-reduces included (their stream forks and joins by events). The attention plan and the copy of the step's
integers into fixed buffers stay outside; steps with prompts run eagerly.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...models.attention import AttentionBackend, Capturable, StepLayout
from ...models.config.json_fields import Refusal
from ...models.config.model_config import ModelConfig
from ...models.llama import LlamaModel
from ...models.transfer import stage
from ...topology.comm.collectives import Boundary, Done, Pending
from ...topology.comm.ledger import Ledger
from ...topology.hardware.cuda_stack import triton_missing
from ..sampling.device_sampler import Replay, feed
from ..sampling.sampler import Sampler


class GraphsError(Refusal, ValueError):
    """engine.cuda_graphs is true but not possible; the message has the reason."""


def graphed(
    setting: bool | str, device: str, capturable: bool, attention: str, collectives: str | None
) -> tuple[bool, str]:
    """Whether to record decode steps, and the reason. wanted: engine.cuda_graphs; capturable: whether `attention` can
    be recorded; collectives: the reason why the rest cannot, or None. Raises GraphsError if graphs are required but
    impossible."""
    if setting is False:
        return False, "off, as configured"
    if device != "cuda":
        reason = f"the device is a {device}"
    elif not capturable:
        reason = f"attention {attention} plans within the step: it needs flashinfer"
    elif collectives is not None:
        reason = collectives
    else:
        return True, "on"
    if setting is True:
        raise GraphsError(f"engine.cuda_graphs=true: {reason}; use auto or false")
    return False, f"off: {reason}"


def fell_back(device: torch.device, setting: str | bool, got: bool) -> bool:
    """Whether a GPU runs without graphs although the configuration allows them, which deserves a warning."""
    return device.type == "cuda" and setting == "auto" and not got


def collectives_refuse(backend: str, size: int, emulated: bool) -> str | None:
    """The reason why steps of a group of `size` cannot be recorded, or None. NCCL's collectives run on a stream; other
    backends run on the host, where a group of one has no collectives unless it emulates a larger group."""
    if backend == "nccl" or (size == 1 and not emulated):
        return None
    return f"collectives of backend {backend} run on the host: it needs nccl"


def experts_refuse(config: ModelConfig) -> str | None:
    """The reason why steps with experts cannot be recorded, or None: torch's products read the numbers of rows on the
    host."""
    fault = None if config.experts is None else triton_missing()
    return None if fault is None else f"products over experts on the device need Triton: {fault}"


class CudaRecorder:
    """Records CUDA graphs that share one memory pool: the largest first, so that the smaller ones fit into it."""

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        """ledger: of the group's collectives. A replay starts those that were captured, and counts them there."""
        self._device, self._ledger = device, ledger
        stream: Any = torch.cuda.Stream
        self._stream = stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], None]) -> Replay:
        """Runs `compute` and records it; the returned Replay repeats its device work on the same memory."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Libraries choose algorithms, compile and connect at their first call, which none may do in a capture.
            for _ in range(2):
                compute()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph: Any = torch.cuda.CUDAGraph()
        ledger, started = self._ledger, self._ledger.started
        # thread_local: the heartbeat's thread and NCCL's watchdog ask for events meanwhile, which is none of ours.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        captured, ledger.started = ledger.started - started, started  # a capture starts nothing

        def replay() -> None:
            ledger.started += captured
            graph.replay()

        return replay

    def memory(self) -> int:
        """Bytes of device memory in use now."""
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)


class FixedBoundary:
    """The boundary of a stage for recorded steps, which read and write rows in fixed memory. Transfers by `inner` take
    place before and after a replay."""

    def __init__(self, inner: Boundary, model: LlamaModel, most: int) -> None:
        self._own, self._copies = model.config.lanes is not None, model.shard.num_lanes

        def rows(count: int) -> list[Tensor]:
            shape = (self._copies, most, model.config.hidden_size)
            return [torch.zeros(shape, dtype=model.dtype, device=model.rotary.cos.device) for _ in range(count)]

        self._inner, stage = inner, model.stage
        self._received = rows(0 if stage.first else 1 + stage.pending)
        self._left = rows(0 if stage.last else 1 + stage.left)
        self._next = 0

    def receive(self, shape: tuple[int, int], dtype: torch.dtype, count: int, own: bool = False) -> list[Pending]:
        return [Done(x[:, : shape[0] // self._copies].flatten(0, 1)) for x in self._received]

    def send(self, x: Tensor, own: bool = False) -> None:
        tokens = len(x) // self._copies
        self._left[self._next][:, :tokens].copy_(x.view(self._copies, tokens, -1))
        self._next = (self._next + 1) % len(self._left)

    def take(self, count: int) -> None:
        """Receives the rows of a step from the previous stage."""
        if self._received:
            shape, dtype = (self._copies * count, self._received[0].shape[2]), self._received[0].dtype
            coming = self._inner.receive(shape, dtype, len(self._received), self._own)
            for x, rows in zip(self._received, coming, strict=True):
                x[:, :count].copy_(rows.wait().view(self._copies, count, -1))

    def hand_on(self, count: int) -> None:
        for x in self._left:
            self._inner.send(x[:, :count].flatten(0, 1).clone(), self._own)


class DecodeGraphs:
    """The graphs of one rank. All ranks of a group record, and later replay, the same sizes in the same order."""

    def __init__(
        self,
        model: LlamaModel,
        attention: Capturable,
        recorder: CudaRecorder,
        sizes: Sequence[int],
        *,
        scratch_block: int,
        most_blocks: int,
        latest: Tensor | None = None,
        reserved: int | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """scratch_block: a block of the cache that no sequence uses, for the keys of padding. most_blocks: of one
        sequence. latest: the last ids sampled on the device, by slot (Sampler.latest), from which steps may read their
        ids. reserved: bytes kept free for the graphs. say: called with log lines."""
        self.sizes = tuple(sorted(sizes))
        self._model, self._recorder, self._scratch, self._say = model, recorder, scratch_block, say
        self._latest, self.reserved = latest, reserved
        self._attention = attention.captured(self.sizes, most_blocks)
        device, most = model.rotary.cos.device, self.sizes[-1]
        # Token ids, positions, blocks and offsets of a step are contiguous: one copy.
        self._staged = torch.zeros(4 * most, dtype=torch.int64)
        self._inputs = torch.zeros(4 * most, dtype=torch.int64, device=device)
        table = model.rotary.cos
        self._cos, self._sin = (table.new_zeros((most, *table.shape[1:])) for _ in range(2))
        logits = (len(model.shard.vocab), torch.float32)
        width, dtype = logits if model.shard.samples else (model.config.hidden_size, model.dtype)
        self._out = torch.zeros((most, width), dtype=dtype, device=device)
        self._boundary = None if model.boundary is None else FixedBoundary(model.boundary, model, most)
        self._replays: dict[int, Replay] = {}
        self._draws: dict[int, Replay] = {}

    def record(self, tell: Callable[[str], None] = lambda doing: None) -> None:
        """Records all sizes, the largest first; required before `run`. tell: called with progress."""
        before, began = self._recorder.memory(), time.monotonic()
        crossing, self._model.boundary = self._model.boundary, self._boundary
        with torch.inference_mode():
            for count, size in enumerate(reversed(self.sizes), 1):
                self._stage(self._padding(size), size)
                self._replays[size] = self._recorder.record(partial(self._compute, size))
                tell(f"recording CUDA graphs, {count} of {len(self.sizes)}")
        self._model.boundary = crossing
        used_bytes, took = self._recorder.memory() - before, time.monotonic() - began
        sizes = ", ".join(map(str, self.sizes))
        room = self.room_text(used_bytes)
        self._say(f"CUDA graphs: decode steps of {sizes} sequences, recorded in {took:.1f} s, {room}")

    def room_text(self, used_bytes: int) -> str:
        words = f"{used_bytes >> 20} MiB"
        if self.reserved is None:
            return words
        words += f" of the {self.reserved >> 20} kept free for them"
        return words if used_bytes <= self.reserved else f"{words}: too few; lower engine.gpu_memory_utilization"

    def drop(self) -> None:
        """Waits for the device and frees the recordings."""
        self._recorder.wait()
        for replays in (self._replays, self._draws):
            replays.clear()

    def record_draws(self, sampler: Sampler) -> None:
        """Also records sampling of greedy and plainly sampled rows; call it after `record`."""
        if self._latest is not None:
            with torch.inference_mode():
                self._draws = sampler.record(self._out, self.sizes, self._recorder.record)

    def fits(self, sequences: int) -> bool:
        """Whether `run` has a graph for a step of so many decodes."""
        return sequences <= self.sizes[-1]

    def run(self, layout: StepLayout, tokens: Tensor) -> Tensor:
        """Starts a decode-only step from its layout and token ids [B] (or placeholders for device_draw.feed) on the
        host. Returns the result of LlamaModel.forward for all rows on the device; the next run overwrites it."""
        count = layout.decode
        size = self.sizes[bisect_left(self.sizes, count)]
        staged = self._part(self._staged, size)
        for row, values, padding in zip(
            staged, (tokens, layout.positions, layout.blocks, layout.offsets), (0, 0, self._scratch, 0), strict=True
        ):
            row[:count] = values
            row[count:] = padding
        padding_rows = size - count
        table = torch.nn.functional.pad(layout.block_table, (0, 0, 0, padding_rows), value=self._scratch)
        self._stage((layout.kv_len + [1] * padding_rows, table), size)
        if self._boundary is not None:
            self._boundary.take(count)
        self._replays[size]()
        if self._boundary is not None:
            self._boundary.hand_on(count)
        return self._out[:count]

    def _padding(self, size: int) -> tuple[list[int], Tensor]:
        """Lengths and block table of a step that has only padding."""
        staged = self._part(self._staged, size)
        staged.zero_()
        staged[2] = self._scratch
        return [1] * size, torch.full((size, 1), self._scratch)

    @staticmethod
    def _part(buffer: Tensor, size: int) -> Tensor:
        """The part [4, size] of a buffer: ids, positions, blocks, offsets."""
        return buffer[: 4 * size].view(4, size)

    def _stage(self, sequences: tuple[list[int], Tensor], size: int) -> None:
        """Copies the staged integers and makes the plan, before a replay."""
        stage(self._inputs[: 4 * size], self._staged[: 4 * size])
        _, positions, blocks, offsets = self._part(self._inputs, size)
        kv_len, table = sequences
        layout = StepLayout(positions, list(range(size + 1)), kv_len, table, blocks, offsets, size)
        self._attention[size].prepare(layout, self._cos[:size], self._sin[:size])

    def _compute(self, size: int) -> None:
        tokens, positions, _, _ = self._part(self._inputs, size)
        if self._latest is not None:
            tokens = feed(tokens, self._latest)
        rotary = self._model.rotary
        torch.index_select(rotary.cos, 0, positions, out=self._cos[:size])
        torch.index_select(rotary.sin, 0, positions, out=self._sin[:size])
        backend: AttentionBackend = self._attention[size]
        self._out[:size].copy_(self._model.compute(tokens, backend))
