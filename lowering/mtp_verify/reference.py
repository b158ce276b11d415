"""Reference of ``dsa::mtp_verify``: speculative decoding whose output follows the target's distribution exactly."""

import torch
from torch import Tensor

from dsa_compile.lowering.mtp_verify.greedy import leading, verify_greedily
from dsa_compile.lowering.mtp_verify.limits import check

GRAINS = 1 << 40
"""Whole numbers that the likeliest token is worth in `draw`: sums over 2^22 tokens fit into int64."""


def mtp_verify(
    target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None, uniforms: Tensor, greedy: bool
) -> tuple[Tensor, Tensor]:
    """How many drafts of each sequence are accepted, and the token behind the last of them.

    Rejection sampling (Leviathan et al., arXiv 2211.17192, theorem 1): a draft x from q is accepted with probability
    min(1, p(x) / q(x)); behind the first rejected one the next token is drawn from norm(max(p - q, 0)), behind M
    accepted ones from p. It never waits for the device, and gives the same tokens on every run.

    Args:
        target_probs: float32 or float64[B, M+1, vocab], p where 0, 1, ..., M drafts precede; both p and q are what is
            drawn from, so behind temperature, top-k and the like. With ``greedy`` logits of any float dtype.
        draft_tokens: int64[B, M], of ``[0, vocab)``; M may be 0.
        draft_probs: [B, M, vocab], q. None: the drafts were not drawn, so q is 1 at the draft. Unread if ``greedy``.
        uniforms: [B, M+1] of ``[0, 1)``: a column for each draft, the last for the token drawn. Unread if ``greedy``.
        greedy: a draft is accepted if it is the argmax. Ties go to the lower token, NaN loses to every number.

    Returns:
        accepted int64[B] of 0, ..., M and next_token int64[B], never one of probability 0. A row that holds no
        probability at all (NaN) gives token 0.

    Raises:
        InputError: an input has another shape, dtype or device.
    """
    check(target_probs, draft_tokens, draft_probs, uniforms, greedy)
    if greedy:
        return verify_greedily(target_probs, draft_tokens)
    drafts = draft_tokens.shape[1]
    p = _of_tokens(target_probs[:, :drafts], draft_tokens)
    q = torch.ones_like(p) if draft_probs is None else _of_tokens(draft_probs, draft_tokens)
    accepted = leading(uniforms[:, :drafts] * q < p)
    return accepted, draw(_remaining(target_probs, draft_tokens, draft_probs, accepted), uniforms[:, drafts])


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One token int64[B] of each row of weights[B, vocab] by inverse CDF, for uniforms[B].

    Weights are summed as whole numbers, which add up to the same in any order and have no last token that rounding
    leaves out; one below 2^-40 of the greatest is never drawn.
    """
    weights = torch.where(weights > 0, weights, 0).double()
    peak = weights.amax(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    sums = (weights / peak * GRAINS).long().cumsum(-1)
    place = torch.minimum((uniforms.double() * sums[:, -1]).long(), sums[:, -1] - 1)
    return torch.searchsorted(sums, place[:, None], right=True).squeeze(1)


def _remaining(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None, accepted: Tensor) -> Tensor:
    """[B, vocab], not normalised: what the token behind the accepted ones is drawn from."""
    drafts, row = draft_tokens.shape[1], _row(target_probs, accepted)
    if drafts == 0:
        return row
    rejected = accepted.clamp_max(drafts - 1)
    if draft_probs is None:
        rest = row.scatter(1, draft_tokens.gather(1, rejected[:, None]), 0)
    else:
        rest = (row - _row(draft_probs, rejected)).clamp_min(0)
    # where p and q differ by rounding alone nothing is left of a rejection
    whole = (accepted == drafts) | ~(rest > 0).any(-1)
    return torch.where(whole[:, None], row, rest)


def _of_tokens(probs: Tensor, tokens: Tensor) -> Tensor:
    return probs.gather(2, tokens[..., None]).squeeze(2)


def _row(probs: Tensor, index: Tensor) -> Tensor:
    return probs[torch.arange(len(index), device=index.device), index]
