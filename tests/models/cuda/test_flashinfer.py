"""The FlashInfer backend against the portable one, on a stand-in of the library (tests/helpers/fake_flashinfer.py); its
arguments against the installed library; and, where there is a GPU, on the real one."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import fake_flashinfer
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laddertron.models.attention import Capturable, KVCache, StepLayout, TorchAttention
from laddertron.models.cuda.flashinfer import (
    FlashInferAttention,
    FlashInferRows,
    contexts,
    contexts_of_tokens,
    pages,
    unfit,
)
from laddertron.models.cuda.workspace import MOST_PROMPTS, prompts_of
from laddertron.models.ops import Norm
from laddertron.models.weights.tensor_reader import FP8
from torch import Tensor

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def make_cache(
    kv_heads: int, dim: int, blocks: int, size: int, dtype: torch.dtype, device: torch.device, layers: int = 2
) -> KVCache:
    """Filled with noise: what a step leaves there is what is compared."""
    shard: Any = SimpleNamespace(config=SimpleNamespace(num_layers=layers, head_dim=dim), num_kv_heads=kv_heads)
    cache = KVCache(shard, blocks, size, dtype, device)
    dice = torch.Generator().manual_seed(1)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=dice).to(dtype))
    return cache


def make_layout(counts: list[int], before: list[int], size: int, device: torch.device, seed: int = 0) -> StepLayout:
    """Sequences with `before` positions known and `counts` new tokens, in shuffled blocks; decodes first."""
    order = sorted(range(len(counts)), key=lambda i: counts[i] != 1)
    counts, before = [counts[i] for i in order], [before[i] for i in order]
    ends = [b + c for b, c in zip(before, counts, strict=True)]
    held = [-(-end // size) for end in ends]
    shuffled = torch.randperm(sum(held), generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(counts), max(held)), 10**6)  # what is behind a sequence's own blocks may be anything
    positions, blocks, start = [], [], [0]
    for i, n in enumerate(held):
        table[i, :n] = torch.tensor(shuffled[:n])
        del shuffled[:n]
        where = list(range(before[i], ends[i]))
        positions += where
        blocks += [int(table[i, p // size]) for p in where]
        start.append(len(positions))
    at = torch.tensor(positions, device=device)
    return StepLayout(
        positions=at,
        query_start=start,
        kv_len=ends,
        block_table=table.to(device),
        blocks=torch.tensor(blocks, device=device),
        offsets=at % size,
        decode=counts.count(1),
    )


def compare(
    library: Any, dtype: torch.dtype, kv_dtype: torch.dtype, shape: tuple[int, int, int, int], layout: StepLayout,
    windows: tuple[int | None, ...], device: torch.device = CPU, norms: bool = False, within: float = 1e-5,
    kind: type[FlashInferAttention] = FlashInferAttention, sinks: bool = False,
) -> None:  # fmt: skip
    """Both backends through a step of two layers: the same outputs, the same cache."""
    heads, kv_heads, dim, size = shape
    blocks = int(layout.blocks.max()) + sum(-(-n // size) for n in layout.kv_len)
    caches = [make_cache(kv_heads, dim, blocks, size, kv_dtype, device) for _ in range(2)]
    scale = 0.7 * dim**-0.5
    portable = TorchAttention(caches[0], windows, scale)
    ours = kind(caches[1], windows, scale, heads, dtype, library)
    tokens = len(layout.positions)
    dice = torch.Generator().manual_seed(2)
    angles = torch.rand(tokens, 1, dim // 2, generator=dice).to(device)
    norm = Norm((torch.rand(dim, generator=dice) + 0.5).to(device, dtype), 1e-6) if norms else None
    for backend in (portable, ours):
        backend.sinks = [torch.linspace(-3, 3, heads, device=device)] * 2 if sinks else ()
        layout_of = layout
        if backend is portable:
            table = layout.block_table.clamp(max=blocks - 1)
            layout_of = StepLayout(
                layout.positions, layout.query_start, layout.kv_len, table, layout.blocks, layout.offsets, layout.decode
            )
        backend.prepare(layout_of, angles.cos(), angles.sin())
    for layer in range(2):
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=dice).to(device, dtype)
        want, got = (backend.attend(layer, qkv, norm, norm) for backend in (portable, ours))
        assert got.dtype == dtype
        assert (got - want).abs().max().item() < within
    for want, got in zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True):
        assert torch.equal(want.view(torch.uint8), got.view(torch.uint8))


steps = st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 5, 9]), st.integers(0, 20)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    steps, st.sampled_from([1, 3, 4, 16]), st.sampled_from([None, 1, 3, 8]), st.sampled_from([(4, 4), (6, 1), (5, 1)])
)
def test_the_same_attention_as_the_portable_one(
    step: list[tuple[int, int]], size: int, window: int | None, heads: tuple[int, int]
) -> None:
    """Decodes, prompts and pieces of prompts in one step, blocks of any size, full and sliding layers, groups with and
    without tensor cores."""
    layout = make_layout([count for count, _ in step], [before for _, before in step], size, CPU)
    shape = (*heads, 8, size)
    compare(fake_flashinfer.LIBRARY, torch.float32, torch.float32, shape, layout, (None, window), sinks=heads == (6, 1))


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
def test_bf16_over_bf16_and_fp8_keys(kv_dtype: torch.dtype, norms: bool) -> None:
    """An fp8 cache is read as it was written: a prompt attends to its own keys as stored, in both backends alike, but
    for a whole prompt, which the portable one attends to before they are rounded."""
    layout = make_layout([1, 1, 3, 4], [7, 0, 9, 5], 4, CPU)
    compare(
        fake_flashinfer.LIBRARY, torch.bfloat16, kv_dtype, (4, 2, 8, 4), layout, (None, 4), norms=norms, within=0.04
    )


def test_page_tables() -> None:
    """Two sequences of 5 and 4 positions and one of 9 in blocks of 4: indptr, indices and the last page's share."""
    layout = StepLayout(
        positions=torch.zeros(3), query_start=[0, 1, 2, 3], kv_len=[5, 4, 9],
        block_table=torch.tensor([[7, 1, 99], [4, 99, 99], [3, 0, 8]]), blocks=torch.zeros(3), offsets=torch.zeros(3),
        decode=3,
    )  # fmt: skip
    indptr, indices, last = pages(layout.block_table, contexts(layout), 4, CPU)
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 2, 3, 6], [7, 1, 4, 3, 0, 8], [1, 4, 1])
    rows, lengths = contexts(layout)
    indptr, indices, last = pages(layout.block_table, (rows[1:2], lengths[1:2]), 4, CPU)
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 1], [4], [4])


