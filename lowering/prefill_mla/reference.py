"""Reference of ``dsa::prefill_mla``, and the choice of form that it shares with the kernels."""

import torch
from torch import Tensor

from dsa_compile.cost.prefill import masked_pays
from dsa_compile.dims import LayerDims
from dsa_compile.lowering.cache_read.reference import cache_read
from dsa_compile.lowering.mla.reference import mla
from dsa_compile.lowering.prefill_mla.limits import check


def prefill_mla(
    q: Tensor,
    latent: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor | None,
    topk_indices: Tensor | None,
    nope: int,
    scale: float,
    form: str,
) -> Tensor:
    """softmax(scale * q . [W_uk c | k_pe]) W_uv c over what is visible and, if given, selected: `mla`, over a pool.

    Args:
        q: [B, H, T, N+P]. latent: rows [kv_c | k_pe], [B, S, R+P], or in fp8 uint8[B, S, bytes]; then they count as
            what ``dsa::cache_read`` makes of them. kv_b_weight: [H*(N+V), R].
        visible, topk_indices: see `dsa_compile.dims`; None: everything. nope: N. scale: the softmax scale.
        form: ``"sparse"``: absorbed, over each row's latents. ``"masked"``: over expanded keys and values of all
            slots, under a mask. ``"auto"``: what costs less by ``T`` and ``S``. They differ by rounding alone.

    Returns:
        [B, T, H, V], contiguous, zeros for a row that sees nothing.
    """
    check(q, latent, kv_b_weight, visible, topk_indices, nope, form)
    dims = dims_of(q, kv_b_weight, nope)
    if topk_indices is not None and not is_masked(dims, q, latent, topk_indices, form):
        return absorbed(q, latent, kv_b_weight, visible, topk_indices, nope, scale)
    return expanded(q, values_of(latent, dims, q.dtype), kv_b_weight, visible, topk_indices, nope, scale)


def expanded(
    q: Tensor,
    latent: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor | None,
    topk_indices: Tensor | None,
    nope: int,
    scale: float,
) -> Tensor:
    """`mla` over the halves of latent [B, S, R+P]."""
    rank = kv_b_weight.shape[-1]
    c_kv, k_pe = latent[..., :rank], latent[..., rank:]
    return mla(q, c_kv, k_pe, kv_b_weight, visible, None, topk_indices, nope, scale, [], 0, "", -1)


def absorbed(
    q: Tensor, latent: Tensor, kv_b_weight: Tensor, visible: Tensor | None, picks: Tensor, nope: int, scale: float
) -> Tensor:
    """``dsa::sparse_mla`` between the halves of kv_b_weight."""
    B, H, T, _ = q.shape
    weight = kv_b_weight.unflatten(0, (H, -1))
    q_absorbed = torch.einsum("bhtn,hnr->bthr", q[..., :nope], weight[:, :nope])
    q_pe = q[..., nope:].transpose(1, 2)
    attended = torch.ops.dsa.sparse_mla.default(q_absorbed, q_pe, latent, visible, None, picks, scale)[0]
    del q_absorbed  # as large as what is yet to come
    out = q.new_empty(B, T, H, weight.shape[1] - nope)
    heads = (x.flatten(0, 1).transpose(0, 1) for x in (attended, out))
    torch.bmm(next(heads), weight[:, nope:].transpose(1, 2), out=next(heads))
    return out


def is_masked(dims: LayerDims, q: Tensor, latent: Tensor, topk_indices: Tensor, form: str) -> bool:
    """Whether a call with a selection runs in the masked form."""
    if form != "auto":
        return form == "masked"
    return masked_pays(dims, q.shape[2], latent.shape[1], topk_indices.shape[-1])


def values_of(latent: Tensor, dims: LayerDims, dtype: torch.dtype) -> Tensor:
    """[B, S, R+P] of a pool in whatever format."""
    if latent.dtype != torch.uint8:
        return latent
    return cache_read(latent, dims.kv_lora_rank, dims.qk_rope_head_dim, dtype)


def dims_of(q: Tensor, kv_b_weight: Tensor, nope: int) -> LayerDims:
    H, rank = q.shape[1], kv_b_weight.shape[-1]
    return LayerDims(
        n_heads=H,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=q.shape[-1] - nope,
        v_head_dim=kv_b_weight.shape[0] // H - nope,
    )
