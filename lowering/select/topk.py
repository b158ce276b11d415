"""Exact top-k of rows of scores on CUDA: what it takes, how a call is cut into programs, and its launch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.errors import InputError
from dsa_compile.lowering.dependent import launch_options
from dsa_compile.lowering.select.limits import LARGEST_TOPK
from dsa_compile.lowering.tiles import power_of_two

MOST_SPLITS = 128
SHORTEST_SHARE = 4096
"""Slots that a program of a split row is for, at least."""
SPLIT_TILE = 2048
"""Slots that it reads at once."""
SPLIT_WARPS = 8
LONG, FEW = 1 << 16, 4
"""Slots from which a row is halved even where there are as many rows a processor: they would not fill it evenly."""
ANY = 1 << 31


@dataclass(frozen=True)
class Config:
    """One way to compile the kernels.

    ``capacity``: entries of a list, at least 2 K. ``sample``: scores of a row that are guessed by. ``tile``: slots that
    a program with a row of its own reads at once, ``registers`` what its threads have.
    """

    capacity: int
    sample: int
    tile: int
    warps: int
    registers: int

    @property
    def choosing_warps(self) -> int:
        """Of a program that chooses from the lists of a split row: 8 entries a thread, where there are so many."""
        return min(32, self.capacity // 256)

    @property
    def programs_per_processor(self) -> int:
        return 65536 // (32 * self.warps * self.registers)


CONFIGS = {
    (2048, 1 << 15): Config(4096, 2048, 2048, 4, 168),
    (2048, 1 << 17): Config(4096, 4096, 4096, 16, 64),
    (2048, ANY): Config(8192, 8192, 4096, 16, 128),
    (8192, ANY): Config(16384, 8192, 8192, 32, 64),
}
"""By the largest K and S that each serves: the more of a sample lies in a list, and the more room a list has beside K,
the rarer a row is tried twice."""


@dataclass(frozen=True)
class Plan:
    """``splits``: programs that share a row. ``lists``: of candidates, one for each program that is at work at once."""

    config: Config
    splits: int
    lists: int


def plan(rows: int, slots: int, index_topk: int, processors: int) -> Plan:
    """How N rows of S scores are served on a device: by what the host knows, so that a graph can be captured."""
    config = next(c for (topk, most), c in CONFIGS.items() if index_topk <= topk and slots <= most)
    if slots <= config.capacity:
        return Plan(config, splits=1, lists=0)
    fill = 2 * processors // max(1, rows)
    if slots >= LONG and rows <= FEW * processors:
        fill = max(fill, 2)
    wanted = min(fill, slots // SHORTEST_SHARE, MOST_SPLITS)
    splits = power_of_two(wanted + 1) // 2
    if splits > 1:
        return Plan(config, splits, lists=rows * splits)
    return Plan(config, splits=1, lists=min(rows, processors * config.programs_per_processor))


def scratch_bytes(rows: int, slots: int, index_topk: int, processors: int) -> int:
    """Bytes that `topk` allocates beside its output."""
    made = plan(rows, slots, index_topk, processors)
    return made.lists * 8 * made.config.capacity + (rows * (4 * made.splits + 8) if made.splits > 1 else 0)


def most_scratch_bytes(slots: int, index_topk: int, processors: int) -> int:
    """The same for the number of rows that takes most: lists of what fills the device, whatever the rows."""
    halved = FEW * processors if slots >= LONG else processors
    return max(scratch_bytes(rows, slots, index_topk, processors) for rows in (halved, 1 << 20))


def topk(scores: Tensor, visible: Tensor, index_topk: int, out: Tensor | None = None) -> Tensor:
    """The ``index_topk`` best visible slots of each row, exactly, with the same bits on every run.

    Nothing is read on the host and no score outside of a row's range is read at all. Can be captured in a CUDA graph.

    Args:
        scores: float32[N, S], contiguous in its last dimension; fastest where rows lie a multiple of 16 apart.
        visible: int32[N, 2], the range [start, end) that a row chooses from, clamped to [0, S].
        index_topk: K, from 1 to 8192.
        out: int32[N, K], contiguous, to write into.

    Returns:
        int32[N, K], ascending, -1 behind the last. Ties go to the lower slot; NaN loses to every number, and -inf is
        never chosen. Of a range of at most K slots all are chosen, and no score is read.

    Raises:
        InputError: naming the input, what was expected and what came.
    """
    _check(scores, visible, index_topk, out)
    rows, slots = scores.shape
    if out is None:
        out = scores.new_empty(rows, index_topk, dtype=torch.int32)
    if rows > 0:
        processors = torch.cuda.get_device_properties(scores.device).multi_processor_count
        launch(scores, visible, out, plan(rows, slots, index_topk, processors))
    return out


def launch(scores: Tensor, visible: Tensor, out: Tensor, plan: Plan) -> None:
    """Run a plan: one kernel, or two where rows are split."""
    from dsa_compile.lowering.select import topk_kernel as kernel

    rows, slots = scores.shape
    config, splits = plan.config, plan.splits
    sizes = {"C": config.capacity, "SAMPLE": config.sample} | launch_options(scores.device)
    lists = out.new_empty(plan.lists, 2, config.capacity)
    visible = visible.contiguous()
    stride, index_topk = scores.stride(0), out.shape[1]
    with torch.cuda.device_of(scores):
        if splits == 1:
            programs = plan.lists or rows
            options = {"TILE": config.tile, "num_warps": config.warps, "maxnreg": config.registers}
            kernel.topk_kernel[(programs,)](
                scores, visible, out, lists, stride, rows, slots, index_topk, **sizes, **options
            )
            return
        counts = out.new_empty(rows, splits)
        brackets = out.new_empty(rows, dtype=torch.int64)
        sizes["SPLITS"] = splits
        kernel.gather_kernel[(rows * splits,)](
            scores,
            visible,
            lists,
            counts,
            brackets,
            stride,
            slots,
            index_topk,
            TILE=SPLIT_TILE,
            num_warps=SPLIT_WARPS,
            **sizes,
        )
        kernel.choose_kernel[(rows,)](
            scores,
            visible,
            out,
            lists,
            counts,
            brackets,
            stride,
            slots,
            index_topk,
            TILE=config.tile,
            num_warps=config.choosing_warps,
            **sizes,
        )


def _check(scores: Tensor, visible: Tensor, index_topk: int, out: Tensor | None) -> None:
    if not 1 <= index_topk <= LARGEST_TOPK:
        raise InputError(
            f"topk: expected index_topk from 1 to {LARGEST_TOPK}, came {index_topk}. Choose more by the reference."
        )
    if scores.dtype != torch.float32 or scores.dim() != 2 or scores.stride(1) != 1:
        raise InputError(
            f"topk: expected scores float32[N, S], contiguous in the last dimension, came {scores.dtype}"
            f"{list(scores.shape)} with strides {list(scores.stride())}. Call .float().contiguous() on them."
        )
    shapes = {"visible": (visible, 2), "out": (out, index_topk)}
    for name, (x, width) in shapes.items():
        if x is None:
            continue
        if x.dtype != torch.int32 or x.shape != (scores.shape[0], width) or x.device != scores.device:
            raise InputError(
                f"topk: expected {name} int32[{scores.shape[0]}, {width}] on {scores.device} as scores, came {x.dtype}"
                f"{list(x.shape)} on {x.device}. Convert or move it."
            )
    if out is not None and not out.is_contiguous():
        raise InputError(f"topk: expected out contiguous, came strides {list(out.stride())}. Give a whole tensor.")
