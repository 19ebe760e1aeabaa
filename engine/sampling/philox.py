"""The noise of sampling: a pure function of (seed, output position, choice, vocabulary id), the same everywhere.
Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11). Key: the request's
64-bit seed, low word first. Counter: (output position, global vocabulary id, choice index, lane), lane 0 for sampling.
Two words make a 52-bit uniform, and that a Gumbel value. The bits of engine/sampling/noise.c: IEEE operations in one
order.
"""

from __future__ import annotations

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_LN2 = 0.6931471805599453


def philox4x32(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds over int64 tensors that hold 32-bit words (and broadcast with one another); four words of noise."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1  # wraps modulo 2^64, as the two words of the product want
        c0, c1, c2, c3 = (p1 >> 32 & _LOW) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32 & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = k0 + _W0 & _LOW, k1 + _W1 & _LOW
    return c0, c1, c2, c3


def logarithm(x: Tensor) -> Tensor:
    """Natural logarithm of normal positive float64 values, within 2 units in the last place: x = 2^k m with m in
    [sqrt 1/2, sqrt 2), log m = 2 atanh((m - 1) / (m + 1)) as a series. Own, because libraries differ in last bits."""
    bits = x.view(torch.int64)
    k = bits - 0x3FE6A09E667F3BCD >> 52
    f = (bits - (k << 52)).view(torch.float64) - 1.0
    s = f / (2.0 + f)
    q = s * s
    p = torch.full_like(q, 1.0 / 19.0)
    for odd in range(17, 0, -2):
        p = p * q + 1.0 / odd
    return k.double() * _LN2 + 2.0 * s * p


def gumbel(seed: Tensor, position: Tensor, choice: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise, float64, in [-3.6, 36.8]. All int64 and broadcasting; `seed` is the 64-bit seed's bit pattern."""
    zero = torch.zeros((), dtype=torch.int64, device=ids.device)
    high, low, *_ = philox4x32((seed & _LOW, seed >> 32 & _LOW), (position, ids, choice, zero))
    bits = high << 20 | low >> 12
    uniform = ((bits | 0x3FF0000000000000).view(torch.float64) - 1.0) + 2.0**-53
    return -logarithm(-logarithm(uniform))
