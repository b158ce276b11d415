"""One step of plain decoding, as code that is captured whole: the tokens behind the last ones."""

from typing import Any

import torch
from torch import Tensor

from dsa_compile.cache import DSACache
from dsa_compile.lowering.mtp_verify.greedy import likeliest
from dsa_compile.models.mtp_step import Place, verify
from dsa_compile.sampling import Sampling


def plain_step(
    model: Any, cache: DSACache, tokens: Tensor, place: Place, sampling: Sampling, uniforms: Tensor
) -> Tensor:
    """Append a token to each sequence of a cache and choose the next.

    Args:
        model: a prepared model. cache: written behind ``place.valid``; its lengths stay.
        tokens: int64[B, 1], the last ones, which no cache holds yet.
        sampling, uniforms: how tokens are chosen, with ``seen`` for a repetition penalty; float32[B, 1] of ``[0, 1)``.

    Returns:
        int64[B, 1].
    """
    logits, _ = verify(model, cache, tokens, place)
    target = sampling.target(logits)
    if sampling.greedy:
        return likeliest(target)
    _, following = torch.ops.dsa.mtp_verify.default(target, tokens[:, 1:], None, uniforms, False)
    return following[:, None]
