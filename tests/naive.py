"""Second derivations of the ops, one query, head and slot at a time, or by one dense mask; for float64."""

import math

import torch
from torch import Tensor


def seen_slots(
    slots: int, row: tuple[int, int], visible: Tensor | None, mask: Tensor | None, topk_indices: Tensor | None
) -> list[int]:
    """Slots that query ``row`` = (sequence, token) attends to."""
    b, t = row
    seen = set(range(slots))
    if visible is not None:
        seen &= set(range(*visible[b, 0, t].tolist()))
    if mask is not None:
        seen &= {s for s in range(slots) if mask[b % len(mask), 0, t % mask.shape[2], s]}
    if topk_indices is not None:
        seen &= set(topk_indices[b, t].tolist())
    return sorted(seen)


def attention(
    q: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    nope: int,
    scale: float,
    visible: Tensor | None = None,
    mask: Tensor | None = None,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, T, H, V] and lse [B, T, H] by the definition of attention."""
    B, H, T, _ = q.shape
    weight = kv_b_weight.view(H, -1, kv_b_weight.shape[1])
    out = q.new_zeros(B, T, H, weight.shape[1] - nope)
    lse = q.new_full((B, T, H), -math.inf)
    for b in range(B):
        for t in range(T):
            seen = seen_slots(c_kv.shape[1], (b, t), visible, mask, topk_indices)
            for h in range(H if seen else 0):
                expanded = c_kv[b, seen] @ weight[h].T
                keys = torch.cat([expanded[:, :nope], k_pe[b, seen]], 1)
                logits = scale * (keys @ q[b, h, t])
                lse[b, t, h] = logits.logsumexp(0)
                out[b, t, h] = logits.softmax(0) @ expanded[:, nope:]
    return out, lse


def dense(q: Tensor, c_kv: Tensor, k_pe: Tensor, kv_b_weight: Tensor, nope: int, scale: float, keep: Tensor) -> Tensor:
    """[B, T, H, V] as eager code of the inputs' own dtype would compute it; keep bool[B, 1, T, S]."""
    H = q.shape[1]
    expanded = torch.einsum("bsr,hdr->bhsd", c_kv, kv_b_weight.view(H, -1, kv_b_weight.shape[1]))
    keys = torch.cat([expanded[..., :nope], k_pe[:, None].expand(-1, H, -1, -1)], -1)
    logits = (q @ keys.transpose(-1, -2) * scale).masked_fill(~keep, -math.inf)
    return (logits.softmax(-1) @ expanded[..., nope:]).transpose(1, 2)


def best(scores: list[float], allowed: list[int], index_topk: int) -> list[int]:
    """The best ``index_topk`` of the allowed slots in ascending order, then -1; ties to the lower, NaN last, no -inf.

    All of them where they are no more than that.
    """
    if len(allowed) > index_topk:
        allowed = [s for s in allowed if scores[s] != -math.inf]
    ranked = sorted(allowed, key=lambda s: (math.isnan(scores[s]), 0 if math.isnan(scores[s]) else -scores[s], s))
    picked = sorted(ranked[:index_topk])
    return picked + [-1] * (index_topk - len(picked))


def a_token_late(own: list[int], before: list[int] | None, start: int, end: int) -> list[int]:
    """What a row of slot ``end - 1`` attends to that selected ``own``, when the token before selected ``before``.

    Those and its own slot; of K the second goes. Where nobody knows what the token before selected, its own selection.
    """
    if end <= start or before is None:
        return own
    picked = [slot for slot in before if slot >= 0] if end - 1 > start else []
    if len(picked) == len(own):
        picked.pop(min(1, len(own) - 1))
    return picked + [end - 1] + [-1] * (len(own) - len(picked) - 1)


def index_score(q: Tensor, weights: Tensor, key: Tensor, scale: float) -> float:
    """One query [HI, DI] with head weights [HI] against one key [DI]."""
    return sum(float(w) * max(0.0, scale * float(head @ key)) for head, w in zip(q, weights))


def fp8(vector: Tensor) -> tuple[list[float], float]:
    """The e4m3 values of a vector and the power of two that they are multiplied by."""
    peak = max(1e-4, *(abs(x) for x in vector.tolist()))
    fraction, exponent = math.frexp(peak / 448)
    scale = 2.0 ** (exponent - (fraction == 0.5))
    return [e4m3(x / scale) for x in vector.tolist()], scale


def e4m3(x: float) -> float:
    """The nearest of the values with 3 bits behind the leading one and exponents from -6 on, ties to even."""
    step = 2.0 ** (max(math.frexp(x)[1] - 1, -6) - 3)
    return round(x / step) * step


def index_score_fp8(q: Tensor, weights: Tensor, key: list[float], key_scale: float, scale: float) -> float:
    """`index_score` of a query that is rounded to fp8, against a key that is in it."""
    heads = [fp8(head) for head in q]
    dots = [scale * sum(a * b for a, b in zip(codes, key)) for codes, _ in heads]
    return key_scale * sum(float(w) * s * max(0.0, dot) for w, (_, s), dot in zip(weights, heads, dots))


def verify(p: list[list[float]], drafts: list[int], q: list[list[float]], uniforms: list[float]) -> tuple[int, int]:
    """Accepted drafts and the next token of one sequence, by the words of speculative sampling."""
    for m, x in enumerate(drafts):
        if uniforms[m] >= min(1.0, p[m][x] / q[m][x]):
            return m, inverse_cdf([max(a - b, 0.0) for a, b in zip(p[m], q[m])], uniforms[-1])
    return len(drafts), inverse_cdf(p[len(drafts)], uniforms[-1])


def inverse_cdf(weights: list[float], uniform: float) -> int:
    total, reached = math.fsum(weights), 0.0
    for token, weight in enumerate(weights):
        reached += weight
        if uniform * total < reached:
            return token
    return len(weights) - 1
