"""Exact top-k of rows of scores in Triton: bracket the K-th best by a sample, gather what may be chosen, choose.

Import this module inside functions only: it needs triton.

Scores are ordered as floats whose -inf and NaN have changed places (`_ordered`): NaN is then the lowest score there is,
and -inf compares with nothing, so that nothing chooses it. A *bracket* is a score and a slot: it keeps the higher
scores, and of the equal ones those of lower groups, so that equal scores are cut as finely as others. No estimate
decides what is chosen: brackets are guessed until one keeps at least K scores and no more than a list holds, and the K
best of the list are found exactly.

A tensor of N scores is [N / 8, 2, GROUP]: groups of neighbours, which a thread loads at once, in two halves of the
range, whose counts share the halves of an integer.
"""

import triton
import triton.language as tl

NEVER = tl.constexpr(-0x80000000)
"""Key of what is never chosen."""
LOWEST = tl.constexpr(-0x7F800001)
"""Key of -inf, the lowest score that may be chosen."""
HIGHEST = tl.constexpr(0x7F800000)
"""Key of +inf."""
NAN = tl.constexpr(0x7FC00000)
"""Bits of a NaN."""
LAST = tl.constexpr(0x7FFFFFFF)
"""A slot behind all others."""
EVERYTHING = tl.constexpr(-0x7F800001 << 32)
"""The bracket that keeps all that may be chosen."""
NOTHING = tl.constexpr(0x7F800001 << 32)
"""The bracket that keeps no score."""
GROUP = tl.constexpr(4)
LINE = tl.constexpr(32)
"""Slots of a cache line."""


@triton.jit
def _ordered(x):
    """Scores with NaN as -inf and -inf as NaN."""
    return tl.where(x == float("-inf"), float("nan"), tl.where(x == x, x, float("-inf")))


