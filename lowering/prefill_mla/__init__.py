"""Attention of a prompt over a pool, in the form that its sizes make the faster one."""

import torch

from dsa_compile.lowering.prefill_mla.launch import prefill_mla_cuda
from dsa_compile.lowering.prefill_mla.limits import check_backward
from dsa_compile.lowering.prefill_mla.reference import prefill_mla

torch.library.impl("dsa::prefill_mla", "cpu")(prefill_mla)
torch.library.impl("dsa::prefill_mla", "cuda")(prefill_mla_cuda)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.nope, ctx.scale, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    q, latent, kv_b_weight, visible, topk_indices = ctx.saved_tensors
    check_backward(latent)
    c_kv, k_pe = latent.tensor_split([kv_b_weight.shape[-1]], -1)
    q_grad, c_grad, pe_grad, weight_grad = torch.ops.dsa.mla_backward(
        grad, q, c_kv, k_pe, kv_b_weight, visible, None, topk_indices, ctx.nope, ctx.scale
    )
    return q_grad, torch.cat([c_grad, pe_grad], -1), weight_grad, None, None, None, None, None


torch.library.register_autograd("dsa::prefill_mla", _backward, setup_context=_setup_context)

__all__ = ["prefill_mla"]
