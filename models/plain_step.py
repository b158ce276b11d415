"""One step of plain decoding, as code that is captured whole: in place, so that steps follow each other."""

from typing import Any

import torch
from torch import Tensor

from dsa_compile.cache import DSACache
from dsa_compile.lowering.mtp_verify.greedy import likeliest
from dsa_compile.models.mtp_step import Place, verify
from dsa_compile.sampling import Sampling


def plain_step(
    model: Any,
    cache: DSACache,
    tokens: Tensor,
    place: Place,
    sampling: Sampling,
    uniforms: Tensor,
    turn: Tensor,
    landed: Tensor,
) -> None:
    """Append a token to each sequence of a cache and choose the next.

    Args:
        model: a prepared model. cache: written behind ``place.valid``; its lengths stay.
        tokens: int64[B, 1], the last ones, which no cache holds yet; then the next ones.
        place: ``valid`` is then that of the next step.
        sampling, uniforms: how tokens are chosen, with ``seen`` for a repetition penalty, which gets the next ones;
            float32[B, 1] of ``[0, 1)``.
        turn: int64[1], which of two places in ``landed`` int64[2, B, 1] gets the next tokens; then the other.
    """
    logits, _ = verify(model, cache, tokens, place)
    target = sampling.target(logits)
    if sampling.greedy:
        following = likeliest(target)
    else:
        following = torch.ops.dsa.mtp_verify.default(target, tokens[:, 1:], None, uniforms, False)[1][:, None]
    if sampling.seen is not None:
        sampling.seen.scatter_(1, following, True)
    landed.index_copy_(0, turn, following[None])
    turn.copy_(1 - turn)
    tokens.copy_(following)
    place.valid.add_(place.alive)
