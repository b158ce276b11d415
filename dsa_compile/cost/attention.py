"""What a layer's attention costs: FLOPs and bytes, as pure functions of its sizes.

A multiplication and an addition count as two FLOPs. Projections are left out: they cost the same dense and sparse.
"""

import math
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
    row, key = _cached_bytes(dims, itemsize, row_bytes, index_key_bytes)
    if index_topk is None:
        return Cost(absorbed_pair_flops(dims) * context, row * context)
    attended = min(context, index_topk)
    if exact:
        flops = exact_selection_flops(dims, context) + absorbed_pair_flops(dims) * attended
        return Cost(flops, row * (context + attended))
    return Cost(index_pair_flops(dims) * context + absorbed_pair_flops(dims) * attended, key * context + row * attended)


def prefill_flops(dims: LayerDims, tokens: int, index_topk: int | None = None) -> int:
    """FLOPs of a causal prompt of ``tokens``: expanded and dense, or absorbed over at most K keys a row."""
    pairs = causal_pairs(tokens)
    if index_topk is None:
        return expanded_pair_flops(dims) * pairs
    return index_pair_flops(dims) * pairs + absorbed_pair_flops(dims) * causal_pairs(tokens, index_topk)


def uniform_prefill_flops(dims: LayerDims, tokens: int, index_topk: int | None = None) -> int:
    """`prefill_flops` as a rule of thumb has it: half a square of pairs, and K keys for every row, also for early ones.

    It makes short sparse prompts dearer than they are.
    """
    half = tokens * tokens // 2
    if index_topk is None:
        return expanded_pair_flops(dims) * half
    return index_pair_flops(dims) * half + absorbed_pair_flops(dims) * tokens * min(tokens, index_topk)


def causal_pairs(tokens: int, most: int | None = None) -> int:
    """Pairs of a query and a key at or before it, at most ``most`` keys a query."""
    full = tokens if most is None else min(tokens, most)
    return full * (full + 1) // 2 + (tokens - full) * full


@dataclass(frozen=True)
class BreakEven:
    """Tokens from which a selection costs no more than dense attention; inf: it always costs more.

    ``flops`` and ``bytes`` are of a decode step behind so many tokens, ``prefill`` are FLOPs of a prompt of so many.
    """

    flops: float
    bytes: float
    prefill: float


def break_even(
    dims: LayerDims,
    index_topk: int,
    *,
    itemsize: int = 2,
    row_bytes: int | None = None,
    index_key_bytes: int | None = None,
) -> BreakEven:
    """Where `decode_cost` and `prefill_flops` of a selection meet those of dense attention. Arguments as there."""
    row, key = _cached_bytes(dims, itemsize, row_bytes, index_key_bytes)
    absorbed, score = absorbed_pair_flops(dims), index_pair_flops(dims)
    return BreakEven(
        flops=_crossing(index_topk, absorbed, absorbed - score),
        bytes=_crossing(index_topk, row, row - key),
        prefill=_causal_crossing(index_topk, absorbed, expanded_pair_flops(dims) - score),
    )


def _crossing(index_topk: int, attended: int, saved: int) -> float:
    """Where K tokens at ``attended`` cost what is ``saved`` on every token."""
    return index_topk * attended / saved if saved > 0 else math.inf


def _causal_crossing(index_topk: int, attended: int, saved: int) -> float:
    """The same over the rows of a prompt: the greater n with saved n (n + 1) / 2 = attended (K n - K (K - 1) / 2)."""
    if saved <= 0:
        return math.inf
    if attended <= saved:
        return 0.0
    slope = 2 * index_topk * attended / saved
    return (slope - 1 + math.sqrt((slope - 1) ** 2 - 2 * slope * (index_topk - 1))) / 2


def cached_bytes(
    dims: LayerDims, *, itemsize: int = 2, row_bytes: int | None = None, index_key_bytes: int | None = None
) -> int:
    """Bytes that a token takes in a layer's cache: its latent row and, with an indexer, its index key.

    Arguments as for `decode_cost`. A selection reads less of a cache; it does not make it smaller.
    """
    return sum(_cached_bytes(dims, itemsize, row_bytes, index_key_bytes))


def _cached_bytes(
    dims: LayerDims, itemsize: int, row_bytes: int | None, index_key_bytes: int | None
) -> tuple[int, int]:
    """Of a latent row and of an index key."""
    key = dims.indexer.head_dim * itemsize if dims.indexer else 0
    return (
        dims.latent_width * itemsize if row_bytes is None else row_bytes,
        key if index_key_bytes is None else index_key_bytes,
    )
