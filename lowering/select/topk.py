"""Exact top-k of rows of scores on CUDA: a program a row, or several where rows are few."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.lowering.device import Device
from dsa_compile.lowering.tiles import power_of_two

FEWEST_ENTRIES = 64
"""Of a list."""
ENTRY_BYTES = 8
"""A score and a slot."""
PROGRAMS = 3
"""Programs that fit on a processor at once, by their registers."""
SHARES = 2
"""Programs a processor that gather, where a row has several."""
MOST_SPLITS = 64


@dataclass(frozen=True)
class Config:
    """How a row is read: scores of the ``sample`` and of a ``tile``, by a program of ``warps``."""

    sample: int
    tile: int
    warps: int

    def constants(self, capacity: int) -> dict[str, int]:
        """The kernels' compile-time arguments and options for lists of ``capacity`` entries."""
        sample, tile = min(self.sample, capacity), min(self.tile, capacity)
        return {"C": capacity, "SAMPLE": sample, "TILE": tile, "num_warps": self.warps}


ROW, SHARE = Config(2048, 2048, 4), Config(4096, 2048, 8)
"""Measured on an H200 at K = 2048: of a program that has a row, and of one that has a part of it."""


def topk(scores: Tensor, visible: Tensor, index_topk: int, out: Tensor) -> None:
    """Write the ``index_topk`` best slots of each row, exactly as `rows.topk_slots` chooses them.

    Ties go to the lower slot, NaN loses to every number, and -inf is never chosen. A row that sees at most K slots
    takes them all, and its scores are not read. Nothing outside of what a row sees is read.

    Args:
        scores: float32[N, S], contiguous in its last dimension.
        visible: int32[N, 2], contiguous: the range of slots that each row sees.
        out: int32[N, K], contiguous: ascending slots, then -1.
    """
    from dsa_compile.lowering.select import topk_kernel

    N, S = scores.shape
    processors = Device.of(scores.device).processors
    splits = splits_of(N, S, index_topk, processors)
    sizes = (ROW if splits == 1 else SHARE).constants(capacity(index_topk))
    lists = scores.new_empty(scratch_bytes(N, S, index_topk, processors) // 4, dtype=torch.int32)
    with torch.cuda.device_of(scores):
        if splits == 1:
            topk_kernel.topk_kernel[(min(N, PROGRAMS * processors),)](
                scores, visible, out, lists, scores.stride(0), N, S, index_topk, **sizes
            )
            return
        counts = scores.new_empty(N * splits, dtype=torch.int32)
        brackets = scores.new_empty(N, dtype=torch.int64)
        given = (lists, counts, brackets, scores.stride(0), S, index_topk)
        topk_kernel.gather_kernel[(N * splits,)](scores, visible, *given, SPLITS=splits, **sizes)
        topk_kernel.choose_kernel[(N,)](scores, visible, out, *given, SPLITS=splits, **sizes)


def capacity(index_topk: int) -> int:
    """Entries of a list: the most that a guess may keep of a row."""
    return max(FEWEST_ENTRIES, 2 * power_of_two(index_topk))


def splits_of(rows: int, slots: int, index_topk: int, processors: int) -> int:
    """Programs that share a row, a power of two, so that few rows fill the device too."""
    wanted = min(SHARES * processors // rows, slots // capacity(index_topk), MOST_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


def scratch_bytes(rows: int, slots: int, index_topk: int, processors: int) -> int:
    """Of the lists of a call."""
    splits = splits_of(rows, slots, index_topk, processors)
    lists = min(rows, PROGRAMS * processors) if splits == 1 else rows * splits
    return ENTRY_BYTES * lists * capacity(index_topk)


def largest_scratch_bytes(index_topk: int, processors: int) -> int:
    """Of the lists of any call."""
    return ENTRY_BYTES * max(PROGRAMS, SHARES) * processors * capacity(index_topk)
