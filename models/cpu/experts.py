"""The experts of a layer: the choice (models/cpu/choice.c), and the products on packed weights (models/cpu/experts.c).

N rows, D hidden, E experts of this rank, k slots a row, F feed-forward of an expert (this rank's share).
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from itertools import accumulate

import torch
from torch import Tensor

from ...topology.transport.native import bind
from ..config.experts import Router
from ..experts import Biased
from ..packed import Packed
from ..pages import HugePages
from .codes import pack_codes, packed_size
from .kernels import FORMS, INT8, ROWS, TYPES, Kernels

SPACE = 64 << 20
"""Bytes of scratch space a call: a step that needs more is computed in chunks of rows."""


MOST_EXPERTS = 4096
"""The most experts for routing, whose scratch memory is on the stack."""


class _Expert(ctypes.Structure):
    _fields_ = [(f"{part}{of}", c_void_p) for of in ("", "_scale", "_zero", "_bias") for part in ("up", "down")]


class _Experts(ctypes.Structure):
    _fields_ = [
        ("each", c_void_p),
        ("count", c_int64),
        ("width", c_int64),
        ("inner", c_int64),
        ("space", c_int64),
        ("up_group", c_int64),
        ("down_group", c_int64),
        ("type", c_int32),
        ("form", c_int32),
        ("scale_type", c_int32),
        ("threads", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
    ]


class _Choice(ctypes.Structure):
    _fields_ = [
        ("bias", c_void_p),
        ("local", c_void_p),
        *((name, c_int64) for name in ("experts", "slots", "groups", "chosen_groups")),
        ("epsilon", c_float),
        ("scale", c_float),
        *((name, c_int32) for name in ("sigmoid", "normalises", "rounds", "threads")),
    ]


class CpuChoice:
    """TorchChoice in one kernel call, but for the weights' last bits."""

    def __init__(self, kernels: Kernels, router: Router, k: int, bias: Tensor | None, local: Tensor) -> None:
        self._held, p = (None if bias is None else bias.float().contiguous(), local.contiguous()), c_void_p
        self._call = bind(kernels.library.kernels_choose, None, p, c_int, p, c_int64, p, p, p)
        self._k = k
        self._plan = _Choice(
            *(None if tensor is None else tensor.data_ptr() for tensor in self._held), len(local), k, router.groups,
            router.chosen_groups, router.epsilon, router.scale, router.score == "sigmoid", router.normalises,
            router.rounds, kernels.threads,
        )  # fmt: skip

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, rows = logits.contiguous(), len(logits)
        if logits.shape[1] != self._plan.experts:
            raise ValueError(f"experts: {logits.shape[1]} logits a row: they must be {self._plan.experts}")
        chosen, numbers = logits.new_empty((2, rows, self._k), dtype=torch.int32)
        weight = logits.new_empty((rows, self._k), dtype=torch.float32)
        addresses = (tensor.data_ptr() for tensor in (chosen, numbers, weight))
        self._call(ctypes.addressof(self._plan), TYPES[logits.dtype], logits.data_ptr(), rows, *addresses)
        return chosen, numbers, weight


