"""``dsa::route`` in Triton: a program chooses the experts of one token.

What is chosen next is the greatest of keys in which a score and its place are one number, so that each choice is one
reduction and ties go to the lower place.

Import this module inside functions only: it needs triton.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TAKEN = tl.constexpr(-(1 << 63))


@triton.jit
def _keys(values, places):
    """int64, ordered as values and, where those are equal, as places fall; NaN is greater than every number."""
    values = tl.where(values == values, values + 0.0, float("inf"))
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)


@triton.jit
def _place(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def route_kernel(
    LOGITS,
    BIAS,
    WEIGHTS,
    EXPERTS,
    stride,
    scale,
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOPK: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """LOGITS[T, E] in rows of ``stride``; WEIGHTS and EXPERTS [T, TOPK]."""
    EACH: tl.constexpr = E // GROUPS
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_GROUPS)
    column = tl.arange(0, BLOCK_EXPERTS)[None, :]
    expert = group[:, None] * EACH + column
    real = (group[:, None] < GROUPS) & (column < EACH)
    scores = tl.sigmoid(tl.load(LOGITS + token * stride + expert, mask=real, other=0.0))
    biased = scores + tl.load(BIAS + expert, mask=real, other=0.0).to(tl.float32)
    keys = tl.where(real, _keys(biased, expert), TAKEN)
    if TOPK_GROUPS < GROUPS:
        first = tl.max(keys, 1)
        # of a group without a real expert both are -inf
        best = tl.max(tl.where(real, biased, float("-inf")), 1)
        second = tl.max(tl.where(real & (keys != first[:, None]), biased, float("-inf")), 1)
        unknown = tl.max((real & (biased != biased)).to(tl.int32), 1) > 0
        worth = tl.where(unknown, float("inf"), best + second)
        group_keys = tl.where(group < GROUPS, _keys(worth, group), TAKEN)
        chosen = tl.zeros([BLOCK_GROUPS], tl.int1)
        for _ in tl.static_range(TOPK_GROUPS):
            key = tl.max(group_keys, 0)
            chosen = chosen | (group_keys == key)
            group_keys = tl.where(group_keys == key, TAKEN, group_keys)
        keys = tl.where(chosen[:, None], keys, TAKEN)
    place = tl.arange(0, BLOCK_TOPK)
    picks = tl.zeros([BLOCK_TOPK], tl.int32)
    weights = tl.zeros([BLOCK_TOPK], tl.float32)
    for pick in tl.static_range(TOPK):
        key = tl.max(tl.max(keys, 1), 0)
        weight = tl.sum(tl.sum(tl.where(keys == key, scores, 0.0), 1), 0)
        picks = tl.where(place == pick, _place(key), picks)
        weights = tl.where(place == pick, weight, weights)
        keys = tl.where(keys == key, TAKEN, keys)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    real_place = place < TOPK
    tl.store(WEIGHTS + token * TOPK + place, weights * scale, mask=real_place)
    tl.store(EXPERTS + token * TOPK + place, picks.to(tl.int64), mask=real_place)
