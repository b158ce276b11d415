"""Reference of teaching: attention, how far index scores are from it, and gradients, a chunk of rows at a time."""

import torch
from torch import Tensor

from dsa_compile.lowering.mla.reference import expand_keys
from dsa_compile.lowering.rows import attend, chosen, compute_dtype, kept, row_slices
from dsa_compile.lowering.select.reference import index_scores

ROW_BUDGET = {"cuda": 512 << 20, "cpu": 4 << 20}
"""Bytes of scores, of heads and of index heads, that a chunk of rows holds at once.

Few launches count on a GPU; on a CPU its caches do, and that a chunk reads no slot behind its last row.
"""


def teach(
    q: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor,
    topk_indices: Tensor | None,
    index_q: Tensor,
    index_weights: Tensor,
    index_keys: Tensor,
    nope: int,
    scale: float,
    index_scale: float,
    wanted: bool,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attention, and the sum over rows of KL(p || softmax(I)); operands are those of `divergence.taught_attention`.

    Args:
        wanted: whether gradients are.

    Returns:
        [B, T, H, V]; the sum, in the compute dtype; its gradients in index_q, index_weights and index_keys, or none.
    """
    B, H, T, _ = q.shape
    student = [x.detach() for x in (index_q, index_weights, index_keys)]
    grads = [torch.zeros_like(x) for x in student] if wanted else []
    key, value = (x.to(q.dtype) for x in expand_keys(q, c_kv, k_pe, kv_b_weight, nope))
    out = q.new_empty(B, T, H, value.shape[-1])
    loss = q.new_zeros((), dtype=compute_dtype(q))
    row_bytes = B * T * (3 * H + 4 * index_q.shape[2] + 8) * loss.itemsize
    for rows in row_slices(T, row_bytes, ROW_BUDGET["cpu" if q.device.type == "cpu" else "cuda"]):
        n = rows.stop  # without a cache no token lies in a slot behind its place in the row
        keep = kept(visible, None, rows, n, q)
        if topk_indices is not None:
            keep = keep & chosen(topk_indices, rows, T)[..., :n]
        scores = (q[:, :, rows] @ key[:, :, :n].transpose(-1, -2)).to(loss.dtype) * scale
        probs, _ = attend(scores, keep[:, None])
        out[:, rows] = (probs.to(q.dtype) @ value[:, :, :n]).transpose(1, 2)
        part = student[0][:, rows], student[1][:, rows], student[2][:, :n]
        divergence, *part_grads = _divergence(_target(probs, temperature), keep, *part, index_scale, wanted)
        loss += divergence
        for grad, place, more in zip(grads, (rows, rows, slice(n)), part_grads):
            grad[:, place] += more
    return out, loss, grads


def _target(probs: Tensor, temperature: float) -> Tensor:
    """[B, t, S] of the probabilities of heads [B, H, t, S]; zeros for a row that sees nothing."""
    if temperature == 1:
        return probs.mean(1)
    flat = probs.pow(1 / temperature).sum(1)
    return flat / flat.sum(-1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)


def _divergence(
    target: Tensor, keep: Tensor, index_q: Tensor, index_weights: Tensor, index_keys: Tensor, scale: float, wanted: bool
) -> tuple[Tensor, ...]:
    """Sum over rows of KL(target || softmax(I)), and where ``wanted`` its gradients in what I is made of."""
    with torch.set_grad_enabled(wanted):
        q, weights, keys = leaves = [x.detach().requires_grad_(wanted) for x in (index_q, index_weights, index_keys)]
        scores = index_scores(q, weights, keys, scale)
    probs, lse = attend(scores.detach(), keep)
    lse = lse.masked_fill(~keep.any(-1), 0)
    cross = (target * (lse.unsqueeze(-1) - scores.detach()).masked_fill(~keep, 0)).sum()
    loss = torch.xlogy(target, target).sum() + cross
    return loss, *(torch.autograd.grad(scores, leaves, probs - target) if wanted else ())
