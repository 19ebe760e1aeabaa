"""Rotary position embedding: angles per position for every scaling that the supported checkpoints use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config.model_config import Rope


def inverse_frequencies(rope: Rope, dim: int) -> tuple[Tensor, float]:
    """([dim / 2] fp32 angular step a position, factor on cos and sin). dim: rotated dimensions of a head."""
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inverse = 1.0 / rope.theta**exponent
    if rope.kind == "linear":
        return inverse / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, dim, inverse)
    return inverse, 1.0  # "dynamic" changes nothing within the original length, and no more is allowed


def _llama3(rope: Rope, inverse: Tensor) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between interpolated (Llama 3.1)."""
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) / rope.factor * inverse + smooth * inverse
    scaled = torch.where(wavelength > original / rope.low_freq_factor, inverse / rope.factor, inverse)
    medium = (wavelength >= original / rope.high_freq_factor) & (wavelength <= original / rope.low_freq_factor)
    return torch.where(medium, between, scaled)


def _yarn(rope: Rope, dim: int, inverse: Tensor) -> tuple[Tensor, float]:
    """NTK-by-parts (arXiv 2309.00071)."""

    def rotations_at(turns: float) -> float:
        original = rope.original_max_position_embeddings
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = rotations_at(rope.beta_fast), rotations_at(rope.beta_slow)
    if not rope.fractional:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    extrapolate = 1 - ramp.clamp(0, 1)
    return inverse / rope.factor * (1 - extrapolate) + inverse * extrapolate, rope.attention_factor or 1.0


class RotaryTable:
    """cos and sin of all positions, [positions, 1, dim / 2] fp32; rows are gathered once a step."""

    def __init__(self, rope: Rope, dim: int, positions: int, device: torch.device) -> None:
        steps, factor = inverse_frequencies(rope, dim)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * steps
        self.cos = (angles.cos() * factor).unsqueeze(1).to(device)
        self.sin = (angles.sin() * factor).unsqueeze(1).to(device)
