"""Digests of rows: one bit changes them, the way in which ranks share a row does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from laddertron.engine.sampling.digest import row_digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_and_every_place_counts(dtype: torch.dtype) -> None:
    x = torch.randn(4, 40).to(dtype)
    x[1], x[2] = x[0], x[0]
    x[2, 7] = torch.nextafter(x[2, 7].float(), torch.tensor(9e9)).to(dtype) if dtype == torch.float32 else x[2, 7] * 2
    x[3] = x[0].roll(1)
    found = row_digests(x)
    assert found[0] == found[1]
    assert len(set(found.tolist())) == 3
    x[1, 0], x[0, 0] = 0.0, -0.0
    assert row_digests(x)[0] != row_digests(x)[1]


def test_parts_add_up_to_the_whole() -> None:
    x = torch.randn(3, 41)
    parts = sum(row_digests(x[:, at : at + 9], at) for at in range(0, 41, 9))
    assert np.array_equal(parts, row_digests(x))
