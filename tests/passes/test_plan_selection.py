"""Layers attend to the selections that a plan names, and what no layer attends to is gone."""

import naive
import pytest
import torch
from graphs import BUDGET, DIMS, NOPE, RANK, SCALE, attend, unrelated
from harness import PassHarness
from strategies import mask_of, mla_rows
from torch import nn

from dsa_compile.config import DSAConfig
from dsa_compile.lowering.fp8_keys import quantise
from dsa_compile.passes.plan_selection import PlanSelection

MLA, SELECT, EXACT = "dsa.mla.default", "dsa.select.default", "dsa.select_attention.default"
TOPK = 4


class Attention(nn.Module):
    """One layer over a pool: by an indexer that writes its keys (in fp8), exact, or dense.

    ``marked``: as `prepare` marks it.
    """

    def __init__(self, kind, marked=-1):
        super().__init__()
        self.kind, self.marked = kind, marked

    def forward(self, q, latent, weight, visible, index_q, index_weights, index_key, pool, slots, marked=None):
        c_kv, k_pe = latent[..., :RANK], latent[..., RANK:]
        picks = None
        if self.kind in ("indexer", "fp8"):
            keys, scales = pool if self.kind == "fp8" else (pool, None)
            torch.ops.dsa.cache_write.default(latent, keys, slots, None, None, index_key * 2, None, scales)
            picks = torch.ops.dsa.select.default(
                index_q.cos(), index_weights, keys, visible, None, TOPK, 0.5, BUDGET, None, scales
            )
        elif self.kind == "exact":
            picks = torch.ops.dsa.select_attention.default(
                q, c_kv, k_pe, weight, visible, None, NOPE, SCALE, TOPK, BUDGET
            )
        return torch.ops.dsa.mla.default(
            q, c_kv, k_pe, weight, visible, None, picks, NOPE, SCALE, [], 0, "half", marked or self.marked
        )


class Model(nn.Module):
    def __init__(self, kinds, marked=None):
        super().__init__()
        marked = marked or [-1] * len(kinds)
        self.layers = nn.ModuleList(Attention(kind, mark) for kind, mark in zip(kinds, marked))

    def forward(self, q, latent, weight, visible, index_q, index_weights, index_key, pools, slots):
        out = []
        for layer, pool in zip(self.layers, pools):
            out.append(layer(q, latent, weight, visible, index_q, index_weights, index_key, pool, slots))
            q = q * 0.9 + 0.1 * out[-1].mean()
        return out


