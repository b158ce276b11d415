"""A dense layer that asks for a selection gets one."""

import naive
import pytest
import torch
from graphs import BUDGET, DIMS, NOPE, RANK, SCALE, over_pool, selected, unrelated
from harness import PassHarness, capture
from strategies import causal, mla_rows
from torch import nn

import dsa_compile
from dsa_compile.config import DSAConfig
from dsa_compile.lowering.fp8_keys import quantise
from dsa_compile.models.miniature import miniature
from dsa_compile.passes.absorption import whole_pool
from dsa_compile.passes.insert_indexer import InsertIndexer

check = PassHarness(InsertIndexer(), DSAConfig(select_budget=BUDGET))
SELECT, EXACT = "dsa.select.default", "dsa.select_attention.default"
HIDDEN, LATENT, HI, DI, P = 8, 7, 2, 6, DIMS.qk_rope_head_dim


class Rotary(nn.Module):
    def forward(self, x):
        steps = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        angles = (steps * x.std())[None, :, None].expand(-1, -1, P)
        return angles.cos(), angles.sin()


class Attention(nn.Module):
    """One layer with the projections of an MLA module, without what ``lacks`` names."""

    def __init__(self, topk, lacks):
        super().__init__()
        self.topk, self.lacks = topk, lacks
        self.q_b_proj = nn.Linear(LATENT, DIMS.n_heads * (NOPE + P), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(HIDDEN, RANK + P, bias=False)
        self.kv_b = nn.Parameter(torch.randn(DIMS.n_heads * (NOPE + DIMS.v_head_dim), RANK))
        shapes = (HI * DI, LATENT), (DI, HIDDEN), (DI,), (DI,), (HI, HIDDEN)
        self.indexer = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, x, q_latent, rope, visible):
        q = q_latent @ self.q_b_proj.weight.T if "q_b_proj" in self.lacks else self.q_b_proj(q_latent)
        weight = self.kv_a_proj_with_mqa.weight
        latent = x @ weight.T if "kv_a_proj_with_mqa" in self.lacks else self.kv_a_proj_with_mqa(x)
        q = q.unflatten(-1, (DIMS.n_heads, -1)).transpose(1, 2)
        q = torch.cat([q[..., :NOPE], q[..., NOPE:] * (rope[0] + rope[1]).unsqueeze(1)], -1)
        return torch.ops.dsa.mla.default(
            q,
            latent[..., :RANK],
            latent[..., RANK:],
            self.kv_b,
            visible,
            None,
            None,
            NOPE,
            SCALE,
            list(self.indexer),
            self.topk,
            "half",
            -1,
        )


class Model(nn.Module):
    def __init__(self, topk, lacks=(), layers=1):
        super().__init__()
        self.layers = nn.ModuleList(Attention(topk, lacks) for _ in range(layers))
        self.rotary_emb = Rotary()

    def forward(self, x, q_latent, visible):
        rope = (x[..., :P], x[..., P:]) if "rotary_emb" in self.layers[0].lacks else self.rotary_emb(x)
        return [layer(x, q_latent, rope, visible) for layer in self.layers]


def inputs(device, queries=5):
    x, q_latent = torch.randn(2, queries, HIDDEN), torch.randn(2, queries, LATENT)
    return x.to(device).double(), q_latent.to(device).double(), causal(2, queries, queries).to(device)


def rows(device, queries=5):
    made = mla_rows(DIMS, 2, queries, 11, device)
    return made.q, torch.cat([made.c_kv, made.k_pe], -1), made.kv_b_weight, made.visible


INDEXER = {SELECT: 1, "linear": 3, "layer_norm": 1}


@pytest.mark.parametrize("topk", [5, 9])
@pytest.mark.parametrize("dynamic", [None, True])
def test_an_indexer_that_selects_everything_changes_nothing(device, topk, dynamic):
    model = Model(topk).to(device).double()
    outcome = check(model, *inputs(device), matches=1, ops={**INDEXER, "scatter": 1}, dynamic=dynamic)
    (select,), (mla,) = outcome.nodes(torch.ops.dsa.select.default), outcome.nodes(torch.ops.dsa.mla.default)
    assert select.args[5:] == (topk, DI**-0.5, BUDGET, None, None)
    assert mla.args[6] is select
    assert mla.args[9:11] == ([], 0)
    assert [(e.where, e.reason) for e in outcome.entries] == [("layers.0", f"dsa::select of {topk}")]


