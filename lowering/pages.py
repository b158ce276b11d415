"""Where a logical slot lies in a pool, with and without a block table."""

import torch
from torch import Tensor


def slot_count(pool: Tensor, block_table: Tensor | None) -> int:
    """S: logical slots of a sequence."""
    return pool.shape[1] if block_table is None else block_table.shape[1] * pool.shape[1]


def locate(slots: Tensor, pool: Tensor, block_table: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Page and row within the page of each slot, and whether there is such a page.

    Args:
        slots: int64[B, ...] in [0, S).
        pool: [B, S, width], or [pages of all sequences, page size, width] with a block table.
        block_table: int32[B, pages]; entries outside [0, pages of all sequences) are absent.

    Returns:
        page and row, int64 of the shape of ``slots`` and safe to read; present bool of that shape, None: all are.
    """
    if block_table is None:
        sequence = torch.arange(slots.shape[0], device=slots.device).view(-1, *[1] * (slots.dim() - 1))
        return sequence.expand_as(slots), slots, None
    size = pool.shape[1]
    page = block_table.gather(1, (slots // size).flatten(1)).view(slots.shape).long()
    present = (page >= 0) & (page < pool.shape[0])
    return page.masked_fill(~present, 0), slots % size, present


def prefix(pool: Tensor, block_table: Tensor | None, n: int) -> tuple[Tensor, Tensor | None]:
    """The first n rows [B, n, ...] of each sequence, and bool[B, n] which of them there are, None: all."""
    if block_table is None:
        return pool[:, :n], None
    slots = torch.arange(n, device=pool.device).expand(block_table.shape[0], n)
    page, row, present = locate(slots, pool, block_table)
    return pool[page, row], present
