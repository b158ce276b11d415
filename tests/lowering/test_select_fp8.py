"""The choice among index keys in fp8."""

import math

import naive
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import causal, lengths, seeds
from torch import Tensor

from dsa_compile.lowering.fp8_keys import decode, quantise
from dsa_compile.lowering.select import index_scores
from dsa_compile.lowering.select.projections import hadamard

BUDGET = 1 << 28
DI = 16
SCALE = DI**-0.5


def rows(batch, queries, slots, device, *, dtype=torch.float64, seed=0, n_heads=3):
    """Index queries, head weights of few bits, so that float64 adds them exactly, and index keys, of many scales."""
    generator = torch.Generator().manual_seed(seed)

    def vectors(*shape):
        sizes = 2.0 ** torch.randint(-9, 1, (*shape, 1), generator=generator)
        return (torch.randn(*shape, DI, generator=generator) * sizes).to(device, dtype)

    weights = torch.randint(-32, 33, (batch, queries, n_heads), generator=generator) / 16
    return vectors(batch, queries, n_heads), weights.to(device, dtype), vectors(batch, slots)


def select(q: Tensor, weights: Tensor, pools, visible=None, mask=None, topk=4) -> Tensor:
    codes, scales = pools
    return torch.ops.dsa.select(q, weights, codes, visible, mask, topk, SCALE, BUDGET, None, scales)


@given(data=st.data(), slots=lengths(4), seed=seeds)
def test_equals_the_definition(device, data, slots, seed):
    batch, queries = data.draw(st.integers(1, 3), label="B"), data.draw(st.integers(1, 3), label="T")
    q, weights, keys = rows(batch, queries, slots, device, seed=seed)
    if data.draw(st.booleans(), label="few values, so many ties"):
        q, keys = (2 * q).round() / 2, keys.round()
    end = torch.randint(0, slots + 1, (batch, 1, queries, 1), dtype=torch.int32)
    visible = torch.cat([end % 3, end], -1).to(device)
    mask = torch.rand(1, 1, queries, slots, device=device) < 0.7 if data.draw(st.booleans(), label="mask") else None
    codes, scales = quantise(keys)
    ours, found = select(q, weights, (codes, scales), visible, mask), index_scores(q, weights, codes, SCALE, scales)
    for b in range(batch):
        stored = [naive.fp8(key) for key in keys[b]]
        for t in range(queries):
            scores = [naive.index_score_fp8(q[b, t], weights[b, t], *key, SCALE) for key in stored]
            assert found[b, t].tolist() == pytest.approx(scores, rel=1e-12, abs=1e-14)
            seen = naive.seen_slots(slots, (b, t), visible, mask, None)
            assert ours[b, t].tolist() == naive.best(scores, seen, 4)


@pytest.mark.parametrize("topk", [1, 96])
def test_rows_that_see_around_k_slots(device, topk):
    q, weights, keys = rows(1, 5, 230, device)
    end = torch.tensor([0, topk - 1, topk, topk + 1, 230])
    visible = torch.stack([torch.zeros(5), end], -1).int()[None, None].to(device)
    picks = select(q, weights, quantise(keys), visible, topk=topk)
    assert (picks >= 0).sum(-1)[0].tolist() == end.clamp(max=topk).tolist()
    scores = index_scores(q, weights, quantise(keys)[0], SCALE, quantise(keys)[1])
    for t in range(5):
        assert picks[0, t].tolist() == naive.best(scores[0, t].tolist(), list(range(end[t])), topk)


def test_it_is_the_choice_among_the_values_that_codes_and_scales_stand_for(device):
    q, weights, keys = rows(2, 6, 300, device)
    pools, (q_codes, q_scales) = quantise(keys), quantise(q)
    values = decode(pools[0], torch.float64) * pools[1].unsqueeze(-1)
    rounded = decode(q_codes, torch.float64) * q_scales.unsqueeze(-1)
    visible = causal(2, 6, 300).to(device)
    want = torch.ops.dsa.select(rounded, weights, values, visible, None, 32, SCALE, BUDGET)
    assert torch.equal(select(q, weights, pools, visible, topk=32), want)
    unquantised = torch.ops.dsa.select(q, weights, keys, visible, None, 32, SCALE, BUDGET)
    assert not torch.equal(unquantised, want)


def test_any_scale_is_read(device):
    q, weights, keys = rows(1, 4, 60, device)
    codes, scales = quantise(keys)
    plain = index_scores(q, weights, codes, SCALE, scales)
    factors = torch.rand(1, 60, device=device) * 3 - 1
    other = index_scores(q, weights, codes, SCALE, scales * factors)
    torch.testing.assert_close(other, plain * (scales * factors / scales).unsqueeze(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrower_inputs_have_the_scores_of_float64(device, dtype):
    q, weights, keys = rows(2, 4, 300, device, dtype=dtype)
    codes, scales = quantise(keys)
    exact = index_scores(q.double(), weights.double(), codes, SCALE, scales)
    ours = index_scores(q, weights, codes, SCALE, scales)
    assert (ours.dtype, exact.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_keys_are_chosen_last_and_bad_queries_choose_the_first(device, bad):
    q, weights, keys = rows(1, 1, 10, device)
    keys[0, [1, 4], 3] = bad
    assert select(q, weights, quantise(keys), topk=8).tolist() == [[[0, 2, 3, 5, 6, 7, 8, 9]]]
    assert select(q, weights, quantise(keys), topk=9).tolist() == [[[0, 1, 2, 3, 5, 6, 7, 8, 9]]]
    q[0, 0, 0, 0] = bad
    assert select(q, weights, quantise(keys), topk=8).tolist() == [[list(range(8))]]


def test_what_a_row_does_not_see_changes_nothing(device):
    q, weights, keys = rows(2, 6, 40, device)
    visible = causal(2, 6, 40).to(device)
    codes, scales = quantise(keys)
    want = select(q, weights, (codes, scales), visible)
    codes, scales = codes.clone(), scales.clone()
    codes[:, 37:], scales[:, 38:] = 0xFF, math.nan
    seen = visible[0, 0, :, 1] <= 37
    assert 0 < seen.sum() < 6
    assert torch.equal(select(q, weights, (codes, scales), visible)[:, seen], want[:, seen])


@pytest.mark.parametrize(
    ("in_queries", "in_keys", "gain"),
    [(16, 16, 5), (64, 64, 8), (4, 64, 2.5), (1, 16, 0.8)],
    ids=["shared", "large", "mostly in keys", "in keys alone: none"],
)
def test_the_rotation_averages_the_errors_of_an_outlier_that_queries_and_keys_share(device, in_queries, in_keys, gain):
    shapes = (1, 8, 64, 128), (1, 8, 64), (1, 500, 128)
    q, weights, keys = (torch.randn(s, dtype=torch.float64).to(device) for s in shapes)
    q[..., 5] *= in_queries
    keys[..., 5] *= in_keys
    exact, rotation = index_scores(q, weights, keys, SCALE), hadamard(128, torch.float64, device)

    def error(q, keys):
        codes, scales = quantise(keys)
        return (index_scores(q, weights, codes, SCALE, scales) - exact).std() / exact.std()

    assert 0.03 < error(q, keys) < 0.06
    assert error(q @ rotation, keys @ rotation) < error(q, keys) / gain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(device, dtype):
    q, weights, keys = rows(2, 3, 20, device, dtype=dtype)
    codes, scales = quantise(keys)
    args = q, weights, codes, causal(2, 3, 20).to(device), None, 4, SCALE, BUDGET, None, scales
    torch.library.opcheck(torch.ops.dsa.select.default, args)