def test_what_the_indexer_picks_is_what_the_layer_attends_to(device):
    model, (x, q_latent, visible) = Model(3).to(device).double(), inputs(device, queries=12)
    outcome = check(model, x, q_latent, visible, matches=1, ops=INDEXER, atol=None)
    layer, (cos, sin) = model.layers[0], model.rotary_emb(x)
    q = (q_latent @ layer.indexer[0].T).unflatten(-1, (HI, DI))
    key = nn.functional.layer_norm(x @ layer.indexer[1].T, [DI], *layer.indexer[2:4], 1e-6)
    weights = x @ layer.indexer[4].T

    def turned(rows, cos, sin):
        pairs = torch.complex(rows[..., : P // 2], rows[..., P // 2 : P]) * torch.complex(cos, sin)[..., : P // 2]
        return torch.cat([pairs.real, pairs.imag, rows[..., P:]], -1)

    q, key = turned(q, cos.unsqueeze(2), sin.unsqueeze(2)), turned(key, cos, sin)
    scores = (weights.unsqueeze(-1) * torch.einsum("bthd,bsd->bths", q, key).relu()).sum(2)
    picks = [[naive.best(scores[b, t].tolist(), list(range(t + 1)), 3) for t in range(12)] for b in range(2)]
    assert outcome.values[outcome.nodes(torch.ops.dsa.select.default)[0]].tolist() == picks


@pytest.mark.parametrize(("head_dim", "dtype"), [(12, None), (16, "fp8")])
def test_a_cached_layer_writes_its_index_keys_and_reads_their_pools(device, head_dim, dtype):
    model = dsa_compile.prepare(
        miniature("deepseek_v3", num_hidden_layers=2).to(device),
        indexer="random",
        index_n_heads=4,
        index_head_dim=head_dim,
        index_topk=8,
        cache={"index_dtype": dtype},
    )
    ids = torch.randint(3, 128, (2, 6), device=device)
    graph = capture(model, ids, past_key_values=model.make_cache(2, 32))
    outcome = check(graph, matches=2, ops={SELECT: 2, "linear": 6}, atol=0)
    assert [e.where for e in outcome.entries] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    selects = outcome.nodes(torch.ops.dsa.select.default)
    writes = outcome.nodes(torch.ops.dsa.cache_write.default)
    order = list(outcome.gm.graph.nodes)
    for write, select in zip(writes, selects, strict=True):
        read = [pool and whole_pool(pool) for pool in (select.args[2], select.args[9])]
        assert [write.args[1], write.args[7]] == read
        assert outcome.values[select.args[2]].shape[1] == 16, "as far as it is filled"
        assert order.index(write) < order.index(select)
        written = outcome.values[write.args[5]]
        want = (written,) if dtype is None else quantise(written)
        pools = [outcome.values[pool] for pool in (write.args[1], write.args[7]) if pool is not None]
        for pool, rows in zip(pools, want, strict=True):
            assert torch.equal(pool[:, :6], rows)
            assert not pool[:, 6:].any()


def test_the_exact_selector_needs_no_parameters(device):
    outcome = check(over_pool, *rows(device), matches=1, ops={EXACT: 1}, atol=None, index_topk=4)
    (select,), (mla,) = outcome.nodes(torch.ops.dsa.select_attention.default), outcome.nodes(torch.ops.dsa.mla.default)
    assert (select.args[:6], select.args[6:]) == (mla.args[:6], (NOPE, SCALE, 4, BUDGET))
    assert mla.args[6] is select
    assert outcome.entries[0].reason == "dsa::select_attention of 4"


@pytest.mark.parametrize(("own", "option", "used"), [(0, 11, 11), (0, None, 2048), (12, 11, 12)])
def test_the_option_gives_attention_to_layers_that_ask_for_nothing(device, own, option, used):
    exact = PassHarness(InsertIndexer(), DSAConfig(selector="attention", index_topk=option))
    outcome = exact(over_pool, *rows(device), matches=1, ops={EXACT: 1}, atol=0, index_topk=own)
    assert outcome.entries[0].reason == f"dsa::select_attention of {used}"


def test_a_dense_layer_stays(device):
    check(over_pool, *rows(device), matches=0, reason="no selector: attention stays dense")


def test_a_selection_stays(device):
    check(selected, *rows(device), 4, matches=0, reason="has a selection already")


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ("kv_a_proj_with_mqa", "no projection layers.0.kv_a_proj_with_mqa in the graph"),
        ("q_b_proj", "no projection layers.0.q_b_proj or layers.0.q_proj in the graph"),
        ("rotary_emb", "no cos and sin (or complex frequencies) that come out of a rotary_emb module"),
    ],
)
def test_a_layer_without_what_an_indexer_needs_stays(device, lacks, reason):
    check(Model(3, {lacks}).to(device).double(), *inputs(device), matches=0, reason=reason)


def test_noise_and_several_layers(device):
    class Noisy(Model):
        def forward(self, x, q_latent, visible):
            x.sin()
            return *super().forward(x * 1, q_latent.view(q_latent.shape), visible), x.mean(), q_latent.cos()

    model = Noisy(5, layers=3).to(device).double()
    outcome = check(model, *inputs(device), matches=3, ops={op: 3 * n for op, n in INDEXER.items()}, atol=0)
    assert [e.where for e in outcome.entries] == ["layers.0", "layers.1", "layers.2"]


def test_a_layer_that_runs_twice_reads_each_time_what_it_is_given_then(device):
    class Twice(Model):
        def forward(self, x, q_latent, visible, *then):
            return super().forward(x, q_latent, visible) + super().forward(*then)

    def picks(model, *given, matches):
        outcome = check(model, *given, matches=matches, ops={op: matches * n for op, n in INDEXER.items()}, atol=None)
        return [outcome.values[node] for node in outcome.nodes(torch.ops.dsa.select.default)]

    model, first, then = Twice(3).to(device).double(), inputs(device, queries=12), inputs(device, queries=12)
    once = Model(3).to(device).double()
    once.load_state_dict(model.state_dict())
    want = [picks(once, *given, matches=1)[0] for given in (first, then)]
    assert not torch.equal(*want)
    assert all(map(torch.equal, picks(model, *first, *then, matches=2), want))


def test_other_attention_is_untouched(device):
    x, weight = torch.randn(2, 5, 8, device=device), torch.randn(8, 8, device=device)
    assert check(unrelated, x, weight, matches=0).entries == []
