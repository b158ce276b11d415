"""``dsa::cache_write`` in Triton: a program moves one row of a call to its slot.

Import this module inside functions only: it needs triton.
"""

import triton
import triton.language as tl

from dsa_compile.lowering.fp8_kernel import quantise


@triton.jit
def _place(SLOTS, TABLE, b, row, page_stride, slot_stride, num_pages, pages_per_sequence, PAGE: tl.constexpr):
    """Where the row goes in its pool, in elements, and whether it goes anywhere."""
    slot = tl.load(SLOTS + row)
    if PAGE == 0:
        return b.to(tl.int64) * page_stride + slot * slot_stride, (slot >= 0) & (slot < pages_per_sequence)
    else:
        inside = (slot >= 0) & (slot < pages_per_sequence * PAGE)
        page = tl.load(TABLE + b * pages_per_sequence + slot // PAGE, mask=inside, other=-1)
        return page.to(tl.int64) * page_stride + slot % PAGE * slot_stride, (page >= 0) & (page < num_pages)


@triton.jit
def _values(ROWS, b, t, stride_b, stride_t, columns, WIDTH: tl.constexpr):
    return tl.load(ROWS + b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t + columns, mask=columns < WIDTH)


@triton.jit
def copy_kernel(
    POOL,
    SLOTS,
    TABLE,
    FIRST,
    SECOND,
    first_stride_b,
    first_stride_t,
    second_stride_b,
    second_stride_t,
    page_stride,
    slot_stride,
    num_pages,
    pages_per_sequence,
    T,
    FIRST_WIDTH: tl.constexpr,
    SECOND_WIDTH: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    SECOND_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rows [FIRST | SECOND] in the dtype of the pool. With PAGE 0, ``pages_per_sequence`` counts slots."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    b = row // T
    t = row % T
    place, valid = _place(SLOTS, TABLE, b, row, page_stride, slot_stride, num_pages, pages_per_sequence, PAGE)
    columns = tl.arange(0, FIRST_BLOCK)
    first = _values(FIRST, b, t, first_stride_b, first_stride_t, columns, FIRST_WIDTH)
    tl.store(POOL + place + columns, first.to(POOL.dtype.element_ty), mask=valid & (columns < FIRST_WIDTH))
    if SECOND_WIDTH > 0:
        columns = tl.arange(0, SECOND_BLOCK)
        second = _values(SECOND, b, t, second_stride_b, second_stride_t, columns, SECOND_WIDTH)
        second = second.to(POOL.dtype.element_ty)
        tl.store(POOL + place + FIRST_WIDTH + columns, second, mask=valid & (columns < SECOND_WIDTH))


@triton.jit
def pack_kernel(
    POOL,
    SLOTS,
    TABLE,
    FIRST,
    SECOND,
    first_stride_b,
    first_stride_t,
    second_stride_b,
    second_stride_t,
    page_stride,
    slot_stride,
    num_pages,
    pages_per_sequence,
    T,
    FIRST_WIDTH: tl.constexpr,
    SECOND_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    SECOND_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rows as `fp8_rows.pack` writes them, to the bit."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    b = row // T
    t = row % T
    place, valid = _place(SLOTS, TABLE, b, row, page_stride, slot_stride, num_pages, pages_per_sequence, PAGE)
    tiles = tl.arange(0, BLOCK_TILES)
    columns = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    FIRST += b.to(tl.int64) * first_stride_b + t.to(tl.int64) * first_stride_t
    values = tl.load(FIRST + columns, mask=columns < FIRST_WIDTH, other=0.0).to(tl.float32)
    codes, scale = quantise(values)
    codes = codes.to(tl.uint8, bitcast=True)
    tl.store(POOL + place + columns, codes, mask=valid & (columns < FIRST_WIDTH))
    scales = (POOL + place + FIRST_WIDTH).to(tl.pointer_type(tl.float32))
    tl.store(scales + tiles, scale, mask=valid & (tiles < TILES))
    columns = tl.arange(0, SECOND_BLOCK)
    second = _values(SECOND, b, t, second_stride_b, second_stride_t, columns, SECOND_WIDTH).to(tl.bfloat16)
    ropes = (POOL + place + FIRST_WIDTH + 4 * TILES).to(tl.pointer_type(tl.bfloat16))
    tl.store(ropes + columns, second, mask=valid & (columns < SECOND_WIDTH))


@triton.jit
def quantise_kernel(
    CODES,
    SCALES,
    SLOTS,
    TABLE,
    KEYS,
    key_stride_b,
    key_stride_t,
    codes_page_stride,
    codes_slot_stride,
    scales_page_stride,
    scales_slot_stride,
    num_pages,
    pages_per_sequence,
    T,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Codes and scale of an index key, to the bit of `fp8_keys.quantise`, to their slot in two pools."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    b = row // T
    t = row % T
    columns = tl.arange(0, BLOCK)
    KEYS += b.to(tl.int64) * key_stride_b + t.to(tl.int64) * key_stride_t
    values = tl.load(KEYS + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    codes, scale = quantise(values[None, :])
    codes = codes.to(tl.uint8, bitcast=True)
    place, valid = _place(
        SLOTS, TABLE, b, row, codes_page_stride, codes_slot_stride, num_pages, pages_per_sequence, PAGE
    )
    tl.store(CODES + place + columns[None, :], codes, mask=valid & (columns[None, :] < WIDTH))
    place, valid = _place(
        SLOTS, TABLE, b, row, scales_page_stride, scales_slot_stride, num_pages, pages_per_sequence, PAGE
    )
    tl.store(SCALES + place + tl.arange(0, 1), scale, mask=valid)
