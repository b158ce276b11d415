"""The mathematics of ``dsa::sparse_mla`` in Triton, shared by the Inductor templates and the eager launches.

Import this module inside functions only: it needs triton.
"""

import triton
import triton.language as tl

from dsa_compile.lowering.fp8_rows import TILE

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Where the running maximum starts: finite, so that a block without any live slot gives weights of 0 and no NaN."""
FP8_TILE = tl.constexpr(TILE)
"""Values of a latent row that share one float32 scale."""
E4M3_AS_BF16 = tl.constexpr(2.0**120)
"""bf16 bits made of e4m3 bits are too small by this factor."""


@triton.jit
def bf16_bits(packed):
    """Four e4m3 bytes -> four bf16, each 2^-120 of its value: the exponent field moves, nothing is converted."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 lo, hi, sign;
        prmt.b32 lo, 0, $2, 0x5040;
        prmt.b32 hi, 0, $2, 0x7060;
        and.b32 sign, lo, 0x80008000;
        shr.u32 lo, lo, 4;
        lop3.b32 $0, lo, 0x07f007f0, sign, 0xea;
        and.b32 sign, hi, 0x80008000;
        shr.u32 hi, hi, 4;
        lop3.b32 $1, hi, 0x07f007f0, sign, 0xea;
        }
        """,
        "=r,=r,r",
        [packed],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _unchained(x, true):
    """``x``, without a visible link to the dots that follow.

    Triton puts all warps on the rows of a dot that others follow; with fewer rows than warps each warpgroup would then
    compute the same scores again. A branch ends its search; LLVM removes the branch, as ``true`` always is.
    """
    return x if true else x * 2


@triton.jit
def _load_rows(rows, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALL_LIVE: tl.constexpr):
    """[N, BLOCK] of the rows that start at the pointers ``rows``; zeros where not live and behind WIDTH."""
    columns = tl.arange(0, BLOCK)
    places = rows[:, None] + columns[None, :]
    if WIDTH == BLOCK and ALL_LIVE:
        return tl.load(places)
    elif WIDTH == BLOCK:
        return tl.load(places, mask=live[:, None], other=0)
    else:
        return tl.load(places, mask=(live[:, None] | ALL_LIVE) & (columns < WIDTH)[None, :], other=0)


@triton.jit
def _latent_tile(
    rows,
    live,
    DTYPE: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """kv_c [N, BLOCK_R] and k_pe [N, BLOCK_P] of the rows that start at the pointers ``rows``; zeros where not live.

    Rows of bytes are R e4m3, a float32 scale for each 128 of them, P bf16 (`dsa_compile.lowering.fp8_rows`).
    """
    if rows.dtype.element_ty == tl.uint8:
        TILES: tl.constexpr = (R + FP8_TILE - 1) // FP8_TILE
        BLOCK_TILES: tl.constexpr = (BLOCK_R + FP8_TILE - 1) // FP8_TILE
        bits = _load_rows(rows, live, R, BLOCK_R, False)
        scale = _load_rows(rows.to(tl.pointer_type(tl.float32)) + R // 4, live, TILES, BLOCK_TILES, False)
        k_pe = _load_rows(rows.to(tl.pointer_type(tl.bfloat16)) + (R // 2 + 2 * TILES), live, P, BLOCK_P, False)
        if tl.bfloat16 == DTYPE:
            c_kv = bf16_bits(bits)
            scale = (scale * E4M3_AS_BF16).to(tl.bfloat16)
        else:
            c_kv = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        c_kv = tl.reshape(c_kv, [rows.shape[0], BLOCK_TILES, BLOCK_R // BLOCK_TILES]) * scale[:, :, None]
        c_kv = tl.reshape(c_kv, [rows.shape[0], BLOCK_R])
    else:
        c_kv = _load_rows(rows, live, R, BLOCK_R, False)
        k_pe = _load_rows(rows + R, live, P, BLOCK_P, False)
    return c_kv.to(DTYPE), k_pe.to(DTYPE)


@triton.jit
def _block_of_slots(INDICES, row, places, end, SELECTED: tl.constexpr, K: tl.constexpr):
    """The slots that stand at ``places`` of a row's selection, or the places themselves; -1 from ``end`` on."""
    if SELECTED:
        return tl.load(INDICES + row.to(tl.int64) * K + places, mask=places < end, other=-1)
    else:
        return tl.where(places < end, places, -1)


