"""The scores, mask and top-k of a stock indexer are one selection."""

import pytest
import torch
from graphs import BUDGET, DIMS, NOPE, SCALE, selected, unrelated
from harness import PassHarness, capture
from strategies import mask_of, mla_rows
from torch import nn
from transformers import masking_utils

from dsa_compile.config import DSAConfig
from dsa_compile.passes.base import Context, arguments
from dsa_compile.passes.raise_indexer import RaiseIndexer
from dsa_compile.report import Report

check = PassHarness(RaiseIndexer(), DSAConfig(select_budget=BUDGET))
SELECT, MLA = torch.ops.dsa.select.default, torch.ops.dsa.mla.default
TOPK, HI, DI = 4, 8, 6
RAISED = {"dsa.select.default": 1, "topk": -1, "matmul": -2, "relu": -1, "masked_fill": -1, "invert": -1}
ROUNDING = 1e-12


class Indexed(nn.Module):
    """How transformers selects, in front of a raised attention. Its parts are overridden by near misses."""

    def scores(self, q, weights, keys):
        heads = torch.matmul(q.float(), keys.transpose(-1, -2).float().unsqueeze(1)) * DI**-0.5
        return torch.matmul(weights.unsqueeze(-2), nn.functional.relu(heads)).squeeze(-2)

    def masked(self, scores, mask):
        return scores.masked_fill(~mask[:, 0, :, :], float("-inf"))

    def picks(self, scores):
        return scores.topk(min(TOPK, scores.shape[-1]), dim=-1).indices.to(torch.int32)

    def attend(self, rows, mask, picks):
        return torch.ops.dsa.mla.default(*rows, None, mask, picks, NOPE, SCALE, [], 0, "half", -1)

    def select(self, index, mask):
        return self.picks(self.masked(self.scores(*index), mask))

    def forward(self, rows, index, mask):
        return self.attend(rows, mask, self.select(index, mask))


def inputs(device, queries=5, slots=11):
    """Attention's tensors, index queries, head weights and keys, and the mask of queries that are the last tokens."""
    rows = mla_rows(DIMS, 2, queries, slots, device)
    generator = torch.Generator().manual_seed(1)
    shapes = (2, queries, HI, DI), (2, queries, HI), (2, slots, DI)
    index = tuple(torch.randn(shape, generator=generator).to(device) for shape in shapes)
    return rows.attention, index, mask_of(rows.visible, slots)


@pytest.mark.parametrize("queries", [1, 5, 11])
@pytest.mark.parametrize("dynamic", [None, True])
def test_the_chain_becomes_one_op(device, queries, dynamic):
    rows, index, mask = inputs(device, queries)
    outcome = check(Indexed(), rows, index, mask, matches=1, ops=RAISED, atol=ROUNDING, dynamic=dynamic)
    (select,) = outcome.nodes(SELECT)
    args = arguments(select)
    for name, value in zip(("q", "weights", "index_keys"), index):
        assert torch.equal(outcome.values[args[name]], value)
    assert args["mask"].op == "placeholder"
    assert [args[n] for n in ("visible", "index_topk", "budget")] == [None, TOPK, BUDGET]
    assert args["scale"] == pytest.approx(DI**-0.5)
    assert arguments(outcome.nodes(MLA)[0])["topk_indices"] is select
    assert outcome.entries[0].reason == f"dsa::select of {TOPK}"


def test_k_is_the_configured_one_under_a_dynamic_length(device):
    rows, index, mask = inputs(device, 11)
    outcome = check(Indexed(), rows, index, mask, matches=1, ops=RAISED | {"sym_min": -1}, atol=ROUNDING, dynamic=True)
    assert arguments(outcome.nodes(SELECT)[0])["index_topk"] == TOPK


def test_k_is_the_length_where_that_is_less_and_static(device):
    rows, index, mask = inputs(device, 3, 3)
    outcome = check(Indexed(), rows, index, mask, matches=1, ops=RAISED, atol=ROUNDING)
    assert arguments(outcome.nodes(SELECT)[0])["index_topk"] == 3


def test_an_option_replaces_the_models_k(device):
    graph = capture(Indexed(), *inputs(device)).gm
    RaiseIndexer()(graph, Context(DSAConfig(index_topk=2), Report()))
    (select,) = [n for n in graph.graph.nodes if n.target is SELECT]
    assert arguments(select)["index_topk"] == 2


class InGraphMask(Indexed):
    """The mask is made in the graph, as stock models do."""

    def forward(self, rows, index, offset):
        mask = masking_utils.sdpa_mask(
            2, index[0].shape[1], index[2].shape[1], q_offset=offset, allow_is_causal_skip=False, device=index[0].device
        )
        return super().forward(rows, index, mask)


def test_a_causal_mask_becomes_ranges(device):
    rows, index, mask = inputs(device)
    outcome = check(InGraphMask(), rows, index, 6, matches=1, ops={"dsa.select.default": 1}, atol=ROUNDING)
    args = arguments(outcome.nodes(SELECT)[0])
    assert args["mask"] is None
    assert torch.equal(mask_of(outcome.values[args["visible"]], 11), mask)


