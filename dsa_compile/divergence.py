"""Attention that also says how far an indexer is from it, without ever holding all rows' probabilities."""

from typing import Any

import torch
from torch import Tensor

from dsa_compile.lowering.teach import teach, teach_cuda


class _TaughtAttention(torch.autograd.Function):
    """Gradients are made with the loss, so that backward recomputes and holds nothing."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        visible: Tensor = inputs[4]
        run: Any = teach_cuda if visible.is_cuda else teach
        *operands, temperature = inputs
        out, loss, grads = run(*operands, any(ctx.needs_input_grad), temperature)
        taught = (visible[..., 1] > visible[..., 0]).sum().clamp_min(1)
        ctx.save_for_backward(taught, *grads)
        ctx.mark_non_differentiable(out)
        return out, loss / taught

    @staticmethod
    def backward(ctx: Any, _: Tensor, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        taught, *grads = ctx.saved_tensors
        share = loss_grad / taught  # in its own dtype: float16 has no 1 / 100,000
        return *[None] * 6, *((grad.to(share.dtype) * share).to(grad.dtype) for grad in grads), *[None] * 4


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
    temperature: float = 1.0,
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
        temperature: at least 1. p is the sum over heads of their probabilities to the power 1 / temperature, over its
            own sum: above 1 it is flatter, and a token to which several heads attend a little counts for more beside
            one to which a single head attends much.

    Returns:
        [B, T, H, V] without a gradient, zeros for a row that sees nothing; and the mean over the other rows, a scalar.
    """
    result: tuple[Tensor, Tensor] = _TaughtAttention.apply(
        q,
        c_kv,
        k_pe,
        kv_b_weight,
        visible,
        topk_indices,
        index_q,
        index_weights,
        index_keys,
        nope,
        scale,
        index_scale,
        temperature,
    )
    return result
