"""The cost model: pure functions of sizes, one file for each question. What they cost is counted, not measured."""

from dsa_compile.cost.attention import (
    BreakEven,
    Cost,
    absorbed_pair_flops,
    break_even,
    cached_bytes,
    causal_pairs,
    decode_cost,
    exact_selection_flops,
    expanded_pair_flops,
    index_pair_flops,
    prefill_flops,
    uniform_prefill_flops,
)

__all__ = [
    "BreakEven",
    "Cost",
    "absorbed_pair_flops",
    "break_even",
    "cached_bytes",
    "causal_pairs",
    "decode_cost",
    "exact_selection_flops",
    "expanded_pair_flops",
    "index_pair_flops",
    "prefill_flops",
    "uniform_prefill_flops",
]
