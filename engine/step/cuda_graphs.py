"""Steps as recorded graphs, one for each padded shape: a replay costs the host one call. A graph covers token ids to
logits, all-reduces included (their stream forks and joins by events). The attention plan and the copy of the step's
integers into fixed buffers stay outside. A step with more prompt rows than the largest graph has runs eagerly: there
the GPU, not the host, takes the time. If recording all graphs at the start would take more than START_S, the others are
recorded at their first use, which follows from the Batch: all ranks record the same graph in the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...models.attention import Capturable, StepLayout
from ...models.config.json_fields import Refusal
from ...models.config.model_config import ModelConfig
from ...models.config.shapes import Shape
from ...models.cuda.workspace import MOST_PROMPTS, prompts_of
from ...models.llama import LlamaModel
from ...models.stages import Stage
from ...models.transfer import stage
from ...topology.comm.collectives import Boundary, Done, Pending
from ...topology.comm.ledger import Ledger
from ...topology.hardware.cuda_stack import triton_missing
from ..batch import Chunk
from ..sampling.device_sampler import Replay, feed
from ..sampling.sampler import Sampler

START_S = 20.0
"""The longest time [s] for which a start records graphs, if more than one is left."""


class GraphsError(Refusal, ValueError):
    """engine.cuda_graphs is true but not possible; the message has the reason."""


def graphed(
    setting: bool | str, device: str, capturable: bool, attention: str, collectives: str | None
) -> tuple[bool, str]:
    """Whether to record steps, and the reason. setting: engine.cuda_graphs; capturable: whether `attention` can be
    recorded; collectives: the reason why the rest cannot, or None. Raises GraphsError if graphs are required but
    impossible."""
    if setting is False:
        return False, "off, as configured"
    if device != "cuda":
        reason = f"the device is a {device}"
    elif not capturable:
        reason = f"attention {attention} plans within the step: it needs flashinfer, or Triton's kernels for DSA"
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


def model_refuses(config: ModelConfig, stage: Stage | None) -> str | None:
    """The reason why steps of the model, or of this stage of it, cannot be recorded, or None. Torch's products over
    experts read the numbers of rows on the host; a recorded step's boundary has no room for chosen positions."""
    if stage is not None and stage.any_lends:
        return "a pipeline stage begins with a layer that uses the positions which the stage before chose"
    fault = None if config.experts is None else triton_missing()
    return None if fault is None else f"products over experts on the device need Triton: {fault}"


def recorded_at_start(seconds: float, count: int) -> int:
    """How many of `count` graphs a start records, if each takes so many seconds: all, if that takes START_S at most,
    else as many as do, at least one."""
    return count if seconds * count <= START_S else max(1, int(START_S / seconds))


