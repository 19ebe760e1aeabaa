"""On PYTHONPATH of ranks alone: layer 1's MLP, or its experts' product, depends on its number of rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.argv[0] == "-m" and "laddertron.launchers.measure.verify_rank" in sys.orig_argv:
    sys.path[1:1] = [
        str(Path(__file__).parents[1]),
        *map(str, {p.parent for p in Path(__file__).parents[2].rglob("*.py")}),
    ]
    from determinism_cases import plant
    from laddertron.engine.step import build as module

    right = module.build

    def build(*args: Any, **named: Any) -> Any:
        built = right(*args, **named)
        plant(built)
        return built

    module.build = build
