"""Absorbed attention over the selected latent rows."""

import naive
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import SELECTION_KINDS, mask_of, mla_dims, mla_rows, seeds, selection_row, selections

from dsa_compile.dims import LayerDims
from dsa_compile.lowering.sparse_mla import reference

DIMS = LayerDims(n_heads=3, kv_lora_rank=9, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6)
REAL = LayerDims(n_heads=22, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def absorbed(rows):
    """q_absorbed, q_pe and latent of the same attention."""
    w_uk = rows.kv_b_weight.view(rows.q.shape[1], -1, rows.c_kv.shape[-1])[:, : rows.nope]
    q_absorbed = torch.einsum("bhtn,hnr->bthr", rows.q[..., : rows.nope], w_uk)
    return q_absorbed, rows.q[..., rows.nope :].transpose(1, 2), torch.cat([rows.c_kv, rows.k_pe], -1)


def values(rows, out):
    """From latent outputs [B, T, H, R] to [B, T, H, V]."""
    w_uv = rows.kv_b_weight.view(rows.q.shape[1], -1, rows.c_kv.shape[-1])[:, rows.nope :]
    return torch.einsum("bthr,hvr->bthv", out, w_uv)


def attend(rows, visible=None, mask=None, topk_indices=None):
    return torch.ops.dsa.sparse_mla(*absorbed(rows), visible, mask, topk_indices, rows.scale)


def close(ours, theirs, atol=1e-11):
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, atol=atol, rtol=1e-9)


def some_picks(rows, topk=5, seed=0):
    """A selection with a row of every kind."""
    generator = torch.Generator().manual_seed(seed)
    B, _, T, _ = rows.q.shape
    kinds = [SELECTION_KINDS[i % len(SELECTION_KINDS)] for i in range(B * T)]
    picked = [selection_row(kind, rows.c_kv.shape[1], topk, generator) for kind in kinds]
    return torch.stack(picked).view(B, T, topk).to(rows.q.device)


@given(data=st.data(), dims=mla_dims(), seed=seeds, topk=st.sampled_from([1, 5, 30]))
def test_equals_the_definition_unabsorbed(device, data, dims, seed, topk):
    batch, queries, slots = data.draw(
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 20)), label="B, T, S"
    )
    rows = mla_rows(dims, batch, queries, slots, device, seed=seed, spans=True)
    picks = data.draw(st.none() | selections(batch, queries, slots, topk), label="topk_indices")
    picks = None if picks is None else picks.to(device)
    form = data.draw(st.sampled_from(["visible", "mask", "both", "neither"]), label="form")
    visible = rows.visible if form in ("visible", "both") else None
    mask = torch.rand(batch, 1, 1, slots, device=device) < 0.7 if form in ("mask", "both") else None
    out, lse = attend(rows, visible, mask, picks)
    want = naive.attention(*rows.attention, rows.nope, rows.scale, visible, mask, picks)
    close((values(rows, out), lse), want, atol=1e-10)


def test_a_selection_of_everything_equals_dense(device):
    rows = mla_rows(DIMS, 2, 6, 12, device, spans=True)
    everything = torch.arange(12, dtype=torch.int32, device=device).expand(2, 6, 12)
    for width in (12, 13, 40):
        picks = torch.nn.functional.pad(everything, (0, width - 12), value=-1)
        close(attend(rows, rows.visible, None, picks), attend(rows, rows.visible), atol=1e-13)


@pytest.mark.parametrize("topk", [3, 5, 30])
def test_places_in_the_selection_mean_nothing(device, topk):
    rows = mla_rows(DIMS, 2, 8, 17, device)
    picks = some_picks(rows, topk)
    want = attend(rows, None, None, picks)
    for _ in range(3):
        order = torch.rand(picks.shape, device=device).argsort(-1)
        close(attend(rows, None, None, picks.gather(-1, order)), want, atol=1e-13)
    absent = torch.where((picks < 0) | (picks >= 17), -1, picks)
    assert all(torch.equal(a, b) for a, b in zip(attend(rows, None, None, absent), want))


