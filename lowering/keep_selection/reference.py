"""Reference of ``dsa::keep_selection``."""

import torch
from torch import Tensor


def keep_selection(kept: Tensor, slots: Tensor, topk_indices: Tensor | None, current: bool) -> None:
    """Keep of each sequence the selection of its last row that has a slot; where none has, what was kept stays.

    Args:
        kept: int32[B, K], changed in place.
        slots: int64[B, T], negative for padding.
        topk_indices: int32[B, T, K]; None: nothing is kept.
        current: for passes alone, see `dsa_compile.lowering.ops`.
    """
    if topk_indices is None:
        return
    rows = torch.arange(slots.shape[1], device=slots.device)
    last = torch.where(slots >= 0, rows, -1).amax(1, keepdim=True)
    found = topk_indices.take_along_dim(last.clamp_min(0).unsqueeze(-1), 1).squeeze(1)
    kept.copy_(torch.where(last >= 0, found, kept))
