"""The noise: known answers, golden values, and C equal to torch to the last bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from laddertron.engine.sampling.logits_shard import LIMIT, MASS, NOISE, ROW, Logits, NativeShard, TorchShard, make_shard
from laddertron.engine.sampling.philox import gumbel, logarithm, philox4x32
from laddertron.topology.transport import native

# Random123's known answers for philox4x32 with ten rounds: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

# (seed, output position, choice, vocabulary id) -> Gumbel. A change here changes every seeded answer ever given.
GOLDEN = [
    ((0, 0, 0, 0), "0x1.5b6c7ad999345p-4"),
    ((1, 0, 0, 0), "0x1.137735381c91cp+1"),
    ((2**64 - 1, 0, 0, 1), "0x1.b99a26756fcd5p-2"),
    ((0x0123456789ABCDEF, 7, 3, 128255), "0x1.027aab71e1691p+2"),
    ((42, 1000, 0, 31999), "0x1.a973a2e1e4ca9p+0"),
]


def signed(value: int) -> torch.Tensor:
    return torch.tensor([value if value < 2**63 else value - 2**64])


def native_shard(first: int = 0) -> NativeShard:
    library = native.load("laddertron.engine.sampling._noise")
    if library is None:
        pytest.skip("laddertron.engine.sampling._noise was not built (no C compiler): the torch fallback is in use")
    return NativeShard(library, first)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = map(signed, counter)
    out = philox4x32((signed(key[0]), signed(key[1])), (c0, c1, c2, c3))
    assert tuple(int(word) for word in out) == words


def plain_philox(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int]:
    """Two words by plain integers, written apart from the product's."""
    c, k = list(counter), [key % 2**32, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[0], c[1]


@pytest.mark.parametrize(("at", "golden"), GOLDEN)
def test_golden_noise(at: tuple[int, int, int, int], golden: str) -> None:
    """Key, counter and the way from bits to Gumbel are what the architecture defines, and stay so."""
    seed, position, choice, token = at
    value = float(gumbel(signed(seed), signed(position), signed(choice), signed(token)))
    assert value.hex() == golden
    high, low = plain_philox(seed, (position, token, choice, 0))
    uniform = ((high << 20 | low >> 12) + 0.5) / 2**52
    assert value == pytest.approx(-math.log(-math.log(uniform)), rel=1e-14)


@pytest.mark.parametrize(("at", "golden"), GOLDEN)
def test_golden_noise_in_c(at: tuple[int, int, int, int], golden: str) -> None:
    rows = np.zeros(1, ROW)
    rows["seed"], rows["position"], rows["choice"] = at[:3]
    assert float(native_shard().gumbel(rows, np.array([[at[3]]]))[0, 0]).hex() == golden


def test_logarithm_is_a_logarithm() -> None:
    """Within two units in the last place from the smallest uniform to the largest exponential."""
    edges = torch.tensor([2.0**-53, 1 - 2.0**-53, 36.7, 0.5, 2.0], dtype=torch.float64)
    dice = torch.Generator().manual_seed(1)
    x = torch.cat([torch.rand(100_000, dtype=torch.float64, generator=dice).clamp_min(2.0**-53), edges])
    error = (logarithm(x) - x.log()).abs() / x.log().abs()
    assert float(error.max()) < 5e-16


def test_noise_is_gumbel_distributed() -> None:
    """200,000 values in 64 bins of equal probability: chi-square within 5 standard deviations (fixed seed)."""
    n, bins = 200_000, 64
    values = gumbel(signed(20240607), signed(3), signed(0), torch.arange(n)).numpy()
    counts, _ = np.histogram(np.exp(-np.exp(-values)), bins, (0.0, 1.0))
    chi = float(((counts - n / bins) ** 2 / (n / bins)).sum())
    assert abs(chi - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))
    neighbours = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(neighbours) < 5 / math.sqrt(n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limited", [False, True])
def test_c_equals_torch(dtype: torch.dtype, limited: bool, run_seed: int) -> None:
    """Peaks, noisy bests, counts and candidates to the last bit (the search in C skips what cannot win), masses within
    1e-12; over flat and steep rows, hot and cold, widths that are no multiple of a vector, ties, -inf, one column."""
    rng = np.random.default_rng(run_seed)
    for columns in (1, 7, 256, 1000, 5001):
        for scale in (0.01, 1.0, 30.0, 1000.0):
            rows = 6
            x = torch.from_numpy(rng.standard_normal((rows, columns)) * scale).to(dtype)
            x[1] = x[1].round()
            x[2, rng.integers(0, columns, columns // 2)] = -torch.inf
            x[3] = 0.0
            if columns > 3:
                x[4, columns // 2], x[5, 1] = torch.nan, torch.inf
            first = int(rng.integers(0, 100_000))
            c, t = native_shard(first), TorchShard(first)
            mine = np.zeros(rows, ROW)
            mine["seed"] = rng.integers(0, 2**64, rows, dtype=np.uint64)
            mine["inv_temperature"] = rng.choice([0.3, 1.0, 5.0, 1e4], rows)
            mine["position"], mine["choice"] = rng.integers(0, 9, rows), rng.integers(0, 9, rows)
            mine["reference"] = np.nan
            mine["flags"] = NOISE | MASS
            if limited:
                mine["flags"] |= LIMIT
                mine["limit"], mine["limit_id"] = x[:, columns // 3].float().numpy(), first + columns // 3
            theirs, every = mine.copy(), np.arange(rows)
            c.scan(Logits(x), every, mine)
            t.scan(Logits(x), every, theirs)
            good = theirs["bad"] == 0
            assert (mine["bad"] == theirs["bad"]).all()
            for name in ("peak", "peak_id", "best", "best_id", "count"):
                assert (mine[name] == theirs[name])[good].all(), (name, columns, scale)
            np.testing.assert_allclose(mine["mass"][good], theirs["mass"][good], rtol=1e-12)
            for k in {1, min(5, columns), columns}:
                finite = every[:4]
                assert (c.top(Logits(x), finite, k) == t.top(Logits(x), finite, k)).all()
            ids = rng.integers(0, 2**31, (rows, 3))
            assert (c.gumbel(mine, ids) == t.gumbel(mine, ids)).all()


def test_a_build_without_c_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda module: None)
    assert isinstance(make_shard(0, torch.device("cpu")), TorchShard)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_equals_cpu(dtype: torch.dtype) -> None:
    """The same torch code on a GPU: peaks, noisy bests and candidates to the last bit."""
    torch.manual_seed(1)
    x = (torch.randn(16, 50_000) * 3).to(dtype)
    rows = np.zeros(16, ROW)
    rows["seed"], rows["position"] = np.arange(16, dtype="u8") * np.uint64(0x9E3779B97F4A7C15) >> 1, np.arange(16)
    rows["inv_temperature"], rows["reference"], rows["flags"] = 1.25, np.nan, NOISE | MASS
    shard, other, every = TorchShard(11), rows.copy(), np.arange(16)
    shard.scan(Logits(x), every, rows)
    shard.scan(Logits(x.cuda()), every, other)
    for name in ("peak", "peak_id", "best", "best_id", "bad"):
        assert (rows[name] == other[name]).all()
    np.testing.assert_allclose(rows["mass"], other["mass"], rtol=1e-12)
    assert (shard.top(Logits(x), every, 100) == shard.top(Logits(x.cuda()), every, 100)).all()
