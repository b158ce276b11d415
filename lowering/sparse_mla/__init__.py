"""Absorbed attention over the selected latent rows: by Triton kernels on CUDA, eager and in Inductor."""

import torch

from dsa_compile.lowering.sparse_mla.launch import sparse_mla_cuda
from dsa_compile.lowering.sparse_mla.reference import sparse_mla, sparse_mla_backward

torch.library.impl("dsa::sparse_mla", "cpu")(sparse_mla)
torch.library.impl("dsa::sparse_mla", "cuda")(sparse_mla_cuda)
torch.library.impl("dsa::sparse_mla_backward", ("cpu", "cuda"))(sparse_mla_backward)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale, block_table = inputs
    ctx.save_for_backward(*tensors, block_table)


def _backward(ctx, grad_out, grad_lse):
    *tensors, block_table = ctx.saved_tensors
    grads = torch.ops.dsa.sparse_mla_backward(grad_out, grad_lse, *tensors, ctx.scale, block_table)
    return *grads, None, None, None, None, None


torch.library.register_autograd("dsa::sparse_mla", _backward, setup_context=_setup_context)

__all__ = ["sparse_mla", "sparse_mla_backward"]
