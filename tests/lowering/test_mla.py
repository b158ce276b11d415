"""The canonical attention: dense or selected, over latents."""

import naive
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import causal, mask_of, mla_dims, mla_rows, seeds, selections

from dsa_compile.dims import LayerDims
from dsa_compile.lowering.mla import reference

DIMS = LayerDims(n_heads=3, kv_lora_rank=9, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6)
REAL = LayerDims(n_heads=22, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def mla(rows, visible=None, mask=None, topk_indices=None):
    return torch.ops.dsa.mla(*rows.attention, visible, mask, topk_indices, rows.nope, rows.scale, [], 0, "half", -1)


@given(data=st.data(), dims=mla_dims(), seed=seeds, topk=st.sampled_from([1, 5, 30]))
def test_equals_the_definition(device, data, dims, seed, topk):
    batch, queries, slots = data.draw(
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 20)), label="B, T, S"
    )
    rows = mla_rows(dims, batch, queries, slots, device, seed=seed, spans=True)
    picks = data.draw(st.none() | selections(batch, queries, slots, topk), label="topk_indices")
    picks = None if picks is None else picks.to(device)
    form = data.draw(st.sampled_from(["visible", "mask", "both", "neither"]), label="form")
    visible = rows.visible if form in ("visible", "both") else None
    mask = torch.rand(1, 1, queries, slots, device=device) < 0.7 if form in ("mask", "both") else None
    want, _ = naive.attention(*rows.attention, rows.nope, rows.scale, visible, mask, picks)
    torch.testing.assert_close(mla(rows, visible, mask, picks), want, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("n_heads", [1, 8, 22])
def test_visible_and_mask_say_the_same(device, n_heads):
    rows = mla_rows(LayerDims(**{**vars(DIMS), "n_heads": n_heads}), 2, 6, 17, device, spans=True)
    by_mask = mla(rows, mask=mask_of(rows.visible, 17))
    torch.testing.assert_close(mla(rows, rows.visible), by_mask, atol=1e-12, rtol=0)


def test_a_row_that_sees_nothing_gives_zero(device):
    rows = mla_rows(DIMS, 2, 5, 9, device)
    rows.visible[0, 0, :2] = 0
    rows.visible[1, 0, 3] = torch.tensor([7, 2], device=device)
    rows.q[0, :, :2] = float("nan")
    out = mla(rows, rows.visible)
    assert out.isfinite().all()
    assert not out[0, :2].any()
    assert not out[1, 3].any()
    assert out[0, 2:].any(-1).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["c_kv", "k_pe"])
def test_a_bad_slot_reaches_the_rows_that_see_it_alone(device, bad, which):
    rows = mla_rows(DIMS, 2, 6, 12, device)
    clean = mla(rows, rows.visible)
    getattr(rows, which)[1, 9] = bad
    out = mla(rows, rows.visible)
    hit = mask_of(rows.visible, 12)[1, 0, :, 9]
    assert 0 < hit.sum() < 6
    assert out[1, hit].isnan().all()
    assert torch.equal(out[0], clean[0])
    assert torch.equal(out[1, ~hit], clean[1, ~hit])
    unselected = torch.arange(9, dtype=torch.int32, device=device).expand(2, 6, 9)
    assert mla(rows, rows.visible, topk_indices=unselected).isfinite().all()


def test_a_bad_slot_reaches_no_gradient_of_rows_that_do_not_see_it(device):
    rows = mla_rows(DIMS, 1, 4, 8, device)
    rows.c_kv[0, 7] = float("nan")
    rows.visible[0, 0, 0] = 0
    rows.q[0, :, 0] = float("nan")
    leaves = [x.clone().requires_grad_() for x in rows.attention]
    out = torch.ops.dsa.mla(*leaves, rows.visible, None, None, rows.nope, rows.scale, [], 0, "half", -1)
    out[:, :3].sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_batch_order_changes_nothing(device):
    rows = mla_rows(DIMS, 4, 5, 16, device, spans=True)
    order = torch.tensor([2, 0, 3, 1], device=device)
    moved = [x[order] for x in (rows.q, rows.c_kv, rows.k_pe)]
    permuted = torch.ops.dsa.mla(
        *moved, rows.kv_b_weight, rows.visible[order], None, None, rows.nope, rows.scale, [], 0, "half", -1
    )
    torch.testing.assert_close(permuted, mla(rows, rows.visible)[order], atol=1e-13, rtol=0)