@pytest.mark.parametrize("topk", [96, 100, 200])
@pytest.mark.parametrize("n_heads", [1, 8, 22])
def test_any_width_and_number_of_heads(device, topk, n_heads):
    rows = mla_rows(LayerDims(**{**vars(DIMS), "n_heads": n_heads}), 1, 3, 230, device)
    picks = some_picks(rows, topk)
    want = naive.attention(*rows.attention, rows.nope, rows.scale, rows.visible, None, picks)
    out, lse = attend(rows, rows.visible, None, picks)
    close((values(rows, out), lse), want)


@pytest.mark.parametrize("seen", [0, 1, 7, 8, 9])
def test_rows_that_see_around_k_slots(device, seen):
    rows = mla_rows(DIMS, 1, 1, 20, device)
    rows.visible[..., 1] = seen
    picks = torch.arange(8, dtype=torch.int32, device=device).masked_fill(torch.arange(8, device=device) >= seen, -1)
    out, lse = attend(rows, rows.visible, None, picks.expand(1, 1, 8))
    close(
        (values(rows, out), lse),
        naive.attention(*rows.attention, rows.nope, rows.scale, rows.visible, None, picks[None, None]),
    )
    assert (lse.isfinite().all() and out.any()) if seen else (lse.isneginf().all() and not out.any())


def test_visible_and_mask_say_the_same(device):
    rows = mla_rows(DIMS, 2, 6, 17, device, spans=True)
    for picks in (None, some_picks(rows)):
        close(attend(rows, rows.visible, None, picks), attend(rows, None, mask_of(rows.visible, 17), picks), atol=1e-13)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, DIMS.kv_lora_rank])
@pytest.mark.parametrize("selected", [False, True])
def test_a_bad_slot_reaches_the_rows_that_attend_to_it_alone(device, bad, place, selected):
    rows = mla_rows(DIMS, 2, 8, 12, device)
    q_absorbed, q_pe, latent = absorbed(rows)
    picks = some_picks(rows) if selected else None
    clean = torch.ops.dsa.sparse_mla(q_absorbed, q_pe, latent, rows.visible, None, picks, rows.scale)
    latent[1, 7, place] = bad
    dirty = torch.ops.dsa.sparse_mla(q_absorbed, q_pe, latent, rows.visible, None, picks, rows.scale)
    hit = mask_of(rows.visible, 12)[1, 0, :, 7]
    if selected:
        hit = hit & (picks[1] == 7).any(-1)
    assert 0 < hit.sum() < 8
    for before, after in zip(clean, dirty):
        assert after[1, hit].isnan().all()
        assert torch.equal(after[0], before[0])
        assert torch.equal(after[1, ~hit], before[1, ~hit])


def test_padded_and_unseen_nan_reach_no_gradient(device):
    rows = mla_rows(DIMS, 1, 8, 12, device)
    rows.visible[0, 0, 0] = 0
    rows.q[0, :, 0] = float("nan")
    rows.c_kv[0, 11] = float("nan")
    for picks in (None, some_picks(rows)):
        leaves = [x.clone().requires_grad_() for x in absorbed(rows)]
        out, lse = torch.ops.dsa.sparse_mla(*leaves, rows.visible, None, picks, rows.scale)
        (out[:, :7].sum() + lse[:, 1:7].masked_fill(lse[:, 1:7].isinf(), 0).sum()).backward()
        assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_batch_order_changes_nothing(device):
    rows = mla_rows(DIMS, 4, 8, 16, device)
    order = torch.tensor([2, 0, 3, 1], device=device)
    q_absorbed, q_pe, latent = absorbed(rows)
    for picks in (None, some_picks(rows)):
        moved = [x[order] for x in (q_absorbed, q_pe, latent, rows.visible)]
        ours = torch.ops.dsa.sparse_mla(*moved, None, None if picks is None else picks[order], rows.scale)
        close(ours, [x[order] for x in attend(rows, rows.visible, None, picks)], atol=1e-13)


def test_chunks_change_nothing(device, monkeypatch):
    rows = mla_rows(DIMS, 2, 8, 16, device, spans=True)
    picks = some_picks(rows)

    def results():
        every = []
        for chosen in (None, picks):
            leaves = [x.clone().requires_grad_() for x in absorbed(rows)]
            out, lse = torch.ops.dsa.sparse_mla(*leaves, rows.visible, None, chosen, rows.scale)
            finite = lse.masked_fill(lse.isinf(), 0)
            every += [out, lse, *torch.autograd.grad(out.sin().sum() + finite.cos().sum(), leaves)]
        return every

    whole = results()
    monkeypatch.setattr(reference, "ROW_BUDGET", 1)
    close(results(), whole, atol=1e-12)


