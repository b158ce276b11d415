"""Index scores in Triton: I[t, s] = k_scale[s] * sum_j w[t, j] * relu(scale * q[t, j] . k[s]).

Keys lie on the rows of a product and heads on its columns, so that a thread sums over heads what it holds itself.
Import this module inside functions only: it needs triton.
"""

import triton
import triton.language as tl

from dsa_compile.lowering.fp8_kernel import quantise

NEVER = tl.constexpr(float("-inf"))
"""The score of a slot whose page is absent: top-k does not choose it."""


@triton.jit
def _fetch(pointers):
    """Ask for lines before what they hold is needed, and wait for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def score(
    Q,
    WEIGHTS,
    KEYS,
    KEY_SCALES,
    VISIBLE,
    TABLE,
    OUT,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    w_stride_b,
    w_stride_t,
    page_stride,
    slot_stride,
    scale_page_stride,
    num_pages,
    pages_per_sequence,
    S,
    T,
    first_block,
    first_row,
    out_stride,
    scale,
    K,
    splits,
    HEADS: tl.constexpr,
    DI: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    PAGE: tl.constexpr,
    FAR: tl.constexpr,
    EARLY: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Scores of QUERIES rows of one sequence, every ``splits``-th tile of BLOCK_N keys.

    Row r of OUT is row ``first_row + r`` of the call, in float32; only what is visible is written. Rows that see at
    most K slots are left out: their selection needs no score. EARLY: ask for a program's first keys before it is known
    which are visible; of contiguous keys, and not under the interpreter.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    FP8: tl.constexpr = KEYS.dtype.element_ty == tl.float8e4nv
    split = tl.program_id(0) % splits
    block = first_block + tl.program_id(0) // splits
    blocks = tl.cdiv(T, QUERIES)
    b = block // blocks
    columns = tl.arange(0, BLOCK_D)
    place = tl.arange(0, QUERIES * BLOCK_H)
    head = place % BLOCK_H
    query = block % blocks * QUERIES + place // BLOCK_H
    real = (query < T) & (head < HEADS)
    # before it is known whether there is anything to score: one wait for both
    q_rows = Q + b.to(tl.int64) * q_stride_b + query.to(tl.int64) * q_stride_t + head * q_stride_h
    q = tl.load(q_rows[:, None] + columns[None, :], mask=real[:, None] & (columns < DI)[None, :], other=0.0)
    w_rows = WEIGHTS + b.to(tl.int64) * w_stride_b + query.to(tl.int64) * w_stride_t
    w = tl.load(w_rows + head, mask=real, other=0.0).to(tl.float32) * scale
    t = block % blocks * QUERIES + tl.arange(0, QUERIES)
    row = b * T + t
    if EARLY:
        ahead = tl.maximum(tl.minimum(split * BLOCK_N + tl.arange(0, BLOCK_N), S - 1), 0)
        _fetch(KEYS + b.to(tl.int64) * page_stride + ahead.to(tl.int64) * slot_stride)
    start = tl.maximum(tl.load(VISIBLE + 2 * row, mask=t < T, other=0), 0)
    end = tl.minimum(tl.load(VISIBLE + 2 * row + 1, mask=t < T, other=0), S)
    scored = end - start > K
    start = tl.where(scored, start, S)
    end = tl.where(scored, end, 0)
    first_tile = tl.min(start, 0) // BLOCK_N
    last_tile = tl.cdiv(tl.max(end, 0), BLOCK_N)
    if first_tile < last_tile:
        if FP8:
            factor, q_scale = quantise(q.to(tl.float32))
            w *= 0.5 * q_scale
        else:
            factor = q
        if PAGE == 0:
            KEYS += b.to(tl.int64) * page_stride
            KEY_SCALES += b.to(tl.int64) * scale_page_stride
        out_rows = OUT + (row - first_row).to(tl.int64) * out_stride
        for tile in tl.range(first_tile + split, last_tile, splits, num_stages=STAGES):
            slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            near = tl.minimum(slot, S - 1)
            if PAGE == 0:
                offset = near * slot_stride if not FAR else near.to(tl.int64) * slot_stride
                scale_offset = near
            else:
                page = tl.load(TABLE + b * pages_per_sequence + near // PAGE)
                present = (page >= 0) & (page < num_pages)
                page = tl.where(present, page, 0)
                if FAR:
                    page = page.to(tl.int64)
                offset = page * page_stride + near % PAGE * slot_stride
                scale_offset = page * scale_page_stride + near % PAGE
            if DI == BLOCK_D:
                keys = tl.load(KEYS + offset[:, None] + columns[None, :])
            else:
                keys = tl.load(KEYS + offset[:, None] + columns[None, :], mask=(columns < DI)[None, :], other=0.0)
            products = tl.dot(keys, tl.trans(factor), input_precision=PRECISION)
            if FP8:  # twice relu(x), at twice the rate of a comparison; of codes no product is infinite
                weighed = (products + tl.abs(products)) * w[None, :]
            else:
                weighed = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
            if HEADS < BLOCK_H:  # what is not a head has products of 0 * inf too
                weighed = tl.where((head < HEADS)[None, :], weighed, 0.0)
            scores = tl.sum(tl.reshape(weighed, (BLOCK_N, QUERIES, BLOCK_H)), 2)
            if FP8:
                scores *= tl.load(KEY_SCALES + scale_offset)[:, None]
            if PAGE > 0:
                scores = tl.where(present[:, None], scores, NEVER)
            inside = (slot[:, None] >= start[None, :]) & (slot[:, None] < end[None, :])
            tl.store(out_rows[None, :] + slot[:, None], scores, mask=inside)
