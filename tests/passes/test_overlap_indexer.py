"""Selections that a later layer reads are started early and waited for late; others stay as they are."""

import pytest
import torch
from graphs import BUDGET, SCALE
from harness import PassHarness
from torch import nn

from dsa_compile.passes.overlap_indexer import MOST_QUERIES, OverlapIndexer

SELECT, START, WAIT = (f"dsa.{name}.default" for name in ("select", "select_start", "select_wait"))
R, P, H, K = 8, 4, 2, 3


class Model(nn.Module):
    """Layer i attends to the selection of layer ``sources[i]``."""

    def __init__(self, sources):
        super().__init__()
        self.sources = sources

    def forward(self, x, latents, pools, visible):
        made, outs = {}, []
        for layer, source in enumerate(self.sources):
            q = (x * (layer + 1)).unflatten(-1, (H, R + P))
            if layer in self.sources:
                made[layer] = torch.ops.dsa.select.default(
                    q.cos(), x[..., :H], pools[layer], visible, None, K, 0.5, BUDGET
                )
            out, _ = torch.ops.dsa.sparse_mla.default(
                q[..., :R], q[..., R:], latents[layer], visible, None, made[source], SCALE
            )
            outs.append(out)
            x = x + out.sum((-2, -1), keepdim=True).squeeze(-1)
        return outs


def check(sources, rows=1, batch=2, slots=9, **expected):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    layers = range(len(sources))
    latents, pools = ([normal(batch, slots, R + P) for _ in layers] for _ in range(2))
    visible = torch.tensor([0, slots]).int().expand(batch, 1, rows, 2).contiguous()
    return PassHarness(OverlapIndexer())(
        Model(sources), normal(batch, rows, H * (R + P)), latents, pools, visible, **expected
    )


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


def test_the_window_is_a_layer_and_one_selection_runs_at_a_time():
    ops = {SELECT: -2, START: 2, WAIT: 2}
    assert order(check([0, 0, 1, 2], matches=2, ops=ops, reason="its own layer reads it")) == [
        "select 0",
        "attend to 0",
        "select_start 1",
        "attend to 0",
        "select_wait 1",
        "select_start 2",
        "attend to 1",
        "select_wait 2",
        "attend to 2",
    ]


def test_a_wait_names_all_tensors_that_the_start_reads():
    outcome = check([0, 0, 1], matches=1, ops={SELECT: -1, START: 1, WAIT: 1})
    (start,), (wait,) = (outcome.nodes(getattr(torch.ops.dsa, n).default) for n in ("select_start", "select_wait"))
    assert wait.args == (start, list(start.all_input_nodes))


def test_what_each_layer_reads_itself_stays():
    check([0, 1, 2], matches=0, reason="its own layer reads it")
    check([0, 0, 0], matches=0, reason="its own layer reads it")


@pytest.mark.parametrize(("rows", "matches"), [(1, 1), (MOST_QUERIES, 1), (MOST_QUERIES + 1, 0)])
def test_only_few_query_rows_leave_room_beside_them(rows, matches):
    ops = {SELECT: -1, START: 1, WAIT: 1} if matches else {}
    check([0, 0, 1], rows=rows, matches=matches, ops=ops)
