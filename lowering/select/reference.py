"""Reference of ``dsa::select`` (DeepSeek-V3.2 report, equations 1 and 2; transformers ``DeepseekV32Indexer``)."""

import torch
from torch import Tensor

from dsa_compile.lowering.fp8_keys import decode, quantise
from dsa_compile.lowering.pages import prefix, slot_count
from dsa_compile.lowering.rows import compute_dtype, kept, row_slices, topk_slots, used_slots
from dsa_compile.lowering.select.limits import check


def index_scores(
    q: Tensor, weights: Tensor, index_keys: Tensor, scale: float, index_scales: Tensor | None = None
) -> Tensor:
    """I[t, s] = sum_j weights[t, j] * relu(scale * q[t, j] . index_keys[s]), differentiable.

    Over keys in fp8 the queries are rounded to fp8 as well, each head of a token by itself, and
    I[t, s] = index_scales[s] * sum_j weights[t, j] * q_scales[t, j] * relu(scale * q_codes[t, j] . index_keys[s]);
    then only weights and index_scales have a gradient.

    Args:
        q: [B, T, HI, DI]. weights: [B, T, HI], signed. index_keys: [B, S, DI], in fp8 uint8 codes with
            index_scales float32[B, S].
        scale: ``DI ** -0.5``; not the attention's.

    Returns:
        [B, T, S] in float32, or float64 for float64 queries.
    """
    dtype = compute_dtype(q)
    weights = weights.to(dtype)
    if index_scales is not None:
        codes, q_scales = quantise(q)
        q, weights, index_keys = decode(codes, dtype), weights * q_scales, decode(index_keys, dtype)
    heads = (q.to(dtype) @ index_keys.to(dtype).transpose(-1, -2).unsqueeze(1)) * scale
    scores = (weights.unsqueeze(-2) @ heads.relu()).squeeze(-2)
    return scores if index_scales is None else scores * index_scales.unsqueeze(1)


def select(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    index_topk: int,
    scale: float,
    budget: int,
    block_table: Tensor | None = None,
    index_scales: Tensor | None = None,
) -> Tensor:
    """The ``index_topk`` visible slots of highest index score.

    Args:
        q: [B, T, HI, DI]. weights: [B, T, HI]. index_keys: [B, S, DI]. scale: ``DI ** -0.5``.
        visible, mask: see `dsa_compile.dims`.
        budget: bytes that the scores of one chunk of rows may take.
        block_table: int32[B, pages], with index_keys [pages of all sequences, page size, DI]; slots of an absent page
            score -inf.
        index_scales: float32 of the first two dimensions of index_keys, which then are codes uint8; see `index_scores`.

    Returns:
        int32[B, T, K]. A row that sees at most K slots takes them all.

    Raises:
        InputError: an input would be misread, or the budget cannot hold one row; see `limits`.
    """
    check(q, weights, index_keys, visible, mask, index_topk, budget, block_table, index_scales)
    T, S = q.shape[1], slot_count(index_keys, block_table)
    out = q.new_empty(q.shape[0], T, index_topk, dtype=torch.int32)
    row_bytes = q.shape[0] * S * (q.shape[2] * 2 + 6) * compute_dtype(q).itemsize
    for rows in row_slices(T, row_bytes, budget):
        n = used_slots(S, visible, mask, rows)
        keys, present = prefix(index_keys, block_table, n)
        scales = None if index_scales is None else prefix(index_scales, block_table, n)[0]
        scores = index_scores(q[:, rows], weights[:, rows], keys, scale, scales)
        if present is not None:
            scores = scores.masked_fill(~present.unsqueeze(1), float("-inf"))
        out[:, rows] = topk_slots(scores, kept(visible, mask, rows, n, q), index_topk)
    return out
