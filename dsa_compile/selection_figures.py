"""How much of its attention a layer's selection keeps, and how much of a selection is in another."""

import math

import torch
from torch import Tensor

from dsa_compile.lowering.mla.reference import expand_keys
from dsa_compile.lowering.rows import ROW_BUDGET, attend, chosen, kept, row_slices


def selection_figures(
    q: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor,
    topk_indices: Tensor | None,
    before: Tensor | None,
    nope: int,
    scale: float,
    index_topk: int,
) -> Tensor:
    """Sums over the rows past K of one sequence without padding.

    Args:
        q: [1, H, T, N+P]. c_kv: [1, S, R]. k_pe: [1, S, P]. kv_b_weight: [H*(N+V), R]. visible: see `dsa_compile.dims`.
        topk_indices: int32[1, T, K] that the layer attends to; None: everything.
        before: the same of the layer before.

    Returns:
        float64[2]: of the head-mean attention probability, over everything visible, of the selected slots; and of the
        share of the selected slots that the layer before attends to as well, NaN where one attends to everything.
    """
    q, visible = q[:, :, index_topk:], visible[:, :, index_topk:]
    kept_mass = common = q.new_zeros((), dtype=torch.float64)
    if topk_indices is None:
        return torch.stack([kept_mass + q.shape[2], kept_mass + math.nan])
    S, picks = c_kv.shape[1], topk_indices[:, index_topk:]
    key, _ = expand_keys(q, c_kv, k_pe, kv_b_weight, nope)
    for rows in row_slices(q.shape[2], q.shape[1] * S * 3 * key.element_size(), ROW_BUDGET):
        scores = (q[:, :, rows].to(key.dtype) @ key.transpose(-1, -2)) * scale
        probs, _ = attend(scores, kept(visible, None, rows, S, q)[:, None])
        picked = chosen(picks, rows, S)
        kept_mass = kept_mass + (probs.mean(1) * picked).sum(dtype=torch.float64)
        if before is not None:
            common = common + (picked & chosen(before[:, index_topk:], rows, S)).sum(dtype=torch.float64) / index_topk
    return torch.stack([kept_mass, common if before is not None else common + math.nan])