@triton.jit
def attend(
    Q,
    Q_PE,
    LATENT,
    VISIBLE,
    INDICES,
    TABLE,
    row,
    heads,
    split,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    pe_stride_b,
    pe_stride_t,
    pe_stride_h,
    page_stride,
    slot_stride,
    num_pages,
    pages_per_sequence,
    num_slots,
    T,
    scale,
    H: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    SELECTED: tl.constexpr,
    K: tl.constexpr,
    PAGE: tl.constexpr,
    FAR: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
):
    """Attention of some heads of one query row to its share of the slots.

    Args:
        row: b * T + t. heads: int32[BLOCK_H]. split: which of SPLITS shares.
        SELECTED: attend to the K entries of the row of INDICES; else to every visible slot.
        PAGE: slots of a page of TABLE; 0: each sequence has a pool of its own.
        FAR: rows may lie 2^31 elements or more behind the start of their pool.
        Tensors that a case does not need may be anything.

    Returns:
        out float32[BLOCK_H, BLOCK_R], and lse float32[BLOCK_H] by the natural logarithm.
    """
    b = row // T
    t = row % T
    entries = tl.arange(0, BLOCK_N)
    Q += b.to(tl.int64) * q_stride_b + t.to(tl.int64) * q_stride_t
    Q_PE += b.to(tl.int64) * pe_stride_b + t.to(tl.int64) * pe_stride_t
    real = tl.minimum(heads, H - 1).to(tl.int64)
    q = _load_rows(Q + real * q_stride_h, heads < H, R, BLOCK_R, True)
    q_pe = _load_rows(Q_PE + real * pe_stride_h, heads < H, P, BLOCK_P, True)
    first = 0
    last = num_slots
    if HAS_VISIBLE:
        first = tl.maximum(tl.load(VISIBLE + 2 * row), 0)
        last = tl.minimum(tl.load(VISIBLE + 2 * row + 1), num_slots)
    if SELECTED:
        SHARE: tl.constexpr = ((K + BLOCK_N - 1) // BLOCK_N + SPLITS - 1) // SPLITS * BLOCK_N
        begin = split * SHARE
        end = tl.minimum(begin + SHARE, K)
    else:
        share = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), BLOCK_N), SPLITS) * BLOCK_N
        begin = first + split * share
        end = tl.minimum(begin + share, last)
    peak = tl.full([BLOCK_H], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    out = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
    pool = LATENT
    if PAGE == 0:
        pool += b.to(tl.int64) * page_stride
    # slots are read a block ahead: the gather of a block then waits for no index
    upcoming = _block_of_slots(INDICES, row, begin + entries, end, SELECTED, K)
    for start in range(begin, end, BLOCK_N):
        slots = upcoming
        upcoming = _block_of_slots(INDICES, row, start + BLOCK_N + entries, end, SELECTED, K)
        live = (slots >= first) & (slots < last)
        slots = tl.where(live, slots, 0)
        if PAGE > 0:
            page = tl.load(TABLE + b * pages_per_sequence + slots // PAGE, mask=live, other=-1)
            live = live & (page >= 0) & (page < num_pages)
            page = tl.where(live, page, 0)
            slots = slots % PAGE
            if FAR:
                places = page.to(tl.int64) * page_stride + slots * slot_stride
            else:
                places = page * page_stride + slots * slot_stride
        elif FAR:
            places = slots.to(tl.int64) * slot_stride
        else:
            places = slots * slot_stride
        c_kv, k_pe = _latent_tile(pool + places, live, q.dtype, R, P, BLOCK_R, BLOCK_P)
        if LATENT.dtype.element_ty == tl.uint8 and BLOCK_H < 64:
            # else mma.sync operands are laid out for the bytes that the tile was made of, out of ldmatrix' reach
            c_kv = _unchained(c_kv, start < end)
        scores = tl.dot(q_pe, k_pe.T, input_precision="ieee")
        scores = _unchained(scores, start < end)
        scores = tl.dot(q, c_kv.T, scores, input_precision="ieee")
        scores = _unchained(scores, start < end)
        scores = tl.where(live[None, :], scores * (scale * LOG2_E), float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        peak = higher
        total = total * shrink + tl.sum(weights, 1)
        out = tl.dot(weights.to(c_kv.dtype), c_kv, out * shrink[:, None], input_precision="ieee")
    empty = total == 0
    out = out / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), (peak + tl.log2(total)) * LN_2)
    return out, lse


@triton.jit
def attend_kernel(
    Q,
    Q_PE,
    LATENT,
    VISIBLE,
    INDICES,
    TABLE,
    OUT,
    LSE,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    pe_stride_b,
    pe_stride_t,
    pe_stride_h,
    page_stride,
    slot_stride,
    num_pages,
    pages_per_sequence,
    num_slots,
    T,
    scale,
    H: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    SELECTED: tl.constexpr,
    K: tl.constexpr,
    PAGE: tl.constexpr,
    FAR: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
):
    """OUT [B, T, SPLITS, H, R] and LSE float32[B, T, SPLITS, H], contiguous; the result itself where SPLITS is 1."""
    head_tiles = tl.cdiv(H, BLOCK_H)
    share = tl.program_id(0) // head_tiles
    heads = tl.program_id(0) % head_tiles * BLOCK_H + tl.arange(0, BLOCK_H)
    out, lse = attend(
        Q,
        Q_PE,
        LATENT,
        VISIBLE,
        INDICES,
        TABLE,
        share // SPLITS,
        heads,
        share % SPLITS,
        q_stride_b,
        q_stride_t,
        q_stride_h,
        pe_stride_b,
        pe_stride_t,
        pe_stride_h,
        page_stride,
        slot_stride,
        num_pages,
        pages_per_sequence,
        num_slots,
        T,
        scale,
        H,
        R,
        P,
        SELECTED,
        K,
        PAGE,
        FAR,
        SPLITS,
        BLOCK_H,
        BLOCK_N,
        BLOCK_R,
        BLOCK_P,
        HAS_VISIBLE,
    )
    values = tl.arange(0, BLOCK_R)
    places = share.to(tl.int64) * H + heads
    tl.store(LSE + places, lse, mask=heads < H)
    places = OUT + places[:, None] * R + values[None, :]
    if H % BLOCK_H == 0 and R == BLOCK_R:
        tl.store(places, out.to(OUT.dtype.element_ty))
    else:
        tl.store(places, out.to(OUT.dtype.element_ty), mask=(heads < H)[:, None] & (values < R)[None, :])


@triton.jit
def merge(
    PARTS,
    PART_LSE,
    row,
    head,
    values,
    H: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """out float32[len(values)] and lse of one head of one row, from normalised parts over disjoint slots."""
    splits = tl.arange(0, BLOCK_S)
    places = (row.to(tl.int64) * SPLITS + splits) * H + head
    part_lse = tl.load(PART_LSE + places, mask=splits < SPLITS, other=float("-inf"))
    peak = tl.max(part_lse, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2((part_lse - peak) * LOG2_E)
    total = tl.sum(weights, 0)
    parts = tl.load(
        PARTS + places[:, None] * R + values[None, :],
        mask=(splits < SPLITS)[:, None] & (values < R)[None, :],
        other=0.0,
    )
    empty = total == 0
    out = tl.sum(parts.to(tl.float32) * weights[:, None], 0) / tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), peak + tl.log2(total) * LN_2)
    return out, lse


@triton.jit
def merge_kernel(
    PARTS,
    PART_LSE,
    OUT,
    LSE,
    H: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """OUT [B, T, H, R] and LSE float32[B, T, H] from `attend_kernel`'s parts."""
    place = tl.program_id(0)
    values = tl.arange(0, BLOCK_R)
    out, lse = merge(PARTS, PART_LSE, place // H, place % H, values, H, R, SPLITS, BLOCK_S)
    tl.store(OUT + place.to(tl.int64) * R + values, out.to(OUT.dtype.element_ty), mask=values < R)
    tl.store(LSE + place, lse)
