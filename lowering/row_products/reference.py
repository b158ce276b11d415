"""References of ``dsa::row_products`` and ``dsa::expert_products``."""

import torch
import torch.nn.functional as F
from torch import Tensor


def row_products(x: Tensor, weights: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """What linear layers without biases make of a few rows, one layer behind the other.

    Args:
        x: [R, K] or, in parts, [R, H, K / H], of up to `limits.MOST_ROWS` rows.
        weights: each [N_i, K], of the dtype of ``x``.
        dtype: of the result: that of ``x``, or float32, which both are then converted to first.

    Returns:
        [R * sum of N_i]: the rows [R, N_0] of the first weight, then those of the second.
    """
    dtype = dtype or x.dtype
    x = x.flatten(1)
    return torch.cat([F.linear(x.to(dtype), weight.to(dtype)).flatten() for weight in weights])


def expert_products(x: Tensor, weights: Tensor, picks: Tensor) -> Tensor:
    """A linear layer of an expert for each pick; zeros for what is picked from outside.

    Args:
        x: [R, K], each for P / R picks in a row.
        weights: [E, N, K]. picks: int64[P].

    Returns:
        [P, N] in the dtype of ``x``.
    """
    inside = (picks >= 0) & (picks < weights.shape[0])
    rows = x.repeat_interleave(picks.shape[0] // x.shape[0], 0)
    products = torch.einsum("pk,pnk->pn", rows, weights[picks.where(inside, 0)])
    return torch.where(inside[:, None], products, 0)