def test_tokens_by_themselves() -> None:
    """A decode, a prompt's last two tokens, a whole prompt of three: each token's row and what it knows."""
    rows, lengths = contexts_of_tokens(make_layout([1, 2, 3], [7, 5, 0], 4, CPU))
    assert (rows.tolist(), lengths.tolist()) == ([0, 1, 1, 2, 2, 2], [8, 6, 7, 1, 2, 3])


def parts_equal_the_whole(kind: type[FlashInferAttention]) -> bool:
    """A prompt of five tokens beside a decode, and the same tokens one by one: whether all bits are the same."""
    layout, found = make_layout([1, 5], [7, 2], 4, CPU), []
    qkv, angles = torch.randn(6, 64, generator=torch.Generator().manual_seed(3)), torch.zeros(6, 1, 4)
    steps = [(0, 6), *((at, at + 1) for at in range(6))]
    for some in (steps[:1], steps[1:]):
        cache, rows = make_cache(2, 8, 9, 4, torch.float32, CPU), []
        attention = kind(cache, (None, 3), 1.0, 4, torch.float32, fake_flashinfer.LIBRARY)
        for first, last in some:
            mine = slice(first, last)
            step = layout if last == 6 and first == 0 else replace(
                layout, positions=layout.positions[mine], query_start=[0, 1], decode=1,
                kv_len=[int(layout.positions[first]) + 1], block_table=layout.block_table[min(first, 1)][None],
                blocks=layout.blocks[mine], offsets=layout.offsets[mine],
            )  # fmt: skip
            attention.prepare(step, angles[mine].cos(), angles[mine].sin())
            rows.append(torch.stack([attention.attend(layer, qkv[mine], None, None) for layer in (0, 1)], 1))
        found.append(torch.cat(rows))
    return torch.equal(*found)


def test_a_row_by_itself_has_the_same_bits_in_any_step() -> None:
    """The stand-in's bits depend on the batch, as the library's do, but of a tensor-core decode that is not split."""
    assert parts_equal_the_whole(FlashInferRows)
    assert not parts_equal_the_whole(FlashInferAttention)


def test_a_step_must_be_planned() -> None:
    cache = make_cache(1, 8, 2, 4, torch.float32, CPU)
    backend = FlashInferAttention(cache, (None, None), 1.0, 1, torch.float32, fake_flashinfer.LIBRARY)
    assert isinstance(backend, Capturable)
    assert not isinstance(TorchAttention(cache, (None, None), 1.0), Capturable)
    for each in (backend, backend.captured([(1, 0)], 1)[1, 0]):
        with pytest.raises(RuntimeError, match="before plan"):
            each.attend(0, torch.ones(1, 24), None, None)


