"""The CPU's own kernels against the torch operators that say what they mean, over shapes that fit nothing evenly."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laddertron.models.attention import StepLayout, TorchAttention
from laddertron.models.cpu import attention as cpu_attention
from laddertron.models.cpu.attention import CpuAttention, fits_kernels
from laddertron.models.cpu.kernels import Kernels
from laddertron.models.cpu.ops import CpuOps
from laddertron.models.ops import Norm, TorchOps, Tree
from laddertron.models.pages import HugePages
from laddertron.topology.hardware import cpu_tier
from laddertron.topology.transport import native
from torch import Tensor

KERNELS = Kernels.find()
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="the C kernels were not built (no compiler)")
TYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = TYPES[1:]


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def assert_near(got: Tensor, want: Tensor) -> None:
    """Within a few roundings of the largest value: fp32 sums in another order, bf16 has 8 bits, fp16 11."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    tolerance = {torch.float32: 2e-5, torch.float16: 3e-3}.get(got.dtype, 2e-2)
    error = (got.float() - want.float()).abs().max().item()
    assert error <= tolerance * want.float().abs().max().item(), error


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (70, 66), (32, 96), (16, 2), (10, 34), (1, 130), (10, 2048)])
@pytest.mark.parametrize("tokens", [1, 2, 11, 12, 13, 17, 100, 205])
@needs_kernels
def test_products_mean_what_torch_means(dtype: torch.dtype, outputs: int, inputs: int, tokens: int) -> None:
    """Plain, with a bias, behind a norm, gated: rows that fill no block, tokens that fill no tile."""
    fast, plain = CpuOps(KERNELS), TorchOps()
    weight, bias = normal(outputs, inputs, dtype=dtype), normal(outputs, dtype=dtype)
    norm = Norm(normal(inputs, dtype=dtype), 1e-5)
    x = normal(tokens, inputs, dtype=dtype)
    for b in (None, bias):
        for n in (None, norm):
            assert_near(fast.product(weight, b, n)(x), plain.product(weight, b, n)(x))
            if outputs % 2 == 0:
                assert_near(fast.gated_product(weight, b, n)(x), plain.gated_product(weight, b, n)(x))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [32, 70, 7])
