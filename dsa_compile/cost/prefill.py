"""In which form a prompt attends to its selection: absorbed over K latents a row, or expanded over all under a mask."""

from bisect import bisect_right

from dsa_compile.cost.attention import absorbed_pair_flops, expanded_pair_flops
from dsa_compile.dims import LayerDims

SPARSE_RATES = {0: 525e12, 128 << 10: 488e12}
MASKED_RATES = {0: 507e12, 8 << 10: 556e12, 16 << 10: 539e12}
PRODUCT_RATE = 700e12
"""FLOPs a second of both forms from so many tokens of context on, and of the products that expand or absorb.

Of 4096 rows on an H200 at DeepSeek-V3.2's sizes, over random selections; of other devices and sizes their ratio is
taken to be the same.
"""


def sparse_seconds(dims: LayerDims, rows: int, context: int, index_topk: int) -> float:
    """Of ``rows`` queries with K latents each, their queries and outputs absorbed; empty places are computed too."""
    attended = rows * index_topk * absorbed_pair_flops(dims) / _rate(SPARSE_RATES, context)
    return attended + rows * _projection_flops(dims) / PRODUCT_RATE


def masked_seconds(dims: LayerDims, rows: int, context: int) -> float:
    """Of the last ``rows`` queries of a context whose keys and values are all expanded, as if none were skipped."""
    pairs = rows * (2 * context - rows + 1) / 2
    return pairs * expanded_pair_flops(dims) / _rate(MASKED_RATES, context) + (
        context * _projection_flops(dims) / PRODUCT_RATE
    )


def masked_pays(dims: LayerDims, rows: int, context: int, index_topk: int) -> bool:
    """Whether the masked form is the faster one for the last ``rows`` queries of ``context`` tokens."""
    return masked_seconds(dims, rows, context) <= sparse_seconds(dims, rows, context, index_topk)


def _projection_flops(dims: LayerDims) -> int:
    """FLOPs of one token through both halves of kv_b_proj."""
    return 2 * dims.n_heads * dims.kv_lora_rank * (dims.qk_nope_head_dim + dims.v_head_dim)


def _rate(rates: dict[int, float], context: int) -> float:
    starts = sorted(rates)
    return rates[starts[bisect_right(starts, context) - 1]]
