"""Absorbed attention over the selected latent rows."""

import torch

from dsa_compile.lowering.sparse_mla.reference import sparse_mla, sparse_mla_backward

torch.library.impl("dsa::sparse_mla", ("cpu", "cuda"))(sparse_mla)
torch.library.impl("dsa::sparse_mla_backward", ("cpu", "cuda"))(sparse_mla_backward)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_out, grad_lse):
    grads = torch.ops.dsa.sparse_mla_backward(grad_out, grad_lse, *ctx.saved_tensors, ctx.scale)
    return *grads, None, None, None, None


torch.library.register_autograd("dsa::sparse_mla", _backward, setup_context=_setup_context)

__all__ = ["sparse_mla", "sparse_mla_backward"]
