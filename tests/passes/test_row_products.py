"""Linear layers of few rows share launches; others stay as they are."""

import pytest
import torch
import torch.nn.functional as F
from harness import PassHarness
from torch import nn

from dsa_compile.lowering.row_products.limits import MOST_ROWS
from dsa_compile.passes import row_products
from dsa_compile.passes.row_products import RowProducts

PRODUCTS = "dsa.row_products.default"


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(row_products, "on_gpu", lambda x: True)


class Layers(nn.Module):
    """``count`` layers of ``x`` and one behind the first; which of them has a bias."""

    def __init__(self, count=2, bias=None, scaled=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 3 + i, bias=i == bias) for i in range(count))
        self.behind, self.scaled = nn.Linear(3, 4, bias=False), scaled
        self.double()

    def forward(self, x):
        outs = [F.linear(x, layer.weight * 2) if self.scaled else layer(x) for layer in self.layers]
        return [*outs, self.behind(outs[0].sin())]


def check(model, rows=1, **expected):
    with torch.no_grad():
        return PassHarness(RowProducts())(model, torch.randn(rows, 1, 6, dtype=torch.float64), **expected)


@pytest.mark.parametrize(("count", "launches"), [(1, 2), (2, 2), (4, 2), (5, 3)])
def test_layers_of_one_input_share_launches_of_four(count, launches):
    outcome = check(Layers(count), matches=2, ops={PRODUCTS: launches}, atol=1e-14)
    assert not outcome.nodes(F.linear)
    assert outcome.entries[0].reason == f"{count} of one input in a launch"


@pytest.mark.parametrize("rows", [2, MOST_ROWS])
def test_few_rows_are_read_as_one_is(rows):
    check(Layers(), rows=rows, matches=2, ops={PRODUCTS: 2}, atol=1e-14)


def test_more_rows_are_left_without_a_word():
    assert not check(Layers(), rows=MOST_ROWS + 1, matches=0).entries


class Output(nn.Module):
    """Behind a product by head, whose rows lie head by head."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 5, bias=False).double()

    def forward(self, heads):
        rows = heads.transpose(0, 1).unsqueeze(0)
        return self.layer(rows.reshape(1, rows.shape[1], -1).contiguous())


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_lie_by_head_are_read_as_they_lie(rows):
    with torch.no_grad():
        heads = torch.randn(2, rows, 3, dtype=torch.float64)
        outcome = PassHarness(RowProducts())(Output(), heads, matches=1, ops={PRODUCTS: 1}, atol=1e-14)
    (node,) = outcome.nodes(torch.ops.dsa.row_products.default)
    x = outcome.values[node.args[0]]
    assert x.shape == ((1, 6) if rows == 1 else (rows, 2, 3))
    assert x.stride()[-2:] == ((6, 1) if rows == 1 else (3 * rows, 1))


def test_layers_of_whole_rows_and_of_their_parts_share_nothing():
    whole, part = nn.Linear(6, 5, bias=False).double(), nn.Linear(3, 4, bias=False).double()
    with torch.no_grad():
        heads = torch.randn(1, 1, 2, 3, dtype=torch.float64)
        PassHarness(RowProducts())(
            lambda x: (part(x), whole(x.reshape(1, 1, 6))), heads, matches=2, ops={PRODUCTS: 2}, atol=1e-14
        )


class Router(nn.Module):
    """Beside another layer of its input, whose rows it flattens and converts, as transformers' routers do."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(6, 4, bias=False), nn.Linear(6, 5, bias=False)
        self.bfloat16()

    def forward(self, x):
        rows = x.view(-1, 6)
        return F.linear(rows.type(torch.float32), self.gate.weight.type(torch.float32)), self.up(x)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_router_shares_the_launch_of_what_it_converts(rows):
    with torch.no_grad():
        x = torch.randn(rows, 1, 6, dtype=torch.bfloat16)
        outcome = PassHarness(RowProducts())(Router(), x, matches=1, ops={PRODUCTS: 1}, atol=2**-8)
    assert not outcome.nodes(F.linear)
    assert not outcome.nodes("type"), "weights are read as they lie"
    logits, up = outcome.gm.graph.output_node().args[0]
    assert (outcome.values[logits].dtype, outcome.values[up].dtype) == (torch.float32, torch.bfloat16)


def test_a_layer_with_a_bias_is_left_beside_one_without():
    check(Layers(3, bias=1), matches=2, ops={PRODUCTS: 2}, atol=1e-14)


def test_a_weight_that_is_computed_is_left():
    check(Layers(1, scaled=True), matches=1, ops={PRODUCTS: 1}, atol=1e-14, reason="its weight is no parameter")


def test_nothing_changes_elsewhere(monkeypatch):
    monkeypatch.undo()
    assert not check(Layers(), matches=0).entries


def test_nothing_changes_where_gradients_are_wanted():
    PassHarness(RowProducts())(
        Layers(), torch.randn(1, 1, 6, dtype=torch.float64), matches=0, reason="gradients are wanted"
    )
