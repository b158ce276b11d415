"""The divergence of index scores from a target, and its gradients, in Triton.

I[t, s] = sum_j w[t, j] * relu(scale * q[t, j] . k[s]) has, for a gradient D[t, s] in it,

    a[t, j] = scale * sum_s D[t, s] * [q[t, j] . k[s] > 0] * k[s]
    q_grad = w * a,  w_grad = q . a,  k_grad[s] = scale * sum_tj D[t, s] * [q[t, j] . k[s] > 0] * w[t, j] * q[t, j]

so that rows sum over slots, and slots over rows, each in one order: the same bits in every run.
Import this module inside functions only: it needs triton.
"""

import triton
import triton.language as tl

from dsa_compile.lowering.teach.rows_kernel import load_rows, spans

LOWEST = tl.constexpr(-3.4028234663852886e38)
GAIN = tl.constexpr(256.0)
"""What gradients in scores are multiplied by while they are in the dtype of a product: float16 ends at 6e-8."""


@triton.jit
def diverge(
    TARGET,
    SCORES,
    VISIBLE,
    KEEP,
    LOSS,
    stride,
    keep_stride,
    first_row,
    num_rows,
    T,
    SELECTED: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """KL(target || softmax(scores)) of one row, and over its scores what their gradient is, softmax - target.

    TARGET and SCORES are float32[B, num_rows, stride], LOSS is float32[B, num_rows]; where KEEP bool[B, num_rows,
    keep_stride] does not hold, if SELECTED, the gradient is 0. A target of any sum, if FLAT, is divided by it. What a
    row does not see is not written.
    """
    row = tl.program_id(0)
    b = row // num_rows
    start, stop = spans(VISIBLE, b, first_row + row % num_rows, T)
    TARGET += row.to(tl.int64) * stride
    KEEP += row.to(tl.int64) * keep_stride
    SCORES += row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    goals = tl.zeros([BLOCK], tl.float32)
    for begin in range(start // BLOCK * BLOCK, stop, BLOCK):
        slot = begin + lane
        keep = (slot >= start) & (slot < stop)
        if SELECTED:
            keep = tl.load(KEEP + slot, mask=keep, other=0) != 0
        score = tl.load(SCORES + slot, mask=keep, other=float("-inf"))
        higher = tl.maximum(peak, score)
        total = total * tl.exp(peak - higher) + tl.exp(score - higher)
        peak = higher
        if FLAT:
            goals += tl.load(TARGET + slot, mask=keep, other=0.0)
    highest = tl.max(peak, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(peak - highest), 0))
    whole = tl.sum(goals, 0)
    loss = tl.zeros([BLOCK], tl.float32)
    for begin in range(start // BLOCK * BLOCK, stop, BLOCK):
        slot = begin + lane
        seen = (slot >= start) & (slot < stop)
        keep = seen
        if SELECTED:
            keep = tl.load(KEEP + slot, mask=seen, other=0) != 0
        score = tl.load(SCORES + slot, mask=keep, other=0.0) - lse
        goal = tl.load(TARGET + slot, mask=keep, other=0.0)
        if FLAT:
            goal = goal / whole
        loss += tl.where(keep, tl.where(goal == 0, 0.0, goal * tl.log(goal)) - goal * score, 0.0)
        tl.store(SCORES + slot, tl.where(keep, tl.exp(score) - goal, 0.0), mask=seen)
    tl.store(LOSS + row, tl.sum(loss, 0))


@triton.jit
def row_gradients(
    Q,
    WEIGHTS,
    KEYS,
    VISIBLE,
    GRAD,
    Q_GRAD,
    WEIGHTS_GRAD,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    w_stride_b,
    w_stride_t,
    k_stride_b,
    k_stride_t,
    grad_stride,
    first_row,
    num_rows,
    T,
    scale,
    HEADS: tl.constexpr,
    DI: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients in index queries and head weights of QUERIES rows, from GRAD float32[B, num_rows, grad_stride].

    Q_GRAD is [B, T, HI, DI], WEIGHTS_GRAD float32[B, T, HI], both contiguous.
    """
    blocks = tl.cdiv(num_rows, QUERIES)
    block = blocks - 1 - tl.program_id(0) % blocks  # the longest first
    b = tl.program_id(0) // blocks
    place = tl.arange(0, QUERIES * BLOCK_H)
    head = place % BLOCK_H
    row = block * QUERIES + place // BLOCK_H
    real = (row < num_rows) & (head < HEADS)
    t = (first_row + row).to(tl.int64)
    q = load_rows(Q + b.to(tl.int64) * q_stride_b + t * q_stride_t + head * q_stride_h, real, DI, BLOCK_D, False)
    one = tl.minimum(block * QUERIES + tl.arange(0, QUERIES), num_rows - 1)
    start, stop = spans(VISIBLE, b, first_row + one, T)
    grad_rows = GRAD + (b.to(tl.int64) * num_rows + one)[:, None] * grad_stride
    KEYS += b.to(tl.int64) * k_stride_b
    total = tl.zeros([QUERIES * BLOCK_H, BLOCK_D], tl.float32)
    end = tl.max(stop, 0)
    for tile in tl.range(tl.min(start, 0) // BLOCK_N, tl.cdiv(end, BLOCK_N), num_stages=STAGES):
        slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        keys = load_rows(KEYS + slot.to(tl.int64) * k_stride_t, slot < end, DI, BLOCK_D, False)
        seen = (slot[None, :] >= start[:, None]) & (slot[None, :] < stop[:, None])
        grad = tl.load(grad_rows + slot[None, :], mask=seen, other=0.0) * GAIN
        grad = tl.broadcast_to(grad[:, None, :], (QUERIES, BLOCK_H, BLOCK_N))
        grad = tl.reshape(grad, (QUERIES * BLOCK_H, BLOCK_N))
        products = tl.dot(q, keys.T, input_precision=PRECISION)
        passed = tl.where(products > 0, grad, 0.0).to(keys.dtype)
        total = tl.dot(passed, keys, total, input_precision=PRECISION)
    total *= scale / GAIN
    w = tl.load(WEIGHTS + b.to(tl.int64) * w_stride_b + t * w_stride_t + head, mask=real, other=0.0).to(tl.float32)
    heads = (b.to(tl.int64) * T + t) * HEADS + head
    tl.store(WEIGHTS_GRAD + heads, tl.sum(q.to(tl.float32) * total, 1), mask=real)
    values = tl.arange(0, BLOCK_D)
    tl.store(
        Q_GRAD + heads[:, None] * DI + values[None, :],
        (total * w[:, None]).to(Q_GRAD.dtype.element_ty),
        mask=real[:, None] & (values < DI)[None, :],
    )


@triton.jit
def column_gradients(
    Q,
    WEIGHTS,
    KEYS,
    VISIBLE,
    GRAD,
    PARTS,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_t,
    grad_stride,
    first_row,
    num_rows,
    T,
    batch,
    splits,
    scale,
    HEADS: tl.constexpr,
    DI: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients in BLOCK_N index keys from every ``splits``-th block of rows: PARTS float32[splits, B, T, DI].

    WEIGHTS is [B, HI, T] here, contiguous: a program reads many rows of a head.
    """
    split = tl.program_id(0) % splits
    b = tl.program_id(0) // splits % batch
    tile = tl.program_id(0) // splits // batch  # the first keys are seen by most rows
    slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    far = slot.to(tl.int64)
    keys = load_rows(KEYS + b.to(tl.int64) * k_stride_b + far * k_stride_t, slot < T, DI, BLOCK_D, False)
    Q += b.to(tl.int64) * q_stride_b
    WEIGHTS += b.to(tl.int64) * HEADS * T + first_row
    GRAD += b.to(tl.int64) * num_rows * grad_stride
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for block in range(split, tl.cdiv(num_rows, BLOCK_M), splits):
        place = block * BLOCK_M + tl.arange(0, BLOCK_M)
        live = place < num_rows
        row = tl.minimum(place, num_rows - 1)
        start, stop = spans(VISIBLE, b, first_row + row, T)
        if (tl.min(start, 0) < (tile + 1) * BLOCK_N) & (tl.max(stop, 0) > tile * BLOCK_N):
            seen = (slot[:, None] >= start[None, :]) & (slot[:, None] < stop[None, :]) & live[None, :]
            grad_rows = GRAD + row.to(tl.int64)[None, :] * grad_stride
            grad = tl.load(grad_rows + slot[:, None], mask=seen, other=0.0) * GAIN
            t = (first_row + row).to(tl.int64)
            for head in tl.range(0, HEADS, num_stages=STAGES):
                q = load_rows(Q + t * q_stride_t + head * q_stride_h, row >= 0, DI, BLOCK_D, True)
                w = tl.load(WEIGHTS + head * T + place, mask=live, other=0.0).to(tl.float32)
                products = tl.dot(keys, q.T, input_precision=PRECISION)
                passed = (tl.where(products > 0, w[None, :], 0.0) * grad).to(q.dtype)
                total = tl.dot(passed, q, total, input_precision=PRECISION)
    values = tl.arange(0, BLOCK_D)
    parts = PARTS + ((split * batch + b).to(tl.int64) * T + far) * DI
    tl.store(
        parts[:, None] + values[None, :],
        total * (scale / GAIN),
        mask=(slot < T)[:, None] & (values < DI)[None, :],
    )
