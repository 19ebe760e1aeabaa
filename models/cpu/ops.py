"""The operators of models/ops.py on a CPU: weights are packed once; models/cpu/products.c computes products (oneDNN
without it), models/cpu/kernels.c the rest, in the current CPU tier.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...topology.hardware import cpu_tier
from ..config.experts import Router
from ..experts import Biased, Choice, ExpertProduct
from ..ops import Lookup, Norm, OtherLanes, Product, RunningSum, TorchOps, Tree, rms_norm, silu_and_mul, whole
from ..packed import Packed
from ..pages import HugePages
from .codes import PackedCodes, pack_codes, packed_size
from .experts import MOST_EXPERTS, CpuChoice, PackedExperts
from .kernels import INT8, ROWS, TYPES, Kernels, OddInputsError
from .product import FEW_TOKENS, CpuProduct, ProductPlan, sub_block

_Plan = tuple[ProductPlan, tuple[Tensor | None, ...]]
"""A product's C structure, and the tensors that it points to."""


class CpuOps(TorchOps):
    """Packed products, and kernels for norm and gate if they were built. int8: rounds bf16 weights to 8-bit integers
    with one scale per output row (needs kernels.int8); activations stay bf16 and sums fp32."""

    name = "cpu"
    repacks = True
    pages: HugePages

    def __init__(
        self,
        kernels: Kernels | None,
        *,
        int8: bool = False,
        pages: HugePages | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """pages: memory for packed weights. If it is already filled, its contents are used and the given weights are
        ignored. dtype: of the tokens that quantised weights multiply."""
        self.kernels, self.dtype = kernels, dtype
        self.sums_late = kernels is not None
        self.int8 = int8
        self.matrix_bytes = 1 if int8 else None
        self.pages = pages or HugePages()

    @property
    def exact(self) -> CpuOps:
        return CpuOps(self.kernels, pages=self.pages, dtype=self.dtype) if self.int8 else self

    def _matmul(self, weight: Tensor, bias: Tensor | None) -> Product:
        """oneDNN's product with a weight packed once. oneDNN packs bf16 only with AVX-512, and fp16 almost nowhere."""
        packs = {"generic": (), "avx2": (torch.float32,)}.get(cpu_tier.current(), (torch.float32, torch.bfloat16))
        if weight.dtype not in packs:
            return super()._matmul(weight, bias)
        multiply = torch.ops.mkldnn._linear_pointwise.default
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        return lambda x: multiply(x, packed, bias, "none", [], "")

    def _fused(
        self, weight: Tensor, bias: Tensor | None, norm: Norm | None, gated: bool, tree: Tree | None = None
    ) -> Product | None:
        """The product with norm and gate as one kernel call; None if models/cpu/products.c does not support it."""
        plan = self._packed(weight, bias, norm, gated, tree)
        return None if plan is None else self._call(*plan)

    def _packed(
        self, weight: Tensor, bias: Tensor | None, norm: Norm | None, gated: bool, tree: Tree | None = None
    ) -> _Plan | None:
        kernels, weight = self.kernels, weight.contiguous()
        rows, inputs = weight.shape
        if kernels is None or inputs % 2 or not (self.int8 or weight.dtype in kernels.served):
            self._leave_to_torch(f"a product of {inputs}")
            return None
        outputs = rows // 2 if gated else rows
        blocks = -(-outputs // (ROWS // 2 if gated else ROWS))
        scales: Tensor | None = None
        if self.int8:
            leaves = 1 if tree is None else tree.leaves
            scales = self.pages.take(4 * leaves * blocks * ROWS).view(torch.float32)
            packed = self.pages.take(blocks * ROWS * inputs)
            if not self.pages.filled:
                kernels.pack_int8(packed.data_ptr(), scales.data_ptr(), weight.data_ptr(), rows, inputs, gated, leaves)
        else:
            packed = self.pages.take(weight.element_size() * blocks * ROWS * inputs)
            if not self.pages.filled:
                kernels.pack(packed.data_ptr(), weight, gated)
        return self._plan(TYPES[weight.dtype], packed, scales, bias, norm, inputs, outputs, gated, tree)

    def _leave_to_torch(self, product: str) -> None:
        """Leaves a product to torch; raises OddInputsError with `deterministic`, because torch's are not."""
        if self.kernels is not None and self.kernels.deterministic:
            raise OddInputsError(
                f"parallel.deterministic=true: {product} inputs on this rank, not an even number: use another "
                "tensor_parallel_size, or false"
            )
        self.pages.complete = False

    def _plan(
        self,
        kind: int,
        packed: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        norm: Norm | None,
        inputs: int,
        outputs: int,
        gated: bool,
        tree: Tree | None = None,
        quantised: PackedCodes | None = None,
    ) -> _Plan:
        kernels, q = self.kernels, quantised
        assert kernels is not None
        scale = None if norm is None else norm.weight.contiguous()
        offset = None if bias is None else bias.contiguous()
        plan = ProductPlan(
            packed.data_ptr(),
            None if offset is None else offset.data_ptr(),
            None if scale is None else scale.data_ptr(),
            q.scale if q is not None else None if scales is None else scales.data_ptr(),
            None if q is None else q.zero,
            inputs,
            outputs,
            0 if q is None else q.group,
            0.0 if norm is None else norm.eps,
            kind,
            kind if scales is None and q is None else INT8 if q is None else q.form,
            0 if q is None else q.scale_type,
            gated,
            kernels.threads,
            0 if tree is None else tree.leaves,
            1.0 if tree is None else tree.factor,
        )
        return plan, (packed, scales, scale, offset)

    def _call(self, plan: ProductPlan, tensors: tuple[Tensor | None, ...]) -> Product:
        assert self.kernels is not None
        return CpuProduct(self.kernels, plan, tensors)

    def joined(self, first: Product, last: Product) -> Product:
        if not isinstance(first, CpuProduct) or not isinstance(last, CpuProduct):
            return super().joined(first, last)
        return partial(sub_block, first, last)

    def choice(self, router: Router, k: int, bias: Tensor | None, local: Tensor) -> Choice:
        if self.kernels is None or len(local) > MOST_EXPERTS:
            return super().choice(router, k, bias, local)
        return CpuChoice(self.kernels, router, k, bias, local)

    def experts(
        self, gate_up: Tensor | Packed, down: Tensor | Packed, routed: int, biased: Biased | None = None
    ) -> ExpertProduct:
        kernels = self.kernels
        if kernels is not None and isinstance(gate_up, Packed) and isinstance(down, Packed):
            return PackedExperts(kernels, self.pages, False, gate_up, down, biased=biased, dtype=self.dtype)
        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        odd = next((inputs for inputs in down.shape[1:] if inputs % 2), 0)
        if kernels is not None and not odd and (self.int8 or down.dtype in kernels.served):
            return PackedExperts(kernels, self.pages, self.int8, gate_up, down, biased=biased)
        self._leave_to_torch(f"an expert's product of {odd}")
        return super().experts(gate_up, down, routed, biased)

    def packed_product(
        self, weight: Packed, bias: Tensor | None, norm: Norm | None, *, gated: bool = False, tree: Tree | None = None
    ) -> Product:
        kernels, inputs, rows = self.kernels, weight.columns, len(weight.codes)
        if kernels is None:
            return super().packed_product(weight, bias, norm, gated=gated, tree=tree)
        if tree is not None and inputs // tree.leaves % weight.width:
            raise OddInputsError(
                f"parallel.deterministic=everywhere: {inputs} inputs on this rank / {tree.leaves} shares = "
                f"{inputs // tree.leaves}, not a multiple of the {weight.width} that share a scale: use true, or false"
            )
        piece = self.pages.take(packed_size(weight, gated))
        packed = pack_codes(kernels, piece.data_ptr(), weight, gated, self.pages.filled)
        outputs = rows // 2 if gated else rows
        plan, alive = self._plan(TYPES[self.dtype], piece, None, bias, norm, inputs, outputs, gated, tree, packed)
        return self._call(plan, alive)

    def lane_products(self, weights: Tensor, norms: Sequence[Norm | None], gated: bool) -> Product:
        packed = [self._packed(weight, None, norm, gated) for weight, norm in zip(weights, norms, strict=True)]
        plans = [plan for plan in packed if plan is not None]
        if self.kernels is None or len(plans) < len(packed):
            return super().lane_products(weights, norms, gated)
        array = (ProductPlan * len(plans))(*(plan for plan, _ in plans))
        call, address, lanes = self.kernels.lane_products, ctypes.addressof(array), len(plans)
        alive, outputs = (array, plans), array[0].outputs

        def product(x: Tensor) -> Tensor:
            tokens = x.shape[1]
            out = x.new_empty((lanes, tokens, outputs))
            if x.stride(2) != 1:
                x = x.contiguous()
            if call(address, lanes, x.data_ptr(), x.stride(0), x.stride(1), out.data_ptr(), tokens):
                inputs = alive[0][0].inputs
                raise MemoryError(f"the product kernel could not allocate its scratch space, {lanes} x {inputs} inputs")
            return out

        return product

    def join_lanes(self, x: Tensor, own: Tensor | None, others: OtherLanes | None) -> Tensor:
        if self.kernels is None:
            return super().join_lanes(x, own, others)
        out = x.new_empty(x.shape)
        total, past = (None, None) if others is None else (others.total, others.own)
        self.kernels.join_lanes(
            TYPES[x.dtype], out.data_ptr(), x.data_ptr(), x.stride(0), None if own is None else own.data_ptr(),
            None if total is None else total.data_ptr(), None if past is None else past.data_ptr(),
            x.shape[0], x[0].numel(),
        )  # fmt: skip
        return out

    def sum_lanes(self, x: Tensor) -> Tensor:
        if self.kernels is None:
            return super().sum_lanes(x)
        out = x.new_empty(x.shape[1:])
        self.kernels.sum_lanes(TYPES[x.dtype], out.data_ptr(), x.data_ptr(), len(x), out.numel())
        return out

    def by_head(self, qkv: Tensor, heads: int, kv_heads: int, dim: int) -> Tensor:
        if self.kernels is None:
            return super().by_head(qkv, heads, kv_heads, dim)
        lanes, tokens, _ = qkv.shape
        out = qkv.new_empty((tokens, (heads + 2 * kv_heads) * dim))
        sizes = lanes, tokens, heads, kv_heads, dim * qkv.element_size()
        self.kernels.by_head(out.data_ptr(), qkv.data_ptr(), *sizes)
        return out

    def normed(self, norm: Norm) -> Product:
        if self.kernels is None:
            return super().normed(norm)
        call, width = self.kernels.rms_norm, norm.weight.numel()

        def normed(x: Tensor | RunningSum) -> Tensor:
            x = whole(x).contiguous()
            out = torch.empty_like(x)
            call(TYPES[x.dtype], out.data_ptr(), x.data_ptr(), norm.weight.data_ptr(), len(x), width, norm.eps)
            return out

        return normed

    def product(
        self, weight: Tensor, bias: Tensor | None, norm: Norm | None = None, tree: Tree | None = None
    ) -> Product:
        return self._fused(weight, bias, norm, False, tree) or super().product(weight, bias, norm, tree)

    def gated_product(self, weight: Tensor, bias: Tensor | None, norm: Norm | None) -> Product:
        return self._fused(weight, bias, norm, True) or super().gated_product(weight, bias, norm)

    def tied(self, table: Tensor, norm: Norm | None) -> tuple[Product, Lookup | None]:
        """One packed table for head and embedding: the inputs of a row (in bf16 pairs of inputs) are one panel's width
        apart."""
        kernels, table, (rows, inputs) = self.kernels, table.contiguous(), table.shape
        if kernels is None or inputs % 2 or table.dtype not in kernels.served:
            self.pages.complete = False
            return super().tied(table, norm)
        blocks, width, kind = -(-rows // ROWS), 2 * kernels.vector_floats, TYPES[table.dtype]
        packed = self.pages.take(table.element_size() * blocks * ROWS * inputs)
        if not self.pages.filled:
            kernels.pack(packed.data_ptr(), table, False)
        together = 2 if table.dtype == torch.bfloat16 else 1
        panels = packed.view(table.dtype).view(-1, inputs // together, width, together)

        def lookup(ids: Tensor) -> Tensor:
            return panels[ids // width, :, ids % width].reshape(len(ids), inputs)

        return self._call(*self._plan(kind, packed, None, None, norm, inputs, rows, False)), lookup

    def around(self, matmul: Product, norm: Norm | None, *, gated: bool = False) -> Product:
        if norm is None and not gated:
            return matmul
        normed, gate = None if norm is None else self._norm(norm), self.gate_kernel() if gated else None

        def product(x: Tensor) -> Tensor:
            y = matmul(x if normed is None else normed(x))
            return y if gate is None else gate(y)

        return product

    def _norm(self, norm: Norm) -> Product:
        if self.kernels is None:
            return lambda x: rms_norm(x, norm)
        call, kind, width = self.kernels.rms_norm, TYPES[norm.weight.dtype], norm.weight.numel()

        def normed(x: Tensor | RunningSum) -> Tensor:
            x = whole(x)
            if x.shape[0] > FEW_TOKENS or not x.is_contiguous():
                return rms_norm(x, norm)
            out = torch.empty_like(x)
            call(kind, out.data_ptr(), x.data_ptr(), norm.weight.data_ptr(), x.shape[0], width, norm.eps)
            return out

        return normed

    def gate_kernel(self) -> Product:
        if self.kernels is None:
            return silu_and_mul
        call = self.kernels.silu_and_mul

        def gated(gate_up: Tensor) -> Tensor:
            rows, width = gate_up.shape
            if rows > FEW_TOKENS:
                return silu_and_mul(gate_up)
            out = gate_up.new_empty((rows, width // 2))
            call(TYPES[gate_up.dtype], out.data_ptr(), gate_up.data_ptr(), rows, width // 2)
            return out

        return gated
