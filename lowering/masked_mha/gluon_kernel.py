"""Masked attention on Hopper's own instructions, in Gluon: a copying warpgroup and two that attend 64 rows each.

One program attends 128 rows of one head to the blocks that its tile wants. The first warpgroup copies expanded keys,
rope keys and values into rings of two blocks of 128. Each of the others multiplies the values of a block while it
weighs the scores of the next, and while one weighs the other multiplies.

Import this module inside functions only: it needs triton.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from dsa_compile.lowering.masked_mha.kernel import LOG2_E, LOWEST

ROWS = gl.constexpr(64)
"""Of a warpgroup."""
KEYS = gl.constexpr(128)
STAGES = gl.constexpr(2)
WORDS = gl.constexpr(4)
"""Of bits in a block."""
INFINITY = gl.constexpr(float("inf"))
LINES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Of tiles in shared memory that wgmma reads."""
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""16 bytes a thread, a cache line of each of 4 rows a warp."""
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
"""Of scores and outputs, 64 x 128 both."""
BITS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 0, 1], [0, 0, 8], [0, 0, 16], [8, 0, 0]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 32],
    )
)
"""The places of `SCORES` as rows, words and bits: a thread reads the words of its own scores, and nobody else's."""
WORD = gl.constexpr(gl.SliceLayout(2, BITS))


def described(rows, width):
    """The matrix ``rows``, of which blocks of `KEYS` rows and ``width`` values are copied."""
    return TensorDescriptor.from_tensor(rows, [KEYS.value, width], LINES.value)


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(made.index(i), count=COUNT)
    return made


