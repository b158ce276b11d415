"""Linear layers of few rows, as in decoding of few sequences, become kernels that read weights at the device's pace.

Before::

    q = linear(x, q_a_proj.weight)
    k = linear(x, kv_a_proj_with_mqa.weight)

After::

    both = dsa.row_products(x.flatten().view(1, -1), [q_a_proj.weight, kv_a_proj_with_mqa.weight])
    q, k = both[:1536].view(1, 1, -1), both[1536:].view(1, 1, -1)

Layers of one input share a launch, and a router's float32 logits are products of what it converts: the launch is then
in float32, and what other layers make of it is rounded behind. The rows are flattened: the strides of a prompt's last
token hold the prompt's length, which Inductor may not know where it calls the op (torch 2.11).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from dsa_compile import programs
from dsa_compile.lowering.row_products.limits import MOST_ROWS, MOST_WEIGHTS
from dsa_compile.passes.base import Context, GraphPass, Refused, emit, erase_dead, is_linear, target_name, value_of
from dsa_compile.passes.overlap_indexer import started_programs

VIEWS = "view", "reshape", "contiguous"
CONVERSIONS = "to", "type", "float"


@dataclass(frozen=True)
class _Match:
    """Layers of one input, in order."""

    layers: tuple[Node, ...]


class RowProducts(GraphPass):
    """Linear layers of few rows on a GPU -> ``dsa::row_products``. Numerics: exact."""

    name = "row_products"
    numerics = "exact"

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Over a graph and the programs that it starts."""
        graphs = [gm, *map(programs.named, started_programs(gm.graph))]
        return sum(GraphPass.__call__(self, graph, context) for graph in graphs)

    def candidates(self, graph: Graph) -> list[Node]:
        """The first layer of each input of few rows; on a CPU Inductor's own products are as fast."""
        firsts: dict[Any, Node] = {}
        for node in graph.nodes:
            if is_linear(node) and _few_rows(value_of(node)) and on_gpu(value_of(node)):
                firsts.setdefault((_operands(node)[0], _width(node)), node)
        return list(firsts.values())

    def match(self, node: Node, context: Context) -> _Match:
        x = _operands(node)[0]
        reason = _refusal(node)
        if reason is not None:
            raise Refused(reason, node)
        layers = sorted(n for n in _readers(x) if _operands(n)[0] is x and _width(n) == _width(node))
        return _Match(tuple(n for n in layers if _refusal(n) is None))

    def rewrite(self, graph: Graph, match: _Match, context: Context) -> str:
        x = _operands(match.layers[0])[0]
        inner = value_of(x).shape[-1]
        part = 0 if inner == _width(match.layers[0]) else inner
        for first in range(0, len(match.layers), MOST_WEIGHTS):
            layers = match.layers[first : first + MOST_WEIGHTS]
            weights, values = [_operands(layer)[1] for layer in layers], [value_of(layer) for layer in layers]
            for layer, product in zip(layers, emit(graph, match.layers[0], _multiplied, x, part, weights, values)):
                layer.replace_all_uses_with(product)
        erase_dead(graph, *match.layers)
        return f"{len(match.layers)} of one input in a launch"


def _multiplied(x: Any, part: int, weights: list[Any], wanted: list[torch.Tensor]) -> list[Any]:
    """Products of few rows in one launch, each of the shape and dtype of its fake value in ``wanted``.

    ``part``: values of a row of ``x`` that lie side by side; 0: all.
    """
    rows, dtypes = wanted[0].shape[:-1].numel(), {value.dtype for value in wanted}
    shared = torch.float32 if torch.float32 in dtypes else wanted[0].dtype
    flat = x.flatten().view(rows, -1) if rows == 1 or not part else x.reshape(rows, -1, part)
    parts = torch.ops.dsa.row_products.default(flat, weights, shared).split([value.numel() for value in wanted])
    made = [parts[place].view(value.shape) for place, value in enumerate(wanted)]
    return [product if value.dtype == shared else product.to(value.dtype) for product, value in zip(made, wanted)]


def _operands(layer: Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias of a linear layer; the former two as they were before conversions and, the input, views.

    Conversions but for those that round: of a layer in float32 those of its operands to float32.
    """
    named = dict(zip(("input", "weight", "bias"), layer.args)) | layer.kwargs
    dtype = value_of(layer).dtype
    x, weight = named["input"], named["weight"]
    while (source := _unconverted(_unviewed(x), dtype)) is not x:
        x = source
    return x, _unconverted(weight, dtype), named.get("bias")


def _readers(x: Node) -> Iterator[Node]:
    """Linear layers of ``x`` and of views and conversions of it."""
    for user in x.users:
        if is_linear(user):
            yield user
        elif user.op == "call_method" and target_name(user) in VIEWS + CONVERSIONS:
            yield from _readers(user)


def _width(layer: Node) -> int:
    """Values of a row that a linear layer reads."""
    return int(value_of(_operands(layer)[1]).shape[1])


def _unviewed(rows: Any) -> Any:
    """The same rows before a view that flattens tokens, or joins the heads of each."""
    if rows.op != "call_method" or target_name(rows) not in VIEWS:
        return rows
    source = rows.all_input_nodes[0]
    before, after = value_of(source).shape, value_of(rows).shape
    joined = before[-1] == after[-1] or (len(before) > 2 and before[-2] * before[-1] == after[-1])
    return source if joined else rows


def _unconverted(x: Any, dtype: torch.dtype) -> Any:
    """``x`` before conversions that lose nothing to a layer of ``dtype``."""
    while x.op == "call_method" and target_name(x) in CONVERSIONS:
        value, source = value_of(x), x.all_input_nodes[0]
        if value is not value_of(source) and not value.dtype == dtype == torch.float32:
            break
        x = source
    return x


def _few_rows(x: torch.Tensor) -> bool:
    sizes = x.shape[:-1]
    return all(isinstance(size, int) for size in sizes) and 0 < sizes.numel() <= MOST_ROWS


def _refusal(layer: Node) -> str | None:
    """Why a layer stays as it is."""
    x, weight, bias = _operands(layer)
    if bias is not None:
        return "it has a bias"
    if not isinstance(value_of(weight), nn.Parameter):
        return "its weight is no parameter: a kernel may change it in the step"
    if torch.is_grad_enabled():
        return "gradients are wanted"
    if value_of(x).dtype != value_of(weight).dtype or value_of(layer).dtype not in (value_of(x).dtype, torch.float32):
        return "it changes dtypes"
    return None


def on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda
