"""``dsa::prefill_mla`` on CUDA: the form that a call of its sizes runs in, without waiting for the device."""

import warnings

from torch import Tensor

from dsa_compile.lowering.masked_mha import configs
from dsa_compile.lowering.masked_mha.launch import masked_mha
from dsa_compile.lowering.prefill_mla.limits import check
from dsa_compile.lowering.prefill_mla.reference import absorbed, dims_of, expanded, is_masked, values_of


def prefill_mla_cuda(
    q: Tensor,
    latent: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor | None,
    topk_indices: Tensor | None,
    nope: int,
    scale: float,
    form: str,
) -> Tensor:
    """`reference.prefill_mla` by kernels, or where ``form`` leaves no choice by itself with a warning of the limit."""
    check(q, latent, kv_b_weight, visible, topk_indices, nope, form)
    dims = dims_of(q, kv_b_weight, nope)
    refused = configs.refusal(dims, q.dtype)
    if topk_indices is not None and (
        (form == "auto" and refused) or not is_masked(dims, q, latent, topk_indices, form)
    ):
        return absorbed(q, latent, kv_b_weight, visible, topk_indices, nope, scale)
    values = values_of(latent, dims, q.dtype)
    if refused:
        warnings.warn(f"dsa::prefill_mla runs as its reference, not as a Triton kernel: {refused}.", stacklevel=2)
        return expanded(q, values, kv_b_weight, visible, topk_indices, nope, scale)
    return masked_mha(q, values, kv_b_weight, visible, topk_indices, scale, dims)
