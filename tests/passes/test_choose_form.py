"""A prompt's attention is left to an operator that chooses its form by its sizes."""

import pytest
import torch
from graphs import DIMS, NOPE, RANK, attend, over_pool, selected, unrelated
from harness import PassHarness
from strategies import mask_of, mla_rows

from dsa_compile.config import MOST_DRAFTS, DSAConfig
from dsa_compile.passes.choose_form import ChooseForm

check = PassHarness(ChooseForm())
MLA, SELECT, PREFILL = "dsa.mla.default", "dsa.select_attention.default", "dsa.prefill_mla.default"
PROMPT = MOST_DRAFTS + 2
ROUNDING = 1e-12
CHOSEN = {MLA: -1, PREFILL: 1, "getitem": -2}


def inputs(device, queries=PROMPT, slots=23):
    rows = mla_rows(DIMS, 2, queries, slots, device)
    return rows.q, torch.cat([rows.c_kv, rows.k_pe], -1), rows.kv_b_weight, rows.visible


@pytest.mark.parametrize("prefill", ["auto", "masked"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_prompt_is_left_to_the_run(device, prefill, dynamic):
    run = PassHarness(ChooseForm(), DSAConfig(prefill=prefill))
    changes = {MLA: -1, PREFILL: 1}
    outcome = run(selected, *inputs(device), 4, matches=1, ops=changes, atol=ROUNDING, dynamic=dynamic)
    (made,) = outcome.nodes(torch.ops.dsa.prefill_mla.default)
    assert made.args[1].op == "placeholder"
    assert made.args[4].target is torch.ops.dsa.select_attention.default
    assert made.args[7] == prefill
    assert outcome.entries[0].reason == f"dsa::prefill_mla, {prefill}"


def test_so_is_one_without_a_selection(device):
    outcome = check(over_pool, *inputs(device), matches=1, ops=CHOSEN, atol=ROUNDING)
    assert outcome.entries[0].reason == "dsa::prefill_mla, dense"


def test_the_first_slots_of_a_pool_stay_its_first_slots(device):
    def seen(q, latent, weight, visible):
        return over_pool(q, latent[:, :21], weight, visible)

    outcome = check(seen, *inputs(device), matches=1, ops=CHOSEN, atol=ROUNDING)
    (made,) = outcome.nodes(torch.ops.dsa.prefill_mla.default)
    assert outcome.values[made.args[1]].shape == (2, 21, DIMS.latent_width)


def test_rows_that_are_no_pool_are_joined(device):
    rows = mla_rows(DIMS, 2, PROMPT, 23, device)
    check(attend, *rows.attention, rows.visible, matches=1, ops={MLA: -1, PREFILL: 1, "cat": 1}, atol=ROUNDING)


def test_a_dense_prompt_drops_its_selection_unless_it_is_read_elsewhere(device):
    dense = PassHarness(ChooseForm(), DSAConfig(prefill="dense"))

    def twice(q, latent, weight, visible):
        c_kv, k_pe = latent[..., :RANK], latent[..., RANK:]
        picks = torch.ops.dsa.select_attention.default(q, c_kv, k_pe, weight, visible, None, NOPE, 0.3, 4, 1 << 20)
        return attend(q, c_kv, k_pe, weight, visible, picks), picks

    everything = inputs(device, slots=PROMPT), PROMPT
    ops = {MLA: -1, PREFILL: 1, SELECT: -1}
    outcome = dense(selected, *everything[0], everything[1], matches=1, ops=ops, atol=ROUNDING)
    (made,) = outcome.nodes(torch.ops.dsa.prefill_mla.default)
    assert (made.args[4], outcome.entries[0].reason) == (None, "dsa::prefill_mla, dense")
    captured, _ = dense(twice, *inputs(device), matches=1, ops={MLA: -1, PREFILL: 1}, atol=10.0), None
    assert captured.nodes(torch.ops.dsa.select_attention.default)


@pytest.mark.parametrize("queries", [1, MOST_DRAFTS + 1])
def test_a_step_of_decoding_is_no_prompt(device, queries):
    check(selected, *inputs(device, queries), 4, matches=0, reason="few query rows: no prompt")


def test_a_mask_operand_stays(device):
    def masked(q, latent, weight, mask):
        return torch.ops.dsa.mla.default(
            q, latent[..., :RANK], latent[..., RANK:], weight, None, mask, None, NOPE, 0.3, [], 0, "half", -1
        )

    q, latent, weight, visible = inputs(device)
    check(masked, q, latent, weight, mask_of(visible, 23), matches=0, reason="a mask operand says who sees whom")


def test_other_attention_is_untouched(device):
    x, weight = torch.randn(2, 5, 8, device=device), torch.randn(8, 8, device=device)
    assert check(unrelated, x, weight, matches=0).entries == []