class Shared(Indexed):
    """GLM-5.2: a shared layer reads the selection before it."""

    def attend(self, rows, mask, picks):
        out = super().attend(rows, mask, picks)
        return out + super().attend((rows[0] * 2, *rows[1:]), mask, picks)


def test_shared_layers_read_one_selection(device):
    outcome = check(Shared(), *inputs(device), matches=1, ops=RAISED, atol=ROUNDING)
    (select,) = outcome.nodes(SELECT)
    assert [arguments(n)["topk_indices"] for n in outcome.nodes(MLA)] == [select, select]


def test_noise_changes_nothing(device):
    class Noisy(Indexed):
        def select(self, index, mask):
            q, weights, keys = index
            q.cos()
            picks = super().select((q.view(q.shape), weights + 0, keys * 1), mask)
            self.seen = (q.sum(), keys.sum())
            return picks

        def forward(self, *args):
            return super().forward(*args), self.seen

    check(Noisy(), *inputs(device), matches=1, ops={"dsa.select.default": 1}, atol=ROUNDING)


class ReadByOthers(Indexed):
    def attend(self, rows, mask, picks):
        return super().attend(rows, mask, picks) + picks.sum()


class Indices64(Indexed):
    def picks(self, scores):
        return super().picks(scores).long()


class Sorted(Indexed):
    def picks(self, scores):
        return scores.argsort(-1, descending=True)[..., :TOPK].to(torch.int32)


class Values(Indexed):
    def picks(self, scores):
        return scores.topk(TOPK, dim=-1).values.nan_to_num().clamp(0, 3).to(torch.int32)


class Smallest(Indexed):
    def picks(self, scores):
        return scores.topk(TOPK, dim=-1, largest=False).indices.to(torch.int32)


class LengthDependentK(Indexed):
    def picks(self, scores):
        return scores.topk(scores.shape[-1] // 2, dim=-1).indices.to(torch.int32)


class FiniteFill(Indexed):
    def masked(self, scores, mask):
        return scores.masked_fill(~mask[:, 0, :, :], -1.0)


class AddedMask(Indexed):
    def masked(self, scores, mask):
        return scores + torch.where(mask[:, 0, :, :], 0.0, float("-inf"))


class Absolute(Indexed):
    def scores(self, q, weights, keys):
        heads = torch.matmul(q.float(), keys.transpose(-1, -2).float().unsqueeze(1)) * DI**-0.5
        return torch.matmul(weights.unsqueeze(-2), heads.abs()).squeeze(-2)


class NoScale(Indexed):
    def scores(self, q, weights, keys):
        heads = torch.matmul(q.float(), keys.transpose(-1, -2).float().unsqueeze(1))
        return torch.matmul(weights.unsqueeze(-2), nn.functional.relu(heads)).squeeze(-2)


class ScalePerHead(Indexed):
    def scores(self, q, weights, keys):
        scale = weights.abs().mean((0, 1)).view(1, 1, -1, 1)
        heads = torch.matmul(q.float(), keys.transpose(-1, -2).float().unsqueeze(1)) * scale
        return torch.matmul(weights.unsqueeze(-2), nn.functional.relu(heads)).squeeze(-2)


class WrittenBetween(Indexed):
    def scores(self, q, weights, keys):
        scores = super().scores(q, weights, keys)
        keys.mul_(-1)
        return scores


NEAR_MISSES = {
    ReadByOthers: "the selection is read by more than attention",
    Indices64: "expected to, found long",
    Sorted: "expected getitem",
    Values: "the selection does not come out of topk",
    Smallest: "topk is not of the largest scores of a row",
    FiniteFill: "the scores are masked in an unknown way",
    AddedMask: "expected masked_fill in front of topk, found add",
    Absolute: "expected relu in front of matmul, found abs",
    NoScale: "expected mul in front of relu, found matmul",
    ScalePerHead: "the scores are not q . k times a constant",
    WrittenBetween: "mul_ writes in place before attention reads",
}


@pytest.mark.parametrize("cls", NEAR_MISSES)
def test_near_misses_stay(device, cls):
    check(cls(), *inputs(device), matches=0, reason=NEAR_MISSES[cls])


def test_a_k_that_follows_the_length_stays(device):
    given = inputs(device, 11)
    check(LengthDependentK(), *given, matches=0, reason="the number of selected keys is no constant", dynamic=True)


def test_rewritten_and_other_attention_is_untouched(device):
    rows = mla_rows(DIMS, 2, 5, 11, device)
    pool = torch.cat([rows.c_kv, rows.k_pe], -1)
    assert check(selected, rows.q, pool, rows.kv_b_weight, rows.visible, TOPK, matches=0).entries == []
    x, weight = torch.randn(2, 5, 8, device=device), torch.randn(8, 8, device=device)
    assert check(unrelated, x, weight, matches=0).entries == []