def test_gradients(device):
    rows = mla_rows(LayerDims(**{**vars(DIMS), "n_heads": 2}), 2, 4, 5, device)
    picks = some_picks(rows, topk=4)

    def run(*inputs):
        results = [
            torch.ops.dsa.sparse_mla(*inputs, rows.visible, None, chosen, rows.scale) for chosen in (None, picks)
        ]
        return [x.masked_fill(x.isinf(), 0) for pair in results for x in pair]

    torch.autograd.gradcheck(run, [x.detach().requires_grad_() for x in absorbed(rows)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_error_is_within_that_of_eager_code(device, dtype):
    rows = mla_rows(REAL, 2, 4, 300, device, seed=1)
    inputs = [x.to(dtype) for x in absorbed(rows)]
    inputs[0] *= 0.04
    picks = torch.stack([torch.randperm(300)[:100] for _ in range(8)]).view(2, 4, 100).int().to(device)
    exact = torch.ops.dsa.sparse_mla(*(x.double() for x in inputs), rows.visible, None, picks, rows.scale)
    ours = reference.sparse_mla(*inputs, rows.visible, None, picks, rows.scale)
    assert (ours[0].dtype, ours[1].dtype) == (dtype, torch.float32)
    keep = torch.zeros(2, 4, 300, dtype=torch.bool, device=device).scatter(-1, picks.long(), True)
    keep &= mask_of(rows.visible, 300)[:, 0]
    logits = torch.einsum("bthd,bsd->bths", torch.cat(inputs[:2], -1), inputs[2]) * rows.scale
    probs = logits.masked_fill(~keep.unsqueeze(2), float("-inf")).softmax(-1)
    eager = torch.einsum("bths,bsr->bthr", probs, inputs[2][..., : REAL.kv_lora_rank])
    error, allowed = ((x.double() - exact[0]).abs() for x in (ours[0], eager))
    assert error.max() <= 1.1 * allowed.max() + torch.finfo(dtype).eps * exact[0].abs().max()
    assert error.mean() <= 1.1 * allowed.mean()
    torch.testing.assert_close(ours[1].double(), exact[1], atol=1e-4, rtol=0)


def test_same_bits_on_twenty_runs(device):
    rows = mla_rows(DIMS, 3, 8, 40, device, dtype=torch.float32)
    picks = some_picks(rows)

    def run():
        leaves = [x.clone().requires_grad_() for x in absorbed(rows)]
        out, lse = torch.ops.dsa.sparse_mla(*leaves, rows.visible, None, picks, rows.scale)
        return [out, lse, *torch.autograd.grad(out.sum(), leaves)]

    first = run()
    assert all(torch.equal(a, b) for _ in range(20) for a, b in zip(first, run()))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(device, requires_grad):
    rows = mla_rows(DIMS, 2, 4, 6, device, dtype=torch.float32)
    inputs = [x.detach().requires_grad_(requires_grad) for x in absorbed(rows)]
    op, picks = torch.ops.dsa.sparse_mla.default, torch.tensor([0, 5, -1], dtype=torch.int32, device=device)
    for where in (
        (rows.visible, None, None),
        (None, mask_of(rows.visible, 6), None),
        (rows.visible, None, picks.expand(2, 4, 3).contiguous()),
    ):
        torch.library.opcheck(op, (*inputs, *where, rows.scale))


def test_opcheck_of_the_backward(device):
    rows = mla_rows(DIMS, 2, 8, 6, device, dtype=torch.float32)
    inputs = absorbed(rows)
    grads = torch.randn_like(inputs[0]), torch.randn(2, 8, DIMS.n_heads, device=device)
    op = torch.ops.dsa.sparse_mla_backward.default
    for picks in (None, some_picks(rows)):
        torch.library.opcheck(op, (*grads, *inputs, rows.visible, None, picks, rows.scale))
