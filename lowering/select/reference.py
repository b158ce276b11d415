"""Reference of ``dsa::select`` (DeepSeek-V3.2 report, equations 1 and 2; transformers ``DeepseekV32Indexer``)."""

import torch
from torch import Tensor

from dsa_compile.lowering.rows import compute_dtype, kept, row_slices, topk_slots, used_slots


def index_scores(q: Tensor, weights: Tensor, index_keys: Tensor, scale: float) -> Tensor:
    """I[t, s] = sum_j weights[t, j] * relu(scale * q[t, j] . index_keys[s]), differentiable.

    Args:
        q: [B, T, HI, DI]. weights: [B, T, HI], signed. index_keys: [B, S, DI].
        scale: ``DI ** -0.5``; not the attention's.

    Returns:
        [B, T, S] in float32, or float64 for float64 inputs.
    """
    dtype = compute_dtype(q)
    heads = (q.to(dtype) @ index_keys.to(dtype).transpose(-1, -2).unsqueeze(1)) * scale
    return (weights.to(dtype).unsqueeze(-2) @ heads.relu()).squeeze(-2)


def select(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    index_topk: int,
    scale: float,
    budget: int,
) -> Tensor:
    """The ``index_topk`` visible slots of highest index score.

    Args:
        q: [B, T, HI, DI]. weights: [B, T, HI]. index_keys: [B, S, DI]. scale: ``DI ** -0.5``.
        visible, mask: see `dsa_compile.dims`.
        budget: bytes that the scores of one chunk of rows may take.

    Returns:
        int32[B, T, K]. A row that sees at most K slots takes them all.
    """
    T, S = q.shape[1], index_keys.shape[1]
    out = q.new_empty(q.shape[0], T, index_topk, dtype=torch.int32)
    row_bytes = q.shape[0] * S * (q.shape[2] * 2 + 6) * compute_dtype(q).itemsize
    for rows in row_slices(T, row_bytes, budget):
        n = used_slots(S, visible, mask, rows)
        scores = index_scores(q[:, rows], weights[:, rows], index_keys[:, :n], scale)
        out[:, rows] = topk_slots(scores, kept(visible, mask, rows, n, q), index_topk)
    return out
