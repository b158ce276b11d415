"""``dsa::sparse_mla`` on Hopper's own instructions, in Gluon: a pipeline of four warpgroups around wgmma and mbarriers.

One program attends up to 64 heads of one query row to a share of its slots. A warpgroup gathers latent rows, 64 at a
time, into a ring of two blocks; one scores a block and weighs the scores; two mix the values, half of the 512 columns
each. The scoring warpgroup keeps two thirds of its queries in registers, which leaves shared memory, and its bandwidth,
to the rows. Of rows in fp8 the gatherer makes bfloat16 on their way into the ring; the registers that it does so with
are those of a quarter of the queries, which then stay in shared memory.
docs/kernels.md has what this was measured against.

Import this module inside functions only: it needs triton.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from dsa_compile.lowering.sparse_mla.kernel import E4M3_AS_BF16, bf16_bits

KEYS = gl.constexpr(64)
"""Latent rows of a block: the longest sum of a chain of wgmma that the ring has room for."""
STAGES = gl.constexpr(2)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.4028234663852886e38)
"""Where the running maximum starts: finite, so that a block without any live slot gives weights of 0 and no NaN."""
INFINITY = gl.constexpr(float("inf"))
LINES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Of tiles in shared memory that wgmma reads."""
BYTES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
GATHERED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""16 bytes a thread, a cache line of each of 4 rows a warp."""
ENTRIES = gl.constexpr(gl.SliceLayout(1, GATHERED))
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
MIXED = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))


@gluon.jit
def _tile(H: gl.constexpr):
    """The program's share, its first head, and how many heads it has."""
    TILES: gl.constexpr = (H + 63) // 64
    head = gl.program_id(0) % TILES * 64
    heads = 64
    if H % 64:
        heads = gl.minimum(H - head, 64)
    return gl.program_id(0) // TILES, head, heads


@gluon.jit
def _columns(WIDTH: gl.constexpr):
    return gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, GATHERED)), 0)


@gluon.jit
def _barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(made.index(i), count=COUNT)
    return made