def check(model, plan=None, layer0="serial", **expected):
    rows = mla_rows(DIMS, 2, 5, 11, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    kinds = [layer.kind for layer in model.modules() if isinstance(layer, Attention)]
    pools = [quantise(normal(2, 11, 16)) if kind == "fp8" else normal(2, 11, 16) for kind in kinds]
    latent = torch.cat([rows.c_kv, rows.k_pe], -1)
    slots = torch.arange(6, 11).expand(2, 5).contiguous()
    inputs = rows.q, latent, rows.kv_b_weight, rows.visible, normal(2, 5, 3, 16), normal(2, 5, 3), normal(2, 5, 16)
    harness = PassHarness(PlanSelection(), DSAConfig(plan=plan, layer0=layer0))
    return harness(model, *inputs, pools, slots, **expected)


def sources(outcome):
    """For each attention the number of the layer whose selection it reads; None: all."""
    found = []
    for node in outcome.nodes(torch.ops.dsa.mla.default):
        topk = node.args[6]
        path = None if topk is None else list(topk.meta["nn_module_stack"].values())[-1][0]
        found.append(None if path is None else int(path.split("layers.")[1].split(".")[0]))
    return found


@pytest.mark.parametrize("kind", ["indexer", "fp8", "exact"])
@pytest.mark.parametrize(
    ("plan", "layer0", "read", "matches", "dropped"),
    [
        ("share:FSFS", "serial", [0, 0, 2, 2], 4, 2),
        ("mli", "serial", [0, 0, 1, 2], 4, 1),
        ("mli", "dense", [None, 0, 1, 2], 5, 1),
        ("mli+share:FSFS", "serial", [0, 0, 0, 2], 5, 2),
        (["own", "from:0", "previous", "own"], "serial", [0, 0, 1, 3], 3, 1),
    ],
)
def test_layers_read_what_the_plan_names(kind, plan, layer0, read, matches, dropped):
    ops = {EXACT: -dropped} if kind == "exact" else {SELECT: -dropped, "dsa.cache_write.default": -dropped}
    outcome = check(Model([kind] * 4), plan, layer0, matches=matches, ops=ops, atol=None)
    assert sources(outcome) == read
    gone = [e for e in outcome.entries if e.matched and e.reason.startswith("selection dropped")]
    assert len(gone) == dropped
    assert len(outcome.nodes("cos")) == (4 - dropped) * (kind != "exact")


def test_marks_of_prepare_need_no_option():
    model = Model(["exact", "dense", "exact", "dense"], [-1, 0, 0, 2])
    outcome = check(model, matches=3, ops={}, atol=None)
    assert sources(outcome) == [0, 0, 0, 2]


def test_a_layer_that_runs_again_may_read_the_last_row_of_its_first_selection():
    class Again(Model):
        def forward(self, q, latent, weight, visible, index_q, index_weights, index_key, pools, slots):
            rest = latent, weight, visible, index_q, index_weights, index_key, pools[1], slots
            row = [x[:, -1:] for x in (index_q, index_weights, index_key)]
            last = latent, weight, visible[:, :, -1:], *row, pools[1], slots[:, -1:]
            return self.layers[1](q, *rest), self.layers[1](q[:, :, -1:], *last, marked=1)

    outcome = check(Again(["dense", "indexer"]), matches=2, ops={SELECT: -1}, atol=None)
    (select,) = outcome.nodes(torch.ops.dsa.select.default)
    first, again = outcome.nodes(torch.ops.dsa.mla.default)
    assert first.args[6] is select
    assert torch.equal(outcome.values[again.args[6]], outcome.values[select][:, -1:])
    assert all(write.args[5] is not None for write in outcome.nodes(torch.ops.dsa.cache_write.default))


def test_a_layer_marked_dense_lends_its_selection_all_the_same():
    outcome = check(Model(["exact", "exact", "exact"], [-2, 0, -1]), matches=3, ops={EXACT: -1}, atol=None)
    assert sources(outcome) == [None, 0, 2]


class Keeping(nn.Module):
    """A cache layer names the selections that it keeps."""

    def __init__(self, current):
        super().__init__()
        self.layers, self.current = nn.ModuleList([Attention("exact", -3)]), current
        self.layers[0].forward = self.attend

    def attend(self, kept, slots, *inputs):
        torch.ops.dsa.keep_selection.default(kept, slots, None, self.current)
        return Attention.forward(self.layers[0], *inputs)

    def forward(self, *inputs):
        return self.layers[0](*inputs) * 2


@pytest.mark.parametrize(
    ("tokens", "current", "waits", "words"),
    [(1, True, False, "that the cache kept"), (1, False, True, "to its own"), (4, True, True, "that the cache kept")],
)
def test_the_first_layer_attends_to_the_selection_of_the_token_before(tokens, current, waits, words):
    rows = mla_rows(DIMS, 2, tokens, 11, torch.device("cpu"))
    slots, kept = torch.arange(11 - tokens, 11).expand(2, tokens), torch.tensor([[1, 2, 5, 6], [0, 3, -1, -1]]).int()
    latent = torch.cat([rows.c_kv, rows.k_pe], -1)
    inputs = rows.q, latent, rows.kv_b_weight, rows.visible, None, None, None, None, None
    harness = PassHarness(PlanSelection())
    outcome = harness(Keeping(current), kept, slots, *inputs, matches=1, ops={}, atol=None)
    assert words in outcome.entries[0].reason
    (mla,), (own,) = outcome.nodes(torch.ops.dsa.mla.default), outcome.nodes(torch.ops.dsa.select_attention.default)
    (keep,) = outcome.nodes(torch.ops.dsa.keep_selection.default)
    assert (keep.args[2], keep.next.op) == (own, "output")
    assert (own in ancestors(mla)) == waits
    late, selected = outcome.values[mla.args[6]], outcome.values[own]
    for b in range(2):
        before = kept[b].tolist() if current else None
        for t, (start, end) in enumerate(rows.visible[b, 0].tolist()):
            assert late[b, t].tolist() == naive.a_token_late(selected[b, t].tolist(), before, start, end)
            before = selected[b, t].tolist()
    assert torch.equal(outcome.inputs[0], selected[:, -1])


def ancestors(node):
    found, todo = set(), [node]
    while todo:
        found |= {*(inputs := todo.pop().all_input_nodes)}
        todo += inputs
    return found


def test_a_mask_does_not_say_which_token_a_row_is(device):
    rows = mla_rows(DIMS, 2, 5, 11, device)

    def forward(q, c_kv, k_pe, weight, mask):
        common = q, c_kv, k_pe, weight, None, mask
        picks = torch.ops.dsa.select_attention.default(*common, NOPE, SCALE, TOPK, BUDGET)
        return torch.ops.dsa.mla.default(*common, picks, NOPE, SCALE, [], 0, "half", -3)

    layer = nn.Module()
    layer.layers = nn.ModuleList([nn.Module()])
    layer.layers[0].forward = forward
    layer.forward = lambda *inputs: layer.layers[0](*inputs)
    mask = mask_of(rows.visible, 11)
    harness = PassHarness(PlanSelection())
    harness(layer, *rows.attention, mask, matches=0, reason="which token a row is, a mask does not say")


def test_a_plan_that_is_the_model_changes_nothing():
    for plan in (None, "own", ["own"] * 3):
        check(Model(["indexer"] * 3), plan, matches=0)


def test_refusals():
    check(Model(["dense"] * 3), "mli", matches=0, reason="no layer has a selection")
    check(Model(["dense", "dense"], [-1, 0]), matches=0, reason="layer 0 has no selection to attend to")


def test_a_graph_of_some_layers_is_left_alone():
    model = Model(["exact"] * 3)
    model.layers = nn.ModuleDict({"1": model.layers[1], "2": model.layers[2]})
    model.forward = lambda *args: [
        layer(*args[:7], pool, args[8]) for layer, pool in zip(model.layers.values(), args[7])
    ]
    check(model, "mli", matches=0, reason="all layers from 0 on, the graph holds [1, 2]")


def test_attention_outside_of_numbered_layers_is_left_alone(device):
    rows = mla_rows(DIMS, 2, 5, 11, device)
    harness = PassHarness(PlanSelection(), DSAConfig(plan="mli"))
    harness(attend, rows.q, rows.c_kv, rows.k_pe, rows.kv_b_weight, rows.visible, matches=0, reason="no number")
    x, weight = torch.randn(2, 5, 8, device=device), torch.randn(8, 8, device=device)
    assert harness(unrelated, x, weight, matches=0).entries == []
