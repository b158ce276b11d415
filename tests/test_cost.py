"""FLOPs and bytes agree with hand counts of DeepSeek-V3.2 (K = 2048, bf16 latents, fp8 index keys)."""

import dataclasses
import math

import pytest
from cases import V32

from dsa_compile import cost
from dsa_compile.dims import IndexerDims, LayerDims

FP8_KEY = 128 + 4


def test_flops_of_a_pair():
    assert cost.absorbed_pair_flops(V32) == 278_528
    assert cost.expanded_pair_flops(V32) == 81_920
    assert cost.index_pair_flops(V32) == 16_384


@pytest.mark.parametrize(
    ("context", "dense", "sparse", "dense_mib", "sparse_mib"),
    [(4096, 1.14, 0.64, 4.50, 2.77), (32768, 9.13, 1.11, 36.00, 6.38), (131072, 36.51, 2.72, 144.00, 18.75)],
)
def test_decode(context, dense, sparse, dense_mib, sparse_mib):
    full = cost.decode_cost(V32, context)
    picked = cost.decode_cost(V32, context, 2048, index_key_bytes=FP8_KEY)
    assert full.flops / 1e9 == pytest.approx(dense, abs=0.005)
    assert picked.flops / 1e9 == pytest.approx(sparse, abs=0.005)
    assert full.bytes / 2**20 == pytest.approx(dense_mib, abs=0.005)
    assert picked.bytes / 2**20 == pytest.approx(sparse_mib, abs=0.005)


@pytest.mark.parametrize(
    ("tokens", "ratio"), [(4096, 0.36), (8192, 0.59), (16384, 1.00), (32768, 1.63), (131072, 3.27)]
)
def test_prefill_gains_from_where_rows_are_long(tokens, ratio):
    assert cost.prefill_flops(V32, tokens) / cost.prefill_flops(V32, tokens, 2048) == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize(
    ("context", "flops", "read", "prefill"),
    [(4096, 1.79, 1.63, 0.28), (32768, 8.24, 5.65, 1.60), (131072, 13.43, 7.68, 3.27)],
)
def test_gain_over_dense_attention_by_the_rule_of_thumb(context, flops, read, prefill):
    full, picked = cost.decode_cost(V32, context), cost.decode_cost(V32, context, 2048, index_key_bytes=FP8_KEY)
    assert round(full.flops / picked.flops, 2) == flops
    assert round(full.bytes / picked.bytes, 2) == read
    dense, sparse = (cost.uniform_prefill_flops(V32, context, k) for k in (None, 2048))
    assert round(dense / sparse, 2) == prefill


@pytest.mark.parametrize("most", [1, 3, 7, 8, 9, None])
def test_causal_pairs_are_a_sum_over_rows(most):
    assert cost.causal_pairs(8, most) == sum(min(t + 1, most or 8) for t in range(8))


def test_where_sparse_breaks_even():
    found = cost.break_even(V32, 2048, index_key_bytes=FP8_KEY)
    assert found.flops == 2176
    assert cost.decode_cost(V32, 2176).flops == cost.decode_cost(V32, 2176, 2048).flops
    assert found.bytes == pytest.approx(2313.04, abs=0.005)
    dearer = [
        cost.prefill_flops(V32, n, 2048) > cost.prefill_flops(V32, n)
        for n in (math.floor(found.prefill), math.ceil(found.prefill))
    ]
    assert (round(found.prefill), dearer) == (16_315, [True, False])
    assert cost.uniform_prefill_flops(V32, 17_408) == cost.uniform_prefill_flops(V32, 17_408, 2048)


def test_a_dear_indexer_never_breaks_even_and_a_cheap_attention_always():
    small = {"n_heads": 2, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 32}
    dear = LayerDims(**small, kv_lora_rank=16, indexer=IndexerDims(n_heads=64, head_dim=128))
    assert cost.break_even(dear, 8) == cost.BreakEven(math.inf, math.inf, math.inf)
    cheap = LayerDims(**small, kv_lora_rank=8, indexer=IndexerDims(n_heads=1, head_dim=8))
    assert cost.break_even(cheap, 8).prefill == 0
    assert all(cost.prefill_flops(cheap, n, 8) <= cost.prefill_flops(cheap, n) for n in range(40))


def test_an_index_key_makes_the_cache_larger():
    bare = dataclasses.replace(V32, indexer=None)
    assert cost.cached_bytes(V32, index_key_bytes=FP8_KEY) / cost.cached_bytes(bare) - 1 == pytest.approx(
        0.1146, abs=5e-5
    )
    assert (cost.cached_bytes(V32), cost.cached_bytes(V32, row_bytes=656, index_key_bytes=FP8_KEY)) == (1408, 788)


def test_the_exact_selection_expands_and_scores_every_key():
    small = LayerDims(n_heads=3, kv_lora_rank=5, qk_nope_head_dim=7, qk_rope_head_dim=2, v_head_dim=4)
    found = cost.decode_cost(small, 11, 4, exact=True, itemsize=1)
    assert found.flops == 3 * 2 * 11 * (5 * 7 + 7 + 2) + 3 * 2 * 4 * (2 * 5 + 2)
    assert found.bytes == 7 * (11 + 4)


def test_sparse_is_never_dearer_than_dense_far_beyond_k():
    for context in (8192, 65536):
        assert cost.decode_cost(V32, context, 2048).flops < cost.decode_cost(V32, context).flops
        assert cost.decode_cost(V32, 2 * context, 2048).flops > cost.decode_cost(V32, context, 2048).flops


def test_values_of_a_cached_token():
    assert V32.latent_width == 576
    assert 2 * V32.expanded_values_per_token() == 81_920