@aggregate
class Shared:
    """Rings of keys, rope keys and values, and the queries of both warpgroups.

    Barriers of a block: ``keyed``, its keys have arrived; ``valued``, its values; ``scored``, both warpgroups have read
    its keys; ``mixed``, its values. ``asked``: a warpgroup's queries have arrived.
    """

    key: gl.shared_memory_descriptor
    k_pe: gl.shared_memory_descriptor
    value: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    q_pe: gl.shared_memory_descriptor
    keyed: gl.shared_memory_descriptor
    valued: gl.shared_memory_descriptor
    scored: gl.shared_memory_descriptor
    mixed: gl.shared_memory_descriptor
    asked: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, key, k_pe, value, q, q_pe, keyed, valued, scored, mixed, asked):
        self.key = key
        self.k_pe = k_pe
        self.value = value
        self.q = q
        self.q_pe = q_pe
        self.keyed = keyed
        self.valued = valued
        self.scored = scored
        self.mixed = mixed
        self.asked = asked

    @gluon.jit
    def make(DTYPE: gl.constexpr):
        return Shared(
            gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, 128], LINES),
            gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, 64], LINES),
            gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, 128], LINES),
            gl.allocate_shared_memory(DTYPE, [2, ROWS, 128], LINES),
            gl.allocate_shared_memory(DTYPE, [2, ROWS, 64], LINES),
            _barriers(1),
            _barriers(1),
            _barriers(2),
            _barriers(2),
            _barriers(128),
        )

    @gluon.jit
    def await_(self, barriers, i):
        """Wait until block ``i`` has passed one of the barriers."""
        mbarrier.wait(barriers.index(i % STAGES), i // STAGES & 1)

    @gluon.jit
    def await_room(self, barriers, i):
        """Wait until the block that stood in the place of ``i`` has passed one of the barriers."""
        mbarrier.wait(barriers.index(i % STAGES), (i // STAGES & 1) ^ 1)


@gluon.jit
def _copy(s, EXPANDED, K_PE, BLOCKS, count, row, column):
    """Block after block of the head whose keys begin at ``column``, of the sequence that begins at ``row``."""
    for i in range(count):
        stage = i % STAGES
        start = row + gl.load(BLOCKS + i) * KEYS
        s.await_room(s.scored, i)
        mbarrier.expect(s.keyed.index(stage), KEYS * (128 + 64) * 2)
        tma.async_copy_global_to_shared(EXPANDED, [start, column], s.keyed.index(stage), s.key.index(stage))
        tma.async_copy_global_to_shared(K_PE, [start, 0], s.keyed.index(stage), s.k_pe.index(stage))
        s.await_room(s.mixed, i)
        mbarrier.expect(s.valued.index(stage), KEYS * 128 * 2)
        tma.async_copy_global_to_shared(EXPANDED, [start, column + 128], s.valued.index(stage), s.value.index(stage))


@gluon.jit
def _score(s, i, group: gl.constexpr):
    """Start the scores of block ``i``: two groups of products."""
    s.await_(s.keyed, i)
    stage = i % STAGES
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    k_pe = s.k_pe.index(stage).permute((1, 0))
    scores = warpgroup_mma(s.q_pe.index(group), k_pe, scores, use_acc=False, is_async=True)
    return warpgroup_mma(s.q.index(group), s.key.index(stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _weigh(scores, bits, peak, total, factor):
    """Weights of a block, how much what came before shrinks, and the new maximum and sum."""
    shifts = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, BITS)))
    keep = (gl.expand_dims(bits, 2) >> gl.expand_dims(gl.expand_dims(shifts, 0), 1)) & 1
    keep = gl.convert_layout(gl.reshape(keep, [ROWS, KEYS]), SCORES)
    scores = gl.where(keep != 0, scores, -INFINITY)
    higher = gl.maximum(peak, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - gl.expand_dims(higher, 1))
    shrink = gl.exp2(peak - higher)
    return weights, shrink, higher, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _attend(s, Q, BITS_ROWS, BLOCKS, OUT, q_stride_t, out_stride_t, t, T, blocks, count, factor, group: gl.constexpr):
    """64 rows from ``t`` on."""
    WEIGHED: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    t += group * ROWS
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPIED))
    near = gl.expand_dims(gl.minimum(t + row, T - 1).to(gl.int64), 1)
    columns = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, COPIED)), 0)
    rope = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, COPIED)), 0)
    async_copy.async_copy_global_to_shared(s.q.index(group), Q + near * q_stride_t + columns)
    async_copy.async_copy_global_to_shared(s.q_pe.index(group), Q + near * q_stride_t + 128 + rope)
    async_copy.mbarrier_arrive(s.asked.index(group), increment_count=False)
    places = gl.minimum(t + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WORD)), T - 1).to(gl.int64) * blocks * WORDS
    BITS_ROWS += gl.expand_dims(places, 1) + gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, WORD)), 0)
    bits = gl.load(BITS_ROWS + gl.load(BLOCKS) * WORDS)
    mbarrier.wait(s.asked.index(group), 0)
    fence_async_shared()
    scores = warpgroup_mma_wait(0, deps=[_score(s, 0, group)])
    mbarrier.arrive(s.scored.index(0), count=1)
    peak = gl.full([ROWS], LOWEST, gl.float32, ROW)
    total = gl.full([ROWS], 0.0, gl.float32, ROW)
    out = gl.zeros([ROWS, 128], gl.float32, SCORES)
    upcoming = gl.load(BITS_ROWS + gl.load(BLOCKS + gl.minimum(1, count - 1)) * WORDS)
    weights, shrink, peak, total = _weigh(scores, bits, peak, total, factor)
    weighed = gl.convert_layout(weights.to(s.q.dtype), WEIGHED)
    for i in range(1, count):
        bits = upcoming
        scores = _score(s, i, group)
        # words are read a block ahead, while products run
        upcoming = gl.load(BITS_ROWS + gl.load(BLOCKS + gl.minimum(i + 1, count - 1)) * WORDS)
        s.await_(s.valued, i - 1)
        out = warpgroup_mma(weighed, s.value.index((i - 1) % STAGES), out, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(s.scored.index(i % STAGES), count=1)
        weights, shrink, peak, total = _weigh(scores, bits, peak, total, factor)
        out, weighed = warpgroup_mma_wait(0, deps=[out, weighed])
        mbarrier.arrive(s.mixed.index((i - 1) % STAGES), count=1)
        out = out * gl.expand_dims(shrink, 1)
        weighed = gl.convert_layout(weights.to(s.q.dtype), WEIGHED)
    s.await_(s.valued, count - 1)
    out = warpgroup_mma(weighed, s.value.index((count - 1) % STAGES), out, is_async=True)
    out, weighed = warpgroup_mma_wait(0, deps=[out, weighed])
    out = out * gl.expand_dims(1 / gl.where(total == 0, 1.0, total), 1)
    # through the place of the queries, so that a warp writes whole cache lines
    s.q.index(group).store(out.to(s.q.dtype))
    places = gl.expand_dims((t + row).to(gl.int64), 1) * out_stride_t + columns
    gl.store(OUT + places, s.q.index(group).load(COPIED), mask=gl.expand_dims(t + row, 1) < T)


@gluon.jit(do_not_specialize=["num_slots", "T", "blocks", "tiles"])
def attend_masked_kernel(
    Q,
    EXPANDED,
    K_PE,
    WORDS_OF_BITS,
    BLOCKS,
    COUNTS,
    OUT,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    out_stride_b,
    out_stride_t,
    out_stride_h,
    num_slots,
    T,
    blocks,
    tiles,
    scale,
):
    """As `kernel.attend_masked_kernel`; EXPANDED [B S, h (128 + 128)] and K_PE [B S, 64] by descriptors of blocks.

    Where nobody of a tile wants a block it visits block 0, as BLOCKS then says.
    """
    tile = tiles - 1 - gl.program_id(0) % tiles  # a late tile has most to do: it starts first
    h = gl.program_id(0) // tiles
    per_sequence = gl.cdiv(T, 2 * ROWS)
    b = tile // per_sequence
    t = tile % per_sequence * (2 * ROWS)
    Q += b.to(gl.int64) * q_stride_b + h.to(gl.int64) * q_stride_h
    OUT += b.to(gl.int64) * out_stride_b + h.to(gl.int64) * out_stride_h
    WORDS_OF_BITS += b.to(gl.int64) * T * blocks * WORDS
    BLOCKS += tile.to(gl.int64) * blocks
    count = gl.maximum(gl.load(COUNTS + tile), 1)
    factor = scale * LOG2_E
    s = Shared.make(Q.dtype.element_ty)
    gl.warp_specialize(
        [
            (_copy, (s, EXPANDED, K_PE, BLOCKS, count, b * num_slots, h * 256)),
            (
                _attend,
                (s, Q, WORDS_OF_BITS, BLOCKS, OUT, q_stride_t, out_stride_t, t, T, blocks, count, factor, 0),
            ),
            (
                _attend,
                (s, Q, WORDS_OF_BITS, BLOCKS, OUT, q_stride_t, out_stride_t, t, T, blocks, count, factor, 1),
            ),
        ],
        [4, 4],
        [232, 232],
    )