class CudaRecorder:
    """Records CUDA graphs that share one memory pool: the largest first, so that the smaller ones fit into it."""

    def __init__(self, device: torch.device, ledger: Ledger, drain: Callable[[], None] = lambda: None) -> None:
        """ledger: of the group's collectives. A replay starts those that were captured, and counts them there. drain:
        waits for the device's collectives, at most for their timeout."""
        self._device, self._ledger, self._drain = device, ledger, drain
        stream: Any = torch.cuda.Stream
        self._stream = stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], None]) -> Replay:
        """Runs `compute` and records it; the returned Replay repeats its device work on the same memory."""
        self.warm_up(compute)
        return self.capture(compute)

    def warm_up(self, compute: Callable[[], None]) -> None:
        """Runs `compute`, which `capture` requires once before."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Libraries choose algorithms, compile and connect at their first call, which none may do in a capture.
            for _ in range(2):
                compute()
        current.wait_stream(self._stream)

    def capture(self, compute: Callable[[], None]) -> Replay:
        """Records `compute` without running it: nothing is given to the device, which has finished all of its work, on
        every stream, when this begins."""
        self._drain()
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


class StepGraphs:
    """The graphs of one rank. All ranks of a group record, and later replay, the same shapes in the same order."""

    def __init__(
        self,
        model: LlamaModel,
        attention: Capturable,
        recorder: CudaRecorder,
        shapes: Sequence[Shape],
        *,
        scratch_block: int,
        most_blocks: int,
        block_size: int,
        latest: Tensor | None = None,
        reserved: int | None = None,
        say: Callable[[str], None] = lambda line: None,
        greatest: Callable[[float], float] = lambda seconds: seconds,
    ) -> None:
        """shapes: decodes and prompt rows of the steps to record. scratch_block: a block of the cache that no sequence
        uses, for the keys of padding. most_blocks: of one sequence. latest: the last ids sampled on the device, by slot
        (Sampler.latest), from which steps may read their ids. reserved: bytes kept free for the graphs. say: called
        with log lines. greatest: returns the greatest of the numbers with which the group's ranks call it."""
        self.shapes = sorted(shapes, key=lambda shape: shape[::-1])
        self.sizes = tuple(decodes for decodes, rows in self.shapes if not rows)
        self.drafted = tuple(rows for decodes, rows in self.shapes if not decodes)
        """Rows of steps of sequences with drafts."""
        self._model, self._recorder, self._scratch, self._say = model, recorder, scratch_block, say
        self._greatest, self.recorded_at = greatest, 0.0
        """`recorded_at`: when the last graph was recorded, on the monotonic clock [s]."""
        self._block_size, self._latest, self.reserved = block_size, latest, reserved
        self._attention = attention.captured(self.shapes, most_blocks)
        device, most = model.rotary.cos.device, max(map(sum, shapes))
        sampled = max(map(_sampled_rows, shapes))
        # Token ids, positions, blocks, offsets and the rows to sample of a step are contiguous: one copy.
        self._staged = torch.zeros(4 * most + sampled, dtype=torch.int64)
        self._inputs = torch.zeros(4 * most + sampled, dtype=torch.int64, device=device)
        table = model.rotary.cos
        self._cos, self._sin = (table.new_zeros((most, *table.shape[1:])) for _ in range(2))
        logits = (sampled, len(model.shard.vocab), torch.float32)
        rows, width, dtype = logits if model.shard.samples else (most, model.config.hidden_size, model.dtype)
        self._out = torch.zeros((rows, width), dtype=dtype, device=device)
        states = most if model.keeps_states else 0, model.config.hidden_size
        self._states = torch.zeros(states, dtype=model.dtype, device=device)
        self._boundary = None if model.boundary is None else FixedBoundary(model.boundary, model, most)
        self._replays: dict[Shape, Replay] = {}
        self._draws: dict[int, Replay] = {}

    @property
    def most_rows(self) -> tuple[int, int]:
        """SchedulerLimits.most_rows."""
        return max((*self.drafted, self.sizes[-1])), self.sizes[-1]

    @property
    def recorded(self) -> tuple[Shape, ...]:
        """The shapes that are recorded, in that order."""
        return tuple(self._replays)

    def record(self, tell: Callable[[str], None] = lambda doing: None) -> None:
        """Runs every shape and records them, the largest first, or those for which START_S suffices; required before
        `run`. tell: called with progress."""
        before, began = self._recorder.memory(), time.monotonic()
        shapes = sorted(self.shapes, key=sum, reverse=True)
        at_start, all_s = len(shapes), 0.0
        with torch.inference_mode(), self._recording():
            for count, shape in enumerate(shapes):
                self._stage(*self._padding(shape), shape)
                self._recorder.warm_up(partial(self._compute, shape))
                if count < at_start:
                    seconds = self._capture(shape)
                if count == 0:
                    seconds = self._greatest(seconds)
                    at_start, all_s = recorded_at_start(seconds, len(shapes)), seconds * len(shapes)
                tell(f"recording CUDA graphs, {count + 1} of {len(shapes)}")
        taken, took = self._recorder.memory() - before, time.monotonic() - began
        words = f"CUDA graphs: {len(self.sizes)} of decode steps to {self.sizes[-1]} sequences"
        if mixed := [shape for shape in self.shapes if _mixed(shape)]:
            words += f", {len(mixed)} with prompts to {mixed[-1][1]} tokens"
        if self.drafted:
            words += f", {len(self.drafted)} with drafts to {self.drafted[-1]} rows"
        words += ", recorded" if at_start == len(shapes) else f"; {at_start} recorded"
        words += f" in {took:.1f} s, {self.room_text(taken)}"
        if at_start < len(shapes):
            words += f"; {len(shapes) - at_start} wait for their first use: all would take {all_s:.0f} s"
        self._say(words)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """The model's boundary is that of recorded steps meanwhile; its states are those of before afterwards, and none
        of a graph's memory."""
        model, states = self._model, self._model.states
        crossing, model.boundary = model.boundary, self._boundary
        try:
            yield
        finally:
            model.boundary, model.states = crossing, states

    def _capture(self, shape: Shape) -> float:
        """Records a shape of which a step with only padding is staged; returns the seconds that it took."""
        began = time.monotonic()
        self._replays[shape] = self._recorder.capture(partial(self._compute, shape))
        self.recorded_at = time.monotonic()
        return self.recorded_at - began

    def _capture_late(self, shape: Shape) -> None:
        """Records a shape at its first use. That runs nothing on the device, collectives included; `record` has run the
        shape, so nothing compiles or connects."""
        before = self._recorder.memory()
        self._stage(*self._padding(shape), shape)
        with self._recording():
            took = self._capture(shape)
        taken, waiting = self._recorder.memory() - before, len(self.shapes) - len(self._replays)
        self._say(
            f"CUDA graphs: {shape[0]} decodes and {shape[1]} rows of prompts, recorded at the first use in "
            f"{took:.1f} s, {taken >> 20} MiB; {waiting} wait"
        )

    def room_text(self, taken: int) -> str:
        words = f"{taken >> 20} MiB"
        if self.reserved is None:
            return words
        words += f" of the {self.reserved >> 20} kept free for them"
        return words if taken <= self.reserved else f"{words}: too few; lower engine.gpu_memory_utilization"

    def drop(self) -> None:
        """Waits for the device and frees the recordings."""
        self._recorder.wait()
        for replays in (self._replays, self._draws):
            replays.clear()

    def record_draws(self, sampler: Sampler) -> None:
        """Also records sampling of greedy and plainly sampled rows; call it after `record`."""
        if self._latest is not None:
            sizes = sorted({*self.sizes, *self.drafted})
            with torch.inference_mode():
                self._draws = sampler.record(self._out, sizes, self._recorder.record)

    def shape(self, chunks: Sequence[Chunk]) -> Shape | None:
        """The recorded shape for a step of these chunks (decodes first); None: no graph has room for them, or prompts
        are to be scored. The chunks alone decide, so all ranks replay the same graph. Sequences with drafts are joined,
        unless there are few drafts, or prompts: then each of their rows is a decode."""
        prompts = [chunk.count for chunk in chunks if chunk.count > 1]
        decodes, rows = len(chunks) - len(prompts), sum(prompts)
        if len(prompts) > MOST_PROMPTS or (prompts and any(chunk.prompt_logprobs for chunk in chunks)):
            return None
        if not prompts and (sequences := len({chunk.slot for chunk in chunks})) < decodes:
            joined = next((r for r in self.drafted if r >= decodes and prompts_of((0, r)) >= sequences), None)
            if joined is not None and (joined < 2 * decodes or decodes > self.sizes[-1]):
                return 0, joined
        fitting = (s for s in self.shapes if s[0] >= max(1, decodes) and s[1] >= rows and bool(s[1]) == bool(rows))
        return next(fitting, None)

    def run(self, shape: Shape, layout: StepLayout, tokens: Tensor, rows: Tensor) -> Tensor | None:
        """Starts a step of `shape` from its layout (with a table of all slots), token ids [T] (or placeholders for
        device_draw.feed) and rows whose logits are needed [R], all but the table on the host; records the shape before,
        if it was not. Returns on the device the result of LlamaModel.forward, of a step without prompts for all rows;
        the next run overwrites it. None: attention's plan differs from the captured one, and the step must be computed
        eagerly."""
        if shape not in self._replays:
            self._capture_late(shape)
        decodes, mixed = shape[0], _mixed(shape)
        layout = layout if decodes else _joined(layout)
        decode, total = layout.decode, layout.query_start[-1]
        fields, sampled = self._parts(self._staged, shape)
        end = decodes + total - decode
        for row, values, padding in zip(
            fields, (tokens, layout.positions, layout.blocks, layout.offsets), (0, 0, self._scratch, 0), strict=True
        ):
            row.fill_(padding)
            row[:decode], row[decodes:end] = values[:decode], values[decode:]
        sampled.zero_()
        if mixed:
            sampled[: len(rows)] = torch.where(rows < decode, rows, rows + decodes - decode)
        if not self._stage(*self._padded(layout, shape), shape):
            return None
        # Rows between stages are those of the graph, if prompts follow padding.
        crossing = sum(shape) if mixed else total
        if self._boundary is not None:
            self._boundary.take(crossing)
        self._replays[shape]()
        if self._boundary is not None:
            self._boundary.hand_on(crossing)

        def without_padding(x: Tensor) -> Tensor:
            return torch.cat((x[:decode], x[decodes:end])) if mixed else x[:total]

        if len(self._states):
            self._model.states = without_padding(self._states)
        return self._out[: len(rows)] if mixed and self._model.shard.samples else without_padding(self._out)

    @staticmethod
    def _padded(layout: StepLayout, shape: Shape) -> tuple[list[int], list[int], Tensor, NDArray[np.int64]]:
        """Query starts, lengths, block table and its rows of a step with its padding: decodes and, with prompts,
        prompts of no rows over the scratch block, of which the table's last row is."""
        decodes, decode, table = shape[0], layout.decode, layout.block_table
        assert layout.rows is not None
        count, most = len(layout.kv_len), decodes + prompts_of(shape)
        rows = np.full(most, len(table) - 1)
        rows[:decode], rows[decodes : decodes + count - decode] = layout.rows[:decode], layout.rows[decode:]
        starts = [*range(decodes), *(start + decodes - decode for start in layout.query_start[decode:])]
        lengths = [*layout.kv_len[:decode], *[1] * (decodes - decode), *layout.kv_len[decode:]]
        absent = most - len(lengths)
        return starts + starts[-1:] * absent, lengths + [1] * absent, table, rows

    def _padding(self, shape: Shape) -> tuple[list[int], list[int], Tensor, NDArray[np.int64]]:
        """Like _padded, of a step that has only padding, of which prompts' rows belong to one prompt."""
        fields, sampled = self._parts(self._staged, shape)
        fields.zero_()
        fields[2] = self._scratch
        sampled.zero_()
        decodes, prompts = shape
        absent = max(0, prompts_of(shape) - 1)
        starts = [*range(decodes + 1), *[decodes + prompts] * ((1 + absent) if prompts else 0)]
        lengths = [1] * decodes + ([prompts] + [1] * absent if prompts else [])
        table = torch.full((1, max(1, -(-prompts // self._block_size))), self._scratch)
        return starts, lengths, table, np.zeros(len(lengths), np.int64)

    @staticmethod
    def _parts(buffer: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """The parts [4, T] of a buffer (ids, positions, blocks, offsets), and [R] (rows to sample)."""
        end = 4 * sum(shape)
        return buffer[:end].view(4, -1), buffer[end : end + _sampled_rows(shape)]

    def _stage(
        self, starts: list[int], lengths: list[int], table: Tensor, rows: NDArray[np.int64], shape: Shape
    ) -> bool:
        """Copies the staged integers and makes the plan, before a replay. Returns whether the graph fits the plan."""
        size = sum(shape)
        end = 4 * size + _sampled_rows(shape)
        stage(self._inputs[:end], self._staged[:end])
        _, positions, blocks, offsets = self._parts(self._inputs, shape)[0]
        layout = StepLayout(positions, starts, lengths, table, blocks, offsets, shape[0], rows=rows)
        attention = self._attention[shape]
        attention.prepare(layout, self._cos[:size], self._sin[:size])
        return attention.replayable

    def _compute(self, shape: Shape) -> None:
        (tokens, positions, blocks, _), sampled = self._parts(self._inputs, shape)
        size, model = sum(shape), self._model
        if self._latest is not None:
            tokens = feed(tokens, self._latest)
        torch.index_select(model.rotary.cos, 0, positions, out=self._cos[:size])
        torch.index_select(model.rotary.sin, 0, positions, out=self._sin[:size])
        padding = None if model.config.experts is None else blocks == self._scratch
        rows = sampled if _mixed(shape) and model.shard.samples else None
        out = model.compute(tokens, self._attention[shape], rows, padding)
        self._out[: len(out)].copy_(out)
        if len(self._states):
            self._states[:size].copy_(model.states)


def _mixed(shape: Shape) -> bool:
    """Whether a recorded step has decodes and prompts."""
    return min(shape) > 0


def _sampled_rows(shape: Shape) -> int:
    """The most rows of a recorded step that are sampled."""
    return shape[0] + MOST_PROMPTS if _mixed(shape) else sum(shape)


def _joined(layout: StepLayout) -> StepLayout:
    """The layout of decodes with the rows of each sequence as one prompt."""
    assert layout.rows is not None
    last = np.flatnonzero(np.append(np.diff(layout.rows) != 0, True))
    starts, lengths = [0, *(last + 1).tolist()], [layout.kv_len[row] for row in last]
    return replace(layout, query_start=starts, kv_len=lengths, rows=layout.rows[last], decode=0)