class PackedExperts:
    """x [N, D], chosen [N, k] int32 (this rank's number of an expert, or -1), weight [N, k] fp32 -> partial sum [N, D]
    in x's type. Inner values are rounded to x's type, as transformers does; a row's slots are weighed and added in
    ascending order in fp32. Holds its own copy of the weights, one piece of the pages an expert."""

    def __init__(
        self,
        kernels: Kernels,
        pages: HugePages,
        int8: bool,
        gate_up: Tensor | Packed,
        down: Tensor | Packed,
        *,
        biased: Biased | None = None,
        space: int = SPACE,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """gate_up: E times [2F, D], down: E times [D, F]; both quantised, or neither. dtype: of tokens, if they are."""
        p = c_void_p
        self._call = bind(kernels.library.kernels_experts, c_int, p, p, p, p, p, c_int64, c_int64)
        groups, form, scale_type = (0, 0), INT8, 0
        if isinstance(gate_up, Packed) and isinstance(down, Packed):
            self._dtype, self._width, inner = dtype, down.codes.shape[1], down.columns
            experts = [_pack_codes(kernels, pages, *expert) for expert in zip(gate_up.each(), down.each(), strict=True)]
            groups, form, scale_type = (gate_up.width, down.width), FORMS[down.code], TYPES[down.scale.dtype]
        else:
            assert isinstance(gate_up, Tensor)
            assert isinstance(down, Tensor)
            self._dtype, (self._width, inner) = down[0].dtype, down[0].shape
            form = INT8 if int8 else TYPES[self._dtype]
            experts = [_pack(kernels, pages, int8, *expert) for expert in zip(gate_up, down, strict=True)]
        self._each = (_Expert * len(experts))(*[expert for expert, _ in experts])
        self._pieces, self._biased, gate = [piece for _, piece in experts], biased, (0.0, 0.0)
        if biased is not None:
            gate = biased.gate
            for number, expert in enumerate(self._each):
                expert.up_bias = biased.up[number].data_ptr()
                expert.down_bias = None if biased.down is None else biased.down[number].data_ptr()
        self._plan = _Experts(
            ctypes.addressof(self._each), len(experts), self._width, inner, space, *groups, TYPES[self._dtype], form,
            scale_type, kernels.threads, *gate,
        )  # fmt: skip

    def __call__(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        slots = tuple(chosen.shape)
        for name, given, dtype, shape in (
            ("x", x, self._dtype, (slots[0], self._width)),
            ("chosen", chosen, torch.int32, slots),
            ("weight", weight, torch.float32, slots),
        ):
            if given.dtype != dtype or tuple(given.shape) != shape:
                described = f"{list(given.shape)} {given.dtype}"
                raise ValueError(f"experts: {name} is {described}: it must be {list(shape)} {dtype}")
        x, chosen, weight = x.contiguous(), chosen.contiguous(), weight.contiguous()
        out = torch.empty_like(x)
        failed = self._call(
            ctypes.addressof(self._plan), x.data_ptr(), chosen.data_ptr(), weight.data_ptr(), out.data_ptr(), *slots
        )
        if failed == 1:
            raise MemoryError(f"the experts' kernel could not allocate its scratch space, {slots[0]} rows")
        if failed:
            described = f"{int(chosen.min())} to {int(chosen.max())}"
            raise ValueError(f"experts: chosen has {described}: it must be -1 to {self._plan.count - 1}")
        return out


def _pack(kernels: Kernels, pages: HugePages, int8: bool, gate_up: Tensor, down: Tensor) -> tuple[_Expert, Tensor]:
    """The scales of int8 weights, then gate and up, then down, in one piece."""
    item, blocks = 1 if int8 else down.element_size(), (-(-len(gate_up) // ROWS), -(-len(down) // ROWS))
    scales = [4 * ROWS * count if int8 else 0 for count in blocks]
    packed = [item * ROWS * count * w.shape[1] for count, w in zip(blocks, (gate_up, down), strict=True)]
    piece = pages.take(sum(scales) + sum(packed))
    parts = [piece.data_ptr() + offset for offset in accumulate((*scales, packed[0]), initial=0)]
    if not pages.filled:
        for number, weight in enumerate((gate_up.contiguous(), down.contiguous())):
            address, gated = weight.data_ptr(), number == 0
            if int8:
                kernels.pack_int8(parts[2 + number], parts[number], address, *weight.shape, gated, 1)
            else:
                kernels.pack(parts[2 + number], weight, gated)
    return _Expert(parts[2], parts[3], *(parts[:2] if int8 else (None, None))), piece


def _pack_codes(kernels: Kernels, pages: HugePages, gate_up: Packed, down: Packed) -> tuple[_Expert, Tensor]:
    """Of quantised matrices, in one piece."""
    sizes = packed_size(gate_up, True), packed_size(down, False)
    piece = pages.take(sum(sizes))
    at = piece.data_ptr()
    up, low = (
        pack_codes(kernels, at, gate_up, True, pages.filled),
        pack_codes(kernels, at + sizes[0], down, False, pages.filled),
    )
    return _Expert(up.codes, low.codes, up.scale, low.scale, up.zero, low.zero), piece
