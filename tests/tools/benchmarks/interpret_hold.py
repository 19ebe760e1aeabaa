"""What test_hold_kernel.py starts with TRITON_INTERPRET=1: `hold` on the CPU, with a clock that counts its readings.
Prints one JSON line a case: are exactly the bytes copied that should be, and did it wait? Not a test module.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import hold_kernel
import torch

READINGS = itertools.count(0, 50)
NAPS: list[int] = []


def main() -> None:
    kernels: Any = hold_kernel
    # Interpreted kernels are Python: the two that the interpreter has no instructions for are put in its place.
    kernels.nanoseconds = lambda: next(READINGS)
    kernels.nap = lambda: NAPS.append(1)
    for dtype, elements, programs, laps in (
        (torch.bfloat16, 100, 1, 1.0),
        (torch.float32, 70_000, 3, 1.75),
        (torch.bfloat16, 70_000, 5, 1.0),
        (torch.float16, 40_000, 2, 0.0),
    ):
        vector = kernels.VECTOR_BYTES // dtype.itemsize
        x = torch.arange(1, elements + 1).remainder(200).add(1).to(dtype)
        scratch, before = torch.zeros_like(x), x.clone()
        vectors = elements // vector
        NAPS.clear()
        kernels.hold[(programs,)](
            x, scratch, vectors, int(vectors * laps), 400, VECTOR=vector, TILE=kernels.TILE_BYTES // dtype.itemsize
        )
        whole = vectors * vector
        copied = torch.equal(scratch[:whole], x[:whole]) if laps else not scratch.any()
        line = {
            "copied": bool(copied),
            "rest_untouched": not scratch[whole:].any(),
            "x_unchanged": torch.equal(x, before),
            "naps_a_program": len(NAPS) / programs,
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
