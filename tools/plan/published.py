"""Measurements of Ladder Residual's authors on H100 (arXiv 2501.06589): prompts of 1,024 tokens, 512 new tokens."""

from __future__ import annotations

from ...topology.cost.cost import Shape

POSITIONS = 1536  # prompt 1024, generate 512, in a static cache

Key = tuple[str, str, int]
"""(model, interconnect, batch)"""

TOKENS: dict[Key, dict[str, float]] = {
    ("70B", "p2p", 1): {"standard": 77.4, "ladder": 101.2, "parallel": 94.2, "none": 110.6},
    ("70B", "p2p", 4): {"standard": 258.6, "ladder": 331.5, "parallel": 307.3, "none": 355.8},
    ("70B", "p2p", 16): {"standard": 843.0, "ladder": 1004.0, "parallel": 974.0, "none": 1110.0},
    ("70B", "p2p", 64): {"standard": 1941.0, "ladder": 2242.0, "parallel": 2259.0, "none": 2474.0},
    ("70B", "no p2p", 1): {"standard": 51.7, "ladder": 82.6, "parallel": 72.4},
    ("70B", "no p2p", 4): {"standard": 173.6, "ladder": 271.8, "parallel": 241.1},
    ("70B", "no p2p", 16): {"standard": 547.0, "ladder": 739.0, "parallel": 744.0},
    ("70B", "no p2p", 64): {"standard": 1454.0, "ladder": 1864.0, "parallel": 1874.0},
    ("405B", "2 nodes", 1): {"standard": 28.5, "ladder": 38.8, "none": 43.3},
    ("405B", "2 nodes", 4): {"standard": 97.3, "ladder": 127.2, "none": 147.0},
    ("405B", "2 nodes", 8): {"standard": 163.6, "ladder": 228.0, "none": 271.1},
    ("405B", "2 nodes", 16): {"standard": 290.2, "ladder": 391.6, "none": 473.6},
}
"""Tokens/s over all sequences; "none" leaves every all-reduce out."""

SPEEDUPS = {
    "p2p": {"1B": 1.56, "3B": 1.57, "8B": 1.46, "34B": 1.44, "70B": 1.29, "405B": 1.31},
    "no p2p": {"1B": 1.39, "3B": 1.50, "8B": 1.40, "34B": 1.47, "70B": 1.59, "405B": 1.57},
}
"""Ladder over standard at batch 4, tp 8 (405B: tp 16 over two nodes); none of them is fitted but 70B's and 405B's."""

SHAPES = {
    "p2p": Shape(1, 8, "nvlink", "ib", 8, 450e9, 50e9),
    "no p2p": Shape(1, 8, "pcie", "ib", 8, None, 50e9),
    "2 nodes": Shape(2, 8, "nvlink", "ib", 8, 450e9, 50e9),
    "2 nodes, no p2p": Shape(2, 8, "pcie", "ib", 8, None, 50e9),
}
