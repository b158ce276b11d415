"""``dsa::row_products`` and ``dsa::expert_products`` in Triton: a program multiplies a few rows of a weight.

A step of few tokens takes the time of reading its weights, and each kernel of it would wait for the one before to end
before it asks for the first of them. With DEPENDENT, for launches as dependent grids (programmatic dependent launch),
a program asks for its first weights, waits for what it reads of others, and then lets the next kernel begin: all that
ran before has ended by then, so that the next one may read of it.

Import this module inside functions only: it needs triton.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _weights(W, rows, columns, N, K, EVEN: tl.constexpr):
    """A tile, each value of which is read once in a step."""
    mask = rows[:, None] < N
    if not EVEN:
        mask = mask & (columns[None, :] < K)
    place = rows[:, None].to(tl.int64) * K + columns[None, :]
    return tl.load(W + place, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _multiply(
    X,
    W,
    OUT,
    rows,
    N,
    K,
    x_row,
    x_part,
    ahead,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """OUT[ROWS, N] at ``rows`` from the first tile of weights, which is there, and from those behind it.

    A row of X lies in parts of PART values, in one if that is 0; ``x_row`` and ``x_part`` are strides.
    """
    columns = tl.arange(0, BLOCK_K)
    sums = (tl.zeros([BLOCK_N, BLOCK_K], tl.float32),) * ROWS
    for start in range(0, K, BLOCK_K):
        tile = ahead.to(tl.float32)
        following = start + BLOCK_K
        if following < K:
            ahead = _weights(W, rows, following + columns, N, K, EVEN)
        place = start + columns
        if PART > 0:
            place = place // PART * x_part + place % PART
        new = sums[:0]
        for row in tl.static_range(ROWS):
            x = tl.load(X + row * x_row + place, mask=start + columns < K, other=0.0)
            new += (sums[row] + tile * x.to(tl.float32)[None, :],)
        sums = new
    for row in tl.static_range(ROWS):
        tl.store(OUT + row * N + rows, tl.sum(sums[row], 1).to(OUT.dtype.element_ty), mask=rows < N)


@triton.jit
def row_kernel(
    X,
    OUT,
    W0,
    W1,
    W2,
    W3,
    N0,
    N1,
    N2,
    N3,
    K,
    x_row,
    x_part,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs are dealt to the weights in turn; a weight that is not there has no rows."""
    block = tl.program_id(0)
    W, N = W0, N0
    if block >= tl.cdiv(N, BLOCK_N):
        block -= tl.cdiv(N, BLOCK_N)
        OUT += ROWS * N
        W, N = W1, N1
        if block >= tl.cdiv(N, BLOCK_N):
            block -= tl.cdiv(N, BLOCK_N)
            OUT += ROWS * N
            W, N = W2, N2
            if block >= tl.cdiv(N, BLOCK_N):
                block -= tl.cdiv(N, BLOCK_N)
                OUT += ROWS * N
                W, N = W3, N3
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    first = _weights(W, rows, tl.arange(0, BLOCK_K), N, K, EVEN)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    _multiply(X, W, OUT, rows, N, K, x_row, x_part, first, ROWS, PART, BLOCK_N, BLOCK_K, EVEN)


@triton.jit
def expert_kernel(
    X,
    OUT,
    W,
    PICKS,
    each,
    experts,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row of programs a pick, of which ``each`` is of one row of X."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    place = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    OUT += place.to(tl.int64) * N
    pick = tl.load(PICKS + place)
    if (pick >= 0) & (pick < experts):
        W += pick.to(tl.int64) * N * K
        first = _weights(W, rows, tl.arange(0, BLOCK_K), N, K, EVEN)
        _multiply(X + place // each * K, W, OUT, rows, N, K, K, K, first, 1, 0, BLOCK_N, BLOCK_K, EVEN)
    else:
        tl.store(OUT + rows, tl.zeros([BLOCK_N], OUT.dtype.element_ty), mask=rows < N)
