"""Attention over expanded keys and values under a mask of bits, in Triton: its bits, its list of blocks, itself.

Bit s % 32 of word s // 32 of a row says whether the row attends to slot s. A tile of rows visits the blocks of keys of
which some row wants one, so a future block, and one that nobody selected, costs nothing.
Import this module inside functions only: it needs triton.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Where the running maximum starts: finite, so that a row without any slot gives weights of 0 and no NaN."""
WORD = tl.constexpr(32)


@triton.jit
def _range(VISIBLE, row, num_slots, HAS_VISIBLE: tl.constexpr):
    """The first slot that a row sees, and the one behind the last."""
    first = 0
    last = num_slots
    if HAS_VISIBLE:
        first = tl.maximum(tl.load(VISIBLE + 2 * row), 0)
        last = tl.minimum(tl.load(VISIBLE + 2 * row + 1), num_slots)
    return first, last


@triton.jit(do_not_specialize=["num_slots", "K", "words"])
def selected_bits_kernel(INDICES, VISIBLE, BITS, num_slots, K, words, HAS_VISIBLE: tl.constexpr, BLOCK: tl.constexpr):
    """Set in BITS int32[rows, words], which holds zeros, what INDICES int32[rows, K] name and a row sees."""
    row = tl.program_id(0)
    first, last = _range(VISIBLE, row, num_slots, HAS_VISIBLE)
    for start in range(0, K, BLOCK):
        places = start + tl.arange(0, BLOCK)
        slots = tl.load(INDICES + row.to(tl.int64) * K + places, mask=places < K, other=-1)
        live = (slots >= first) & (slots < last)
        slots = tl.where(live, slots, 0)
        bit = tl.full([BLOCK], 1, tl.int32) << (slots % WORD)
        tl.atomic_or(BITS + row.to(tl.int64) * words + slots // WORD, bit, mask=live, sem="relaxed")


@triton.jit(do_not_specialize=["num_slots", "words"])
def visible_bits_kernel(VISIBLE, BITS, num_slots, words, HAS_VISIBLE: tl.constexpr, BLOCK: tl.constexpr):
    """Write to BITS int32[rows, words] all that a row sees."""
    row = tl.program_id(0)
    first, last = _range(VISIBLE, row, num_slots, HAS_VISIBLE)
    for start in range(0, words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        begin = tl.minimum(tl.maximum(first - word * WORD, 0), WORD).to(tl.int64)
        end = tl.minimum(tl.maximum(last - word * WORD, 0), WORD).to(tl.int64)
        one = tl.full([BLOCK], 1, tl.int64)
        bits = ((one << end) - 1) & ~((one << begin) - 1)
        tl.store(BITS + row.to(tl.int64) * words + word, bits.to(tl.int32), mask=word < words)


@triton.jit(do_not_specialize=["T", "words"])
def blocks_kernel(
    BITS,
    BLOCKS,
    COUNTS,
    T,
    words,
    ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    STEP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The blocks of BLOCK_WORDS words that hold a bit of some row of a tile of ROWS: ascending, and how many.

    BLOCKS int32[tiles, words / BLOCK_WORDS] and COUNTS int32[tiles]; a tile is of one sequence of T rows.
    """
    tile = tl.program_id(0)
    tiles = tl.cdiv(T, ROWS)
    row = tile // tiles * T + tile % tiles * ROWS
    rows = tl.minimum(ROWS, T - tile % tiles * ROWS)
    blocks = words // BLOCK_WORDS
    count = 0
    for start in range(0, blocks, AT_ONCE):
        word = start * BLOCK_WORDS + tl.arange(0, AT_ONCE * BLOCK_WORDS)
        held = tl.zeros([AT_ONCE * BLOCK_WORDS], tl.int32)
        for near in range(0, rows, STEP):
            t = near + tl.arange(0, STEP)
            places = (row + t).to(tl.int64)[:, None] * words + word[None, :]
            found = tl.load(BITS + places, mask=(t < rows)[:, None] & (word < words)[None, :], other=0)
            held = tl.maximum(held, tl.max((found != 0).to(tl.int32), 0))
        wanted = tl.max(tl.reshape(held, [AT_ONCE, BLOCK_WORDS]), 1)
        places = tile.to(tl.int64) * blocks + count + tl.cumsum(wanted, 0) - 1
        tl.store(BLOCKS + places, start + tl.arange(0, AT_ONCE), mask=wanted != 0)
        count += tl.sum(wanted, 0)
    tl.store(COUNTS + tile, count)


@triton.jit
def _rows_of(pointers, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK] of the rows that start at ``pointers``; zeros behind WIDTH."""
    columns = tl.arange(0, BLOCK)
    places = pointers[:, None] + columns[None, :]
    return tl.load(places) if WIDTH == BLOCK else tl.load(places, mask=(columns < WIDTH)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_slots", "T", "words", "tiles"])
def attend_masked_kernel(
    Q,
    KEY,
    K_PE,
    VALUE,
    BITS,
    BLOCKS,
    COUNTS,
    OUT,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    key_stride_b,
    key_stride_s,
    key_stride_h,
    pe_stride_b,
    pe_stride_s,
    out_stride_b,
    out_stride_t,
    out_stride_h,
    num_slots,
    T,
    words,
    tiles,
    scale,
    N: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """OUT [B, T, H, V] of a tile of BLOCK_M rows and one head, BLOCK_S keys at a time.

    KEY and VALUE [B, S, H, N or V] have the same strides; K_PE [B, S, P] is shared by all heads.
    """
    BLOCK_WORDS: tl.constexpr = BLOCK_S // 32
    tile = tiles - 1 - tl.program_id(0) % tiles  # a late tile has most to do: it starts first
    h = tl.program_id(0) // tiles
    per_sequence = tl.cdiv(T, BLOCK_M)
    b = tile // per_sequence
    t = tile % per_sequence * BLOCK_M + tl.arange(0, BLOCK_M)
    near = tl.minimum(t, T - 1)
    Q += b.to(tl.int64) * q_stride_b + h.to(tl.int64) * q_stride_h
    KEY += b.to(tl.int64) * key_stride_b + h * key_stride_h
    VALUE += b.to(tl.int64) * key_stride_b + h * key_stride_h
    K_PE += b.to(tl.int64) * pe_stride_b
    q_rows = Q + near.to(tl.int64) * q_stride_t
    q = _rows_of(q_rows, N, BLOCK_N)
    q_pe = _rows_of(q_rows + N, P, BLOCK_P)
    word_rows = BITS + (b * T + near).to(tl.int64) * words
    BLOCKS += tile.to(tl.int64) * (words // BLOCK_WORDS)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    factor = scale * LOG2_E
    count = tl.load(COUNTS + tile)
    # a block is named an iteration ahead: else the pipeline gives its copies half of its depth
    upcoming = tl.load(BLOCKS, mask=count > 0, other=0)
    for i in range(count):
        block = upcoming
        upcoming = tl.load(BLOCKS + tl.minimum(i + 1, count - 1))
        slots = tl.minimum(block * BLOCK_S + tl.arange(0, BLOCK_S), num_slots - 1).to(tl.int64)
        key = _rows_of(KEY + slots * key_stride_s, N, BLOCK_N)
        k_pe = _rows_of(K_PE + slots * pe_stride_s, P, BLOCK_P)
        bits = tl.load(word_rows[:, None] + (block * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS))[None, :])
        scores = tl.dot(q_pe, k_pe.T, input_precision="ieee")
        scores = tl.dot(q, key.T, scores, input_precision="ieee")
        keep = (bits[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        scores = tl.where(tl.reshape(keep, [BLOCK_M, BLOCK_S]) != 0, scores * factor, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        peak = higher
        total = total * shrink + tl.sum(weights, 1)
        value = _rows_of(VALUE + slots * key_stride_s, V, BLOCK_V)
        out = tl.dot(weights.to(value.dtype), value, out * shrink[:, None], input_precision="ieee")
    out = out / tl.where(total == 0, 1.0, total)[:, None]
    columns = tl.arange(0, BLOCK_V)
    places = OUT + b.to(tl.int64) * out_stride_b + t.to(tl.int64)[:, None] * out_stride_t + h * out_stride_h
    tl.store(places + columns[None, :], out.to(OUT.dtype.element_ty), mask=(t < T)[:, None] & (columns < V)[None, :])
