"""Greedy choices in plain torch, which Inductor makes a few short kernels of."""

from math import gcd

import torch
from torch import Tensor

LONG = 8192
"""Tokens of a vocabulary from which on a row is searched in parts: by one program it took longer than two launches."""
MOST_PARTS = 64


def likeliest(logits: Tensor) -> Tensor:
    """int64[...], the argmax of logits[..., vocab]: ties go to the lower token, NaN loses to every number."""
    known, vocab = logits.masked_fill(logits.isnan(), float("-inf")), logits.shape[-1]
    parts = gcd(vocab, MOST_PARTS) if vocab >= LONG else 1
    if parts == 1:
        return known.argmax(-1)
    best, places = known.unflatten(-1, (parts, vocab // parts)).max(-1)
    part = best.argmax(-1, keepdim=True)
    return (places.gather(-1, part) + part * (vocab // parts)).squeeze(-1)


def verify_greedily(logits: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """``dsa::mtp_verify`` with ``greedy``: a draft is accepted if it is the `likeliest` token of its row.

    Args:
        logits: [B, M+1, vocab]. draft_tokens: int64[B, M].

    Returns:
        accepted int64[B] and next_token int64[B].
    """
    best = likeliest(logits)
    accepted = leading(best[:, :-1] == draft_tokens)
    return accepted, best.gather(1, accepted[:, None]).squeeze(1)


def leading(agrees: Tensor) -> Tensor:
    """How many True each row of bool[B, M] begins with."""
    drafts = agrees.shape[1]
    columns = torch.arange(drafts + 1, device=agrees.device)
    ended = torch.nn.functional.pad(~agrees, (0, 1), value=True)
    return torch.where(ended, columns, drafts).amin(1)
