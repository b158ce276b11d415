"""The canonical attention over latent rows."""

import torch

from dsa_compile.lowering.mla.reference import mla, mla_backward

torch.library.impl("dsa::mla", ("cpu", "cuda"))(mla)
torch.library.impl("dsa::mla_backward", ("cpu", "cuda"))(mla_backward)


def _setup_context(ctx, inputs, output):
    q, c_kv, k_pe, kv_b_weight, visible, mask, topk_indices, ctx.nope, ctx.scale, indexer_params, *_ = inputs
    ctx.num_params = len(indexer_params)
    ctx.save_for_backward(q, c_kv, k_pe, kv_b_weight, visible, mask, topk_indices)


def _backward(ctx, grad):
    grads = torch.ops.dsa.mla_backward(grad, *ctx.saved_tensors, ctx.nope, ctx.scale)
    return *grads, *[None] * 5, [None] * ctx.num_params, None, None, None


torch.library.register_autograd("dsa::mla", _backward, setup_context=_setup_context)

__all__ = ["mla", "mla_backward"]
