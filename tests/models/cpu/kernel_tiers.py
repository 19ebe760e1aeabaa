"""Fixtures of the C kernels' tests, which import them: every CPU tier that runs here, and a seed that is printed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from laddertron.models.cpu.kernels import Kernels
from laddertron.topology.hardware import cpu_tier

TIERS = cpu_tier.TIERS[cpu_tier.TIERS.index(cpu_tier.current()) :]
NEEDS_KERNELS = pytest.mark.skipif(Kernels.find() is None, reason="the C kernels were not built (no compiler)")


@pytest.fixture(autouse=True)
def seed() -> Iterator[int]:
    number = random.randrange(1 << 30)
    print(f"seed {number}")
    torch.manual_seed(number)
    with torch.inference_mode():
        yield number


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The tier of the kernels that the test finds."""
    with monkeypatch.context() as patch:
        patch.setenv(cpu_tier.VARIABLE, request.param)
        yield request.param
    Kernels.find()  # the library's tier is the process's again


@pytest.fixture
def kernels(tier: str) -> Kernels:
    """Those that sum in one order."""
    kernels = Kernels.find(deterministic=True)
    assert kernels is not None
    return kernels
