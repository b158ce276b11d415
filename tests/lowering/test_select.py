"""The lightning indexer's choice: scores, exact top-k, memory."""

import naive
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import causal, indexer_dims, lengths, mask_of, seeds
from torch.utils._python_dispatch import TorchDispatchMode

from dsa_compile.dims import IndexerDims
from dsa_compile.errors import ConfigError
from dsa_compile.lowering.select import index_scores
from dsa_compile.lowering.select.projections import hadamard, project, rotate
from dsa_compile.lowering.select.reference import select as reference

BUDGET = 1 << 28
DIMS = IndexerDims(n_heads=8, head_dim=12)


def indexer_rows(dims, batch, queries, slots, device, *, dtype=torch.float64, seed=0):
    """Index queries, signed head weights and index keys."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, queries, dims.n_heads, dims.head_dim),
        (batch, queries, dims.n_heads),
        (batch, slots, dims.head_dim),
    )
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes]


def select(q, weights, keys, visible=None, mask=None, topk=8, budget=BUDGET):
    return torch.ops.dsa.select(q, weights, keys, visible, mask, topk, q.shape[-1] ** -0.5, budget)


@given(data=st.data(), dims=indexer_dims(), slots=lengths(4), seed=seeds)
def test_equals_the_definition(device, data, dims, slots, seed):
    batch, queries = data.draw(st.integers(1, 3), label="B"), data.draw(st.integers(1, 3), label="T")
    q, weights, keys = indexer_rows(dims, batch, queries, slots, device, seed=seed)
    if data.draw(st.booleans(), label="whole numbers, so many ties"):
        q, weights, keys = q.round(), weights.round(), keys.round()
    scale = data.draw(st.sampled_from([1.0, 0.25]), label="scale")
    start = torch.randint(0, slots + 1, (batch, 1, queries, 1), dtype=torch.int32)
    visible = torch.cat([start % 3, start], -1).to(device)
    mask = torch.rand(1, 1, queries, slots, device=device) < 0.7 if data.draw(st.booleans(), label="mask") else None
    ours = torch.ops.dsa.select(q, weights, keys, visible, mask, 4, scale, BUDGET)
    for b in range(batch):
        for t in range(queries):
            scores = [naive.index_score(q[b, t], weights[b, t], keys[b, s], scale) for s in range(slots)]
            seen = naive.seen_slots(slots, (b, t), visible, mask, None)
            assert ours[b, t].tolist() == naive.best(scores, seen, 4)


def test_permuted_heads_and_scaled_weights_choose_the_same(device):
    q, weights, keys = indexer_rows(DIMS, 2, 5, 60, device)
    visible, order = causal(2, 5, 60).to(device), torch.randperm(DIMS.n_heads, device=device)
    scores = index_scores(q, weights, keys, 0.3)
    torch.testing.assert_close(index_scores(q[:, :, order], weights[..., order], keys, 0.3), scores, atol=1e-12, rtol=0)
    want = select(q, weights, keys, visible)
    assert torch.equal(select(q[:, :, order], weights[..., order], keys, visible), want)
    assert torch.equal(select(q, weights * 7.5, keys, visible), want)
    assert not torch.equal(select(q, -weights, keys, visible), want)


def test_scores_have_gradients(device):
    leaves = [x.requires_grad_() for x in indexer_rows(IndexerDims(n_heads=3, head_dim=4), 2, 2, 5, device)]
    torch.autograd.gradcheck(lambda *inputs: index_scores(*inputs, 0.5), leaves)


@pytest.mark.parametrize("topk", [1, 96, 100, 200])
@pytest.mark.parametrize("n_heads", [1, 8, 22])
def test_rows_that_see_around_k_slots(device, topk, n_heads):
    q, weights, keys = indexer_rows(IndexerDims(n_heads=n_heads, head_dim=8), 1, 5, 230, device)
    end = torch.tensor([0, topk - 1, topk, topk + 1, 230])
    visible = torch.stack([torch.zeros(5), end], -1).int()[None, None].to(device)
    picks = select(q, weights, keys, visible, topk=topk)
    assert (picks >= 0).sum(-1)[0].tolist() == end.clamp(max=topk).tolist()
    for t in range(3):
        assert picks[0, t, : end[t]].tolist() == list(range(end[t]))
    by_mask = select(q, weights, keys, None, mask_of(visible, 230), topk=topk)
    assert torch.equal(picks, by_mask)


def test_later_other_and_unseen_keys_change_nothing(device):
    q, weights, keys = indexer_rows(DIMS, 2, 6, 40, device)
    visible = causal(2, 6, 40).to(device)
    visible[0, 0, :, 0] = 3
    want = select(q, weights, keys, visible)
    dirty = keys.clone()
    dirty[0, :3] = float("nan")
    dirty[:, 37:] = float("inf")
    seen_all = visible[0, 0, :, 1] <= 37
    assert 0 < seen_all.sum() < 6
    assert torch.equal(select(q, weights, dirty, visible)[:, seen_all], want[:, seen_all])
    alone = [select(q[b : b + 1], weights[b : b + 1], keys[b : b + 1], visible[b : b + 1]) for b in range(2)]
    assert torch.equal(torch.cat(alone), want)


def test_nan_is_chosen_last(device):
    q, weights, keys = indexer_rows(DIMS, 1, 1, 10, device)
    keys[0, [1, 4]] = float("nan")
    assert select(q, weights, keys).tolist() == [[[0, 2, 3, 5, 6, 7, 8, 9]]]
    assert select(q, weights, keys, topk=9).tolist() == [[[0, 1, 2, 3, 5, 6, 7, 8, 9]]]
    nothing = torch.full_like(q, float("nan"))
    assert select(nothing, weights, keys).tolist() == [[list(range(8))]]


def test_16_bit_inputs_choose_what_their_exact_scores_say(device):
    rows = indexer_rows(DIMS, 2, 4, 300, device, dtype=torch.bfloat16)
    exact = index_scores(*(x.double() for x in rows), DIMS.head_dim**-0.5)
    ours = index_scores(*rows, DIMS.head_dim**-0.5)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=0)
    picks = select(*rows, topk=32).long()
    kth = exact.topk(32).values[..., -1:]
    assert (exact.gather(-1, picks) >= kth - 1e-5).all()


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that an operator made."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


def test_memory_stays_under_the_budget_and_chunks_change_nothing(device):
    q, weights, keys = indexer_rows(DIMS, 2, 64, 512, device)
    visible = causal(2, 64, 512).to(device)
    want, all_scores = select(q, weights, keys, visible, topk=32), 2 * 64 * 8 * 512 * 8
    one_row = all_scores // 64 * (2 * 8 + 6) // 8
    for budget in (one_row, 5 * one_row, all_scores):
        with LargestTensor() as largest:
            chunked = reference(q, weights, keys, visible, None, 32, DIMS.head_dim**-0.5, budget)
        assert torch.equal(chunked, want)
        assert largest.nbytes <= budget
    with LargestTensor() as largest:
        reference(q, weights, keys, visible, None, 32, DIMS.head_dim**-0.5, 4 * 512)
    assert largest.nbytes <= one_row


@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts the memory of a GPU")
def test_gpu_memory_stays_under_the_budget():
    device, budget = torch.device("cuda"), 64 << 20
    q, weights, keys = indexer_rows(DIMS, 1, 2048, 32768, device, dtype=torch.bfloat16)
    visible = causal(1, 2048, 32768).to(device)
    select(q, weights, keys, visible, topk=256, budget=budget)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    picks = select(q, weights, keys, visible, topk=256, budget=budget)
    assert torch.cuda.max_memory_allocated() - before <= 2 * budget + picks.nbytes


def test_same_bits_on_twenty_runs(device):
    rows = indexer_rows(DIMS, 2, 7, 200, device, dtype=torch.bfloat16)
    first = select(*rows, topk=96)
    assert all(torch.equal(first, select(*rows, topk=96)) for _ in range(20))


@pytest.mark.parametrize("topk", [4, 30])
def test_opcheck(device, topk):
    rows = indexer_rows(DIMS, 2, 3, 20, device, dtype=torch.float32)
    visible = causal(2, 3, 20).to(device)
    for where in ((visible, None), (None, mask_of(visible, 20))):
        torch.library.opcheck(torch.ops.dsa.select.default, (*rows, *where, topk, 0.3, BUDGET))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotation_turns_pairs_by_their_angle(device, layout):
    P, angles = 6, torch.rand(2, 4, 3, dtype=torch.float64, device=device)
    x = torch.randn(2, 4, 5, P, dtype=torch.float64, device=device)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    first, second = (x[..., :3], x[..., 3:]) if layout == "half" else (x[..., ::2], x[..., 1::2])
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles).unsqueeze(2)
    torch.testing.assert_close(rotate(x, cos, sin, layout), torch.cat([turned.real, turned.imag], -1))
    with pytest.raises(ValueError, match="expected 'half' or 'interleaved', came 'neox'"):
        rotate(x, cos, sin, "neox")


def projections(device, P):
    """Inputs of `project` for 3 heads of 8 values."""
    hidden, latent = 10, 7

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64, device=device)

    x, q_latent, angles = normal(2, 5, hidden), normal(2, 5, latent), normal(1, 5, P // 2)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    return x, q_latent, cos, sin, normal(24, latent), normal(8, hidden), normal(8), normal(8), normal(3, hidden)


def test_projections_keep_the_norm_of_what_rope_turns(device):
    P, dims = 4, IndexerDims(n_heads=3, head_dim=8)
    inputs = projections(device, P)
    q, k, weights = project(*inputs, n_heads=3, head_dim=8, rope_dim=P, layout="half")
    x, q_latent, _, _, wq_b, wk, weight, bias, proj = inputs
    plain = x @ wk.T
    normed = (plain - plain.mean(-1, keepdim=True)) / (plain.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    normed = normed * weight + bias
    torch.testing.assert_close(k[..., P:], normed[..., P:])
    torch.testing.assert_close(k[..., :P].norm(dim=-1), normed[..., :P].norm(dim=-1))
    torch.testing.assert_close(q.norm(dim=-1), (q_latent @ wq_b.T).view(2, 5, 3, 8).norm(dim=-1))
    torch.testing.assert_close(weights, (x @ proj.T * dims.n_heads**-0.5).float())


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_the_hadamard_matrix_is_the_parity_of_common_bits(device, size):
    found = hadamard(size, torch.float64, device) * size**0.5
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    torch.testing.assert_close(found.cpu(), torch.tensor(signs, dtype=torch.float64))


@pytest.mark.parametrize("size", [12, 24, 96])
def test_there_is_none_of_sizes_that_are_no_power_of_two(device, size):
    with pytest.raises(ConfigError, match=rf"rotate_index: expected an index_head_dim .* power of two, came {size}\."):
        hadamard(size, torch.float32, device)


def test_rotated_projections_have_the_same_scores(device):
    inputs, sizes = projections(device, 4), {"n_heads": 3, "head_dim": 8, "rope_dim": 4, "layout": "half"}
    q, k, weights = project(*inputs, **sizes)
    rotation = hadamard(8, torch.float64, device)
    turned_q, turned_k, same = project(*inputs, rotation, **sizes)
    assert torch.equal(same, weights)
    torch.testing.assert_close((turned_q, turned_k), (q @ rotation, k @ rotation))
    torch.testing.assert_close(index_scores(turned_q, same, turned_k, 0.3), index_scores(q, weights, k, 0.3))