@aggregate
class Shared:
    """What the warpgroups share. Of each block of the ring: kv_c in halves, k_pe, a cap on its scores, their weights
    and how much the sums before them shrink.

    ``codes``, ``scales``: 128 values of a block's rows in fp8, and what they are times, of two places; else anything.
    Barriers of a block: ``ready``, its rows have arrived; ``weighed``, its weights are there; ``free``, both halves are
    mixed. ``asked``: the queries have arrived; ``held``: they are in registers; ``done``: so is the
    inverse of the sum of all weights.
    """

    low: gl.shared_memory_descriptor
    high: gl.shared_memory_descriptor
    k_pe: gl.shared_memory_descriptor
    caps: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    shrink: gl.shared_memory_descriptor
    inverse: gl.shared_memory_descriptor
    q_low: gl.shared_memory_descriptor
    q_mid: gl.shared_memory_descriptor
    q_high: gl.shared_memory_descriptor
    q_pe: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    weighed: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    asked: gl.shared_memory_descriptor
    held: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor
    codes: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, low, high, k_pe, caps, weights, shrink, inverse, q_low, q_mid, q_high, q_pe, ready, weighed, free, asked,
        held, done, codes, scales,
    ):  # fmt: skip
        self.low = low
        self.high = high
        self.k_pe = k_pe
        self.caps = caps
        self.weights = weights
        self.shrink = shrink
        self.inverse = inverse
        self.q_low = q_low
        self.q_mid = q_mid
        self.q_high = q_high
        self.q_pe = q_pe
        self.ready = ready
        self.weighed = weighed
        self.free = free
        self.asked = asked
        self.held = held
        self.done = done
        self.codes = codes
        self.scales = scales

    @gluon.jit
    def make(DTYPE: gl.constexpr, FP8: gl.constexpr):
        low = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, 256], LINES)
        high = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, 256], LINES)
        shrink = gl.allocate_shared_memory(gl.float32, [STAGES, 64], PLAIN)
        # queries that are held lie in the last block of the ring until they are
        if FP8:
            q_mid = gl.allocate_shared_memory(DTYPE, [64, 128], LINES)
            codes = gl.allocate_shared_memory(DTYPE, [2, KEYS, 64], BYTES)
            scales = gl.allocate_shared_memory(gl.float32, [2, KEYS], PLAIN)
        else:
            q_mid = high.index(STAGES - 1)._reinterpret(DTYPE, [64, 128], LINES)
            codes = high
            scales = shrink
        return Shared(
            low,
            high,
            gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, 64], LINES),
            gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], PLAIN),
            gl.allocate_shared_memory(DTYPE, [STAGES, 64, KEYS], LINES),
            shrink,
            gl.allocate_shared_memory(gl.float32, [64], PLAIN),
            low.index(STAGES - 1),
            q_mid,
            gl.allocate_shared_memory(DTYPE, [64, 128], LINES),
            gl.allocate_shared_memory(DTYPE, [64, 64], LINES),
            _barriers(STAGES, 1 if FP8 else 129),
            _barriers(STAGES, 1),
            _barriers(STAGES, 2),
            _barriers(1, 128),
            _barriers(1, 1),
            _barriers(1, 1),
            codes,
            scales,
        )

    @gluon.jit
    def await_(self, barriers, i):
        """Wait until block ``i`` has passed one of the barriers."""
        mbarrier.wait(barriers.index(i % STAGES), i // STAGES & 1)


@gluon.jit
def _ask(s, Q, Q_PE, q_stride_h, pe_stride_h, H: gl.constexpr):
    """Copy the queries; those of heads that are not there are zeros."""
    _, _, heads = _tile(H)
    places = gl.expand_dims(gl.arange(0, 64, layout=ENTRIES), 1)
    mask = places < heads
    q = Q + places.to(gl.int64) * q_stride_h
    async_copy.async_copy_global_to_shared(s.q_low, q + _columns(256), mask=mask)
    async_copy.async_copy_global_to_shared(s.q_mid, q + 256 + _columns(128), mask=mask)
    async_copy.async_copy_global_to_shared(s.q_high, q + 384 + _columns(128), mask=mask)
    q_pe = Q_PE + places.to(gl.int64) * pe_stride_h
    async_copy.async_copy_global_to_shared(s.q_pe, q_pe + _columns(64), mask=mask)
    async_copy.mbarrier_arrive(s.asked.index(0), increment_count=False)


@gluon.jit
def _range(VISIBLE, num_slots, HAS_VISIBLE: gl.constexpr):
    """The first slot that the row sees, and the one behind the last."""
    first = 0
    last = num_slots
    if HAS_VISIBLE:
        first = gl.maximum(gl.load(VISIBLE), 0)
        last = gl.minimum(gl.load(VISIBLE + 1), num_slots)
    return first, last


@gluon.jit
def _slots(INDICES, i, topk):
    """Of block ``i``; -1 behind the selection."""
    places = i * KEYS + gl.arange(0, KEYS, layout=ENTRIES)
    return gl.load(INDICES + places, mask=places < topk, other=-1)


@gluon.jit
def _await_room(s, i):
    """Wait until block ``i`` may be written."""
    mbarrier.wait(s.held.index(0), 0, pred=i == STAGES - 1)
    mbarrier.wait(s.free.index(i % STAGES), (i // STAGES & 1) ^ 1)


@gluon.jit
def _gather(
    s, Q, Q_PE, LATENT, VISIBLE, INDICES, q_stride_h, pe_stride_h, slot_stride, num_slots, topk, H: gl.constexpr,
    HAS_VISIBLE: gl.constexpr,
):  # fmt: skip
    """Copy the queries, then the latent rows of block after block; dead rows become zeros under a cap of -inf."""
    _ask(s, Q, Q_PE, q_stride_h, pe_stride_h, H)
    first, last = _range(VISIBLE, num_slots, HAS_VISIBLE)
    slots = _slots(INDICES, 0, topk)
    for start in range(0, topk, KEYS):
        i = start // KEYS
        stage = i % STAGES
        live = (slots >= first) & (slots < last)
        rows = gl.expand_dims(LATENT + gl.where(live, slots, 0).to(gl.int64) * slot_stride, 1)
        mask = gl.expand_dims(live, 1)
        _await_room(s, i)
        s.caps.index(stage).store(gl.where(live, INFINITY, -INFINITY))
        async_copy.async_copy_global_to_shared(s.low.index(stage), rows + _columns(256), mask=mask)
        async_copy.async_copy_global_to_shared(s.high.index(stage), rows + 256 + _columns(256), mask=mask)
        async_copy.async_copy_global_to_shared(s.k_pe.index(stage), rows + 512 + _columns(64), mask=mask)
        async_copy.mbarrier_arrive(s.ready.index(stage), increment_count=False)
        mbarrier.arrive(s.ready.index(stage), count=1)
        slots = _slots(INDICES, i + 1, topk)


@gluon.jit
def _copy_codes(s, rows, live, c: gl.constexpr):
    """Of 128 values of each row, and their scale, as a group of copies."""
    halves = gl.expand_dims(rows.to(gl.pointer_type(s.low.dtype)), 1) + 64 * c
    async_copy.async_copy_global_to_shared(s.codes.index(c % 2), halves + _columns(64), mask=gl.expand_dims(live, 1))
    scales = rows.to(gl.pointer_type(gl.float32)) + 128 + c
    async_copy.async_copy_global_to_shared(s.scales.index(c % 2), scales, mask=live)
    async_copy.commit_group()


@gluon.jit
def _unpack_codes(s, values, rows, live, c: gl.constexpr, upcoming: gl.constexpr, newer: gl.constexpr):
    """Write 128 values of a block's rows into the ring, and copy others in their place.

    ``newer``: groups of copies since theirs. ``upcoming``: which 128 values of ``rows`` to copy.
    """
    async_copy.wait_group(newer)
    codes = s.codes.index(c % 2)._reinterpret(gl.uint8, [KEYS, 128], BYTES)
    scale = gl.expand_dims((s.scales.index(c % 2).load(ENTRIES) * E4M3_AS_BF16).to(gl.bfloat16), 1)
    values.slice(128 * (c % 2), 64, 1).store(bf16_bits(codes.slice(0, 64, 1).load(GATHERED)) * scale)
    last = codes.slice(64, 64, 1).load(GATHERED)
    _copy_codes(s, rows, live, upcoming)
    values.slice(128 * (c % 2) + 64, 64, 1).store(bf16_bits(last) * scale)


@gluon.jit
def _unpack(
    s, Q, Q_PE, LATENT, VISIBLE, INDICES, q_stride_h, pe_stride_h, slot_stride, num_slots, topk, H: gl.constexpr,
    HAS_VISIBLE: gl.constexpr,
):  # fmt: skip
    """`_gather` of rows in fp8 (`dsa_compile.lowering.fp8_rows`): their codes are copied half a block ahead."""
    _ask(s, Q, Q_PE, q_stride_h, pe_stride_h, H)
    first, last = _range(VISIBLE, num_slots, HAS_VISIBLE)
    slots = _slots(INDICES, 0, topk)
    live = (slots >= first) & (slots < last)
    rows = LATENT + gl.where(live, slots, 0).to(gl.int64) * slot_stride
    _copy_codes(s, rows, live, 0)
    _copy_codes(s, rows, live, 1)
    slots = _slots(INDICES, 1, topk)
    for start in range(0, topk, KEYS):
        i = start // KEYS
        stage = i % STAGES
        _await_room(s, i)
        s.caps.index(stage).store(gl.where(live, INFINITY, -INFINITY))
        k_pe = gl.expand_dims(rows.to(gl.pointer_type(s.low.dtype)) + 264, 1) + _columns(64)
        async_copy.async_copy_global_to_shared(s.k_pe.index(stage), k_pe, mask=gl.expand_dims(live, 1))
        async_copy.commit_group()
        _unpack_codes(s, s.low.index(stage), rows, live, 0, 2, 2)
        _unpack_codes(s, s.low.index(stage), rows, live, 1, 3, 2)
        live = (slots >= first) & (slots < last)
        rows = LATENT + gl.where(live, slots, 0).to(gl.int64) * slot_stride
        slots = _slots(INDICES, i + 2, topk)
        _unpack_codes(s, s.high.index(stage), rows, live, 2, 0, 1)
        _unpack_codes(s, s.high.index(stage), rows, live, 3, 1, 1)
        fence_async_shared()
        mbarrier.arrive(s.ready.index(stage), count=1)
    async_copy.wait_group(0)


@gluon.jit
def _weigh(s, i, scores, peak, total, scale):
    """Write the weights of block ``i``, and how much what came before shrinks; the new maximum and sum."""
    stage = i % STAGES
    scores = gl.minimum(scores, gl.expand_dims(s.caps.index(stage).load(gl.SliceLayout(0, scores.type.layout)), 0))
    higher = gl.maximum(peak, gl.max(scores, 1) * scale)
    shrink = gl.exp2(peak - higher)
    weights = gl.exp2(scores * scale - gl.expand_dims(higher, 1))
    s.weights.index(stage).store(weights.to(s.low.dtype))
    s.shrink.index(stage).store(shrink)
    fence_async_shared()
    mbarrier.arrive(s.weighed.index(stage), count=1)
    return higher, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _score(s, LSE, scale, blocks, H: gl.constexpr, FP8: gl.constexpr):
    """Scores, weights, their sum and the log-sum-exp."""
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    mbarrier.wait(s.asked.index(0), 0)
    a_low = s.q_low.load(gl.DotOperandLayout(0, SCORES, 2))
    a_mid = s.q_mid
    if not FP8:
        a_mid = a_mid.load(gl.DotOperandLayout(0, SCORES, 2))
    mbarrier.arrive(s.held.index(0), count=1)
    scale = scale * LOG2_E
    peak = gl.full([64], LOWEST, gl.float32, ROWS)
    total = gl.full([64], 0.0, gl.float32, ROWS)
    for i in range(blocks):
        s.await_(s.ready, i)
        fence_async_shared()
        stage = i % STAGES
        high = s.high.index(stage)
        scores = gl.zeros([64, KEYS], gl.float32, SCORES)
        scores = warpgroup_mma(s.q_pe, s.k_pe.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma(s.q_high, high.slice(128, 128, 1).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma(a_low, s.low.index(stage).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma(a_mid, high.slice(0, 128, 1).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        peak, total = _weigh(s, i, scores, peak, total, scale)
    empty = total == 0
    s.inverse.store(1 / gl.where(empty, 1.0, total))
    mbarrier.arrive(s.done.index(0), count=1)
    share, head, heads = _tile(H)
    LSE += share.to(gl.int64) * H + head
    places = gl.arange(0, 64, layout=ROWS)
    gl.store(LSE + places, gl.where(empty, -INFINITY, (peak + gl.log2(total)) * LN_2), mask=places < heads)


@gluon.jit
def _mix(s, OUT, values, blocks, H: gl.constexpr):
    """Half of the output's columns: weights times the ring's blocks of ``values``."""
    ROWS: gl.constexpr = gl.SliceLayout(1, MIXED)
    out = gl.zeros([64, 256], gl.float32, MIXED)
    for i in range(blocks):
        stage = i % STAGES
        s.await_(s.weighed, i)
        out = out * gl.expand_dims(s.shrink.index(stage).load(ROWS), 1)
        out = warpgroup_mma(s.weights.index(stage), values.index(stage), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=[out])
        mbarrier.arrive(s.free.index(stage), count=1)
    mbarrier.wait(s.done.index(0), 0)
    out = out * gl.expand_dims(s.inverse.load(ROWS), 1)
    # through shared memory, which nobody else uses any more, so that a warp writes whole cache lines
    staged = values._reinterpret(values.dtype, [64, 256], LINES)
    staged.store(out.to(values.dtype))
    share, head, heads = _tile(H)
    OUT += (share.to(gl.int64) * H + head) * 512
    places = gl.expand_dims(gl.arange(0, 64, layout=ENTRIES), 1)
    gl.store(OUT + places * 512 + _columns(256), staged.load(GATHERED), mask=places < heads)


@gluon.jit(do_not_specialize=["num_slots", "T", "topk", "splits"])
def attend_kernel(
    Q,
    Q_PE,
    LATENT,
    VISIBLE,
    INDICES,
    OUT,
    LSE,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    pe_stride_b,
    pe_stride_t,
    pe_stride_h,
    pool_stride,
    slot_stride,
    num_slots,
    T,
    topk,
    splits,
    scale,
    H: gl.constexpr,
    HAS_VISIBLE: gl.constexpr,
    FP8: gl.constexpr,
    MIXER_REGISTERS: gl.constexpr,
    SCORE_REGISTERS: gl.constexpr,
):
    """OUT [B, T, splits, H, 512] and LSE float32[B, T, splits, H], contiguous; the rest as of `kernel.attend`."""
    share, head, _ = _tile(H)
    row = share // splits
    head = head.to(gl.int64)
    b = (row // T).to(gl.int64)
    t = (row % T).to(gl.int64)
    Q += b * q_stride_b + t * q_stride_t + head * q_stride_h
    Q_PE += b * pe_stride_b + t * pe_stride_t + head * pe_stride_h
    LATENT += b * pool_stride
    VISIBLE += 2 * row
    size = gl.cdiv(gl.cdiv(topk, KEYS), splits) * KEYS
    begin = share % splits * size
    INDICES += row.to(gl.int64) * topk + begin
    topk = gl.minimum(size, topk - begin)
    blocks = gl.cdiv(gl.maximum(topk, 0), KEYS)
    s = Shared.make(Q.dtype.element_ty, FP8)
    gl.warp_specialize(
        [
            (
                _unpack if FP8 else _gather,
                (
                    s,
                    Q,
                    Q_PE,
                    LATENT,
                    VISIBLE,
                    INDICES,
                    q_stride_h,
                    pe_stride_h,
                    slot_stride,
                    num_slots,
                    topk,
                    H,
                    HAS_VISIBLE,
                ),
            ),
            (_mix, (s, OUT, s.low, blocks, H)),
            (_mix, (s, OUT + 256, s.high, blocks, H)),
            (_score, (s, LSE, scale, blocks, H, FP8)),
        ],
        [4, 4, 4],
        [MIXER_REGISTERS, MIXER_REGISTERS, SCORE_REGISTERS],
    )
