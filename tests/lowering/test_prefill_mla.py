"""Attention of a prompt: one result in whichever form, and the form that costs less."""

import naive
import pytest
import torch
from cases import V32
from hypothesis import given
from hypothesis import strategies as st
from strategies import SELECTION_KINDS, mla_dims, mla_rows, seeds, selection_row, selections

from dsa_compile.cost.prefill import masked_pays, masked_seconds, sparse_seconds
from dsa_compile.dims import LayerDims
from dsa_compile.errors import InputError
from dsa_compile.lowering.fp8_rows import pack, unpack

DIMS = LayerDims(n_heads=3, kv_lora_rank=8, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6)
FORMS = ("auto", "masked", "sparse")


def inputs(rows, pool=None):
    latent = torch.cat([rows.c_kv, rows.k_pe], -1) if pool is None else pool
    return rows.q, latent, rows.kv_b_weight


def attend(rows, picks, form="auto", pool=None):
    return torch.ops.dsa.prefill_mla(*inputs(rows, pool), rows.visible, picks, rows.nope, rows.scale, form)


def some_picks(rows, topk=5):
    """A selection with a row of every kind; slots in it are distinct."""
    generator = torch.Generator().manual_seed(0)
    (B, _, T, _), S = rows.q.shape, rows.c_kv.shape[1]
    kinds = [SELECTION_KINDS[i % len(SELECTION_KINDS)] for i in range(B * T)]
    return torch.stack([selection_row(kind, S, topk, generator) for kind in kinds]).view(B, T, topk).to(rows.q.device)


@given(data=st.data(), dims=mla_dims(), seed=seeds, topk=st.sampled_from([1, 5, 30]), form=st.sampled_from(FORMS))
def test_equals_the_definition_in_every_form(device, data, dims, seed, topk, form):
    batch, queries, slots = data.draw(
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 20)), label="B, T, S"
    )
    rows = mla_rows(dims, batch, queries, slots, device, seed=seed, spans=True)
    picks = data.draw(st.none() | selections(batch, queries, slots, topk), label="topk_indices")
    picks = None if picks is None else picks.to(device)
    want = naive.attention(*rows.attention, rows.nope, rows.scale, rows.visible, None, picks)[0]
    torch.testing.assert_close(attend(rows, picks, form), want, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_a_bad_slot_reaches_the_rows_that_attend_to_it_alone(device, form):
    rows = mla_rows(DIMS, 2, 8, 12, device)
    picks = some_picks(rows)
    clean = attend(rows, picks, form)
    rows.c_kv[1, 7, 2] = float("nan")
    dirty = attend(rows, picks, form)
    hit = (picks[1] == 7).any(-1) & (rows.visible[1, 0, :, 1] > 7)
    assert 0 < hit.sum() < 8
    assert dirty[1, hit].isnan().all()
    assert torch.equal(dirty[0], clean[0])
    assert torch.equal(dirty[1, ~hit], clean[1, ~hit])


@pytest.mark.parametrize("form", FORMS)
def test_a_pool_in_fp8_counts_as_the_values_that_it_holds(device, form):
    rows = mla_rows(DIMS, 2, 4, 12, device, dtype=torch.bfloat16)
    pool, picks = pack(rows.c_kv, rows.k_pe), some_picks(rows)
    values = unpack(pool, DIMS.kv_lora_rank, DIMS.qk_rope_head_dim, torch.bfloat16)
    assert torch.equal(attend(rows, picks, form, pool), attend(rows, picks, form, values))


def test_gradients(device):
    rows = mla_rows(DIMS, 2, 4, 5, device)
    picks = some_picks(rows, topk=4)
    leaves = [x.detach().requires_grad_() for x in inputs(rows)]
    for chosen in (None, picks):
        torch.autograd.gradcheck(
            lambda *x, chosen=chosen: torch.ops.dsa.prefill_mla(
                *x, rows.visible, chosen, rows.nope, rows.scale, "sparse"
            ),
            leaves,
        )


def test_a_quantised_pool_has_no_gradient(device):
    rows = mla_rows(DIMS, 1, 2, 3, device, dtype=torch.bfloat16)
    rows.q.requires_grad_()
    out = attend(rows, None, pool=pack(rows.c_kv, rows.k_pe))
    with pytest.raises(InputError, match="came a quantised cache, through which there is no gradient"):
        out.sum().backward()


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(device, form):
    rows = mla_rows(DIMS, 2, 4, 6, device, dtype=torch.float32)
    leaves = [x.detach().requires_grad_() for x in inputs(rows)]
    op = torch.ops.dsa.prefill_mla.default
    torch.library.opcheck(op, (*leaves, rows.visible, some_picks(rows), rows.nope, rows.scale, form))
    torch.library.opcheck(op, (*leaves, None, None, rows.nope, rows.scale, form))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "mask"}, r"expected form as one of 'auto', 'masked', 'sparse', came 'mask'"),
        ({"visible": torch.zeros(2, 1, 4, 2).long()}, r"expected visible in int32, came torch.int64"),
        ({"topk": torch.zeros(1, 4, 2).int()}, r"expected topk_indices of 2 sequences as q, came 1"),
        (
            {"latent": torch.zeros(2, 6, 13)},
            r"expected latent torch.float32\[..., 12\] .*came torch.float32\[..., 13\]",
        ),
        ({"latent": torch.zeros(2, 6, 12).double()}, r"came torch.float64\[..., 12\]"),
        ({"weight": torch.zeros(33, 8, device="meta")}, r"expected kv_b_weight on cpu as q, came meta"),
    ],
    ids=str,
)
def test_errors_name_the_input(change, message):
    rows = mla_rows(DIMS, 2, 4, 6, torch.device("cpu"), dtype=torch.float32)
    named = dict(zip(("q", "latent", "weight"), inputs(rows))) | {"visible": rows.visible, "topk": None}
    named |= {"nope": rows.nope, "scale": rows.scale, "form": "auto"} | change
    with pytest.raises(InputError, match=message):
        torch.ops.dsa.prefill_mla(*named.values())


def test_the_form_that_costs_less_is_chosen():
    """Of pieces of 4096 tokens of DeepSeek-V3.2: masked behind a short context, sparse behind a long one."""
    contexts = (4096, 8192, 12288, 128 << 10)
    assert [masked_pays(V32, 4096, context, 2048) for context in contexts] == [True, True, False, False]
    assert masked_pays(V32, 8192, 8192, 2048), "of a whole prompt many rows see little"
    assert not masked_pays(V32, 16384, 16384, 2048)
    assert not masked_pays(V32, 16, 8192, 2048), "a few rows do not pay for a context that is expanded"


def test_seconds_of_a_form_are_its_flops():
    """128 heads: 278,528 FLOPs of a pair absorbed, 81,920 expanded, and 2 x 128 x 512 x 256 of a token through kv_b."""
    assert sparse_seconds(V32, 10, 100, 2048) == pytest.approx(10 * 2048 * 278_528 / 525e12 + 10 * 33_554_432 / 700e12)
    pairs = sum(range(91, 101))
    assert masked_seconds(V32, 10, 100) == pytest.approx(pairs * 81_920 / 507e12 + 100 * 33_554_432 / 700e12)