@triton.jit
def _keys(x):
    """int32 in the order of ordered scores, equal for 0.0 and -0.0; NEVER for NaN."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), NEVER)


@triton.jit
def _score(key):
    """The ordered score of a key from LOWEST to HIGHEST; NaN behind."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _heads(first, N: tl.constexpr):
    """int32[N / 8, 2]: the first slot of each group of the N slots from ``first`` on."""
    return first + tl.arange(0, N // 8)[:, None] * GROUP + tl.arange(0, 2)[None, :] * (N // 2)


@triton.jit
def _members(heads):
    """[G, 2, GROUP] from the heads [G, 2] of groups, slots or pointers."""
    return heads[:, :, None] + tl.arange(0, GROUP)[None, None, :]


@triton.jit
def _member(x, i: tl.constexpr):
    """[G, 2]: the i-th of each group."""
    return tl.sum(tl.where(tl.arange(0, GROUP)[None, None, :] == i, x, 0), 2)


@triton.jit
def _counted(flags):
    """Of flags [G, 2, GROUP]: bit 8 + i of int32[G, 2] for the i-th, how many are set before each group, and in all."""
    half = tl.arange(0, 2)[None, :]
    weights = 1 + (256 << tl.arange(0, GROUP))
    groups = tl.sum(tl.where(flags, weights[None, None, :], 0), 2)
    pairs = tl.sum((groups & 255) << 16 * half, 1)
    totals = tl.sum(pairs, 0)
    before = (tl.cumsum(pairs, 0) - pairs)[:, None] >> 16 * half & 0xFFFF
    first = totals & 0xFFFF
    return groups, before + first * half, first + (totals >> 16)


@triton.jit
def _bar(keys, reach, k, slack):
    """The k-th highest key, how many keys reach it, and how many are above it. At most ``reach`` keys are not NEVER.

    The bar may be lower, and then nothing is said of those above, while k + slack keys at most reach it. Where there
    are fewer than k keys it is the lowest.
    """
    low = tl.min(tl.where(keys == NEVER, HIGHEST, keys))
    high = tl.maximum(tl.max(keys), low) + 1
    above = tl.full([], 0, tl.int32)
    span = (high - low).to(tl.uint32, bitcast=True)
    while (span > 1) & (reach > k + slack):
        step = (span // 3 + 1).to(tl.int32, bitcast=True)
        pivot = low + step
        counts = tl.sum((keys >= pivot).to(tl.int32) + ((keys >= pivot + step).to(tl.int32) << 16))
        first = counts & 0xFFFF
        second = counts >> 16
        above = tl.where(first < k, first, tl.where(second < k, second, above))
        high = tl.where(first < k, pivot, tl.where(second < k, pivot + step, high))
        reach = tl.where(second >= k, second, tl.where(first >= k, first, reach))
        low = tl.where(second >= k, pivot + step, tl.where(first >= k, pivot, low))
        span = (high - low).to(tl.uint32, bitcast=True)
    return low, reach, above


@triton.jit
def _bracket(ROW, start, end, aim, tries, SAMPLE: tl.constexpr):
    """The bracket that keeps ``aim`` of a sample of the row, or a few more; everything where there are not so many.

    The row is cut into equal strata, of which a scrambled group each is read: neither a trend nor a period fools it.
    """
    STRATA: tl.constexpr = SAMPLE // GROUP
    first = tl.cdiv(start, GROUP) + tries % 4
    groups = end // GROUP - first
    each = groups // STRATA
    more = groups % STRATA
    strata = tl.arange(0, STRATA // 2)[:, None] + tl.arange(0, 2)[None, :] * (STRATA // 2)
    begin = strata * each + strata * more // STRATA
    width = (strata + 1) * each + (strata + 1) * more // STRATA - begin
    scramble = (strata + groups).to(tl.uint32) * 0x9E3779B1 >> 20
    heads = (first + begin + (scramble * width.to(tl.uint32) >> 12).to(tl.int32)) * GROUP
    keys = _keys(_ordered(tl.load(_members(ROW + heads))))
    bar, reach, above = _bar(keys, tl.full([], SAMPLE, tl.int32), aim, aim // 16)
    limit = tl.full([], LAST, tl.int32)
    if reach > aim + aim // 16:
        level, before, count = _counted(keys == bar)
        limit = tl.max(tl.where((level > 0) & (before < aim - above), heads, -1)) + 1
        if above + count < aim:
            bar = LOWEST
            limit = LAST
    return (bar.to(tl.int64) << 32) | (LAST - limit)


@triton.jit
def _tile(ROW, heads, tile, start, last, numbers, TILE: tl.constexpr):
    """Scores of TILE slots from ``tile`` on, those outside of [start, last) as -inf; ordered unless ``numbers``."""
    if (tile >= start) & (tile + TILE <= last) & numbers:
        x = tl.load(_members(ROW + heads))
    else:
        member = tl.arange(0, GROUP)[None, None, :]
        seen = (member >= (start - heads)[:, :, None]) & (member < (last - heads)[:, :, None])
        x = _ordered(tl.load(_members(ROW + heads), mask=seen, other=float("-inf")))
    return x


@triton.jit
def _gather(ROW, LIST, begin, start, last, bracket, C: tl.constexpr, TILE: tl.constexpr):
    """List what the bracket keeps of the slots [start, last), tile by tile from ``begin`` on; return how many.

    A list is int32[2, C]: bits of ordered scores, and their slots, ascending. Those that do not fit are only counted.
    """
    key = (bracket >> 32).to(tl.int32)
    limit = LAST - bracket.to(tl.int32)
    total = tl.full([], 0, tl.int32)
    tl.debug_barrier()
    upcoming = _tile(ROW, _heads(begin, TILE), begin, start, last, key > LOWEST, TILE)
    for tile in range(begin, last, TILE):
        x = upcoming
        heads = _heads(tile, TILE)
        upcoming = _tile(ROW, heads + TILE, tile + TILE, start, last, key > LOWEST, TILE)
        bar = tl.where(heads < limit, _score(key), _score(key + 1))
        groups, place, added = _counted(x >= bar[:, :, None])
        place += total
        for i in tl.static_range(GROUP):
            kept = (groups & (256 << i)) > 0
            fits = kept & (place < C)
            tl.store(LIST + place, _member(x.to(tl.int32, bitcast=True), i), mask=fits)
            tl.store(LIST + place + C, heads + i, mask=fits)
            place += kept.to(tl.int32)
        total += added
    tl.debug_barrier()
    return total


@triton.jit
def _aim(aim, total, k, C: tl.constexpr, SAMPLE: tl.constexpr):
    """What of the sample to aim at so that between k and C of a row are kept, where ``aim`` has kept ``total``."""
    return tl.minimum(aim * ((5 * k + 3 * C) // 8) // tl.maximum(total, 1) + 1, SAMPLE)


@triton.jit
def _fit(
    ROW, LIST, start, end, bracket, total, aim, tries, k, C: tl.constexpr, SAMPLE: tl.constexpr, TILE: tl.constexpr
):
    """Guess brackets until one fits, and list what it keeps; return how many, and the number of tries.

    ``tries`` have been made, the last aimed at ``aim`` of the sample and made ``bracket``, which keeps ``total``.
    """
    wide = tl.full([], EVERYTHING - 1, tl.int64)
    narrow = tl.full([], NOTHING, tl.int64)
    while (total > C) | ((total < k) & (bracket != EVERYTHING)):
        wide = tl.where(total > C, bracket, wide)
        narrow = tl.where(total > C, narrow, bracket)
        aim = _aim(aim, total, k, C, SAMPLE)
        bracket = _bracket(ROW, start, end, aim, tries, SAMPLE)
        if (tries % 3 == 2) | (bracket <= wide) | (bracket >= narrow):
            bracket = wide + ((narrow - wide).to(tl.uint64, bitcast=True) >> 1).to(tl.int64, bitcast=True)
        total = _gather(ROW, LIST, start // LINE * LINE, start, end, bracket, C, TILE)
        tries += 1
    return total, tries


@triton.jit
def _best(x, total, k):
    """Which of the ordered scores, of which at most ``total`` are not NaN, are the k best."""
    keys = _keys(x)
    bar, reach, above = _bar(keys, total, k, 0)
    best = keys >= bar
    if reach > k:
        level = keys == bar
        rank = _counted(level)[1][:, :, None] + tl.cumsum(level.to(tl.int32), 2)
        best = (keys > bar) | (level & (rank <= k - above))
    return best


@triton.jit
def _write(OUT, chosen, slots, k):
    """The chosen slots, and -1 behind."""
    groups, place, total = _counted(chosen)
    for i in tl.static_range(GROUP):
        taken = (groups & (256 << i)) > 0
        tl.store(OUT + place, _member(slots, i), mask=taken)
        place += taken.to(tl.int32)
    rest = total + tl.arange(0, chosen.shape[0] * 8)
    tl.store(OUT + rest, -1, mask=rest < k)


@triton.jit
def _choose(ROW, OUT, LIST, found, start, end, total, k, C: tl.constexpr):
    """Write the k best: of the ``total`` entries of the list, which stand at ``found``, or of a row that is no longer.

    A row of at most k slots is taken without a look at its scores.
    """
    length = end - start
    heads = _heads(start, C)
    if length > C:
        x = tl.load(_members(LIST + found)).to(tl.float32, bitcast=True)
        x = tl.where(_members(_heads(-total, C)) < 0, x, float("nan"))
    else:
        total = length
        seen = tl.arange(0, GROUP)[None, None, :] < (end - heads)[:, :, None]
        x = _ordered(tl.load(_members(ROW + heads), mask=seen & (length > k), other=float("-inf")))
        x = tl.where(seen & (length <= k), 0.0, x)
    best = _best(x, total, k)
    slots = tl.load(_members(LIST + C + found)) if length > C else _members(heads)
    _write(OUT, best, slots, k)


@triton.jit
def _visible(VISIBLE, row, S):
    start = tl.minimum(tl.maximum(tl.load(VISIBLE + 2 * row), 0), S)
    return start, tl.maximum(tl.minimum(tl.load(VISIBLE + 2 * row + 1), S), start)


@triton.jit(do_not_specialize=["N", "S", "k"])
def topk_kernel(
    SCORES,
    VISIBLE,
    OUT,
    LIST,
    stride,
    N,
    S,
    k,
    C: tl.constexpr,
    SAMPLE: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rows program_id, program_id + programs, ... of N, each by one program, with one list."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    LIST += tl.program_id(0) * 2 * C
    for turn in range(tl.cdiv(N - tl.program_id(0), tl.num_programs(0))):
        row = tl.program_id(0) + turn * tl.num_programs(0)
        far = row.to(tl.int64)
        ROW = SCORES + far * stride
        start, end = _visible(VISIBLE, row, S)
        total = end - start
        if end - start > C:
            bracket = tl.full([], EVERYTHING - 1, tl.int64)
            tries = tl.full([], 0, tl.int32)
            aim = tl.full([], SAMPLE, tl.int32)
            total, tries = _fit(ROW, LIST, start, end, bracket, total, aim, tries, k, C, SAMPLE, TILE)
        _choose(ROW, OUT + far * k, LIST, _heads(0, C), start, end, total, k, C)


@triton.jit(do_not_specialize=["S", "k"])
def gather_kernel(
    SCORES,
    VISIBLE,
    LIST,
    COUNTS,
    BRACKETS,
    stride,
    S,
    k,
    C: tl.constexpr,
    SAMPLE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The first try at a row, by SPLITS programs with a list each, in the order of their slots."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    ROW = SCORES + row.to(tl.int64) * stride
    start, end = _visible(VISIBLE, row, S)
    total = tl.full([], 0, tl.int32)
    if end - start > C:
        bracket = _bracket(ROW, start, end, _aim(SAMPLE, end - start, k, C, SAMPLE), 0, SAMPLE)
        first = start // LINE * LINE
        share = tl.cdiv(tl.cdiv(end - first, TILE), SPLITS) * TILE
        begin = first + split * share
        last = tl.minimum(begin + share, end)
        LIST += tl.program_id(0) * 2 * C
        total = _gather(ROW, LIST, begin, start, last, bracket, C, TILE)
        rest = total + tl.arange(0, GROUP)
        tl.store(LIST + rest, NAN, mask=rest < C)
        tl.store(BRACKETS + row, bracket)
    tl.store(COUNTS + tl.program_id(0), total)


@triton.jit
def _joined(filled, C: tl.constexpr, SPLITS: tl.constexpr):
    """int32[C / 8, 2]: where groups of entries stand, when the filled groups of a row's lists are read as one list."""
    ends = tl.cumsum(filled, 0)
    places = tl.reshape(_heads(0, C) // GROUP, [C // GROUP])
    split = tl.zeros([C // GROUP], tl.int32)
    for bit in tl.static_range(SPLITS.bit_length() - 1):
        later = split + (SPLITS >> (bit + 1))
        split = tl.where(tl.gather(ends, later - 1, 0) <= places, later, split)
    found = places - tl.gather(ends - filled, split, 0) + split * (2 * C // GROUP)
    return tl.reshape(found, [C // 8, 2])


@triton.jit(do_not_specialize=["S", "k"])
def choose_kernel(
    SCORES,
    VISIBLE,
    OUT,
    LIST,
    COUNTS,
    BRACKETS,
    stride,
    S,
    k,
    C: tl.constexpr,
    SAMPLE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """What `gather_kernel` leaves to do, by one program a row."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    far = row.to(tl.int64)
    ROW = SCORES + far * stride
    LIST += row * SPLITS * 2 * C
    start, end = _visible(VISIBLE, row, S)
    counts = tl.load(COUNTS + row * SPLITS + tl.arange(0, SPLITS))
    filled = tl.cdiv(counts, GROUP)
    total = tl.sum(filled, 0) * GROUP
    found = _heads(0, C) // GROUP
    if end - start > C:
        bracket = tl.load(BRACKETS + row)
        aim = _aim(SAMPLE, end - start, k, C, SAMPLE)
        tried = tl.full([], 1, tl.int32)
        kept = tl.where(total > C, total, tl.sum(counts, 0))
        kept, tries = _fit(ROW, LIST, start, end, bracket, kept, aim, tried, k, C, SAMPLE, TILE)
        if tries == tried:
            found = _joined(filled, C, SPLITS)
        else:
            total = kept
    _choose(ROW, OUT + far * k, LIST, found * GROUP, start, end, total, k, C)