@needs_kernels
def test_a_tied_table_serves_head_and_lookup(dtype: torch.dtype, rows: int) -> None:
    """One packed copy of 16-bit values; what is not packed stays the caller's."""
    assert KERNELS is not None
    table, norm = normal(rows, 66, dtype=dtype), Norm(normal(66, dtype=dtype), 1e-5)
    x, ids = normal(5, 66, dtype=dtype), torch.tensor([rows - 1, 0, 3, 3, rows // 2])
    head, lookup = CpuOps(KERNELS).tied(table, norm)
    assert_near(head(x), TorchOps().product(table, None, norm)(x))
    if dtype in KERNELS.served:
        assert lookup is not None
        assert torch.equal(lookup(ids), table[ids])
        assert lookup(ids).is_contiguous()
    else:
        assert lookup is None


@needs_kernels
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("inputs", [64, 2048])
def test_a_token_does_not_notice_its_neighbours(dtype: torch.dtype, inputs: int) -> None:
    """Products by the kernel: a token alone, among 5, among 40, behind 128 gives the same bits; also where many tokens
    are copied apart first (2048 inputs)."""
    assert KERNELS is not None
    if dtype not in KERNELS.served:
        pytest.skip(f"products in {dtype} are not the kernel's in tier {cpu_tier.current()}")
    weight, norm = normal(96, inputs, dtype=dtype), Norm(normal(inputs, dtype=dtype), 1e-5)
    x = normal(40, inputs, dtype=dtype)
    for product in (CpuOps(KERNELS).gated_product(weight, None, norm), CpuOps(KERNELS).product(weight, None)):
        together = product(x)
        for row in range(40):
            assert torch.equal(product(x[row : row + 1])[0], together[row])
        assert torch.equal(product(x[3:8]), together[3:8])
        for count in range(2, 14):
            assert torch.equal(product(x[:count]), together[:count])
        assert torch.equal(product(torch.cat((normal(128, inputs, dtype=dtype), x)))[128:], together)


@needs_kernels
def test_without_the_right_to_use_amx_another_loop_computes(caplog: pytest.LogCaptureFixture) -> None:
    """Where arch_prctl refuses, which kernels_set_tier says: one line, and the products go on."""
    library = native.load("laddertron.models.cpu._kernels")

    class Refused:
        def __getattr__(self, name: str) -> Any:
            return (lambda tier: 0) if name == "kernels_set_tier" else getattr(library, name)

    kernels: Any = Kernels(Refused())  # type: ignore[arg-type]
    assert "AMX is not to be had" in caplog.text
    assert kernels.vector_floats > 0


@needs_kernels
@pytest.mark.parametrize("form", [*TYPES, "int8"])
@pytest.mark.parametrize("outputs", [70, 10])
@pytest.mark.parametrize("tokens", [1, 2, 5, 13])
def test_a_tree_of_sums_is_the_same_however_ranks_share_it(form: Any, outputs: int, tokens: int) -> None:
    """One rank's 16 leaves give the bits of 2, 4, 8 and 16 ranks' sums, added two by two."""
    kernels = Kernels.find(deterministic=True)
    assert kernels is not None
    if form == "int8" and not kernels.int8:
        pytest.skip(f"no int8 in tier {cpu_tier.current()}")
    dtype, ops = (torch.bfloat16, CpuOps(kernels, int8=True)) if form == "int8" else (form, CpuOps(kernels))
    weight, bias, x = (normal(*shape, dtype=dtype) for shape in ((outputs, 96), (outputs,), (tokens, 96)))
    whole = ops.product(weight, bias, tree=Tree(16, 0.22))(x)
    assert_near(whole, TorchOps().product(weight, bias, tree=Tree(16, 0.22))(x))
    for ranks in (2, 4, 8, 16):
        parts = zip(weight.chunk(ranks, 1), x.chunk(ranks, 1), [bias, *[None] * (ranks - 1)], strict=True)
        sums = torch.stack([ops.product(w, b, tree=Tree(16 // ranks, 0.22))(a.contiguous()) for w, a, b in parts])
        while len(sums) > 1:
            sums = sums[0::2] + sums[1::2]
        assert torch.equal(sums[0], whole), ranks
    product = ops.product(weight, bias, tree=Tree(16, 0.22))
    assert all(torch.equal(product(x[row : row + 1])[0], whole[row]) for row in range(tokens))


@needs_kernels
def test_every_half_is_read_and_written_as_torch_does() -> None:
    """All 65,536 values of either 16-bit type through norm and gate: what torch's own conversions yield, or NaN."""
    codes = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in HALVES:
        values = codes.view(dtype).view(64, -1)
        up = torch.ones_like(values)
        got = CpuOps(KERNELS).gate_kernel()(torch.cat((values, up), 1))
        want = torch.nn.functional.silu(values.float()).to(dtype)
        assert torch.equal(got.isnan(), want.isnan() | (values == -float("inf")))
        finite = want.isfinite() & got.isfinite()
        step = {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
        off = (got.float() - want.float()).abs()[finite]
        assert (off <= step * want.float().abs()[finite] + 2**-24).all()


@needs_kernels
def test_threads_share_the_work_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of many tokens and the attention of a step on one thread and on three: the same bits."""
    assert KERNELS is not None
    monkeypatch.setattr(cpu_attention, "SHARED_WORK", 0)
    weight, norm = normal(200, 64, dtype=torch.bfloat16), Norm(normal(64, dtype=torch.bfloat16), 1e-5)
    x, qkv = normal(130, 64, dtype=torch.bfloat16), normal(3, 8 * 32, dtype=torch.bfloat16)
    stored = cache_of(4, 2, 16, 32, torch.bfloat16)
    layout = StepLayout(
        torch.tensor([9, 3, 12]), [0, 1, 2, 3], [10, 4, 13], torch.tensor([[1], [2], [3]]), torch.tensor([1, 2, 3]),
        torch.tensor([9, 3, 12]), 3,
    )  # fmt: skip
    answers = []
    for threads in (1, 3):
        monkeypatch.setattr(KERNELS, "threads", threads)
        ops, attention = CpuOps(KERNELS), CpuAttention(stored, (None,), 0.2, KERNELS)
        attention.prepare(layout, torch.ones(3, 1, 16), torch.zeros(3, 1, 16))
        answers.append((ops.gated_product(weight, None, norm)(x), attention.attend(0, qkv, None, None)))
    assert all(torch.equal(one, three) for one, three in zip(*answers, strict=True))


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_what_is_no_number_stays_none(value: float) -> None:
    """A NaN or Inf among the inputs must reach the outputs of its token, and of no other."""
    weight, norm = normal(64, 64, dtype=torch.bfloat16), Norm(normal(64, dtype=torch.bfloat16), 1e-5)
    x = normal(3, 64, dtype=torch.bfloat16)
    x[1, 7] = value
    for made in (CpuOps(KERNELS).product(weight, None), CpuOps(KERNELS).gated_product(weight, None, norm)):
        y = made(x)
        assert torch.isfinite(y[0]).all()
        assert torch.isfinite(y[2]).all()
        if value != 1e38:
            assert not torch.isfinite(y[1]).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_without_the_library_torch_takes_over(dtype: torch.dtype) -> None:
    fast, plain = CpuOps(None), TorchOps()
    weight, norm, x = normal(70, 66, dtype=dtype), Norm(normal(66, dtype=dtype), 1e-6), normal(5, 66, dtype=dtype)
    assert_near(fast.product(weight, None, norm)(x), plain.product(weight, None, norm)(x))
    assert_near(fast.gated_product(weight, None, norm)(x), plain.gated_product(weight, None, norm)(x))


def test_a_library_that_was_not_built_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda module: None)
    assert Kernels.find() is None


def test_huge_pages_give_zeros_that_do_not_overlap() -> None:
    """Three pieces, one larger than a chunk; each zero, aligned, and its own."""
    pages = HugePages()
    pieces = [pages.take(size) for size in (100, HugePages.CHUNK + 1, 7)]
    assert [len(piece) for piece in pieces] == [100, HugePages.CHUNK + 1, 7]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        assert not piece.any()
        piece.fill_(number + 1)
    assert [int(piece[0]) for piece in pieces] == [1, 2, 3]
    del pages
    assert int(pieces[1][-1]) == 2


def cache_of(blocks: int, kv_heads: int, block_size: int, dim: int, dtype: torch.dtype) -> Any:
    stored = [normal(blocks, kv_heads, block_size, dim, dtype=dtype) for _ in range(2)]
    return SimpleNamespace(
        block_size=block_size, num_blocks=blocks, keys=stored[:1], values=stored[1:], write=None, scales=None
    )


SHAPES = [  # heads, KV heads, dim, rotary dims, block size, window, QK norm
    (8, 4, 64, 64, 16, None, False),
    (8, 8, 32, 32, 16, 20, True),
    (6, 2, 40, 40, 4, None, True),
    (6, 1, 128, 64, 7, 9, False),
    (16, 2, 256, 128, 1, None, False),
    (10, 2, 96, 24, 33, 50, True),
    (4, 2, 288, 288, 16, None, False),
]


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decodes_attend_as_torch_does(dtype: torch.dtype, shape: tuple[Any, ...]) -> None:
    """Contexts of 1 to 90 positions in scattered blocks: the same answers, and the same keys and values stored."""
    heads, kv_heads, dim, rotary, size, window, qk_norm = shape
    assert KERNELS is not None
    lengths = [1, 2, 15, 16, 17, 33, 90, 64]
    print("seed 5")
    chance = random.Random(5)
    need = [-(-length // size) for length in lengths]
    blocks = list(range(1, sum(need) + 1))
    chance.shuffle(blocks)
    table = torch.zeros(len(lengths), max(need), dtype=torch.int64)
    for row, count in enumerate(need):
        table[row, :count] = torch.tensor([blocks.pop() for _ in range(count)])
    positions = torch.tensor(lengths) - 1
    rows = torch.arange(len(lengths))
    layout = StepLayout(
        positions, list(range(len(lengths) + 1)), lengths, table, table[rows, positions // size], positions % size, 8
    )
    angles = torch.randn(len(lengths), 1, rotary // 2)
    qkv = normal(len(lengths), (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = (Norm(normal(dim, dtype=dtype), 1e-5), Norm(normal(dim, dtype=dtype), 1e-5)) if qk_norm else (None, None)
    cache = cache_of(sum(need) + 1, kv_heads, size, dim, dtype)
    assert_attend_alike(cache, window, layout, angles, qkv, norms, 0, sinks=heads == 6)


def assert_attend_alike(
    cache: Any,
    window: int | None,
    layout: StepLayout,
    angles: Tensor,
    qkv: Tensor,
    norms: tuple[Any, Any],
    first: int,
    sinks: bool,
) -> None:
    """Torch's attention and the kernels': the same answers, and the same stored in the blocks from `first` on."""
    assert KERNELS is not None
    writable(cache)
    keys, values = cache.keys[0].clone(), cache.values[0].clone()
    answers, stored = [], []
    heads = qkv.shape[1] // cache.keys[0].shape[-1] - 2 * cache.keys[0].shape[1]
    backends: list[TorchAttention] = [
        TorchAttention(cache, (window,), cache.keys[0].shape[-1] ** -0.5),
        CpuAttention(cache, (window,), cache.keys[0].shape[-1] ** -0.5, KERNELS),
    ]
    for backend in backends:
        backend.sinks = [torch.linspace(-3, 3, heads)] if sinks else []
        cache.keys[0], cache.values[0] = keys.clone(), values.clone()
        backend.prepare(layout, angles.cos(), angles.sin())
        answers.append(backend.attend(0, qkv, *norms))
        stored.append((cache.keys[0][first:], cache.values[0][first:]))
    assert_near(answers[1], answers[0])
    assert_near(stored[1][0], stored[0][0])
    assert torch.equal(stored[1][1], stored[0][1])


def prompt_layout(chunks: list[tuple[int, int]], size: int) -> StepLayout:
    """Sequences with tokens [first, last) each, in scattered blocks; those of one token come first."""
    chance = random.Random(7)
    need = [-(-last // size) for _, last in chunks]
    blocks = list(range(1, sum(need) + 1))
    chance.shuffle(blocks)
    table = torch.zeros(len(chunks), max(need), dtype=torch.int64)
    for row, count in enumerate(need):
        table[row, :count] = torch.tensor([blocks.pop() for _ in range(count)])
    positions = torch.tensor([at for first, last in chunks for at in range(first, last)])
    rows = torch.tensor([row for row, (first, last) in enumerate(chunks) for _ in range(first, last)])
    starts = [0]
    for first, last in chunks:
        starts.append(starts[-1] + last - first)
    decode = sum(last - first == 1 for first, last in chunks)
    return StepLayout(
        positions, starts, [last for _, last in chunks], table, table[rows, positions // size], positions % size, decode
    )


def writable(cache: Any) -> Any:
    def write(layer: int, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        cache.keys[layer][blocks, :, offsets], cache.values[layer][blocks, :, offsets] = k, v

    cache.write = write
    return cache


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (15, 1, 64, 64, 16, 70, False), (130, 1, 32, 32, 16, None, False)], ids=str)
def test_prompts_attend_as_torch_does(dtype: torch.dtype, shape: tuple[Any, ...]) -> None:
    """Two decodes, whole prompts and chunks in the middle of long ones, in scattered blocks, beside other sequences'
    NaNs: the same answers, and the same keys and values stored."""
    heads, kv_heads, dim, rotary, size, window, qk_norm = shape
    assert KERNELS is not None
    layout = prompt_layout([(4, 5), (70, 71), (0, 2), (0, 64), (0, 131), (63, 66), (150, 300), (17, 80)], size)
    tokens = layout.query_start[-1]
    angles = torch.randn(tokens, 1, rotary // 2)
    qkv = normal(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = (Norm(normal(dim, dtype=dtype), 1e-5), Norm(normal(dim, dtype=dtype), 1e-5)) if qk_norm else (None, None)
    cache = cache_of(int(layout.block_table.max()) + 1, kv_heads, size, dim, dtype)
    cache.keys[0][0], cache.values[0][0] = float("nan"), float("nan")  # nobody's block: the table's padding
    assert_attend_alike(cache, window, layout, angles, qkv, norms, 1, sinks=heads == 6)


@needs_kernels
@pytest.mark.parametrize("window", [None, 33])
def test_how_a_prompt_is_chunked_changes_no_bit(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 200 tokens whole, on one thread and on three, and in chunks of 7, 90 and 103, beside another one."""
    assert KERNELS is not None
    if not KERNELS.has_prompts(64):
        pytest.skip("this processor's prompts are torch's")
    monkeypatch.setattr(KERNELS, "deterministic", True)  # with AMX prompts are torch's otherwise
    qkv, angles = normal(200, 8 * 64, dtype=torch.bfloat16), torch.randn(200, 1, 32)
    other = normal(40, 8 * 64, dtype=torch.bfloat16)

    def attend(chunks: list[tuple[int, int]], threads: int, beside: bool) -> Tensor:
        monkeypatch.setattr(KERNELS, "threads", threads)
        cache, parts = cache_of(20, 2, 16, 64, torch.bfloat16), []
        for first, last in chunks:
            layout = prompt_layout([(first, last), (0, 40)] if beside else [(first, last)], 16)
            table = torch.arange(16).repeat(len(layout.kv_len), 1)
            table[1:, :4] = torch.arange(16, 20)
            layout = replace(layout, block_table=table)
            turn = torch.cat((angles[first:last], angles[:40])) if beside else angles[first:last]
            backend = CpuAttention(cache, (window,), 0.125, KERNELS)
            backend.prepare(layout, turn.cos(), turn.sin())
            rows = torch.cat((qkv[first:last], other)) if beside else qkv[first:last].clone()
            parts.append(backend.attend(0, rows, None, None)[: last - first])
        return torch.cat(parts)

    whole = attend([(0, 200)], 1, False)
    assert torch.isfinite(whole).all()
    assert torch.equal(attend([(0, 200)], 3, False), whole)
    assert torch.equal(attend([(0, 7), (7, 97), (97, 200)], 3, True), whole)


@needs_kernels
def test_a_poisoned_context_answers_nan() -> None:
    """NaN in one sequence's stored keys: its own answer is NaN, so that the sampler sees it; its neighbour's is not."""
    assert KERNELS is not None
    for dtype in TYPES:
        cache = cache_of(4, 2, 16, 64, dtype)
        cache.keys[0][1, 0, 3, 5] = float("nan")
        layout = StepLayout(
            torch.tensor([9, 9]), [0, 1, 2], [10, 10], torch.tensor([[1], [2]]), torch.tensor([1, 2]),
            torch.tensor([9, 9]), 2,
        )  # fmt: skip
        backend = CpuAttention(cache, (None,), 0.125, KERNELS)
        backend.prepare(layout, torch.ones(2, 1, 32), torch.zeros(2, 1, 32))
        out = backend.attend(0, normal(2, 8 * 64, dtype=dtype), None, None)
        assert torch.isnan(out[0]).any()
        assert torch.isfinite(out[1]).all()
        prompts = prompt_layout([(8, 10), (8, 10)], 16)
        backend = CpuAttention(writable(cache), (None,), 0.125, KERNELS)
        backend.prepare(replace(prompts, block_table=layout.block_table), torch.ones(4, 1, 32), torch.zeros(4, 1, 32))
        out = backend.attend(0, normal(4, 8 * 64, dtype=dtype), None, None)
        assert torch.isnan(out[:2]).any(-1).all()
        assert torch.isfinite(out[2:]).all()


@needs_kernels
def test_what_the_kernels_do_not_serve_is_left_to_torch() -> None:
    assert fits_kernels(cache_of(1, 1, 4, 64, torch.float32), torch.float32, 64)
    assert not fits_kernels(cache_of(1, 1, 4, 64, torch.bfloat16), torch.float32, 64)
    assert fits_kernels(cache_of(1, 1, 4, 64, torch.float16), torch.float16, 64)
    assert not fits_kernels(cache_of(1, 1, 4, 64, torch.float64), torch.float64, 64)
    assert not fits_kernels(cache_of(1, 1, 4, 2048, torch.float32), torch.float32, 2048)
