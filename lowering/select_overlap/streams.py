"""``dsa::select_start`` and ``dsa::select_wait`` on CUDA: a stream of its own beside the current one."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from dsa_compile import programs

_pending: dict[int, torch.cuda.Event] = {}
"""When a selection that was started and not waited for will be there, by its address."""


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that scores on ``device``."""
    return torch.cuda.Stream(device)


@contextmanager
def in_turn() -> Iterator[None]:
    """Programs run on the current stream while this lasts, and nothing beside them."""
    global side_stream
    before = side_stream
    side_stream = torch.cuda.current_stream  # type: ignore[assignment]
    try:
        yield
    finally:
        side_stream = before


def select_start_cuda(writes: list[Tensor], gate: Tensor, reads: list[Tensor], program: str, index_topk: int) -> Tensor:
    """Start a program beside what the current stream does next. The result may be read after `select_wait_cuda`."""
    current, side = torch.cuda.current_stream(gate.device), side_stream(gate.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        picks = programs.run(program, [*writes, gate, *reads])
        _pending[picks.data_ptr()] = side.record_event()
    picks.record_stream(current)
    return picks


def select_wait_cuda(topk_indices: Tensor, gate: Tensor, held: list[Tensor]) -> None:
    """Let the current stream go on when a selection that was started is there.

    Raises:
        RuntimeError: ``topk_indices`` are a copy of what was started, made before it was there.
    """
    if topk_indices.data_ptr() not in _pending:
        raise RuntimeError(
            "dsa::select_wait: expected the tensor that dsa::select_start returned, came another, a copy that a "
            "compiler made too early. Run with disable_passes=['overlap_indexer']."
        )
    torch.cuda.current_stream(topk_indices.device).wait_event(_pending.pop(topk_indices.data_ptr()))
