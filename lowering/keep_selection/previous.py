"""What a row attends to that reads the selection of the token before it."""

import torch
from torch import Tensor


def previous_rows(topk_indices: Tensor, kept: Tensor | None, visible: Tensor) -> Tensor:
    """`with_own_slot` of what each row's token before selected: a row of the same call, or for its first row ``kept``.

    Args:
        topk_indices: int32[B, T, K], what the rows selected themselves.
        kept: int32[B, K], of the token before the first row; None: it is not known, and the first row attends to what
            it selected itself.
        visible: int32[B, 1, T, 2]; padding rows come before, behind and between others.

    Returns:
        int32[B, T, K].
    """
    valid = visible[:, 0, :, 1] > visible[:, 0, :, 0]
    rows = torch.ones_like(valid[:1]).cumsum(1) - 1  # passes trace this, and they cannot trace arange
    last = torch.where(valid, rows, -1).cummax(1).values
    before = torch.where(rows > 0, last.roll(1, 1), -1).unsqueeze(-1)
    found = topk_indices.gather(1, before.clamp_min(0).expand_as(topk_indices))
    if kept is not None:
        return with_own_slot(torch.where(before >= 0, found, kept.unsqueeze(1)), visible)
    return torch.where(before >= 0, with_own_slot(found, visible), topk_indices)


def with_own_slot(before: Tensor, visible: Tensor) -> Tensor:
    """The selections of the tokens before, and each row's own slot.

    Where K slots are taken already the second lowest makes room: the lowest is often an attention sink.

    Args:
        before: int32[B, T, K], which no row reads that is the first to see its sequence.
        visible: int32[B, 1, T, 2].

    Returns:
        int32[B, T, K], ascending, then -1; nothing but -1 where a row sees nothing.
    """
    start, end = visible[:, 0, :, :1], visible[:, 0, :, 1:]
    slot = end - 1
    before = torch.where(slot > start, before, -1)
    place = torch.ones_like(before[:1, :1]).cumsum(-1) - 1
    full = before[..., -1:] >= 0
    roomy = torch.where(full & (place > 0), before.roll(-1, -1), before)
    own = (before >= 0).sum(-1, keepdim=True) - full.long()
    return torch.where(end > start, torch.where(place == own, slot, roomy), -1)
