"""What glibc does with freed blocks, seen by the pages that the kernel has to give anew."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from laddertron.engine.step import loading as heap

def faults(rounds=20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        torch.empty(8 << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
heap.give_back_freed()
faults()
fresh = faults()
heap.keep_freed()
faults()
print(fresh, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator alone has these limits")
def test_a_steps_blocks_are_kept_and_a_loads_are_not() -> None:
    """20 blocks of 8 MiB, one after the other: all new pages while loading (one by one, or by 2 MiB), none in steps."""
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    fresh, kept = map(int, said.split())
    assert fresh >= 20
    assert kept < 20
