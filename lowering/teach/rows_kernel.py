"""How the kernels of teaching read rows: of values, and of what a query sees.

Import this module inside functions only: it needs triton.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(rows, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALL_LIVE: tl.constexpr):
    """[n, BLOCK] of the rows that start at the pointers ``rows``; zeros where not live and behind WIDTH."""
    columns = tl.arange(0, BLOCK)
    places = rows[:, None] + columns[None, :]
    if WIDTH == BLOCK and ALL_LIVE:
        return tl.load(places)
    elif WIDTH == BLOCK:
        return tl.load(places, mask=live[:, None], other=0.0)
    else:
        return tl.load(places, mask=(live[:, None] | ALL_LIVE) & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def spans(VISIBLE, b, t, T):
    """Slots [start, stop) that rows ``t`` of sequence ``b`` see; [T, 0) where that is none."""
    place = VISIBLE + 2 * (b.to(tl.int64) * T + t)
    start = tl.maximum(tl.load(place), 0)
    stop = tl.minimum(tl.load(place + 1), T)
    sees = stop > start
    return tl.where(sees, start, T), tl.where(sees, stop, 0)
