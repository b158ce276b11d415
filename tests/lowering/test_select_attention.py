"""The exact selection: the slots that a layer's own heads, averaged, attend to most."""

import naive
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import causal, lengths, mask_of, mla_dims, mla_rows, seeds

from dsa_compile.dims import LayerDims

BUDGET = 1 << 28
DIMS = LayerDims(n_heads=3, kv_lora_rank=9, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6)


def select_attention(rows, visible=None, mask=None, topk=4, budget=BUDGET):
    return torch.ops.dsa.select_attention(*rows.attention, visible, mask, rows.nope, rows.scale, topk, budget)


def definition(rows, b, t, seen):
    """Head-mean attention probability of every slot for one query, 0 where it sees nothing."""
    H, slots = rows.q.shape[1], rows.c_kv.shape[1]
    weight, mean = rows.kv_b_weight.view(H, -1, rows.c_kv.shape[2]), torch.zeros(slots, dtype=torch.float64)
    for h in range(H if seen else 0):
        keys = torch.cat([rows.c_kv[b, seen] @ weight[h, : rows.nope].T, rows.k_pe[b, seen]], 1)
        mean[seen] += ((keys @ rows.q[b, h, t] * rows.scale).softmax(0) / H).cpu()
    return mean.tolist()


@given(data=st.data(), dims=mla_dims(), slots=lengths(4), seed=seeds)
def test_equals_the_definition(device, data, dims, slots, seed):
    batch, queries = data.draw(st.integers(1, 3), label="B"), data.draw(st.integers(1, 3), label="T")
    rows = mla_rows(dims, batch, queries, slots, device, seed=seed, spans=True)
    mask = torch.rand(1, 1, queries, slots, device=device) < 0.7 if data.draw(st.booleans(), label="mask") else None
    ours = select_attention(rows, rows.visible, mask)
    for b in range(batch):
        for t in range(queries):
            seen = naive.seen_slots(slots, (b, t), rows.visible, mask, None)
            assert ours[b, t].tolist() == naive.best(definition(rows, b, t, seen), seen, 4)


@pytest.mark.parametrize("topk", [7, 96, 100])
def test_rows_that_see_around_k_slots_and_budgets(device, topk):
    rows = mla_rows(DIMS, 1, 5, 130, device)
    end = torch.tensor([0, topk - 1, topk, topk + 1, 130])
    visible = torch.stack([torch.zeros(5), end], -1).int()[None, None].to(device)
    picks = select_attention(rows, visible, topk=topk)
    assert (picks >= 0).sum(-1)[0].tolist() == end.clamp(max=topk).tolist()
    assert picks[0, 2].tolist() == list(range(topk))
    assert torch.equal(select_attention(rows, None, mask_of(visible, 130), topk=topk), picks)
    assert torch.equal(select_attention(rows, visible, topk=topk, budget=1), picks)


def test_equal_keys_tie_to_the_lower_slot(device):
    rows = mla_rows(DIMS, 1, 1, 12, device)
    rows.c_kv[:], rows.k_pe[:] = 0.5, 0.25
    assert select_attention(rows, topk=5).tolist() == [[[0, 1, 2, 3, 4]]]


def test_unseen_nan_and_head_order_change_nothing(device):
    rows = mla_rows(DIMS, 2, 4, 20, device)
    want = select_attention(rows, rows.visible)
    order = torch.tensor([2, 0, 1], device=device)
    weight = rows.kv_b_weight.view(3, -1, DIMS.kv_lora_rank)[order].flatten(0, 1)
    permuted = torch.ops.dsa.select_attention(
        rows.q[:, order], rows.c_kv, rows.k_pe, weight, rows.visible, None, rows.nope, rows.scale, 4, BUDGET
    )
    assert torch.equal(permuted, want)
    rows.c_kv[:, 19] = float("nan")
    assert torch.equal(select_attention(rows, rows.visible)[:, :3], want[:, :3])


def test_same_bits_on_twenty_runs(device):
    rows = mla_rows(DIMS, 2, 7, 200, device, dtype=torch.bfloat16)
    first = select_attention(rows, rows.visible, topk=32)
    assert all(torch.equal(first, select_attention(rows, rows.visible, topk=32)) for _ in range(20))


def test_opcheck(device):
    rows = mla_rows(DIMS, 2, 3, 9, device, dtype=torch.float32)
    visible = causal(2, 3, 9).to(device)
    for where in ((visible, None), (None, mask_of(visible, 9))):
        arguments = (*rows.attention, *where, rows.nope, rows.scale, 4, BUDGET)
        torch.library.opcheck(torch.ops.dsa.select_attention.default, arguments)
