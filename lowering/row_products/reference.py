"""References of ``dsa::row_products`` and ``dsa::expert_products``."""

import torch
import torch.nn.functional as F
from torch import Tensor


def row_products(x: Tensor, weights: list[Tensor]) -> Tensor:
    """What linear layers without biases make of one row, side by side.

    Args:
        x: [..., K] of one row.
        weights: each [N_i, K], of the dtype of ``x``.

    Returns:
        [..., sum of N_i] in the dtype of ``x``.
    """
    return torch.cat([F.linear(x, weight) for weight in weights], -1)


def expert_products(x: Tensor, weights: Tensor, picks: Tensor) -> Tensor:
    """A linear layer of an expert for each pick; zeros for what is picked from outside.

    Args:
        x: [P, K], or [1, K] for all picks.
        weights: [E, N, K]. picks: int64[P].

    Returns:
        [P, N] in the dtype of ``x``.
    """
    inside = (picks >= 0) & (picks < weights.shape[0])
    products = torch.einsum("pk,pnk->pn", x.expand(picks.shape[0], -1), weights[picks.where(inside, 0)])
    return torch.where(inside[:, None], products, 0)