def padded(layout: StepLayout, decodes: int, rows: int, scratch: int, size: int) -> tuple[StepLayout, Tensor]:
    """The layout as engine/step/cuda_graphs.py gives it to a recorded step, and where its rows are."""
    decode, tokens, sequences = layout.decode, len(layout.positions), len(layout.kv_len)
    at = torch.cat((torch.arange(decode), torch.arange(decodes, decodes + tokens - decode)))

    def spread(values: Tensor, padding: int) -> Tensor:
        out = torch.full((decodes + rows,), padding)
        out[at] = values
        return out

    absent = MOST_PROMPTS - (sequences - decode)
    starts = [*range(decodes), *(start + decodes - decode for start in layout.query_start[decode:])]
    lengths = [*layout.kv_len[:decode], *[1] * (decodes - decode), *layout.kv_len[decode:], *[1] * absent]
    width = max(layout.block_table.shape[1], -(-rows // size))
    table = torch.full((decodes + MOST_PROMPTS + 1, width), scratch)
    table[:decode, : layout.block_table.shape[1]] = layout.block_table[:decode]
    table[decodes : decodes + sequences - decode, : layout.block_table.shape[1]] = layout.block_table[decode:]
    made = StepLayout(
        spread(layout.positions, 0), starts + starts[-1:] * absent, lengths, table, spread(layout.blocks, scratch),
        spread(layout.offsets, 0), decodes,
    )  # fmt: skip
    return made, at


def full(decodes: int, rows: int, scratch: int, size: int) -> StepLayout:
    """The layout of a capture: all rows, of one prompt."""
    starts = [*range(decodes + 1), *[decodes + rows] * MOST_PROMPTS]
    table = torch.full((decodes + MOST_PROMPTS + 1, -(-rows // size)), scratch)
    lengths = [1] * decodes + [rows] + [1] * (MOST_PROMPTS - 1)
    zeros = torch.zeros(decodes + rows, dtype=torch.int64)
    return StepLayout(zeros, starts, lengths, table, zeros + scratch, zeros, decodes)


@settings(max_examples=40, deadline=None)
@given(steps.filter(lambda step: any(count > 1 for count, _ in step)), st.integers(0, 3), st.integers(0, 9), st.data())
def test_a_recorded_step_with_prompts(
    step: list[tuple[int, int]], more_decodes: int, more_rows: int, data: st.DataObject
) -> None:
    """The captured backend, planned for all rows and then for a step with padding, attends as the portable one does;
    rows after the last prompt are zero although another step had used them; plans launch what was captured."""
    kind = data.draw(st.sampled_from([FlashInferAttention, FlashInferRows]))
    layout, size = make_layout([count for count, _ in step], [before for _, before in step], 4, CPU), 4
    layout.block_table[layout.block_table == 10**6] = 0
    scratch, tokens = int(layout.block_table.max()) + 1, len(layout.positions)
    decodes, rows = max(1, layout.decode) + more_decodes, tokens - layout.decode + more_rows
    caches = [make_cache(2, 8, scratch + 1, size, torch.float32, CPU) for _ in range(2)]
    dice = torch.Generator().manual_seed(3)
    qkv, angle = torch.randn(tokens, 64, generator=dice), torch.rand(tokens, 1, 4, generator=dice)
    plain = TorchAttention(caches[0], (None, 3), 0.3)
    plain.prepare(layout, angle.cos(), angle.sin())
    backend = kind(caches[1], (None, 3), 0.3, 4, torch.float32, fake_flashinfer.LIBRARY)
    shape = decodes, rows
    recorded = backend.captured([(decodes, 0), shape], 100)[shape]
    made, at = padded(layout, decodes, rows, scratch, size)
    wide, angles = torch.randn(sum(shape), 64, generator=dice), torch.zeros(sum(shape), 1, 4)
    cos, sin = angles.cos(), angles.sin()
    recorded.prepare(full(decodes, rows, scratch, size), cos, sin)
    recorded.attend(0, wide, None, None)
    wide[at], cos[at], sin[at] = qkv, angle.cos(), angle.sin()
    recorded.prepare(made, cos, sin)
    assert recorded.replayable
    for layer in range(2):
        want = plain.attend(layer, qkv, None, None)
        got = replayed(recorded, layer, wide)
        assert (got[at] - want).abs().max() < 1e-5
        if kind is FlashInferAttention:
            assert not got[decodes + tokens - layout.decode :].any()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=4), st.data())
def test_a_recorded_step_with_drafts(step: list[tuple[int, int]], data: st.DataObject) -> None:
    """Each sequence is one prompt of its last token and its drafts, of the shape that has no decodes: as the portable
    backend attends, where each row is a decode."""
    kind = data.draw(st.sampled_from([FlashInferAttention, FlashInferRows]))
    layout, size = make_layout([count for count, _ in step], [before for _, before in step], 4, CPU), 4
    layout = replace(layout, decode=0)
    layout.block_table[layout.block_table == 10**6] = 0
    scratch, tokens = int(layout.block_table.max()) + 1, len(layout.positions)
    rows = max(2 * len(step), 1 << tokens.bit_length())
    caches = [make_cache(2, 8, scratch + 1, size, torch.float32, CPU) for _ in range(2)]
    dice = torch.Generator().manual_seed(3)
    qkv, angle = torch.randn(tokens, 64, generator=dice), torch.rand(tokens, 1, 4, generator=dice)
    plain = TorchAttention(caches[0], (None, 3), 0.3)
    plain.prepare(layout, angle.cos(), angle.sin())
    backend = kind(caches[1], (None, 3), 0.3, 4, torch.float32, fake_flashinfer.LIBRARY)
    recorded = backend.captured([(1, 0), (1, rows), (0, rows)], 100)[0, rows]
    absent = prompts_of((0, rows)) - len(step)
    starts, wide = [*layout.query_start, *[tokens] * absent], torch.randn(rows, 64, generator=dice)
    table = torch.full((prompts_of((0, rows)) + 1, max(layout.block_table.shape[1], -(-rows // size))), scratch)
    full_starts, zeros = [0] + [rows] * (len(step) + absent), torch.zeros(rows, dtype=torch.int64)
    lengths = [rows] + [1] * (len(step) + absent - 1)
    cos, sin = torch.ones(rows, 1, 4), torch.zeros(rows, 1, 4)
    recorded.prepare(StepLayout(zeros, full_starts, lengths, table, zeros + scratch, zeros, 0), cos, sin)
    recorded.attend(0, wide, None, None)
    table[: len(step), : layout.block_table.shape[1]] = layout.block_table
    wide[:tokens], cos[:tokens], sin[:tokens] = qkv, angle.cos(), angle.sin()
    blocks, offsets = zeros + scratch, zeros.clone()
    blocks[:tokens], offsets[:tokens] = layout.blocks, layout.offsets
    recorded.prepare(StepLayout(zeros, starts, layout.kv_len + [1] * absent, table, blocks, offsets, 0), cos, sin)
    assert recorded.replayable
    for layer in range(2):
        got = replayed(recorded, layer, wide)
        assert (got[:tokens] - plain.attend(layer, qkv, None, None)).abs().max() < 1e-5


def replayed(backend: Any, layer: int, qkv: Tensor) -> Tensor:
    """attend as a graph repeats it: with the number of rows of the capture, which Python then compared."""
    with patch.object(fake_flashinfer, "MATCHES", False):
        out: Tensor = backend.attend(layer, qkv, None, None)
    return out


def test_a_step_of_padding_may_be_longer_than_a_sequence() -> None:
    """Its one prompt has all rows of the shape, for any max_model_len."""
    cache = make_cache(2, 8, 9, 4, torch.float32, CPU)
    backend = FlashInferAttention(cache, (None,), 0.3, 4, torch.float32, fake_flashinfer.LIBRARY)
    recorded = backend.captured([(1, 0), (1, 64)], 2)[1, 64]
    recorded.prepare(full(1, 64, 8, 4), torch.ones(65, 1, 4), torch.zeros(65, 1, 4))
    assert recorded.replayable


def test_a_plan_that_launches_something_else_is_not_replayed() -> None:
    cache = make_cache(1, 8, 3, 4, torch.float32, CPU)
    backend = FlashInferAttention(cache, (None, None), 1.0, 1, torch.float32, fake_flashinfer.LIBRARY)
    recorded: Any = backend.captured([(1, 0), (1, 8)], 4)[1, 8]
    for plan, replayable in (([1, 2], True), ([1, 2], True), ([1, 3], False), ([1, 2], True)):
        with patch.object(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "planned", plan):
            recorded.prepare(full(1, 8, 2, 4), torch.ones(9, 1, 4), torch.ones(9, 1, 4))
        assert recorded.replayable == replayable


def test_where_it_cannot_serve() -> None:
    bf16 = torch.bfloat16
    assert unfit(CUDA, (9, 0), bf16, 128) is None
    for reason, arguments in {
        "CUDA device, not cpu": (CPU, (0, 0), bf16, 128),
        "8.0, this GPU has 7.5": (CUDA, (7, 5), bf16, 128),
        "not float32": (CUDA, (9, 0), torch.float32, 128),
        "64, 128, 256, not 80": (CUDA, (9, 0), bf16, 80),
    }.items():
        assert reason in str(unfit(*arguments))


def _parameters(tree: ast.Module, name: str, method: str) -> set[str]:
    """Names that `name.method` takes; where it only hands **kwargs on, those of `_method_impl`, which gets them."""
    found = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    functions = {n.name: n.args for n in found.body if isinstance(n, ast.FunctionDef)}  # the last of overloads
    taken = functions[method]
    if taken.kwarg is not None:
        taken = functions[f"_{method}_impl"]
    return {a.arg for a in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)}


@pytest.mark.parametrize("name", ["BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"])
def test_the_installed_library_takes_what_is_given(name: str) -> None:
    """The stand-in's arguments are the library's. Read from its source: importing it wants a GPU's libraries."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("flashinfer is not installed: laddertron[cuda]")
    source = Path(spec.submodule_search_locations[0]) / ("decode.py" if "Decode" in name else "prefill.py")
    tree = ast.parse(source.read_text())
    for method in ("__init__", "plan", "run"):
        used = set(inspect.signature(getattr(fake_flashinfer.LIBRARY.__dict__[name], method)).parameters)
        assert used <= _parameters(tree, name, method), method
    assert "self._plan_info = " in source.read_text()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (7, 1)])
def test_on_a_gpu(heads: tuple[int, int], kv_dtype: torch.dtype) -> None:
    """The library itself against the portable backend, on the same device."""
    library = pytest.importorskip("flashinfer")
    layout = make_layout([1, 1, 1, 17, 40, 5], [0, 63, 200, 0, 33, 64], 16, CUDA)
    shape = (*heads, 128, 16)
    # The portable backend reads a whole prompt's values as they were before fp8: half a step of values up to 4 apart.
    within = 0.05 if kv_dtype == torch.bfloat16 else 0.3
    compare(library, torch.bfloat16, kv_dtype, shape, layout, (None, 50), CUDA, norms=True, within=within)


def in_chunks(library: Any, device: torch.device, dtype: torch.dtype, cuts: list[int]) -> torch.Tensor:
    """A sequence of 200 tokens in chunks that end at `cuts`, each beside another sequence's prompt of five."""
    cache = make_cache(2, 128, 64, 16, dtype, device)
    ours = FlashInferRows(cache, (None, None), 0.1, 8, dtype, library)
    dice = torch.Generator().manual_seed(4)
    qkv = torch.randn(205, 12 * 128, generator=dice).to(device, dtype)
    angles = torch.rand(205, 1, 64, generator=dice).to(device)
    table, outs = torch.arange(64, device=device).view(2, 32), []
    for first, last in itertools.pairwise([0, *cuts, 200]):
        count = last - first
        rows = torch.tensor([*range(first, last), *range(200, 205)], device=device)
        positions = torch.tensor([*range(first, last), *range(5)], device=device)
        blocks = positions // 16
        blocks[count:] += 32
        starts, known = [0, count, count + 5], [last, 5]
        ours.prepare(
            StepLayout(positions, starts, known, table, blocks, positions % 16, int(count == 1)),
            angles[rows].cos(),
            angles[rows].sin(),
        )
        outs.append(ours.attend(0, qkv[rows], None, None)[:count])
    return torch.cat(outs)


CHUNKS = [[64, 129], [1, 7, 72], list(range(1, 200))]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_by_themselves_on_a_gpu(dtype: torch.dtype) -> None:
    """The same bits from the library, a prompt whole, in chunks and token by token, and from the products' kernel,
    rows alone and among others."""
    library = pytest.importorskip("flashinfer")
    from laddertron.models.cuda.ops import RowOps

    whole = in_chunks(library, CUDA, dtype, [])
    for cuts in CHUNKS:
        assert torch.equal(in_chunks(library, CUDA, dtype, cuts), whole), cuts
    rows = torch.randn(300, 1024, device=CUDA, dtype=dtype)
    product = RowOps().product(torch.randn(512, 1024, device=CUDA, dtype=dtype), None)
    every = product(rows)
    for count in (1, 2, 7, 64, 65):
        assert torch.equal(product(rows[17 : 17 + count].clone()), every[17 : 17 + count]), count
