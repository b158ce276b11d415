"""Reference of ``dsa::sparse_mla``: a gather of the selected latent rows, a chunk of query rows at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.lowering.fp8_rows import unpack
from dsa_compile.lowering.pages import locate, prefix, slot_count
from dsa_compile.lowering.rows import (
    ROW_BUDGET,
    attend,
    attend_backward,
    compute_dtype,
    kept,
    row_slices,
    used_slots,
)
from dsa_compile.lowering.sparse_mla.limits import check, check_backward


@dataclass(frozen=True)
class _Chunk:
    """A few query rows, the latent rows that they read, and which of those count.

    Attributes:
        q: [B, t, H, R+P]. latent: [B, t, K, R+P] picked by each row, or [B, n, R+P] read by all; no NaN, no inf.
        live: bool[B or 1, t, K or n]. slots: int64[B, t, K], None where all rows read the first n.
        bad: bool[B, t, 1], rows that attend to a latent row of NaN or inf.
    """

    q: Tensor
    latent: Tensor
    live: Tensor
    slots: Tensor | None
    bad: Tensor

    @property
    def _letters(self) -> str:
        return "bkd" if self.slots is None else "btkd"

    def attend(self, scale: float) -> tuple[Tensor, Tensor]:
        """Probabilities [B, t, H, K or n] and log-sum-exp [B, t, H]."""
        return attend(self.dot(self.q) * scale, self.live.unsqueeze(-2))

    def dot(self, rows: Tensor) -> Tensor:
        """[B, t, H, K or n]: products of ``rows`` [B, t, H, D] and the first D values of the latent rows."""
        return torch.einsum(f"bthd,{self._letters}->bthk", rows, self.latent[..., : rows.shape[-1]])

    def mix(self, weights: Tensor, width: int) -> Tensor:
        """[B, t, H, width]: the first values of the latent rows, summed with ``weights`` [B, t, H, K or n]."""
        return torch.einsum(f"bthk,{self._letters}->bthd", weights, self.latent[..., :width])

    def spread(self, weights: Tensor, rows: Tensor) -> Tensor:
        """What ``mix`` is to the latent rows, backwards: [B, t, K, D] or [B, n, D] from ``rows`` [B, t, H, D]."""
        return torch.einsum(f"bthk,bthd->{self._letters}", weights, rows)


def _chunk(
    q_absorbed: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    topk_indices: Tensor | None,
    block_table: Tensor | None,
    rows: slice,
) -> _Chunk:
    dtype = compute_dtype(q_absorbed)
    q = torch.cat([q_absorbed[:, rows], q_pe[:, rows]], -1).to(dtype)
    num_slots = slot_count(latent, block_table)
    if topk_indices is None:
        n = used_slots(num_slots, visible, mask, rows)
        slots, live = None, kept(visible, mask, rows, n, q)
        gathered, present = prefix(latent, block_table, n)
        present = None if present is None else present.unsqueeze(1)
    else:
        slots, live = _picked(_filled(topk_indices[:, rows]), num_slots, visible, mask, rows)
        page, place, present = locate(slots, latent, block_table)
        gathered = latent[page, place]
    live = live if present is None else live & present
    if latent.dtype == torch.uint8:
        gathered = unpack(gathered, q_absorbed.shape[-1], q_pe.shape[-1], q_absorbed.dtype)
    gathered = gathered.to(dtype)
    bad = ~gathered.isfinite().all(-1)
    hit = live & (bad if slots is not None else bad.unsqueeze(1))
    return _Chunk(
        q.masked_fill(~live.any(-1)[..., None, None], 0),
        gathered.masked_fill(bad.unsqueeze(-1), 0),
        live,
        slots,
        hit.any(-1, keepdim=True),
    )


def _picked(
    picks: Tensor, num_slots: int, visible: Tensor | None, mask: Tensor | None, rows: slice
) -> tuple[Tensor, Tensor]:
    """Slots int64[B, t, K] that are safe to read, and bool[B, t, K] which of them the row attends to."""
    live = (picks >= 0) & (picks < num_slots)
    slots = picks.masked_fill(~live, 0).long()
    if visible is not None:
        span = visible[:, 0, rows]
        live = live & (slots >= span[..., :1]) & (slots < span[..., 1:])
    if mask is not None:
        seen = mask[:, 0, rows] if mask.shape[2] > 1 else mask[:, 0]
        live = live & seen.expand(*slots.shape[:2], num_slots).gather(-1, slots)
    return slots, live


def _filled(picks: Tensor) -> Tensor:
    """``picks`` without the last columns that no row fills. All of them on CUDA, where asking would synchronise."""
    if picks.is_cuda:
        return picks
    filled = (picks >= 0).flatten(0, 1).any(0).nonzero()
    return picks[..., : int(filled.max()) + 1 if filled.numel() else 1]


def _row_bytes(
    q_absorbed: Tensor, q_pe: Tensor, latent: Tensor, topk_indices: Tensor | None, block_table: Tensor | None
) -> int:
    width = slot_count(latent, block_table) if topk_indices is None else topk_indices.shape[-1]
    gathered = 0 if topk_indices is None else 2 * (q_absorbed.shape[-1] + q_pe.shape[-1])
    return q_absorbed.shape[0] * width * (3 * q_absorbed.shape[2] + gathered) * compute_dtype(q_absorbed).itemsize


def sparse_mla(
    q_absorbed: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    topk_indices: Tensor | None,
    scale: float,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * ([q_absorbed | q_pe] . latent)) c over the slots that are selected and visible.

    Args:
        q_absorbed: W_uk^T q_nope, [B, T, H, R]. q_pe: [B, T, H, P].
        latent: rows [kv_c | k_pe], [B, S, R+P], or in fp8 uint8[B, S, bytes]; then they count as what
            ``dsa::cache_read`` makes of them in the dtype of the queries.
        topk_indices: int32[B, T, K], any order; entries outside [0, S) are absent, a repeated one counts each time.
            None: every visible slot.
        visible, mask: see `dsa_compile.dims`. scale: the softmax scale.
        block_table: int32[B, pages], with latent [pages of all sequences, page size, width]; slots of an absent page
            are not selected.

    Returns:
        out [B, T, H, R] and lse float32[B, T, H] (natural logarithm); zeros and -inf for a row that sees nothing.
    """
    check(q_absorbed, q_pe, latent, visible, mask, topk_indices, block_table)
    T, rank = q_absorbed.shape[1], q_absorbed.shape[-1]
    out = q_absorbed.new_empty(q_absorbed.shape)
    lse = q_absorbed.new_empty(q_absorbed.shape[:3], dtype=compute_dtype(q_absorbed))
    for rows in row_slices(T, _row_bytes(q_absorbed, q_pe, latent, topk_indices, block_table), ROW_BUDGET):
        chunk = _chunk(q_absorbed, q_pe, latent, visible, mask, topk_indices, block_table, rows)
        probs, part = chunk.attend(scale)
        out[:, rows] = chunk.mix(probs, rank).masked_fill(chunk.bad.unsqueeze(-1), float("nan"))
        lse[:, rows] = part.masked_fill(chunk.bad, float("nan"))
    return out, lse


