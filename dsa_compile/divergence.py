"""Attention that also says how far an indexer is from it, without ever holding all rows' probabilities."""

from typing import Any

import torch
from torch import Tensor

from dsa_compile.lowering.mla.reference import expand_keys
from dsa_compile.lowering.rows import attend, chosen, compute_dtype, kept, row_slices
from dsa_compile.lowering.select.reference import index_scores

ROW_BUDGET = {"cuda": 512 << 20, "cpu": 4 << 20}
"""Bytes of scores, of heads and of index heads, that a chunk of rows holds at once.

Few launches count on a GPU; on a CPU its caches do, and that a chunk reads no slot behind its last row.
"""


class _TaughtAttention(torch.autograd.Function):
    """Gradients are made with the loss, chunk by chunk, so that backward recomputes and holds nothing."""

    @staticmethod
    def forward(
        ctx: Any,
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
    ) -> tuple[Tensor, Tensor]:
        B, H, T, _ = q.shape
        student = [x.detach() for x in (index_q, index_weights, index_keys)]
        wanted = any(ctx.needs_input_grad)
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
            divergence, *part_grads = _divergence(probs.mean(1), keep, *part, index_scale, wanted)
            loss += divergence
            for grad, place, more in zip(grads, (rows, rows, slice(n)), part_grads):
                grad[:, place] += more
        taught = (visible[..., 1] > visible[..., 0]).sum().clamp_min(1)
        ctx.save_for_backward(*(grad / taught for grad in grads))
        ctx.mark_non_differentiable(out)
        return out, loss / taught

    @staticmethod
    def backward(ctx: Any, _: Tensor, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        return *[None] * 6, *((grad * loss_grad).to(grad.dtype) for grad in ctx.saved_tensors), None, None, None


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


def taught_attention(
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
) -> tuple[Tensor, Tensor]:
    """``dsa::mla`` of a call without a cache, and KL(p || softmax(I)) of the rows that see something.

    The losses of the DeepSeek-V3.2 report, section 2.1 (equations 3 and 4).

    p is the mean over heads of the attention probabilities over what a row sees, or of that what is selected for it,
    and softmax(I) is over the same; p is a constant, and only the indexer's three tensors have a gradient:
    (softmax(I) - p) / rows in I. Products of matrices are in the dtype of ``q``, softmax and what is summed in float32
    at least.

    Args:
        q: [B, H, T, N+P]. c_kv: [B, T, R]. k_pe: [B, T, P]. kv_b_weight: [H*(N+V), R].
        visible, topk_indices: see `dsa_compile.dims`.
        index_q: [B, T, HI, DI]. index_weights: float32[B, T, HI]. index_keys: [B, T, DI]. nope: N.
        scale: of attention. index_scale: ``DI ** -0.5``.

    Returns:
        [B, T, H, V] without a gradient, zeros for a row that sees nothing; and the mean over the other rows, a scalar.
    """
    result: tuple[Tensor, Tensor] = _TaughtAttention.apply(
        q, c_kv, k_pe, kv_b_weight, visible, topk_indices, index_q, index_weights, index_keys, nope, scale, index_scale
    )
    return result
