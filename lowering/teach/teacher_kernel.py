"""Dense attention that teaches, in Triton: its output, and the mean of its probabilities over heads.

Import this module inside functions only: it needs triton.
"""

import triton
import triton.language as tl

from dsa_compile.lowering.teach.rows_kernel import load_rows, spans

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Where the running maximum starts: finite, so that a tile of which a row sees nothing gives weights of 0, not NaN."""


@triton.jit
def _scores(
    q,
    q_pe,
    k_pe,
    K,
    slot,
    stride,
    end,
    N: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    ALL_LIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """q . k of one head, [rows, slots] in float32; slots from ``end`` on are not read."""
    k = load_rows(K + slot.to(tl.int64) * stride, slot < end, N, BLOCK_NOPE, ALL_LIVE)
    scores = tl.dot(q_pe, k_pe.T, input_precision=PRECISION)
    return tl.dot(q, k.T, scores, input_precision=PRECISION)


@triton.jit
def attend(
    Q,
    KV,
    K_PE,
    VISIBLE,
    KEEP,
    OUT,
    LSE,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    kv_stride_b,
    kv_stride_t,
    pe_stride_b,
    pe_stride_t,
    out_stride_b,
    out_stride_t,
    keep_stride,
    first_row,
    num_rows,
    T,
    scale,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    SELECTED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of BLOCK_M of the rows [first_row, first_row + num_rows) of one head.

    OUT is [B, T, H, V]. LSE float32[B, H, num_rows] is to the base of 2, +inf for a row that sees nothing: any score
    has the probability 0 there. SELECTED: only where KEEP bool[B, num_rows, keep_stride] holds.
    """
    blocks = tl.cdiv(num_rows, BLOCK_M)
    block = blocks - 1 - tl.program_id(0) % blocks  # the longest first
    head = tl.program_id(0) // blocks
    b = head // H
    h = head % H
    place = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(place, num_rows - 1)
    t = first_row + row
    start, stop = spans(VISIBLE, b, t, T)
    q_rows = Q + b.to(tl.int64) * q_stride_b + h.to(tl.int64) * q_stride_h + t.to(tl.int64) * q_stride_t
    q = load_rows(q_rows, row >= 0, N, BLOCK_NOPE, True)
    q_pe = load_rows(q_rows + N, row >= 0, P, BLOCK_ROPE, True)
    K = KV + b.to(tl.int64) * kv_stride_b + h * (N + V)
    K_PE += b.to(tl.int64) * pe_stride_b
    KEEP += (b.to(tl.int64) * num_rows + row)[:, None] * keep_stride
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    end = tl.max(stop, 0)
    first = tl.min(start, 0) // BLOCK_N
    last = tl.cdiv(end, BLOCK_N)
    # tiles that every row sees whole need no mask
    inner = tl.cdiv(tl.max(start, 0), BLOCK_N)
    outer = tl.min(stop, 0) // BLOCK_N
    if SELECTED or inner >= outer:
        inner = last
        outer = last
    for tile in tl.range(inner, outer, num_stages=STAGES):
        slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        far = slot.to(tl.int64)
        k_pe = load_rows(K_PE + far * pe_stride_t, slot < end, P, BLOCK_ROPE, True)
        scores = _scores(q, q_pe, k_pe, K, slot, kv_stride_t, end, N, BLOCK_NOPE, True, PRECISION) * (scale * LOG2_E)
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        peak = higher
        total = total * shrink + tl.sum(weights, 1)
        v = load_rows(K + N + far * kv_stride_t, slot < end, V, BLOCK_V, True)
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
    left = tl.maximum(inner - first, 0)
    for edge in tl.range(0, left + last - outer, num_stages=STAGES):
        tile = tl.where(edge < left, first + edge, outer + edge - left)
        slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        far = slot.to(tl.int64)
        keep = (slot[None, :] >= start[:, None]) & (slot[None, :] < stop[:, None])
        if SELECTED:
            keep = tl.load(KEEP + slot[None, :], mask=keep, other=0) != 0
        k_pe = load_rows(K_PE + far * pe_stride_t, slot < end, P, BLOCK_ROPE, False)
        scores = _scores(q, q_pe, k_pe, K, slot, kv_stride_t, end, N, BLOCK_NOPE, False, PRECISION)
        scores = tl.where(keep, scores * (scale * LOG2_E), float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        peak = higher
        total = total * shrink + tl.sum(weights, 1)
        v = load_rows(K + N + far * kv_stride_t, slot < end, V, BLOCK_V, False)
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
    empty = total == 0
    real = place < num_rows
    lse = tl.where(empty, float("inf"), peak + tl.log2(total))
    tl.store(LSE + head.to(tl.int64) * num_rows + place, lse, mask=real)
    out = out / tl.where(empty, 1.0, total)[:, None]
    values = tl.arange(0, BLOCK_V)
    out_rows = OUT + b.to(tl.int64) * out_stride_b + t.to(tl.int64) * out_stride_t + h * V
    tl.store(
        out_rows[:, None] + values[None, :],
        out.to(OUT.dtype.element_ty),
        mask=real[:, None] & (values < V)[None, :],
    )


@triton.jit
def target(
    Q,
    KV,
    K_PE,
    VISIBLE,
    LSE,
    TARGET,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    kv_stride_b,
    kv_stride_t,
    pe_stride_b,
    pe_stride_t,
    target_stride,
    first_row,
    num_rows,
    T,
    scale,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """TARGET float32[B, num_rows, target_stride]: the mean over heads of exp2(score - lse).

    Tiles of which no row sees a slot are not written; in others, what a row does not see may be anything. A program
    makes one tile, so that no other has probabilities of a head.
    """
    tiles = tl.cdiv(T, BLOCK_N)
    blocks = tl.cdiv(num_rows, BLOCK_M)
    tile = tl.program_id(0) % tiles
    block = tl.program_id(0) // tiles % blocks
    b = tl.program_id(0) // tiles // blocks
    place = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(place, num_rows - 1)
    t = first_row + row
    start, stop = spans(VISIBLE, b, t, T)
    if (tl.min(start, 0) < (tile + 1) * BLOCK_N) & (tl.max(stop, 0) > tile * BLOCK_N):
        slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        columns = tl.arange(0, BLOCK_K)
        Q += b.to(tl.int64) * q_stride_b
        KV += b.to(tl.int64) * kv_stride_b
        K_PE += b.to(tl.int64) * pe_stride_b
        LSE += b.to(tl.int64) * H * num_rows
        NOPES: tl.constexpr = (N + BLOCK_K - 1) // BLOCK_K
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        mean = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        # parts of a head, so that more of them are under way than heads would fit
        for step in tl.range(0, H * (NOPES + 1), num_stages=STAGES):
            part = step % (NOPES + 1)
            rope = part == NOPES
            first = tl.where(rope, N, part * BLOCK_K)
            width = tl.where(rope, P, N - part * BLOCK_K)
            keys = tl.where(rope, K_PE, KV + first)
            q_rows = Q + first + t.to(tl.int64) * q_stride_t
            k_rows = keys + slot.to(tl.int64) * tl.where(rope, pe_stride_t, kv_stride_t)
            if N % BLOCK_K == 0 and P == BLOCK_K:
                q = tl.load(q_rows[:, None] + columns[None, :])
                k = tl.load(k_rows[:, None] + columns[None, :], mask=(slot < T)[:, None], other=0.0)
            else:
                real = (columns < width)[None, :]
                q = tl.load(q_rows[:, None] + columns[None, :], mask=real, other=0.0)
                k = tl.load(k_rows[:, None] + columns[None, :], mask=real & (slot < T)[:, None], other=0.0)
            scores = tl.dot(q, k.T, scores, input_precision=PRECISION)
            if rope:
                lse = tl.load(LSE + row)
                mean += tl.exp2(scores * (scale * LOG2_E) - lse[:, None])
                scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            # outside of the branch: loads of later steps are not to wait for it
            Q += tl.where(rope, q_stride_h, 0)
            KV += tl.where(rope, N + V, 0)
            LSE += tl.where(rope, num_rows, 0)
        rows = TARGET + (b.to(tl.int64) * num_rows + row)[:, None] * target_stride
        tl.store(rows + slot[None, :], mean / H, mask=(place < num_rows)[:, None] & (slot < T)[None, :])
