"""Drafts pay where reading binds, and cost where each token does: DeepSeek-V3 on an H800, in round numbers."""

import dataclasses
import math

import pytest

from dsa_compile.cost import decode_cost
from dsa_compile.cost.capacity import USABLE, Capacity
from dsa_compile.cost.devices import DEVICES, device_named
from dsa_compile.cost.sharing import hiding_ceiling, overlap_ceiling, sharing_speedup
from dsa_compile.cost.speculation import (
    ACCEPTANCE,
    DEEPSEEK_V32,
    break_even_acceptance,
    expected_tokens,
    step_seconds,
    tokens_per_second,
)
from dsa_compile.errors import ConfigError

H800 = DEVICES["h800"]
ROUNDED = dataclasses.replace(DEEPSEEK_V32, attention_weights=187e6, expert_weights=44e6)


def gains(model, context, batch, **options):
    base, *with_drafts = (
        tokens_per_second(model, H800, batch, context, ACCEPTANCE[:drafts], **options) for drafts in range(4)
    )
    return base, [rate / base for rate in with_drafts]


@pytest.mark.parametrize(
    ("context", "batch", "base", "ratios", "needed"),
    [
        (4096, 16, 2227.36, (1.82, 1.72, 1.50), 0.0164),
        (4096, 64, 4715.53, (0.92, 0.82, 0.72), 1.0164),
        (16384, 16, 1414.98, (1.80, 1.73, 1.56), 0.0255),
        (16384, 64, 2301.80, (1.30, 1.16, 1.01), 0.4245),
    ],
)
def test_gain_of_drafts_without_the_head(context, batch, base, ratios, needed):
    found, gained = gains(ROUNDED, context, batch, head=False)
    assert found == pytest.approx(base, abs=0.005)
    assert [round(x, 2) for x in gained] == [*ratios]
    assert break_even_acceptance(ROUNDED, H800, batch, context, head=False) == pytest.approx(needed, abs=5e-5)
    _, exact = gains(DEEPSEEK_V32, context, batch, head=False)
    assert [round(x, 2) for x in exact] == [*ratios]


def test_a_step_is_its_layers_and_a_layer_for_each_draft():
    steps = [step_seconds(ROUNDED, H800, 16, 4096, drafts, head=False) * 1e3 for drafts in range(4)]
    assert steps == pytest.approx([7.1834, 7.3011, 10.4147, 13.9255], abs=5e-5)


def test_the_head_is_read_for_the_verified_tokens_and_for_every_draft():
    read = 2 * 129_280 * 7168 / 3.35e12
    for drafts in range(3):
        bare, whole = (step_seconds(DEEPSEEK_V32, H800, 8, 4096, drafts, head=head) for head in (False, True))
        assert whole - bare == pytest.approx((drafts + 1) * read)
    assert gains(DEEPSEEK_V32, 4096, 16)[1] < gains(DEEPSEEK_V32, 4096, 16, head=False)[1]


def test_expected_tokens_chain_the_acceptance_rates():
    assert [expected_tokens(ACCEPTANCE[:m]) for m in range(4)] == pytest.approx([1, 1.85, 2.4875, 2.901875])


def test_a_selection_shortens_long_steps_and_leaves_short_ones():
    for context, faster in ((2048, False), (131_072, True)):
        dense, sparse = (step_seconds(DEEPSEEK_V32, H800, 16, context, 1, index_topk=k) for k in (None, 2048))
        assert (sparse < dense) is faster
        assert faster or sparse == dense


def test_a_sparse_step_reads_keys_once_a_request_and_a_selection_for_each_token():
    model, context = dataclasses.replace(DEEPSEEK_V32, layers=1), 30_000
    layers = ((2, 4), (2, 2))  # requests and tokens of the layer that verifies and of the one that drafts
    reads = dataclasses.replace(H800, bf16_flops=math.inf, fp8_flops=math.inf, network=math.inf)
    read = sum(187_105_280 + 3 * 44_040_192 + b * context * 132 + t * 2048 * 1152 for b, t in layers)
    assert step_seconds(model, reads, 2, context, 1, index_topk=2048, head=False) == pytest.approx(read / 3.35e12)
    works = dataclasses.replace(H800, bandwidth=math.inf, network=math.inf)
    bf16 = sum(t * 2048 * 278_528 for _, t in layers)
    fp8 = sum(t * (context * 16_384 + 9 * 2 * 44_040_192) for _, t in layers)
    found = step_seconds(model, works, 2, context, 1, index_topk=2048, head=False)
    assert found == pytest.approx(bf16 / 989e12 + fp8 / 1979e12)


def test_what_sharing_and_hiding_indexers_can_gain():
    assert [round(sharing_speedup(0.25, 1 / r), 3) for r in (1, 2, 4, 8, 16, 32)] == [
        *(1.0, 1.143, 1.231),
        *(1.28, 1.306, 1.320),
    ]
    assert hiding_ceiling(0.25) == pytest.approx(4 / 3)
    left = [round(hiding_ceiling(0.25) / sharing_speedup(0.25, 1 / r), 3) for r in (2, 4, 8, 16, 32)]
    assert left == [1.167, 1.083, 1.042, 1.021, 1.010]


@pytest.mark.parametrize(("context", "gain"), [(10_240, 1.57), (32_768, 1.55), (65_536, 1.27), (131_072, 1.14)])
def test_an_indexer_beside_its_attention_alone_gains_less_the_longer_the_context(context, gain):
    attention = decode_cost(DEEPSEEK_V32.attention, 2048).bytes
    indexer = decode_cost(DEEPSEEK_V32.attention, context, 2048, index_key_bytes=132).bytes - attention
    assert round(overlap_ceiling(indexer, attention), 2) == gain


def test_capacity_is_what_the_memory_holds_beside_the_weights():
    capacity = Capacity(memory=1000, weights=100, token=8)
    assert capacity.tokens == (1000 * USABLE - 100) / 8 == 100
    assert capacity.fits(50, 2)
    assert not capacity.fits(51, 2)
    assert (capacity.largest_batch(30), capacity.longest_context(3)) == (3, 33)
    assert Capacity(memory=1000, weights=5000, token=8).tokens == 0


def test_an_unknown_gpu_is_named_with_the_nearest():
    assert device_named("h200").memory == 141e9
    with pytest.raises(ConfigError, match="gpu: unknown name 'h2000'; did you mean 'h200'"):
        device_named("h2000")
