"""Exact top-k: the same slots as a stable sort, whatever the scores are."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive import best

from dsa_compile.lowering.rows import topk_slots

INF, NAN = math.inf, math.nan


def picks(scores, index_topk, keep=None):
    """Of one row of scores."""
    keep = torch.ones_like(scores, dtype=torch.bool) if keep is None else keep
    chosen = topk_slots(scores[None, None], keep[None, None], index_topk)
    assert chosen.dtype == torch.int32
    return chosen[0, 0].tolist()


values = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, INF, -INF, NAN, -3.4028235e38])


@given(
    row=st.lists(st.tuples(values, st.booleans()), min_size=1, max_size=24),
    index_topk=st.integers(1, 30),
)
def test_equals_a_stable_sort(device, row, index_topk):
    scores, keep = ([pair[i] for pair in row] for i in (0, 1))
    allowed = [s for s, kept in enumerate(keep) if kept]
    chosen = picks(torch.tensor(scores, device=device), index_topk, torch.tensor(keep, device=device))
    assert chosen == best(scores, allowed, index_topk)


@pytest.mark.parametrize("index_topk", [1, 96, 100, 200, 2048])
def test_ties_go_to_the_lower_slot(device, index_topk):
    assert picks(torch.full((4096,), 0.25, device=device), index_topk) == list(range(index_topk))


def test_winners_over_a_row_of_zeros_then_the_first_zeros(device):
    scores = torch.zeros(16384, device=device)
    winners = torch.arange(100, device=device) * 163 + 7
    scores[winners] = torch.rand(100, device=device) + 0.5
    chosen = picks(scores, 128)
    assert set(winners.tolist()) < set(chosen)
    others = [s for s in range(200) if s not in set(winners.tolist())]
    assert sorted(set(chosen) - set(winners.tolist())) == others[:28]


def test_scores_that_differ_in_low_mantissa_bits(device):
    order = torch.randperm(16384, device=device)
    scores = (order.int() + torch.tensor(1.0).view(torch.int32).item()).view(torch.float32)
    assert len(scores.unique()) == 16384
    assert picks(scores, 2048) == sorted(order.argsort(descending=True)[:2048].tolist())


def test_nan_loses_to_every_number_and_minus_infinity_is_not_chosen(device):
    scores = torch.tensor([NAN, -INF, NAN, -3.0, NAN, -INF, 5.0], device=device)
    assert picks(scores, 3) == [0, 3, 6]
    assert picks(scores, 6) == [0, 2, 3, 4, 6, -1]
    assert picks(scores, 7) == [0, 1, 2, 3, 4, 5, 6]
    assert picks(torch.full((9,), NAN, device=device), 3) == [0, 1, 2]


@pytest.mark.parametrize("kept", [0, 7, 8, 9])
def test_rows_that_see_around_k_slots(device, kept):
    scores = torch.arange(40.0, device=device)
    keep = torch.arange(40, device=device) % 4 == 1
    keep &= keep.cumsum(0) <= kept
    chosen = picks(scores, 8, keep)
    assert chosen == best(scores.tolist(), keep.nonzero().flatten().tolist(), 8)
    assert sum(s >= 0 for s in chosen) == min(kept, 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_same_bits_on_twenty_runs(device, dtype):
    scores = torch.randint(0, 50, (3, 7, 1000), device=device).to(dtype)
    keep = torch.rand(3, 7, 1000, device=device) < 0.8
    first = topk_slots(scores, keep, 96)
    assert all(torch.equal(first, topk_slots(scores, keep, 96)) for _ in range(20))