def test_chunks_change_nothing(device, monkeypatch):
    rows = mla_rows(DIMS, 2, 7, 16, device)
    whole, grads = mla(rows, rows.visible), gradients(rows)
    monkeypatch.setattr(reference, "ROW_BUDGET", 1)
    torch.testing.assert_close(mla(rows, rows.visible), whole, atol=1e-13, rtol=0)
    for chunked, one in zip(gradients(rows), grads):
        torch.testing.assert_close(chunked, one, atol=1e-12, rtol=0)


def gradients(rows):
    leaves = [x.clone().requires_grad_() for x in rows.attention]
    out = torch.ops.dsa.mla(*leaves, rows.visible, None, None, rows.nope, rows.scale, [], 0, "half", -1)
    return torch.autograd.grad(out.sin().sum(), leaves)


def test_gradients(device):
    rows = mla_rows(LayerDims(**{**vars(DIMS), "n_heads": 2}), 2, 3, 5, device)
    rows.visible[0, 0, 0] = 0
    picks = torch.tensor([[0, 2, 3, -1], [4, -1, 1, 9], [-1, -1, -1, -1]], dtype=torch.int32, device=device).expand(
        2, 3, 4
    )

    def run(*inputs):
        return [
            torch.ops.dsa.mla(*inputs, rows.visible, None, chosen, rows.nope, rows.scale, [], 0, "half", -1)
            for chosen in (None, picks)
        ]

    torch.autograd.gradcheck(run, [x.requires_grad_() for x in rows.attention])


def test_float32_is_float64_to_rounding(device):
    exact, rows = (mla_rows(REAL, 1, 3, 300, device, dtype=d) for d in (torch.float64, torch.float32))
    error = (mla(rows, rows.visible).double() - mla(exact, exact.visible)).abs().max()
    keep = mask_of(rows.visible, 300)
    eager = naive.dense(*rows.attention, rows.nope, rows.scale, keep).double()
    assert error <= 2 * (eager - mla(exact, exact.visible)).abs().max() + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_error_is_within_that_of_eager_code(device, dtype):
    rows = mla_rows(REAL, 2, 4, 300, device, dtype=dtype)
    rows.kv_b_weight.mul_(0.04)
    out = mla(rows, rows.visible)
    exact = torch.ops.dsa.mla(
        *(x.double() for x in rows.attention), rows.visible, None, None, rows.nope, rows.scale, [], 0, "half", -1
    )
    eager = naive.dense(*rows.attention, rows.nope, rows.scale, mask_of(rows.visible, 300))
    assert out.dtype == dtype
    ours, theirs = (out.double() - exact).abs(), (eager.double() - exact).abs()
    assert ours.max() <= 1.1 * theirs.max() + torch.finfo(dtype).eps * exact.abs().max()
    assert ours.mean() <= 1.1 * theirs.mean()


def test_same_bits_on_twenty_runs(device):
    rows = mla_rows(DIMS, 3, 9, 40, device, dtype=torch.float32)
    first = mla(rows, rows.visible)
    assert all(torch.equal(first, mla(rows, rows.visible)) for _ in range(20))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(device, requires_grad):
    rows = mla_rows(DIMS, 2, 3, 6, device, dtype=torch.float32)
    inputs = [x.requires_grad_(requires_grad) for x in rows.attention]
    picks = torch.tensor([0, 3, -1], dtype=torch.int32, device=device).expand(2, 3, 3).contiguous()
    extra = [torch.randn(2, 2, device=device)]
    for where in ((rows.visible, None, None), (None, mask_of(rows.visible, 6), None), (rows.visible, None, picks)):
        torch.library.opcheck(torch.ops.dsa.mla.default, (*inputs, *where, rows.nope, rows.scale, extra, 4, "half", -1))


def test_opcheck_of_the_backward(device):
    rows = mla_rows(DIMS, 2, 3, 6, device, dtype=torch.float32)
    grad = torch.randn(2, 3, DIMS.n_heads, DIMS.v_head_dim, device=device)
    op = torch.ops.dsa.mla_backward.default
    torch.library.opcheck(op, (grad, *rows.attention, causal(2, 3, 6).to(device), None, None, rows.nope, rows.scale))
