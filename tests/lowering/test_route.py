"""Experts of a token: those that a plain statement of the rule picks, whatever ties or is no number."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds

from dsa_compile import lowering  # noqa: F401 (registers the ops)
from dsa_compile.errors import InputError

route = torch.ops.dsa.route
SHAPES = [(8, 2, 1, 4), (8, 4, 2, 3), (12, 3, 3, 12), (64, 1, 1, 6), (256, 8, 4, 8), (384, 1, 1, 8)]
"""Experts, groups, groups to choose from, experts a token; among them those of DeepSeek-V3 and Kimi-K2."""


def plainly(scores, biased, groups, topk_groups, topk):
    """Experts and weights of one token, lists of numbers in and out."""
    each = len(scores) // groups

    def rank(values, i):
        return (0 if math.isnan(values[i]) else 1, -values[i] if values[i] == values[i] else 0, i)

    worth = []
    for group in range(groups):
        members = [biased[i] for i in range(group * each, (group + 1) * each)]
        best = sorted(range(each), key=lambda i: rank(members, i))[:2]
        worth.append(members[best[0]] + members[best[1]])
    chosen = sorted(range(groups), key=lambda g: rank(worth, g))[:topk_groups]
    open_ = [i for i in range(len(scores)) if i // each in chosen]
    experts = sorted(open_, key=lambda i: rank(biased, i))[:topk]
    return experts, [scores[i] for i in experts]


def check(logits, bias, groups, topk_groups, topk, normalise=True, scale=2.5):
    weights, experts = route(logits, bias, groups, topk_groups, topk, normalise, scale)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
    assert weights.shape == experts.shape == (logits.shape[0], topk)
    scores = logits.sigmoid()
    biased = scores + bias.float()
    for token in range(logits.shape[0]):
        picks, want = plainly(scores[token].tolist(), biased[token].tolist(), groups, topk_groups, topk)
        assert experts[token].tolist() == picks
        total = sum(want) + 1e-20 if normalise else 1
        torch.testing.assert_close(weights[token].cpu(), torch.tensor(want) / total * scale, equal_nan=True)


@given(
    shape=st.sampled_from(SHAPES),
    tokens=st.integers(0, 5),
    normalise=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=seeds,
)
def test_experts_are_those_of_the_rule(device, shape, tokens, normalise, dtype, seed):
    torch.manual_seed(seed)
    experts, groups, topk_groups, topk = shape
    # scores that lie apart: a device's sigmoid may round another way
    logits = torch.rand(tokens, experts).argsort(-1).float()
    logits = (logits / experts - 0.5).to(device) * 4
    bias = (torch.randint(-3, 4, (experts,), device=device) / 8).to(dtype)
    check(logits, bias, groups, topk_groups, topk, normalise)


@given(shape=st.sampled_from(SHAPES), seed=seeds)
def test_ties_go_to_the_lower_group_and_expert(device, shape, seed):
    torch.manual_seed(seed)
    experts, groups, topk_groups, topk = shape
    logits = torch.where(torch.rand(4, experts) < 0.5, 0.0, float("inf")).to(device)  # scores of 1/2 and 1
    check(logits, torch.zeros(experts, device=device), groups, topk_groups, topk)


def test_nan_comes_first_and_shows_and_a_closed_expert_comes_last(device):
    logits, bias = torch.zeros(2, 8, device=device), torch.zeros(8, device=device)
    logits[0, 5] = float("nan")
    bias[:3] = float("-inf")
    weights, experts = route(logits, bias, 2, 2, 6, False, 1.0)
    assert experts.tolist() == [[5, 3, 4, 6, 7, 0], [3, 4, 5, 6, 7, 0]]
    assert weights[0].isnan().tolist() == [True] + [False] * 5
    everything = torch.full((1, 8), float("nan"), device=device)
    weights, experts = route(everything, bias, 4, 2, 4, True, 1.0)
    assert experts.tolist() == [[0, 1, 2, 3]]
    assert weights.isnan().all()


def test_a_group_that_is_closed_is_behind_one_that_is_open(device):
    """Also where all experts of an open one are shut by their bias."""
    bias = torch.tensor([float("-inf")] * 4 + [0.0] * 4, device=device)
    _, experts = route(torch.zeros(1, 8, device=device), bias, 4, 3, 6, False, 1.0)
    assert experts.tolist() == [[4, 5, 6, 7, 0, 1]]


def test_strided_logits(device):
    wide = torch.randn(3, 40, device=device)
    bias = torch.zeros(8, device=device)
    for logits in (wide[:, 5:13], wide.T[:8].contiguous().T):
        for got, want in zip(route(logits, bias, 2, 1, 2, True, 1.0), route(logits.clone(), bias, 2, 1, 2, True, 1.0)):
            assert torch.equal(got, want)


def test_opcheck(device):
    arguments = torch.randn(3, 8, device=device), torch.randn(8, device=device), 2, 1, 3, True, 2.5
    torch.library.opcheck(route.default, arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits": torch.zeros(2, 8).half()}, r"expected logits float32\[T, E\], came torch.float16\[2, 8\]"),
        ({"logits": torch.zeros(8)}, r"came torch.float32\[8\]"),
        ({"bias": torch.zeros(7)}, r"expected bias \[8\] of floats for 8 experts, came torch.float32\[7\]"),
        ({"bias": torch.zeros(8).long()}, "came torch.int64"),
        ({"bias": torch.zeros(8, device="meta")}, "expected bias on cpu as logits, came meta"),
        ({"groups": 3}, "expected groups of equally many experts, 2 at least, came 3 of 8 experts"),
        ({"groups": 8}, "came 8 of 8 experts"),
        ({"groups": 0}, "came 0 of 8 experts"),
        ({"topk_groups": 3}, "expected topk_groups of 1 to 2, came 3"),
        ({"topk": 5}, "expected topk of 1 to 4, the experts of 1 groups, came 5"),
        ({"topk": 0}, "expected topk of 1 to 4"),
    ],
)
def test_bad_input_is_refused_at_capture(arguments, message):
    given = {"logits": torch.zeros(2, 8), "bias": torch.zeros(8), "groups": 2, "topk_groups": 1, "topk": 2}
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(InputError, match=message):
        route(**given | arguments, normalise=True, scale=1.0)


def test_more_experts_than_a_program_holds_are_refused():
    with pytest.raises(InputError, match="expected at most 1024 experts in 1 padded groups, came 1026"):
        route(torch.zeros(1, 1026), torch.zeros(1026), 1, 1, 2, True, 1.0)
