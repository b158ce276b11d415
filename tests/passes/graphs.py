"""Small graphs that passes are tried on: functions of tensors, captured by the harness."""

from typing import Any

import torch
from torch import Tensor

from dsa_compile.dims import LayerDims

DIMS = LayerDims(n_heads=3, kv_lora_rank=9, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6)
RANK, NOPE, SCALE, BUDGET = DIMS.kv_lora_rank, DIMS.qk_nope_head_dim, 0.3, 1 << 20


def attend(
    q: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor,
    topk_indices: Tensor | None = None,
    index_topk: int = 0,
) -> Tensor:
    """A canonical attention without an indexer."""
    return torch.ops.dsa.mla.default(
        q, c_kv, k_pe, kv_b_weight, visible, None, topk_indices, NOPE, SCALE, [], index_topk, "half", -1
    )


def over_pool(q: Tensor, latent: Tensor, kv_b_weight: Tensor, visible: Tensor, **fields: Any) -> Tensor:
    """The same over the halves of a pool."""
    return attend(q, latent[..., :RANK], latent[..., RANK:], kv_b_weight, visible, **fields)


def selected(q: Tensor, latent: Tensor, kv_b_weight: Tensor, visible: Tensor, topk: int) -> Tensor:
    """The same over the slots that the exact selector picks."""
    c_kv, k_pe = latent[..., :RANK], latent[..., RANK:]
    picks = torch.ops.dsa.select_attention.default(q, c_kv, k_pe, kv_b_weight, visible, None, NOPE, SCALE, topk, BUDGET)
    return attend(q, c_kv, k_pe, kv_b_weight, visible, picks)


def unrelated(x: Tensor, weight: Tensor) -> Tensor:
    """Attention that is no MLA."""
    q = torch.nn.functional.linear(x, weight).unflatten(-1, (2, -1)).transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
