"""What a selection must be, whatever the scores that it is made from."""

import torch
from torch import Tensor


def well_formed(picks: Tensor, visible: Tensor) -> bool:
    """Whether each row names as many distinct visible slots as it can, ascending, and -1 behind the last.

    Args:
        picks: int[N, K]. visible: int32[N, 2].
    """
    start, end = (x[:, None] for x in visible.unbind(-1))
    named = torch.arange(picks.shape[-1], device=picks.device) < end - start
    inside = (picks >= start) & (picks < end)
    rising = picks[:, 1:] > picks[:, :-1]
    return bool((torch.where(named, inside, picks == -1)).all() & (rising | ~named[:, 1:]).all())
