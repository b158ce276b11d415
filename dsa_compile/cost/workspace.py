"""What a prompt takes beside weights and cache while a layer works on it."""

from itertools import pairwise

from dsa_compile.dims import LayerDims

STATES = 6
"""Hidden states of a token that are held at once: the residual, what is normed, and what goes in and out of a block."""


def token_bytes(
    dims: LayerDims,
    *,
    hidden: int,
    intermediate: int,
    expert_intermediate: int,
    routed_experts: int,
    itemsize: int,
) -> int:
    """Bytes that the layer with the larger need holds of one token.

    Attention holds queries, expanded and absorbed, and its output, latent and expanded; an MLP its two halves and their
    product; experts the same of each copy of a token that is routed to one, and the copy as it comes and goes.
    """
    queries = dims.n_heads * (dims.qk_nope_head_dim + dims.qk_rope_head_dim + dims.latent_width)
    outputs = dims.n_heads * (dims.kv_lora_rank + dims.v_head_dim)
    experts = routed_experts * (3 * expert_intermediate + 2 * hidden)
    return itemsize * (STATES * hidden + max(queries + outputs, 3 * intermediate, experts))


def pieces(tokens: int, most: int) -> list[slice]:
    """As few runs of columns as hold at most ``most`` each, of nearly one length, so that they share a graph."""
    count = max(1, -(-tokens // max(1, most)))
    bounds = [tokens * i // count for i in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]
