"""Attention that teaches is dense attention, and its loss and gradients are those of the definition."""

import pytest
import torch
import torch.nn.functional as F
from cases import V32
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dsa_compile.divergence import taught_attention
from dsa_compile.lowering.mla.reference import expand_keys, mla
from dsa_compile.lowering.select.reference import index_scores, select
from dsa_compile.lowering.teach import reference

B, H, T, N, P, R, V, HI, DI = 2, 3, 13, 4, 2, 5, 6, 2, 4
SCALE, INDEX_SCALE = 0.7, DI**-0.5


@pytest.fixture
def inputs(device):
    """Operands in float64: sequence 0 holds a packed document from slot 5 on, sequence 1 three padded rows."""
    made = [torch.randn(s, dtype=torch.float64, device=device) * 2 for s in shapes()]
    visible = torch.stack([torch.zeros(T), torch.arange(1, T + 1)], -1).int().repeat(B, 1, 1).unsqueeze(1)
    visible[0, 0, 5:, 0] = 5
    visible[1, 0, :, 1] -= 3
    visible[1, 0, :3, 1] = 0
    return *made[:4], visible.to(device), None, *(x.requires_grad_() for x in made[4:])


def shapes():
    return (B, H, T, N + P), (B, T, R), (B, T, P), (H * (N + V), R), (B, T, HI, DI), (B, T, HI), (B, T, DI)


def taught(inputs, temperature=1.0):
    return taught_attention(*inputs, N, SCALE, INDEX_SCALE, temperature)


def naive(q, c_kv, k_pe, kv_b_weight, visible, topk, *student, temperature=1.0):
    """The mean over visible rows of KL(p || softmax(I)), from whole matrices."""
    slots = torch.arange(T, device=q.device)
    keep = (slots >= visible[:, 0, :, :1]) & (slots < visible[:, 0, :, 1:])
    if topk is not None:
        keep = keep & (slots == topk[..., None]).any(-2)
    key, _ = expand_keys(q, c_kv, k_pe, kv_b_weight, N)
    p = (q @ key.mT * SCALE).masked_fill(~keep[:, None], -torch.inf).softmax(-1)
    p = (p ** (1 / temperature)).sum(1)
    p = p / p.sum(-1, keepdim=True)
    scores = index_scores(*student, INDEX_SCALE).masked_fill(~keep, -torch.inf)
    rows = keep.any(-1)
    return (
        sum(F.kl_div(s[k].log_softmax(-1), t[k], reduction="sum") for s, t, k in zip(scores[rows], p[rows], keep[rows]))
        / rows.sum()
    )


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("budget", "temperature"), [(1, 1.0), (1 << 12, 2.0), (1 << 30, 1.0)])
def test_loss_output_and_gradients_are_those_of_the_definition_in_any_chunks(
    inputs, budget, temperature, sparse, monkeypatch
):
    monkeypatch.setitem(reference.ROW_BUDGET, inputs[0].device.type, budget)
    visible, student = inputs[4], inputs[6:]
    topk = select(*(x.detach() for x in student), visible, None, 4, INDEX_SCALE, 1 << 20) if sparse else None
    inputs = (*inputs[:5], topk, *student)
    out, loss = taught(inputs, temperature)
    torch.testing.assert_close(out, mla(*inputs[:5], None, topk, N, SCALE, [], 0, "half", -1))
    want = naive(*inputs, temperature=temperature)
    torch.testing.assert_close(loss, want)
    ours, theirs = (torch.autograd.grad(3 * x, student) for x in (loss, want))
    for mine, its in zip(ours, theirs):
        torch.testing.assert_close(mine, its)


def test_only_the_indexer_has_a_gradient(inputs):
    operands = [x if x is None else x.requires_grad_(x.is_floating_point()) for x in inputs]
    out, loss = taught(operands)
    assert (out.requires_grad, loss.requires_grad) == (False, True)
    loss.backward()
    assert [x is not None and x.grad is not None for x in operands] == [False] * 6 + [True] * 3
    with torch.no_grad():
        assert not taught(operands)[1].requires_grad


def test_a_nan_that_a_row_sees_is_in_the_loss(inputs):
    inputs[-1].data[0, 6] = torch.nan
    assert taught(inputs)[1].isnan()
    hidden = [x if x is None else x.detach() for x in inputs]
    hidden[-1][0, 6] = 0
    hidden[-1][1, T - 1] = torch.nan  # padding: nobody sees the last slots of sequence 1
    assert taught(hidden)[1].isfinite()


class Peak(TorchDispatchMode):
    """Most bytes that tensors made under it hold at once, and the most elements of one of them."""

    def __init__(self):
        super().__init__()
        self.live, self.bytes, self.elements = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(made):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.live[StorageWeakRef(storage)] = storage.nbytes()
                self.elements = max(self.elements, storage.nbytes() // x.itemsize)
        self.live = {storage: size for storage, size in self.live.items() if not storage.expired()}
        self.bytes = max(self.bytes, sum(self.live.values()))
        return made


def test_a_layer_of_deepseek_v3_at_4096_tokens_adds_less_than_6_gib():
    heads, tokens, index = V32.n_heads, 4096, V32.indexer
    with torch.device("meta"), Peak() as peak:
        q = torch.empty(1, heads, tokens, V32.qk_nope_head_dim + V32.qk_rope_head_dim, dtype=torch.bfloat16)
        c_kv, k_pe = (torch.empty(1, tokens, n, dtype=q.dtype) for n in (V32.kv_lora_rank, V32.qk_rope_head_dim))
        weight = torch.empty(heads * (V32.qk_nope_head_dim + V32.v_head_dim), V32.kv_lora_rank, dtype=q.dtype)
        visible = torch.empty(1, 1, tokens, 2, dtype=torch.int32)
        student = [
            torch.empty(1, tokens, index.n_heads, index.head_dim, dtype=q.dtype, requires_grad=True),
            torch.empty(1, tokens, index.n_heads, requires_grad=True),
            torch.empty(1, tokens, index.head_dim, dtype=q.dtype, requires_grad=True),
        ]
        before, peak.elements = peak.bytes, 0
        _, loss = taught_attention(q, c_kv, k_pe, weight, visible, None, *student, V32.qk_nope_head_dim, 0.1, 0.1)
        loss.backward()
    assert reference.ROW_BUDGET["cuda"] / 2 < peak.bytes - before < 6 << 30
    assert peak.elements < heads * tokens * tokens / 16
