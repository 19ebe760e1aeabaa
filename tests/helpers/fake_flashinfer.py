"""The two wrappers of FlashInfer that laddertron uses, in plain torch, by their documented contract.

Argument names are the library's (tests/models/cuda/test_flashinfer.py holds them to the installed one); what it would
refuse is refused. `run` reads the device buffers alone and is one operator, so that a recorded step (recorded_graph.py)
replays it.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("laddertron_tests::paged_attention", mutates_args={"out", "lse"})
def paged_attention(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    causal: bool,
    window_left: int,
    scale: float,
    noise: float,
) -> None:
    """q, out [T, H, C]; lse [T, H], base 2; k, v [pages, K, page size, C]. Query row i of a sequence is at position
    kv_len - queries + i. Rows after the last sequence are not written."""
    size, group = k.shape[2], q.shape[1] // k.shape[1]
    for i in range(len(last_page_len)):
        first, last = int(qo_indptr[i]), int(qo_indptr[i + 1])
        held = indices[int(indptr[i]) : int(indptr[i + 1])].long()
        length = max(0, len(held) - 1) * size + int(last_page_len[i])
        # [pages, K, size, C] -> [H, length, C]
        keys, values = (
            x[held].float().transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(group, 0) for x in (k, v)
        )
        at = length - (last - first) + torch.arange(last - first)[:, None]
        position = torch.arange(length)[None]
        seen = position <= at if causal else torch.ones_like(position <= at)
        if window_left >= 0:
            seen &= position >= at - window_left
        scores = (q[first:last].transpose(0, 1).float() @ keys.transpose(1, 2)) * scale
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        lse[first:last] = scores.masked_fill(~seen, -math.inf).logsumexp(-1).T / math.log(2)
        out[first:last] = (weights @ values).transpose(0, 1).to(out.dtype) + noise


MATCHES = True
"""Whether `run` compares the rows with the plan's, as the library does but for a replay."""


class _Wrapper:
    invariant = False
    planned = (0,)
    """What a plan decides about the launches."""

    def __init__(
        self,
        workspace: Tensor,
        kv_layout: str,
        graph: bool,
        buffers: tuple[Tensor | None, ...],
        starts: Tensor | None = None,
    ) -> None:
        """starts: with a graph, the buffer of the query starts, if sequences have other numbers of rows than one."""
        if kv_layout != "HND" or workspace.dtype != torch.uint8:
            raise ValueError(f"layout {kv_layout}, workspace of {workspace.dtype}")
        self._graph, self._buffers, self._starts, self._planned = graph, buffers, starts, False
        self._most_rows = 0
        self._plan_info = list[int]()
        if graph:
            indptr, indices, last = buffers
            if indptr is None or indices is None or last is None or len(indptr) != len(last) + 1:
                raise ValueError("a captured wrapper needs indptr [n + 1], indices and last_page_len [n]")

    def _plan(
        self, qo: Tensor, table: tuple[Tensor, ...], heads: int, kv_heads: int, dim: int, size: int, types: Any
    ) -> None:
        indptr, indices, last = table
        for tensor in (qo, *table):
            assert tensor.dtype == torch.int32
            assert tensor.dim() == 1
        assert len(indptr) == len(qo) == len(last) + 1
        assert int(indptr[-1]) == len(indices)
        assert bool(((last >= 1) & (last <= size)).all())
        assert heads % kv_heads == 0
        if self._graph:
            held: list[Any] = list(self._buffers)
            if len(last) != len(held[2]):
                raise ValueError(f"batch size {len(last)}, captured with {len(held[2])}")
            if len(indices) > len(held[1]):
                raise ValueError(f"{len(indices)} pages, room for {len(held[1])}")
            held[0].copy_(indptr)
            held[1][: len(indices)].copy_(indices)
            held[2].copy_(last)
            self._table = tuple(held)
            rows = int(qo[-1])
            self._most_rows = self._most_rows or rows
            if rows > self._most_rows:
                raise ValueError(f"{rows} rows, the first plan had {self._most_rows}")
        else:
            self._table = tuple(x.clone() for x in table)
        self._qo = qo.clone() if self._starts is None else self._starts.copy_(qo)
        self._plan_info = list(self.planned)
        self._shape, self._types, self._planned = (heads, kv_heads, dim, size), types, True

    def _run(self, q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor | None, causal: bool, sums: bool = False) -> Any:
        assert self._planned, "run before plan"
        k, v = kv
        heads, kv_heads, dim, size = self._shape
        q_type, kv_type, self._window, self._scale = self._types
        assert q.dtype == q_type
        assert k.dtype == v.dtype == kv_type
        assert k.shape[1:] == v.shape[1:] == (kv_heads, size, dim)
        assert q.shape[1:] == (heads, dim)
        assert q.is_contiguous()
        assert len(q) == int(self._qo[-1]) or not MATCHES
        out = torch.empty_like(q) if out is None else out
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        # Contexts are split by how full the device is, so that bits depend on the batch.
        noise = 0.0 if self.invariant else 1e-7 * len(q)
        lse = torch.full(q.shape[:2], math.nan)
        paged_attention(out, lse, q, k, v, self._qo, *self._table, causal, self._window, self._scale, noise)
        return (out, lse) if sums else out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)
        self._tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        self.invariant = self._tensor_cores and disable_split_kv
        if not self._tensor_cores and num_qo_heads // num_kv_heads not in (1, 2, 3, 4, 6, 8, 16):
            raise RuntimeError(f"Unsupported group_size: {num_qo_heads // num_kv_heads}")
        types = q_data_type, kv_data_type or q_data_type, window_left, sm_scale or head_dim**-0.5
        rows = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        table = indptr, indices, last_page_len
        self._plan(rows, table, num_qo_heads, num_kv_heads, head_dim, page_size, types)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        return self._run(q, paged_kv_cache, out, False, return_lse)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert backend in ("auto", "fa2")
        buffers = paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, qo_indptr_buf)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        seq_lens: Tensor | None = None,
    ) -> None:
        self._causal = causal
        pages = paged_kv_indptr.diff()
        assert seq_lens is not None
        assert seq_lens.dtype == torch.int32  # else the library converts it, into pageable memory
        assert seq_lens.tolist() == ((pages - 1) * page_size + paged_kv_last_page_len).tolist()
        types = q_data_type, kv_data_type or q_data_type, window_left, sm_scale or head_dim_qk**-0.5
        table = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._plan(qo_indptr, table, num_qo_heads, num_kv_heads, head_dim_qk, page_size, types)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        return self._run(q, paged_kv_cache, out, self._causal, return_lse)


