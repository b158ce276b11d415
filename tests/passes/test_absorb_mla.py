"""Dense attention of a few query rows is absorbed."""

import pytest
import torch
from graphs import DIMS, RANK, attend, over_pool, selected, unrelated
from harness import PassHarness
from strategies import mla_rows

from dsa_compile.dims import LayerDims
from dsa_compile.lowering.fp8_rows import pack
from dsa_compile.passes.absorb_mla import AbsorbMLA

check = PassHarness(AbsorbMLA())
MLA, SPARSE = "dsa.mla.default", "dsa.sparse_mla.default"
ROUNDING = 1e-12
FP8_DIMS = LayerDims(**{**vars(DIMS), "kv_lora_rank": 12})


def inputs(device, queries=1, batch=2, slots=11):
    rows = mla_rows(DIMS, batch, queries, slots, device)
    return rows.q, torch.cat([rows.c_kv, rows.k_pe], -1), rows.kv_b_weight, rows.visible


ABSORBED = {MLA: -1, SPARSE: 1, "einsum": 2, "unflatten": 1, "getitem": 3, "transpose": 1}
"""The two slices of the pool go, five slices of query, weight and result come."""


@pytest.mark.parametrize("queries", [1, 2, 8])
def test_few_rows_over_a_pool_read_the_pool_itself(device, queries):
    outcome = check(over_pool, *inputs(device, queries), matches=1, ops=ABSORBED, atol=ROUNDING)
    (sparse,) = outcome.nodes(torch.ops.dsa.sparse_mla.default)
    assert sparse.args[2].op == "placeholder"
    assert outcome.entries[0].reason == "dsa::sparse_mla over all visible slots"


def over_fp8_rows(q, rows, weight, visible, *, late_write=False):
    rank, rope = FP8_DIMS.kv_lora_rank, FP8_DIMS.qk_rope_head_dim
    latent = torch.ops.dsa.cache_read.default(rows, rank, rope, q.dtype)
    c_kv, k_pe = latent[..., :rank], latent[..., rank:]
    if late_write:
        rows.zero_()
    return attend(q, c_kv, k_pe, weight, visible)


@pytest.mark.parametrize("late_write", [False, True])
def test_one_row_over_a_pool_in_fp8_reads_its_rows_itself_unless_they_have_changed(device, late_write):
    rows = mla_rows(FP8_DIMS, 2, 1, 11, device)
    args = rows.q, pack(rows.c_kv, rows.k_pe), rows.kv_b_weight, rows.visible
    read = {} if late_write else {"dsa.cache_read.default": -1}
    outcome = check(over_fp8_rows, *args, matches=1, ops={**ABSORBED, **read}, atol=ROUNDING, late_write=late_write)
    (sparse,) = outcome.nodes(torch.ops.dsa.sparse_mla.default)
    assert (sparse.args[2].op == "placeholder") != late_write


def test_one_row_over_separate_rows_joins_them(device):
    rows = mla_rows(DIMS, 2, 1, 11, device)
    outcome = check(
        attend,
        *rows.attention,
        rows.visible,
        matches=1,
        ops={**ABSORBED, "getitem": 5, "cat": 1},
        atol=ROUNDING,
    )
    (sparse,) = outcome.nodes(torch.ops.dsa.sparse_mla.default)
    assert sparse.args[2].target is torch.cat


def test_halves_of_another_width_are_no_pool(device):
    def narrower(q, latent, weight, visible):
        padded = torch.nn.functional.pad(latent, (0, 1))
        return attend(q, padded[..., :RANK], padded[..., RANK : RANK + DIMS.qk_rope_head_dim], weight, visible)

    outcome = check(narrower, *inputs(device), matches=1, ops={**ABSORBED, "getitem": 5, "cat": 1}, atol=ROUNDING)
    (sparse,) = outcome.nodes(torch.ops.dsa.sparse_mla.default)
    assert sparse.args[2].target is torch.cat


@pytest.mark.parametrize(("queries", "dynamic"), [(9, None), (5, True)])
def test_many_rows_and_an_unknown_number_stay(device, queries, dynamic):
    check(
        over_pool,
        *inputs(device, queries),
        matches=0,
        reason="more than 8 query rows: expanded keys cost less than absorbed ones",
        dynamic=dynamic,
    )


def test_a_selection_is_left_to_sparsify(device):
    check(selected, *inputs(device), 4, matches=0, reason="has a selection: left to sparsify")


def test_slots_may_be_dynamic(device):
    check(over_pool, *inputs(device), matches=1, ops=ABSORBED, atol=ROUNDING, dynamic=True)


def test_noise_and_several_layers(device):
    def layers(q, latent, weight, visible):
        total = q.sum() + latent[..., :RANK].sum()
        latent[..., 2:].cos()
        out = over_pool(q.clone(), latent, weight, visible)
        again = over_pool(q + out.sum(), latent, weight * 2, visible)
        return total, out, again.view(again.shape), over_pool(q.expand(-1, -1, 9, -1), latent, weight, visible)

    twice = {op: 2 * n for op, n in ABSORBED.items()}
    outcome = check(layers, *inputs(device), matches=2, ops={**twice, "getitem": 6}, atol=1e-9)
    assert len(outcome.nodes(torch.ops.dsa.mla.default)) == 1


def test_other_attention_is_untouched(device):
    x, weight = torch.randn(2, 5, 8, device=device), torch.randn(8, 8, device=device)
    assert check(unrelated, x, weight, matches=0).entries == []
