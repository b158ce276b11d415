"""How much of its attention a layer's selection keeps, beside the exact one, and how much of it is in another."""

import math

import torch
from torch import Tensor

from dsa_compile.lowering.mla.reference import expand_keys
from dsa_compile.lowering.rows import ROW_BUDGET, attend, chosen, kept, row_slices, topk_slots


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
        float64[4], sums of: the head-mean attention probability, over everything visible, of the slots attended to; the
        same of the exact selection, the K slots that have most of it; the share of those that are attended to; the
        share of the slots attended to that the layer before attends to as well. The second is NaN for a layer that
        attends to everything, the last where either does.
    """
    q, visible = q[:, :, index_topk:], visible[:, :, index_topk:]
    figures = q.new_zeros(4, dtype=torch.float64)
    if topk_indices is None:
        return figures + q.shape[2] * figures.new_tensor([1, math.nan, 1, math.nan])
    S, picks = c_kv.shape[1], topk_indices[:, index_topk:]
    key, _ = expand_keys(q, c_kv, k_pe, kv_b_weight, nope)
    for rows in row_slices(q.shape[2], q.shape[1] * S * 3 * key.element_size(), ROW_BUDGET):
        scores = (q[:, :, rows].to(key.dtype) @ key.transpose(-1, -2)) * scale
        keep = kept(visible, None, rows, S, q)
        mean = attend(scores, keep[:, None])[0].mean(1)
        picked, best = chosen(picks, rows, S), chosen(topk_slots(mean, keep, index_topk), slice(None), S)
        common = picked * math.nan if before is None else picked & chosen(before[:, index_topk:], rows, S)
        parts = mean * picked, mean * best, (picked & best) / index_topk, common / index_topk
        figures += torch.stack([part.sum(dtype=torch.float64) for part in parts])
    return figures
