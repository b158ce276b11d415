"""A matrix product of a column and a row becomes a multiplication, which Inductor fuses with what surrounds it.

Before::

    freqs = matmul(inv_freq, positions)  # [B, P/2, 1] and [B, 1, T]

After::

    freqs = inv_freq * positions

RoPE computes its angles so, in every step of a decode: a kernel of its own, and in TF32 where that is allowed, which
rounds positions beyond 2048.
"""

import operator

import torch
from torch.fx import Graph, Node

from dsa_compile.passes.base import Context, GraphPass, Refused, emit, value_of


class OuterProducts(GraphPass):
    """``matmul`` over a dimension of size 1 -> ``mul``. Numerics: exact."""

    name = "outer_products"
    numerics = "exact"

    def candidates(self, graph: Graph) -> list[Node]:
        products = (n for n in graph.nodes if n.op == "call_function" and n.target in (torch.matmul, operator.matmul))
        return [n for n in products if len(n.args) == 2 and all(map(_outer, n.args, (-1, -2)))]

    def match(self, node: Node, context: Context) -> Node:
        if any(value_of(factor).dtype != value_of(node).dtype for factor in node.all_input_nodes):
            raise Refused("it changes dtypes", node)
        return node

    def rewrite(self, graph: Graph, match: Node, context: Context) -> str:
        match.replace_all_uses_with(emit(graph, match, operator.mul, *match.args))
        graph.erase_node(match)
        return "a multiplication"


def _outer(factor: object, dim: int) -> bool:
    """Whether ``dim``, which a product sums over, is of size 1."""
    shape = value_of(factor).shape if isinstance(factor, Node) else ()
    return len(shape) >= 2 and isinstance(shape[dim], int) and shape[dim] == 1
