"""What `plan` says of a decode step on the GPU that is measured."""

from __future__ import annotations

import torch
from laddertron.models.config.model_config import ModelConfig, make_wiring
from laddertron.tools.plan.roofline import Load, SimulatedGroup, gpu_rates, links
from laddertron.topology.cost.cost import Shape
from laddertron.topology.hardware.presets import GPU_BY_NAME

ALONE = Shape(1, 1, "nvlink", "ib", 1)


def predicted_ms(
    config: ModelConfig, shape: Shape, device: torch.device, load: Load, wiring: str, fp8: bool = False
) -> float | None:
    """Of one rank of a group of this shape; None on a device whose rates are not known."""
    known = GPU_BY_NAME.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if known is None:
        return None
    rates = gpu_rates(known.device(0, "0000:00:00.0", 0), "fp8" if fp8 else "bfloat16")
    group = SimulatedGroup(config, shape.size, rates, links("nccl", shape), 1.0 if fp8 else 2.0)
    return round(group.step(load, make_wiring(wiring, config.num_layers)).total_s * 1e3, 4)
