"""What a cache write means for the rows of a call that has no cache."""

import torch
from torch import Tensor


def compact_rows(rows: Tensor, visible: Tensor) -> Tensor:
    """Move each row [B, T, D] to the slot that ``visible`` [B, 1, T, 2] gives its token; padding leaves zeros."""
    span = visible[:, 0]
    slots = torch.where(span[..., 1] > span[..., 0], span[..., 1] - 1, rows.shape[1]).long()
    target = rows.new_zeros(rows.shape[0], rows.shape[1] + 1, rows.shape[2])
    return target.scatter(1, slots.unsqueeze(-1).expand_as(rows), rows)[:, :-1]
