"""Reference of ``dsa::route``."""

import torch
from torch import Tensor

from dsa_compile.lowering.route.limits import check


def route(
    logits: Tensor, bias: Tensor, groups: int, topk_groups: int, topk: int, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights: sigmoid scores, chosen under a bias from the best groups alone.

    A group is worth its two best biased scores. Ties go to the lower group and expert, and NaN is greater than every
    number, as for ``torch.topk``, so that it shows. Source: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).

    Args:
        logits: float32[T, E]. bias: [E] of a float dtype, for the choice alone.
        groups: equal parts of the experts. topk_groups: of them, from which experts are chosen. topk: experts a token.
        normalise: divide the weights of a token by their sum. scale: what they are then multiplied by.

    Returns:
        weights float32[T, topk] and experts int64[T, topk], the best first.

    Raises:
        InputError: an input has another shape, dtype or device, or there are too few experts.
    """
    check(logits, bias, groups, topk_groups, topk)
    scores = logits.sigmoid()
    biased = scores + bias.to(scores.dtype)
    worth = biased.unflatten(1, (groups, -1)).sort(dim=-1, descending=True).values[..., :2].sum(-1)
    best = worth.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
    open_ = torch.zeros_like(worth, dtype=torch.bool).scatter(1, best, True)
    open_ = open_.repeat_interleave(biased.shape[1] // groups, 1)
    # what is closed stands behind what is open, also where a bias is -inf
    order = biased.sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(1, (~open_).gather(1, order).to(torch.int8).sort(dim=-1, stable=True).indices)
    experts = order[:, :topk].contiguous()
    weights = scores.gather(1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts
