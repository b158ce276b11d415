"""Attention with a selection reads the selected slots only."""

import pytest
import torch
from graphs import DIMS, attend, over_pool, selected, unrelated
from harness import PassHarness
from strategies import mla_rows

from dsa_compile.config import DSAConfig
from dsa_compile.passes.sparsify import Sparsify

check = PassHarness(Sparsify(), DSAConfig(prefill="sparse"))
MLA, SELECT, SPARSE = "dsa.mla.default", "dsa.select_attention.default", "dsa.sparse_mla.default"
ROUNDING = 1e-12
SPARSIFIED = {MLA: -1, SPARSE: 1, "einsum": 2, "unflatten": 1, "getitem": 5, "transpose": 1}


def inputs(device, queries=5, slots=11):
    rows = mla_rows(DIMS, 2, queries, slots, device)
    return rows.q, torch.cat([rows.c_kv, rows.k_pe], -1), rows.kv_b_weight, rows.visible


@pytest.mark.parametrize(("queries", "topk"), [(1, 4), (5, 4), (5, 10)])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_selection_becomes_sparse(device, queries, topk, dynamic):
    outcome = check(selected, *inputs(device, queries), topk, matches=1, ops=SPARSIFIED, atol=ROUNDING, dynamic=dynamic)
    (sparse,) = outcome.nodes(torch.ops.dsa.sparse_mla.default)
    assert sparse.args[2].op == "placeholder"
    assert sparse.args[5].target is torch.ops.dsa.select_attention.default
    assert outcome.entries[0].reason == "dsa::sparse_mla over the selection"


def test_a_selection_by_anybody_becomes_sparse(device):
    def given_selection(q, latent, weight, visible, picks):
        return over_pool(q, latent, weight, visible, topk_indices=picks)

    picks = torch.arange(11, dtype=torch.int32, device=device).expand(2, 5, 11)
    for width in (4, 11):
        some = picks[..., :width].contiguous()
        check(given_selection, *inputs(device), some, matches=1, ops={**SPARSIFIED, "getitem": 3}, atol=ROUNDING)


@pytest.mark.parametrize("topk", [11, 12])
def test_a_selection_of_all_slots_is_dropped(device, topk):
    outcome = check(selected, *inputs(device), topk, matches=1, ops={SELECT: -1}, atol=ROUNDING)
    (dense,) = outcome.nodes(torch.ops.dsa.mla.default)
    assert dense.args[6] is None
    assert outcome.entries[0].reason == "dense: the 11 slots are no more than K"


def test_a_selection_of_all_slots_that_is_read_elsewhere_stays(device):
    def shared(q, latent, weight, visible):
        c_kv, k_pe = latent[..., :9], latent[..., 9:]
        picks = torch.ops.dsa.select_attention.default(q, c_kv, k_pe, weight, visible, None, 5, 0.3, 20, 1 << 20)
        return attend(q, c_kv, k_pe, weight, visible, picks), picks

    check(shared, *inputs(device), matches=1, ops={}, atol=ROUNDING)


def test_no_selection_stays_dense(device):
    check(over_pool, *inputs(device), matches=0, reason="no selection: attention stays dense")


def test_noise_and_several_layers(device):
    def layers(q, latent, weight, visible):
        out = selected(q, latent, weight, visible, 4)
        latent.cos()
        again = selected(q * 2 + out.mean(), latent, weight, visible, 3)
        return out.view(out.shape), again, over_pool(q, latent, weight, visible)

    twice = {op: 2 * n for op, n in SPARSIFIED.items()}
    outcome = check(layers, *inputs(device), matches=2, ops=twice, atol=1e-9)
    assert [e.matched for e in outcome.entries] == [True, True, False]


def test_other_attention_is_untouched(device):
    x, weight = torch.randn(2, 5, 8, device=device), torch.randn(8, 8, device=device)
    assert check(unrelated, x, weight, matches=0).entries == []
