"""Products of columns and rows are multiplications, to the bit; others stay."""

import pytest
import torch
from harness import PassHarness

from dsa_compile.passes.outer_products import OuterProducts


def check(a, b, product=torch.matmul, **expected):
    with torch.no_grad():
        return PassHarness(OuterProducts())(lambda a, b: product(a, b).cos(), a, b, **expected)


@pytest.mark.parametrize(("a", "b"), [((4, 1), (1, 7)), ((1, 4, 1), (3, 1, 1)), ((2, 1, 4, 1), (3, 1, 7))])
@pytest.mark.parametrize("product", [torch.matmul, lambda a, b: a @ b])
def test_a_column_times_a_row(a, b, product):
    outcome = check(torch.randn(a), torch.randn(b), product, matches=1, ops={"matmul": -1, "mul": 1})
    assert not outcome.nodes(torch.matmul)


def test_any_number_of_positions():
    check(torch.randn(1, 4, 1), torch.randn(1, 1, 6), dynamic=True, matches=1)


@pytest.mark.parametrize(("a", "b"), [((4, 2), (2, 7)), ((1,), (1,)), ((4, 1), (1,)), ((3, 4, 2), (2, 1))])
def test_what_sums_is_left(a, b):
    assert not check(torch.randn(a), torch.randn(b), matches=0).entries


def test_autocast_is_left_to_round():
    def product(a, b):
        with torch.autocast("cpu", torch.bfloat16):
            return a @ b

    check(torch.randn(4, 1), torch.randn(1, 7), product, matches=0, reason="it changes dtypes")
