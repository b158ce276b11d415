"""Deep graphs in pieces: layers that do the same are compiled once.

Before: one graph of all layers. After: one that calls a compiled body for what lies in front of the layers, for each
layer, and for what lies behind; those whose texts and kinds of inputs are the same are one.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dsa_compile import compat
from dsa_compile.passes.base import value_of

FEW = 8
"""Layers up to which a graph stays whole: at each cut a norm is not fused with what it reads."""

Compile = Callable[[GraphModule, list[Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Body:
    """Nodes that run one after another, what they read of others, and what others read of them."""

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    def program(self) -> GraphModule:
        """A module of ``inputs`` that returns ``outputs``; names of its own let layers share a text."""
        graph = Graph()
        made = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(self.inputs)}
        for i, node in enumerate(self.nodes):
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: made[n] if n in made else value_of(n))
            made[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"step_{i}")
        graph.output(tuple(made[node] for node in self.outputs))
        return GraphModule(nn.Module(), graph)


class Compiled(nn.Module):
    """A compiled body as a module that a graph can call."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = run


@dataclass(frozen=True)
class Parts:
    """A graph that calls ``count`` bodies, of which ``compiled`` are different."""

    module: GraphModule
    count: int
    compiled: int


def compile_bodies(gm: GraphModule, compile: Compile) -> Parts | None:
    """The graph with compiled bodies.

    Args:
        gm: a graph without gradients, as passes leave it. compile: makes a program of fake inputs run.

    Returns:
        None for a graph that stays whole: one of few layers, or between whose layers goes what is no tensor or size.
    """
    found = bodies(gm.graph)
    if sum(layer_of(body.nodes[0]) is not None for body in found) <= FEW:
        return None
    passed = (value_of(n) for body in found for n in (*body.inputs, *body.outputs))
    if not all(isinstance(value, (Tensor, torch.SymInt)) for value in passed):
        return None
    made: dict[str, Compiled] = {}
    graph = Graph()
    new = {n: graph.node_copy(n) for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")}
    root = nn.Module()
    for number, body in enumerate(found):
        program, values = body.program(), [value_of(n) for n in body.inputs]
        key = f"{program.code} {[_kind(value) for value in values]}"
        if key not in made:
            made[key] = Compiled(compile(program, values))
        root.add_module(f"body_{number}", made[key])
        called = graph.call_module(f"body_{number}", tuple(new[n] for n in body.inputs))
        for place, node in enumerate(body.outputs):
            new[node] = graph.call_function(operator.getitem, (called, place))
    (output,) = gm.graph.find_nodes(op="output")
    graph.output(map_arg(output.args[0], lambda n: new[n] if n in new else value_of(n)))
    for node in gm.graph.find_nodes(op="get_attr"):
        setattr(root, node.target, getattr(gm, node.target))
    return Parts(GraphModule(root, graph), len(found), len(made))


def bodies(graph: Graph) -> list[Body]:
    """All that a graph runs, cut where a layer begins or ends."""
    ran = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    runs = [tuple(nodes) for _, nodes in groupby(ran, key=_carried(layer_of))]
    sizes = [n for n in graph.find_nodes(op="placeholder") if isinstance(value_of(n), torch.SymInt)]
    found = []
    for nodes in runs:
        inside = set(nodes)
        read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
        inputs = [n for n in read if not _is_number(value_of(n))]
        # of one row of a prompt the strides alone may hold the prompt's length, which Inductor asks for
        unknown = compat.unbound_symbols(map(value_of, inputs))
        inputs += [n for n in sizes if compat.symbol_of(value_of(n)) in unknown]
        read_on = (n for n in nodes if any(user not in inside for user in n.users))
        found.append(Body(nodes, tuple(inputs), tuple(n for n in read_on if not _is_number(value_of(n)))))
    return found


def layer_of(node: Node) -> str | None:
    """The path of the layer that a node was traced in."""
    for path, _ in compat.module_stack(node):
        parts = path.split(".")
        if "layers" in parts[:-1]:
            return ".".join(parts[: parts.index("layers") + 2])
    return None


def _carried(key: Callable[[Node], str | None]) -> Callable[[Node], str | None]:
    """The same key, and for a node without a module that of the node before it."""
    last: list[str | None] = [None]

    def of(node: Node) -> str | None:
        if compat.module_stack(node):
            last[0] = key(node)
        return last[0]

    return of


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, bool))


def _kind(value: Any) -> Sequence[Any]:
    if isinstance(value, Tensor):
        return (value.dtype, str(value.device), str(tuple(value.shape)), str(value.stride()))
    return (str(value),)
