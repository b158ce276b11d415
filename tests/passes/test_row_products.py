"""Linear layers of one row share launches; others stay as they are."""

import pytest
import torch
import torch.nn.functional as F
from harness import PassHarness
from torch import nn

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


def test_two_rows_are_left_without_a_word():
    assert not check(Layers(), rows=2, matches=0).entries


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
