"""``dsa::select`` on CUDA: Triton kernels for scores and top-k, a chunk of rows at a time."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dsa_compile.lowering.dependent import launch_options
from dsa_compile.lowering.device import Device
from dsa_compile.lowering.pages import slot_count
from dsa_compile.lowering.select import configs
from dsa_compile.lowering.select.configs import Call
from dsa_compile.lowering.select.limits import check
from dsa_compile.lowering.select.reference import select
from dsa_compile.lowering.select.topk import most_scratch_bytes, topk

ALIGNMENT = 16
"""A row of scores begins at a multiple of so many, so that Triton reads 16 bytes at a time."""


def select_cuda(
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
    """`reference.select` by Triton kernels, or by the reference with a warning that names the limit.

    Scores and what top-k needs beside them take at most ``budget`` bytes, or what one row takes.
    """
    check(q, weights, index_keys, visible, mask, index_topk, budget, block_table, index_scales)
    call, device = call_of(q, index_keys, mask, block_table), Device.of(q.device)
    reason = configs.refusal(call, device)
    if reason is not None:
        warnings.warn(f"dsa::select runs as its reference, not as Triton kernels: {reason}.", stacklevel=2)
        return select(q, weights, index_keys, visible, mask, index_topk, scale, budget, block_table, index_scales)
    B, T, _, _ = q.shape
    out = q.new_empty(B, T, index_topk, dtype=torch.int32)
    if out.numel() == 0:
        return out
    ranges, picks = _ranges(call, visible, q.device), out.view(B * T, index_topk)
    most_rows = max(1, (budget - most_scratch_bytes(call.slots, index_topk, device.processors)) // (4 * _stride(call)))
    scores = q.new_empty(min(most_rows, B * T), _stride(call), dtype=torch.float32)
    for rows, options in launches(call, device, most_rows):
        part = scores[: rows.stop - rows.start, : call.slots]
        score(part, q, weights, index_keys, ranges, index_topk, scale, block_table, index_scales, **options)
        topk(part, ranges[rows], index_topk, picks[rows])
    return out


def call_of(q: Tensor, index_keys: Tensor, mask: Tensor | None, block_table: Tensor | None) -> Call:
    B, T, HI, DI = q.shape
    return Call(
        dtype=q.dtype,
        keys_dtype=index_keys.dtype,
        heads=HI,
        dim=DI,
        batch=B,
        queries=T,
        slots=slot_count(index_keys, block_table),
        masked=mask is not None,
    )


def launches(call: Call, device: Device, most_rows: int) -> Iterator[tuple[slice, dict[str, Any]]]:
    """Rows of at most ``most_rows`` each, counted over all sequences, and how `score` is called for them."""
    config = configs.config(call, device)
    queries = config.queries(call, most_rows)
    for rows, blocks in chunks(call, queries, most_rows):
        yield (
            rows,
            {
                "first_row": rows.start,
                "blocks": blocks,
                "splits": configs.splits(len(blocks), call, config, device),
                "constants": config.constants(call, queries),
            },
        )


def chunks(call: Call, queries: int, most_rows: int) -> Iterator[tuple[slice, range]]:
    """Rows of the call, counted over all sequences, and the blocks of ``queries`` rows that they are.

    A block is of one sequence, whose last may be shorter. Chunks are of nearly one size.
    """
    per_sequence = -(-call.queries // queries)
    blocks = call.batch * per_sequence
    step = -(-blocks // -(-blocks // max(1, most_rows // queries)))

    def first_row(block: int) -> int:
        return block // per_sequence * call.queries + block % per_sequence * queries

    for start in range(0, blocks, step):
        stop = min(start + step, blocks)
        yield slice(first_row(start), first_row(stop)), range(start, stop)


def score(
    scores: Tensor,
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    ranges: Tensor,
    index_topk: int,
    scale: float,
    block_table: Tensor | None,
    index_scales: Tensor | None,
    *,
    first_row: int,
    blocks: range,
    splits: int,
    constants: dict[str, int | str],
) -> None:
    """Write the scores of ``blocks`` to scores float32[rows, S], whose row 0 is row ``first_row`` of the call.

    Slots that a row does not see, and rows that see at most ``index_topk``, are left as they are.

    Args:
        ranges: int32[B T, 2], contiguous: what each row sees. splits: programs of a block.
        constants: of `configs.Config`.
    """
    from dsa_compile.lowering.select import scores_kernel

    q, weights = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, weights))
    codes = index_keys if index_scales is None else index_keys.view(torch.float8_e4m3fn)
    scales = ranges if index_scales is None else index_scales
    whole = 1 if block_table is None else 0  # the dimension that is indexed from one place on
    with torch.cuda.device_of(q):
        scores_kernel.score[(len(blocks) * splits,)](
            q,
            weights,
            codes,
            scales,
            ranges,
            ranges if block_table is None else block_table.contiguous(),
            scores,
            *q.stride()[:3],
            *weights.stride()[:2],
            *index_keys.stride()[:2],
            scales.stride(0),
            index_keys.shape[0],
            0 if block_table is None else block_table.shape[1],
            scores.shape[1],
            q.shape[1],
            blocks.start,
            first_row,
            scores.stride(0),
            scale,
            index_topk,
            splits,
            PAGE=0 if block_table is None else index_keys.shape[1],
            FAR=index_keys.shape[whole] * index_keys.stride(whole) >= 2**31,
            EARLY=q.is_cuda and block_table is None,
            **constants,
            **launch_options(q.device),
        )


def _ranges(call: Call, visible: Tensor | None, device: torch.device) -> Tensor:
    """int32[B T, 2], contiguous: the slots that each row sees."""
    if visible is not None:
        return visible.reshape(-1, 2).contiguous()
    everything = torch.full((call.batch * call.queries, 2), call.slots, dtype=torch.int32, device=device)
    everything[:, 0] = 0
    return everything


def _stride(call: Call) -> int:
    return -(-call.slots // ALIGNMENT) * ALIGNMENT
