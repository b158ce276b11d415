"""What a layer's attention costs: FLOPs and bytes, as pure functions of its sizes.

A multiplication and an addition count as two FLOPs. Projections are left out: they cost the same dense and sparse.
"""

from dataclasses import dataclass

from dsa_compile.dims import LayerDims


@dataclass(frozen=True)
class Cost:
    """``flops`` of the arithmetic and ``bytes`` read from the cache."""

    flops: int
    bytes: int


def absorbed_pair_flops(dims: LayerDims) -> int:
    """FLOPs of one query and one key in latent space, all heads: 2 (R + P) for the score, 2 R for the output."""
    return dims.n_heads * 2 * (2 * dims.kv_lora_rank + dims.qk_rope_head_dim)


def expanded_pair_flops(dims: LayerDims) -> int:
    """FLOPs of one query and one key with expanded keys and values, all heads."""
    return dims.n_heads * 2 * (dims.qk_nope_head_dim + dims.qk_rope_head_dim + dims.v_head_dim)


def index_pair_flops(dims: LayerDims) -> int:
    """FLOPs of one index score; 0 without an indexer."""
    return 2 * dims.indexer.n_heads * dims.indexer.head_dim if dims.indexer else 0


def exact_selection_flops(dims: LayerDims, context: int) -> int:
    """FLOPs of the exact selection for one query: every key is expanded from its latent, then scored, all heads."""
    nope, rope = dims.qk_nope_head_dim, dims.qk_rope_head_dim
    return dims.n_heads * 2 * (dims.kv_lora_rank * nope + nope + rope) * context


def decode_cost(
    dims: LayerDims,
    context: int,
    index_topk: int | None = None,
    *,
    exact: bool = False,
    itemsize: int = 2,
    row_bytes: int | None = None,
    index_key_bytes: int | None = None,
) -> Cost:
    """One new token behind ``context`` cached ones (itself included).

    Args:
        index_topk: K; None: dense attention, no selection.
        exact: the layer selects by its own attention (``selector="attention"``) instead of by index keys.
        itemsize: bytes of a cached value. row_bytes: of a cached latent row; None: ``(R + P) * itemsize``.
        index_key_bytes: of a cached index key; None: ``DI * itemsize``.
    """
    row = row_bytes if row_bytes is not None else dims.latent_width * itemsize
    if index_topk is None:
        return Cost(absorbed_pair_flops(dims) * context, row * context)
    attended = min(context, index_topk)
    if exact:
        flops = exact_selection_flops(dims, context) + absorbed_pair_flops(dims) * attended
        return Cost(flops, row * (context + attended))
    key = dims.indexer.head_dim * itemsize if dims.indexer else 0
    key = index_key_bytes if index_key_bytes is not None else key
    return Cost(index_pair_flops(dims) * context + absorbed_pair_flops(dims) * attended, key * context + row * attended)


def prefill_flops(dims: LayerDims, tokens: int, index_topk: int | None = None) -> int:
    """FLOPs of a causal prompt of ``tokens``: expanded and dense, or absorbed over at most K keys a row."""
    pairs = causal_pairs(tokens)
    if index_topk is None:
        return expanded_pair_flops(dims) * pairs
    return index_pair_flops(dims) * pairs + absorbed_pair_flops(dims) * causal_pairs(tokens, index_topk)


def causal_pairs(tokens: int, most: int | None = None) -> int:
    """Pairs of a query and a key at or before it, at most ``most`` keys a query."""
    full = tokens if most is None else min(tokens, most)
    return full * (full + 1) // 2 + (tokens - full) * full
