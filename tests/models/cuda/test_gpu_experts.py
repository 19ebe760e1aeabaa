"""The Triton kernels of experts, latents and lanes, interpreted on a CPU; `make gpu-dry` compiles them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from folders import FOLDERS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make env ACCEL=cuda"
)


@pytest.mark.parametrize(
    "interpreted",
    [
        pytest.param(True, id="interpreted"),
        pytest.param(
            False,
            id="on a GPU",
            marks=(pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
        ),
    ],
)
def test_kernels_mean_what_torch_means(interpreted: bool) -> None:
    """The choice of experts with equal scores and NaN; grouped products with experts that no row chose, all rows chose,
    or another rank has; quantised weights with the bits of widened ones; rows in pieces; latents stored in scattered
    blocks; lanes joined and summed."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("interpret_experts.py"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((*FOLDERS, os.environ.get("PYTHONPATH", "")))}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(found["choices"].values()), found["choices"]
    assert len(found["choices"]) == 4
    assert found["not finite"]
    assert found["pieces"]
    assert len(found["products"]) == 14
    for product in found["products"]:
        assert product["distance"] < (1e-6 if interpreted else 1e-5), product  # another order of summation
        assert product["same"], product
    assert len(found["packed"]) == 42
    assert all(found["packed"].values()), found["packed"]
    assert max(found["latents"].values()) < (1e-6 if interpreted else 1e-5), found["latents"]
    assert all(found["lanes"].values()), found["lanes"]
