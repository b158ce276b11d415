"""What the references share: chunks of query rows, who sees whom, a softmax that survives empty rows, exact top-k."""

from collections.abc import Iterator

import torch
from torch import Tensor

ROW_BUDGET = 64 << 20
"""Bytes of scores that a reference attention holds at once."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """float32 for 16-bit inputs, else the input's own."""
    return torch.promote_types(x.dtype, torch.float32)


def row_slices(num_rows: int, row_bytes: int, budget: int) -> Iterator[slice]:
    """Slices over the query rows, each of at most ``budget`` bytes and at least one row."""
    step = max(1, budget // max(1, row_bytes))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def used_slots(num_slots: int, visible: Tensor | None, mask: Tensor | None, rows: slice) -> int:
    """Slots ``[0, n)`` that some row of the chunk may see. All of them on CUDA, where asking would synchronise."""
    if visible is None or mask is not None or visible.is_cuda:
        return num_slots
    return min(num_slots, max(1, int(visible[:, 0, rows, 1].max())))


def kept(visible: Tensor | None, mask: Tensor | None, rows: slice, num_slots: int, like: Tensor) -> Tensor:
    """bool[B or 1, t, S]: which of the slots ``[0, num_slots)`` each row of the chunk may see."""
    keep = torch.ones(1, 1, num_slots, dtype=torch.bool, device=like.device)
    if visible is not None:
        slots = torch.arange(num_slots, device=like.device)
        span = visible[:, 0, rows]
        keep = keep & (slots >= span[..., :1]) & (slots < span[..., 1:])
    if mask is not None:
        keep = keep & (mask[:, 0, rows] if mask.shape[2] > 1 else mask[:, 0])[..., :num_slots]
    return keep


def chosen(topk_indices: Tensor, rows: slice, num_slots: int) -> Tensor:
    """bool[B, t, S]: which slots the chunk's rows of ``topk_indices`` name. Entries outside ``[0, S)`` name none."""
    picks = topk_indices[:, rows].long()
    picks = torch.where((picks < 0) | (picks >= num_slots), num_slots, picks)
    picked = torch.zeros(*picks.shape[:2], num_slots + 1, dtype=torch.bool, device=picks.device)
    return picked.scatter_(-1, picks, True)[..., :num_slots]


def attend(scores: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension where ``keep`` holds: probabilities and log-sum-exp.

    A row without any kept place gives zeros and -inf.
    """
    scores = scores.masked_fill(~keep, float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    peak = torch.where(peak == float("-inf"), 0, peak).detach()
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    safe = total.masked_fill(empty, 1)
    lse = (safe.log() + peak).masked_fill(empty, float("-inf"))
    return weights / safe, lse.squeeze(-1)


def attend_backward(probs: Tensor, probs_grad: Tensor) -> Tensor:
    """Gradient in the scores of `attend`, from its probabilities and their gradient."""
    return probs * (probs_grad - (probs * probs_grad).sum(-1, keepdim=True))


def topk_slots(scores: Tensor, keep: Tensor, index_topk: int) -> Tensor:
    """The ``index_topk`` best kept slots of each row, exactly.

    Args:
        scores: float[B, t, S].
        keep: bool[B or 1, t, S]; other slots are never chosen.
        index_topk: K.

    Returns:
        int32[B, t, K], ascending, -1 behind the last. Ties go to the lower slot, NaN loses to every number, and a score
        of -inf is not chosen. A row that keeps at most K slots takes them all, whatever their scores.
    """
    num_slots = scores.shape[-1]
    keep = keep.expand(scores.shape)
    if num_slots > index_topk:
        keep = keep & (~scores.isneginf() | (keep.sum(-1, keepdim=True) <= index_topk))
        lowest = torch.finfo(scores.dtype).min
        order = torch.where(keep & ~scores.isnan(), scores.clamp_min(lowest), float("-inf"))
        bar = order.topk(index_topk, sorted=False).values.amin(-1, keepdim=True)
        above = order > bar
        level = (order == bar) & keep
        room = index_topk - above.sum(-1, keepdim=True)
        keep = above | (level & (level.cumsum(-1, dtype=torch.int32) <= room))
    slots = torch.arange(num_slots, dtype=torch.int32, device=scores.device)
    picks = torch.where(keep, slots, num_slots)
    picks = picks.topk(min(index_topk, num_slots), largest=False, sorted=True).values
    picks = picks.masked_fill(picks == num_slots, -1)
    return torch.nn.functional.pad(picks, (0, index_topk - picks.shape[-1]), value=-1)
