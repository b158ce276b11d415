"""Reference of ``dsa::select_attention``: what a perfect indexer would pick."""

import torch
from torch import Tensor

from dsa_compile.lowering.mla.reference import expand_keys
from dsa_compile.lowering.rows import attend, kept, row_slices, topk_slots, used_slots


def select_attention(
    q: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    nope: int,
    scale: float,
    index_topk: int,
    budget: int,
) -> Tensor:
    """The ``index_topk`` visible slots of highest mean attention probability over the heads.

    This is the target of the indexer's warm-up (DeepSeek-V3.2 report, section 2.2), so the upper bound of its choice.

    Args:
        q: [B, H, T, N+P]. c_kv: [B, S, R]. k_pe: [B, S, P]. kv_b_weight: [H*(N+V), R].
        budget: bytes that the scores of one chunk of rows may take.

    Returns:
        int32[B, T, K]. A row that sees at most K slots takes them all.
    """
    T, S = q.shape[2], c_kv.shape[1]
    key, _ = expand_keys(q, c_kv, k_pe, kv_b_weight, nope)
    out = q.new_empty(q.shape[0], T, index_topk, dtype=torch.int32)
    for rows in row_slices(T, q.shape[0] * S * (3 * q.shape[1] + 6) * key.element_size(), budget):
        n = used_slots(S, visible, mask, rows)
        keep = kept(visible, mask, rows, n, q)
        scores = (q[:, :, rows].to(key.dtype) @ key[:, :, :n].transpose(-1, -2)) * scale
        probs, _ = attend(scores, keep[:, None])
        out[:, rows] = topk_slots(probs.mean(1), keep, index_topk)
    return out
