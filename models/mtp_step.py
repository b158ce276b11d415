"""One step of speculative decoding, as code that is captured whole: verify, accept, choose, draft again.

A step has W = M + 1 rows for each sequence: its last token, which no cache holds yet, and M drafts behind it. The width
is static, a sequence's progress is a length, and nothing waits for the device. Rows that were rejected stay in the
pools behind the length, where nobody sees them, until the next tokens overwrite them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsa_compile.cache import DSACache, visible_from
from dsa_compile.lowering.mtp_verify.greedy import leading, likeliest
from dsa_compile.models.mtp import rows_at, run_mtp
from dsa_compile.sampling import Sampling


class Place(NamedTuple):
    """Where the sequences of a step are.

    Attributes:
        valid: int64[B], tokens in the cache.
        alive: bool[B]; of other sequences nothing is written and what comes out means nothing.
        offset: int64[B], position of a token less its slot.
    """

    valid: Tensor
    alive: Tensor
    offset: Tensor


def step(
    model: Any,
    cache: DSACache,
    tokens: Tensor,
    place: Place,
    sampling: Sampling,
    uniforms: Tensor,
    history: Tensor | None = None,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`verify` and `settle` in one graph.

    Args:
        model: a prepared model with an MTP layer. cache: written behind ``place.valid``; its lengths stay.
        tokens: int64[B, W], the last token and its drafts.
        sampling, uniforms: how tokens are chosen; float32[B, W] of ``[0, 1)``.
        history, seen: int64[B, S], all tokens so far and the drafts, and int64[B], how many precede ``tokens``, for a
            repetition penalty; else None.

    Returns:
        As `settle`, and the states [B, W, hidden] of ``tokens``.
    """
    logits, states = verify(model, cache, tokens, place)
    lengths = None if seen is None else seen[:, None] + torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    target = sampling.target(logits, history, lengths)
    return *settle(model, cache, target, tokens, states, place, uniforms, sampling.greedy), states


def ongoing(
    model: Any,
    cache: DSACache,
    tokens: Tensor,
    place: Place,
    last: Tensor,
    sampling: Sampling,
    uniforms: Tensor,
    turn: Tensor,
    landed: Tensor,
    states: Tensor,
) -> None:
    """`step` in place, so that steps can follow each other without the host.

    Args:
        tokens: as in `step`; then those of the next step.
        place: as in `step`; ``valid`` is then that of the next step.
        last: int64[B]; a sequence with so many tokens in the cache needs no step.
        turn: int64[1], which of two places below this step writes; then the other.
        landed: int64[2, B, 1 + W], gets how many drafts were accepted, and the block.
        states: [2, B, W, hidden], gets those of ``tokens``.
        model, ...: as in `step`, which has no repetition penalty.
    """
    alive = place.alive & (place.valid < last)
    block, accepted, following, found = step(model, cache, tokens, place._replace(alive=alive), sampling, uniforms)
    landed.index_copy_(0, turn, torch.cat([accepted[:, None], block], 1)[None])
    states.index_copy_(0, turn, found[None])
    turn.copy_(1 - turn)
    tokens.copy_(following)
    place.valid.add_(torch.where(alive, accepted + 1, 0))


def verify(model: Any, cache: DSACache, tokens: Tensor, place: Place) -> tuple[Tensor, Tensor]:
    """Logits [B, W, vocab] and states [B, W, hidden] of ``tokens``, which are appended to the cache; see `step`."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    slots = torch.where(place.alive[:, None], place.valid[:, None] + columns, -1)
    cache.lengths.slots = slots
    # past the hook: which rows the MTP layer gets is known once the drafts are judged
    states = model.model.forward(
        input_ids=tokens,
        attention_mask=visible_from(slots),
        position_ids=(slots + place.offset[:, None]).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    cache.lengths.slots = None
    return model.lm_head(states), states


def settle(
    model: Any,
    cache: DSACache,
    target: Tensor,
    tokens: Tensor,
    states: Tensor,
    place: Place,
    uniforms: Tensor,
    greedy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept drafts, choose the token behind them, and draft behind that.

    Args:
        target: [B, W, vocab] as ``dsa::mtp_verify`` takes it, of ``tokens``. states: [B, W, hidden], theirs.
        tokens, place, uniforms: as in `step`. greedy: ``target`` is logits.

    Returns:
        block int64[B, W]: the accepted drafts, then the token behind them, repeated. accepted int64[B], of 0 to M.
        tokens int64[B, W] of the next step.
    """
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    if greedy:
        chosen = likeliest(target)
        accepted = leading(chosen[:, :-1] == tokens[:, 1:])
    else:
        accepted, following = torch.ops.dsa.mtp_verify.default(target, tokens[:, 1:], None, uniforms, False)
        shifted = torch.cat([tokens[:, 1:], following[:, None]], 1)
        chosen = torch.where(columns < accepted[:, None], shifted, following[:, None])
    block = chosen.gather(1, columns.minimum(accepted[:, None]))
    right_aligned = (columns - columns[-1] + accepted[:, None]).clamp(min=0)
    drafts = draft(
        model,
        cache,
        chosen.gather(1, right_aligned),
        rows_at(states, right_aligned),
        accepted + 1,
        place._replace(valid=place.valid + accepted + 1),
    )
    return block, accepted, drafts


def draft(model: Any, cache: DSACache, fresh: Tensor, states: Tensor, count: Tensor, place: Place) -> Tensor:
    """Append what became certain to the MTP layer's cache, and draft M tokens (which may be none).

    Args:
        fresh: int64[B, W]; the last ``count`` columns hold the tokens that the layer has no rows of, the very last one
            a token that the model has not seen either.
        states: [B, W, hidden], the state of the token before each.
        count: int64[B], from 1 to W.

    Returns:
        int64[B, W]: the last fresh token, then the drafts.
    """
    backbone, width = model.model, fresh.shape[1]
    columns = torch.arange(width, device=fresh.device)
    real = place.alive[:, None] & (columns >= width - count[:, None])
    slots = torch.where(real, place.valid[:, None] - width + columns, -1)
    tokens = [fresh[:, -1:]]
    for drafted in range(max(width - 1, 1)):
        states = run_mtp(
            backbone,
            cache,
            states,
            backbone.embed_tokens(tokens[-1] if drafted else fresh),
            slots,
            slots + place.offset[:, None],
            shares_selection=model.dsa.share_drafts and drafted > 0,
        )[:, -1:]
        tokens.append(likeliest(model.lm_head(states)))
        slots = torch.where(place.alive, place.valid + drafted, -1)[:, None]
    return torch.cat(tokens, 1)[:, :width]


class Graphs(NamedTuple):
    """The functions that generation runs, each one graph where they are compiled."""

    draft: Callable[..., Any]
    step: Callable[..., Any]
    ongoing: Callable[..., Any]
    verify: Callable[..., Any]
    settle: Callable[..., Any]


UNCOMPILED = Graphs(draft, step, ongoing, verify, settle)