def sparse_mla_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q_absorbed: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    topk_indices: Tensor | None,
    scale: float,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `sparse_mla` in q_absorbed, q_pe and latent, recomputed a chunk of rows at a time.

    Raises:
        InputError: latent is paged or in fp8: a cache of that kind has no gradient.
    """
    check_backward(latent, block_table)
    rank, dtype = q_absorbed.shape[-1], compute_dtype(q_absorbed)
    q_grad = q_absorbed.new_empty(*q_absorbed.shape[:-1], latent.shape[-1])
    latent_grad = torch.zeros(latent.shape, dtype=dtype, device=latent.device)
    batch = torch.arange(latent.shape[0], device=latent.device)[:, None, None]
    row_bytes = 2 * _row_bytes(q_absorbed, q_pe, latent, topk_indices, None)
    for rows in row_slices(q_absorbed.shape[1], row_bytes, ROW_BUDGET):
        chunk = _chunk(q_absorbed, q_pe, latent, visible, mask, topk_indices, None, rows)
        out_grad, lse_grad = grad_out[:, rows].to(dtype), grad_lse[:, rows].to(dtype)
        probs, _ = chunk.attend(scale)
        scores_grad = attend_backward(probs, chunk.dot(out_grad))
        scores_grad = (scores_grad + probs * lse_grad.unsqueeze(-1)) * scale
        q_grad[:, rows] = chunk.mix(scores_grad, latent.shape[-1]).to(q_grad.dtype)
        rows_grad = chunk.spread(scores_grad, chunk.q)
        rows_grad[..., :rank] += chunk.spread(probs, out_grad)
        if chunk.slots is None:
            latent_grad[:, : rows_grad.shape[1]] += rows_grad
        else:
            latent_grad.index_put_((batch, chunk.slots), rows_grad, accumulate=True)
    q_absorbed_grad, q_pe_grad = (x.contiguous() for x in q_grad.tensor_split([rank], -1))
    return q_absorbed_grad, q_pe_grad, latent_grad.to(latent.dtype)
