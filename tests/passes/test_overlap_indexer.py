"""Selections that a later layer reads are started early and waited for late; others stay as they are."""

import re

import pytest
import torch
from graphs import BUDGET, SCALE
from harness import PassHarness
from torch import nn
from torch._inductor.utils import run_and_get_code

from dsa_compile.backend import dsa_backend
from dsa_compile.passes.overlap_indexer import MOST_QUERIES, OverlapIndexer, started_programs

SELECT, START, WAIT, WRITE = (
    f"dsa.{name}.default" for name in ("select", "select_start", "select_wait", "cache_write")
)
R, P, H, K = 8, 4, 2, 3


class Model(nn.Module):
    """Layer i attends to the selection of layer ``sources[i]``; its new key is written with its latents or alone."""

    def __init__(self, sources, joint=False):
        super().__init__()
        self.sources, self.joint = sources, joint

    def forward(self, x, latents, pools, slots, visible):
        made, outs = {}, []
        for layer, source in enumerate(self.sources):
            c = x * (layer + 1)
            q = c.unflatten(-1, (H, R + P))
            if layer in self.sources:
                key, new = c.sin()[..., : R + P], (c[..., :R], c[..., :P])
                write = torch.ops.dsa.cache_write.default
                write(latents[layer], pools[layer], slots, *new, key if self.joint else None)
                if not self.joint:
                    write(latents[layer], pools[layer], slots, None, None, key)
                made[layer] = torch.ops.dsa.select.default(
                    c.cos().unflatten(-1, (H, R + P)), c[..., :H].exp(), pools[layer], visible, None, K, 0.5, BUDGET
                )
            out, _ = torch.ops.dsa.sparse_mla.default(
                q[..., :R], q[..., R:], latents[layer], visible, None, made[source], SCALE
            )
            outs.append(out)
            x = x + out.sum((-2, -1), keepdim=True).squeeze(-1)
        return outs


def inputs(sources, rows=1, batch=2, slots=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    layers = range(len(sources))
    latents, pools = ([normal(batch, slots, R + P) for _ in layers] for _ in range(2))
    places = torch.arange(slots - rows, slots).expand(batch, rows).contiguous()
    visible = torch.tensor([0, slots]).int().expand(batch, 1, rows, 2).contiguous()
    return normal(batch, rows, H * (R + P)), latents, pools, places, visible


def check(sources, joint=False, rows=1, **expected):
    return PassHarness(OverlapIndexer())(Model(sources, joint), *inputs(sources, rows), **expected)


def order(outcome):
    """The ops of the graph, each with the layer of its pool or selection."""
    names, seen = [], {}
    for node in outcome.gm.graph.nodes:
        name = str(node.target).removeprefix("dsa.").removesuffix(".default")
        if name in ("select", "select_start"):
            seen[node] = len(seen)
            names.append(f"{name} {seen[node]}")
        elif name == "select_wait":
            names.append(f"{name} {seen[node.args[0]]}")
        elif name == "sparse_mla":
            names.append(f"attend to {seen[node.args[5]]}")
    return names


@pytest.mark.parametrize(("joint", "writes"), [(False, {WRITE: -2}), (True, {})])
def test_the_window_is_a_layer(joint, writes):
    """The keys' own writes are in the programs; those that are written with latents are taken out of that write."""
    ops = {SELECT: -2, START: 2, WAIT: 2, **writes}
    assert order(check([0, 0, 1, 2], joint, matches=2, ops=ops, reason="its own layer reads it")) == [
        "select 0",
        "attend to 0",
        "select_start 1",
        "attend to 0",
        "select_start 2",
        "select_wait 1",
        "attend to 1",
        "select_wait 2",
        "attend to 2",
    ]


def test_a_wait_gates_the_attention_that_reads_and_holds_what_the_program_does():
    outcome = check([0, 0, 1], matches=1, ops={SELECT: -1, START: 1, WAIT: 1, WRITE: -1})
    start, wait, *_, reader = (
        outcome.nodes(getattr(torch.ops.dsa, n).default)[-1] for n in ("select_start", "select_wait", "sparse_mla")
    )
    assert wait.args == (start, reader.args[0], [start.args[1]])
    assert reader.args[5] is start


def test_layers_that_do_the_same_share_a_program():
    outcome = check([0, 0, 1, 2], matches=2, ops={SELECT: -2, START: 2, WAIT: 2, WRITE: -2})
    assert len(started_programs(outcome.gm.graph)) == 1


def test_generated_code_keeps_the_order():
    """Inductor moves what has no reason to stay: a program would start when it is waited for."""
    model, arguments = Model([0, 0, 1, 2]), inputs([0, 0, 1, 2], dtype=torch.float32)
    want = model(*arguments)
    torch._dynamo.reset()
    with torch.no_grad():
        got, sources = run_and_get_code(torch.compile(model, backend=dsa_backend, fullgraph=True), *arguments)
    torch.testing.assert_close(got, want)
    found = re.findall(r"ops\.dsa\.(select_start|select_wait|sparse_mla)\.", sources[-1])
    assert [name for i, name in enumerate(found) if found[i - 1 : i] != [name]] == [
        "sparse_mla",
        "select_start",
        "sparse_mla",
        "select_start",
        "select_wait",
        "sparse_mla",
        "select_wait",
        "sparse_mla",
    ]


def test_what_each_layer_reads_itself_stays():
    check([0, 1, 2], matches=0, reason="its own layer reads it")
    check([0, 0, 0], matches=0, reason="its own layer reads it")


@pytest.mark.parametrize(("rows", "matches"), [(1, 1), (MOST_QUERIES, 1), (MOST_QUERIES + 1, 0)])
def test_only_few_query_rows_leave_room_beside_them(rows, matches):
    ops = {SELECT: -1, START: 1, WAIT: 1, WRITE: -1} if matches else {}
    check([0, 0, 1], rows=rows, matches=matches, ops=ops)


class InPlace(nn.Module):
    """What the second layer's indexer reads is changed before its turn, or is an input of the graph."""

    def __init__(self, changed):
        super().__init__()
        self.changed = changed

    def forward(self, x, latents, pools, slots, visible):
        c = x * 2 if self.changed else x
        q, made = (x * 3).unflatten(-1, (H, R + P)), []
        for layer in range(2):
            if self.changed:
                c.add_(1)
            made.append(
                torch.ops.dsa.select.default(
                    c.unflatten(-1, (H, R + P)), c[..., :H], pools[layer], visible, None, K, 0.5, BUDGET
                )
            )
            read = q[..., :R], q[..., R:], latents[layer], visible, None
            out, _ = torch.ops.dsa.sparse_mla.default(*read, made[0], SCALE)
        return out, torch.ops.dsa.sparse_mla.default(*read, made[1], SCALE)[0]


@pytest.mark.parametrize(("changed", "reason"), [(True, "in place"), (False, "waits for nothing")])
def test_an_indexer_that_cannot_run_early_stays(changed, reason):
    PassHarness(OverlapIndexer())(InPlace(changed), *inputs([0, 1]), matches=0, reason=reason)
