"""The cases of `make gpu-dry`: a new model or wiring is one row. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Case:
    """One rank of a deployment. `layers` of the model are kept, which decides neither a step's peak nor a layer's
    launches. `fp8`: as the model's published fp8 checkpoint. `emulated`: all-reduces
    take the time of another fabric's. `stages`: of a pipeline, all of which run."""

    name: str
    model: str
    tp: int
    nodes: int = 1
    wiring: str = "standard"
    fp8: bool = False
    two_level: bool = False
    emulated: bool = False
    stages: int = 1
    layers: int = 4
    parallel: tuple[tuple[str, Any], ...] = ()
    engine: tuple[tuple[str, Any], ...] = ()

    @property
    def recorded(self) -> bool:
        """Whether its decode steps are CUDA graphs."""
        return dict(self.engine).get("cuda_graphs", "auto") is not False

    @property
    def seats(self) -> int:
        return int(dict(self.engine).get("max_num_seqs", 256))


CASES = (
    Case("8B", "llama-3.1-8b", 1),
    Case("70B, tp 8", "llama-3.1-70b", 8),
    Case("405B, tp 16", "llama-3.1-405b", 16, 2),
    Case("405B fp8, tp 8", "llama-3.1-405b", 8, fp8=True),
    Case("405B, tp 8 x pp 2", "llama-3.1-405b", 8, stages=2),
    Case("405B ladder, tp 16", "llama-3.1-405b", 16, 2, "ladder"),
    Case("8B parallel, tp 8", "llama-3.1-8b", 8, wiring="parallel"),
    Case("8B delay-2, tp 8", "llama-3.1-8b", 8, wiring="delay-2"),
    Case("8B deterministic, tp 8", "llama-3.1-8b", 8, parallel=(("deterministic", True),)),
    Case("70B fp8 KV, tp 8", "llama-3.1-70b", 8, engine=(("kv_cache_dtype", "fp8"),)),
    Case("405B two-level, tp 16", "llama-3.1-405b", 16, 2, two_level=True),
    Case("70B emulated links, tp 8", "llama-3.1-70b", 8, emulated=True),
    Case("70B split steps, tp 8", "llama-3.1-70b", 8, parallel=(("split_steps", "always"),)),
)

RANKS = ("405B, tp 16", "405B two-level, tp 16", "405B, tp 8 x pp 2", "8B deterministic, tp 8")
"""Cases whose collectives are compared over all ranks."""
CAPABILITIES = (80, 90, 100)
"""Every Triton kernel is compiled for these; what computes in fp8 from 89 on."""

Kind = Literal["greedy", "temperature", "top_p"]
DRAWS: dict[Kind, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
}
