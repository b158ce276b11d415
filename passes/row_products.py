"""Linear layers of a single row, as in decoding at batch 1, become kernels that read weights at the device's pace.

Before::

    q = linear(x, q_a_proj.weight)
    k = linear(x, kv_a_proj_with_mqa.weight)

After::

    both = dsa.row_products(x.flatten(), [q_a_proj.weight, kv_a_proj_with_mqa.weight])
    q, k = both[:1536].view(1, 1, -1), both[1536:].view(1, 1, -1)

Layers of one input share a launch. The row is flattened: the strides of a prompt's last token hold the prompt's length,
which Inductor may not know where it calls the op (torch 2.11).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from dsa_compile import programs
from dsa_compile.lowering.row_products.limits import MOST_WEIGHTS
from dsa_compile.passes.base import Context, GraphPass, Refused, emit, is_linear, value_of
from dsa_compile.passes.overlap_indexer import started_programs


@dataclass(frozen=True)
class _Match:
    """Layers of one input, in order."""

    layers: tuple[Node, ...]


class RowProducts(GraphPass):
    """Linear layers of one row on a GPU -> ``dsa::row_products``. Numerics: exact."""

    name = "row_products"
    numerics = "exact"

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Over a graph and the programs that it starts."""
        graphs = [gm, *map(programs.named, started_programs(gm.graph))]
        return sum(GraphPass.__call__(self, graph, context) for graph in graphs)

    def candidates(self, graph: Graph) -> list[Node]:
        """The first layer of each input of one row; on a CPU Inductor's own products are as fast."""
        firsts: dict[Any, Node] = {}
        for node in graph.nodes:
            if is_linear(node) and _one_row(value_of(node)) and on_gpu(value_of(node)):
                firsts.setdefault(_operands(node)[0], node)
        return list(firsts.values())

    def match(self, node: Node, context: Context) -> _Match:
        x = _operands(node)[0]
        reason = _refusal(node)
        if reason is not None:
            raise Refused(reason, node)
        layers = (n for n in node.graph.nodes if is_linear(n) and _operands(n)[0] is x)
        return _Match(tuple(n for n in layers if _refusal(n) is None))

    def rewrite(self, graph: Graph, match: _Match, context: Context) -> str:
        x = _operands(match.layers[0])[0]
        for first in range(0, len(match.layers), MOST_WEIGHTS):
            layers = match.layers[first : first + MOST_WEIGHTS]
            weights = [_operands(layer)[1] for layer in layers]
            shapes = [tuple(value_of(layer).shape) for layer in layers]
            for layer, product in zip(layers, emit(graph, match.layers[0], _multiplied, x, weights, shapes)):
                layer.replace_all_uses_with(product)
        for layer in match.layers:
            graph.erase_node(layer)
        return f"{len(match.layers)} of one input in a launch"


def _multiplied(x: Any, weights: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    """Products of a row in one launch, each of its shape."""
    parts = torch.ops.dsa.row_products.default(x.flatten(), weights).split([shape[-1] for shape in shapes])
    return [parts[place].view(shape) for place, shape in enumerate(shapes)]


def _operands(layer: Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias of a linear layer; the former two as they were before they were said to be of a dtype."""
    named = dict(zip(("input", "weight", "bias"), layer.args)) | layer.kwargs
    return _source(named["input"]), _source(named["weight"]), named.get("bias")


def _source(node: Any) -> Any:
    """What a conversion returned as it was."""
    while node.op == "call_method" and node.target == "to" and value_of(node) is value_of(node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
    return node


def _one_row(x: torch.Tensor) -> bool:
    return all(isinstance(size, int) and size == 1 for size in x.shape[:-1])


def _refusal(layer: Node) -> str | None:
    """Why a layer stays as it is."""
    x, weight, bias = _operands(layer)
    if bias is not None:
        return "it has a bias"
    if not isinstance(value_of(weight), nn.Parameter):
        return "its weight is no parameter: a kernel may change it in the step"
    if torch.is_grad_enabled():
        return "gradients are wanted"
    if not value_of(x).dtype == value_of(weight).dtype == value_of(layer).dtype:
        return "it changes dtypes"
    return None


def on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda
