"""Reference of ``dsa::mla``: keys and values are expanded, scores live a chunk of rows at a time."""

import torch
from torch import Tensor

from dsa_compile.lowering.rows import (
    ROW_BUDGET,
    attend,
    attend_backward,
    chosen,
    compute_dtype,
    kept,
    row_slices,
    used_slots,
)


def expand_keys(q: Tensor, c_kv: Tensor, k_pe: Tensor, kv_b_weight: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """Keys [B, H, S, N+P] and values [B, H, S, V] of all heads, in the compute dtype."""
    H, dtype = q.shape[1], compute_dtype(q)
    weight, c_kv = kv_b_weight.to(dtype).unflatten(0, (H, -1)), c_kv.to(dtype)
    k_nope = torch.einsum("bsr,hnr->bhsn", c_kv, weight[:, :nope])
    key = torch.cat([k_nope, k_pe.to(dtype)[:, None].expand(-1, H, -1, -1)], -1)
    return key, torch.einsum("bsr,hvr->bhsv", c_kv, weight[:, nope:])


def _finite_rows(c_kv: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """c_kv and k_pe with zeros where a slot holds NaN or inf, and bool[B, S] which do."""
    bad = ~(c_kv.isfinite().all(-1) & k_pe.isfinite().all(-1))
    return *(x.masked_fill(bad.unsqueeze(-1), 0) for x in (c_kv, k_pe)), bad  # type: ignore[return-value]


def mla(
    q: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    topk_indices: Tensor | None,
    nope: int,
    scale: float,
    indexer_params: list[Tensor],
    index_topk: int,
    index_rope: str,
    selection_of: int,
) -> Tensor:
    """softmax(scale * q . [W_uk c | k_pe]) W_uv c over the slots that are visible and, if given, selected.

    Args:
        q: [B, H, T, N+P]. c_kv: [B, S, R]. k_pe: [B, S, P]. kv_b_weight: [H*(N+V), R].
        visible, mask, topk_indices: see `dsa_compile.dims`. nope: N. scale: the softmax scale.
        indexer_params, index_topk, index_rope, selection_of: read by the passes ``insert_indexer`` and
            ``plan_selection``, not by the mathematics.

    Returns:
        [B, T, H, V], zeros for a row that sees nothing.
    """
    T, S = q.shape[2], c_kv.shape[1]
    c_kv, k_pe, bad = _finite_rows(c_kv, k_pe)
    key, value = expand_keys(q, c_kv, k_pe, kv_b_weight, nope)
    out = q.new_empty(q.shape[0], T, q.shape[1], value.shape[-1])
    for rows in row_slices(T, q.shape[0] * q.shape[1] * S * 3 * key.element_size(), ROW_BUDGET):
        n = used_slots(S, visible, mask, rows)
        keep = _keep(visible, mask, topk_indices, rows, n, S, q)
        scores = (q[:, :, rows].to(key.dtype) @ key[:, :, :n].transpose(-1, -2)) * scale
        probs, _ = attend(scores, keep[:, None])
        hit = (keep & bad[:, None, :n]).any(-1)
        out[:, rows] = (probs @ value[:, :, :n]).transpose(1, 2).masked_fill(hit[..., None, None], float("nan"))
    return out


def _keep(
    visible: Tensor | None, mask: Tensor | None, topk_indices: Tensor | None, rows: slice, n: int, S: int, like: Tensor
) -> Tensor:
    keep = kept(visible, mask, rows, n, like)
    if topk_indices is not None:
        keep = keep & chosen(topk_indices, rows, S)[..., :n]
    return keep


def mla_backward(
    grad: Tensor,
    q: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    topk_indices: Tensor | None,
    nope: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `mla` in q, c_kv, k_pe and kv_b_weight, recomputed a chunk of rows at a time."""
    T, S = q.shape[2], c_kv.shape[1]
    c_kv, k_pe, _ = _finite_rows(c_kv, k_pe)
    key, value = expand_keys(q, c_kv, k_pe, kv_b_weight, nope)
    key_grad, value_grad = torch.zeros_like(key), torch.zeros_like(value)
    q_grad = torch.empty_like(q, memory_format=torch.contiguous_format)
    for rows in row_slices(T, q.shape[0] * q.shape[1] * S * 6 * key.element_size(), ROW_BUDGET):
        keep = _keep(visible, mask, topk_indices, rows, S, S, q)
        q_rows = q[:, :, rows].to(key.dtype).masked_fill(~keep.any(-1)[:, None, :, None], 0)
        out_grad = grad[:, rows].transpose(1, 2).to(key.dtype)
        probs, _ = attend((q_rows @ key.transpose(-1, -2)) * scale, keep[:, None])
        scores_grad = attend_backward(probs, out_grad @ value.transpose(-1, -2)) * scale
        q_grad[:, :, rows] = (scores_grad @ key).to(q.dtype)
        key_grad += scores_grad.transpose(-1, -2) @ q_rows
        value_grad += probs.transpose(-1, -2) @ out_grad
    c_rows, k_nope_grad = c_kv.to(key.dtype), key_grad[..., :nope]
    weight = kv_b_weight.to(key.dtype).unflatten(0, (q.shape[1], -1))
    c_grad = torch.einsum("bhsn,hnr->bsr", k_nope_grad, weight[:, :nope])
    c_grad += torch.einsum("bhsv,hvr->bsr", value_grad, weight[:, nope:])
    weight_grad = torch.einsum("bhsd,bsr->hdr", torch.cat([k_nope_grad, value_grad], -1), c_rows).flatten(0, 1)
    return (
        q_grad,
        c_grad.to(c_kv.dtype).contiguous(),
        key_grad[..., nope:].sum(1).to(k_pe.dtype).contiguous(),
        weight_grad.to(kv_b_weight.dtype).contiguous(),
    )
