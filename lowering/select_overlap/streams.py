"""``dsa::select_start`` and ``dsa::select_wait`` on CUDA: a stream of its own beside the current one."""

from functools import cache

import torch
from torch import Tensor

from dsa_compile.lowering.select.launch import select_cuda

_pending: set[int] = set()
"""Addresses of selections that were started and not waited for."""


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that scores on ``device``."""
    return torch.cuda.Stream(device)


def select_start_cuda(
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
    """Start `select` beside what the current stream does next. The result may be read after `select_wait_cuda`."""
    out = q.new_empty(*q.shape[:2], index_topk, dtype=torch.int32)  # on the current stream, which frees it too
    side = side_stream(q.device)
    side.wait_stream(torch.cuda.current_stream(q.device))
    with torch.cuda.stream(side):
        select_cuda(
            q, weights, index_keys, visible, mask, index_topk, scale, budget, block_table, index_scales, out=out
        )
    _pending.add(out.data_ptr())
    return out


def select_wait_cuda(topk_indices: Tensor, reads: list[Tensor]) -> None:
    """Let the current stream go on when all selections that were started are there.

    Raises:
        RuntimeError: ``topk_indices`` are a copy of what was started, made before it was there.
    """
    if topk_indices.data_ptr() not in _pending:
        raise RuntimeError(
            "dsa::select_wait: expected the tensor that dsa::select_start returned, came another, a copy that a "
            "compiler made too early. Run with disable_passes=['overlap_indexer']."
        )
    _pending.discard(topk_indices.data_ptr())
    torch.cuda.current_stream(topk_indices.device).wait_stream(side_stream(topk_indices.device))