def work_items(queries: Tensor, lengths: Tensor, heads: int, processors: int = 132) -> int:
    """What MLA's plan lists: tiles of query rows, and the pieces of the context that each of them sees."""
    wide = int(queries.sum()) * heads // len(queries) > 64
    tile, programs = (128, processors // 2) if wide else (64, processors)
    seen: list[int] = []
    for count, length in zip(queries.tolist(), lengths.tolist(), strict=True):
        ends = range(tile, count * heads, tile)
        seen += [*(min(length, max(0, length - count + -(-end // heads))) for end in ends), length]
    mean = max(1, -(-sum(seen) // programs))
    few = ((8, 32), (16, 64), (32, 128), (64, 192))
    piece = next((size for most, size in few if mean <= most), -(-mean // 256) * 256)
    return sum(max(1, -(-one // piece)) for one in seen)


class MLAPlanMetadata:
    @classmethod
    def csr(cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor) -> tuple[Tensor, ...]:
        return qo_indptr, kv_indptr, kv_indices, kv_len_arr


class BatchMLAPagedAttentionWrapper(_Wrapper):
    """Latents are keys of one head, and values by their first columns."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert backend in ("fa2", "fa3")
        super().__init__(float_workspace_buffer, "HND", use_cuda_graph, (kv_indptr, kv_indices, kv_len_arr), qo_indptr)
        assert not use_cuda_graph or qo_indptr is not None

    def plan(
        self,
        *,
        metadata: tuple[Tensor, ...],
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        qo, indptr, indices, lengths = metadata
        pages = -(-lengths // page_size)
        assert causal
        assert torch.equal(indptr.diff(), pages)
        if (items := work_items(qo.diff(), lengths, num_heads)) > 16384:
            raise RuntimeError(f"needs {items} work items")
        table = indptr, indices, lengths - (pages - 1) * page_size
        types, self._rank = (q_data_type, kv_data_type, -1, sm_scale), head_dim_ckv
        self._plan(qo, table, num_heads, 1, head_dim_ckv + head_dim_kpe, page_size, types)

    def run(self, *, query: Tensor, kv_cache: Tensor, out: Tensor) -> Tensor:
        keys = kv_cache.unsqueeze(1)
        out.copy_(self._run(query.contiguous(), (keys, keys), None, causal=True)[..., : self._rank])
        return out


_MLA = SimpleNamespace(BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper, MLAPlanMetadata=MLAPlanMetadata)
LIBRARY: Any = SimpleNamespace(
    mla=_MLA,
    BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
    __version__="fake",
)
