"""A router's choice of experts, some twenty nodes of which each is a kernel, becomes one op.

Before::

    scores = logits.sigmoid()
    ...                                  # groups, their best, a mask, topk, gather, sum, division
    weights = chosen * 2.5

After::

    weights, experts = dsa.route(logits, bias, 8, 4, 8, True, 2.5)

What comes before, a linear layer in float32, stays. The nodes are followed one by one from the logits on, so that a
router that does anything else is left as it is.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node, Proxy, Tracer
from torch.fx.node import map_arg

from dsa_compile.lowering.route.limits import MOST_EXPERTS, padded
from dsa_compile.passes.base import Context, GraphPass, Refused, constant, emit, is_linear, target_name, value_of


@dataclass(frozen=True)
class _Sizes:
    """Numbers of a router, as ``dsa::route`` takes them."""

    experts: int
    groups: int
    topk_groups: int
    topk: int
    normalise: bool


@dataclass(frozen=True)
class _Match:
    """``nodes``: all between the logits and what the router returns, in order."""

    logits: Node
    bias: Node
    sizes: _Sizes
    scale: float
    nodes: tuple[Node, ...]
    weights: Node
    picks: Node


class FuseRouting(GraphPass):
    """Sigmoid routing of DeepSeek-V3 and its kin on a GPU -> ``dsa::route``. Numerics: exact, but for ties."""

    name = "fuse_routing"
    numerics = "exact"

    def candidates(self, graph: Graph) -> list[Node]:
        """Routers' sigmoids; on a CPU Inductor's own code is as fast."""
        nodes = graph.find_nodes(op="call_method", target="sigmoid")
        return [n for n in nodes if is_linear(n.args[0]) and _user(n, "gather") and on_gpu(value_of(n))]

    def match(self, node: Node, context: Context) -> _Match:
        logits = node.all_input_nodes[0]
        if torch.is_grad_enabled():
            raise Refused("gradients are wanted", node)
        if value_of(logits).dtype != torch.float32 or value_of(logits).dim() != 2:
            raise Refused("its logits are not float32[T, E]", node)
        sizes, bias = _read(node)
        if padded(sizes.groups, sizes.experts) > MOST_EXPERTS:
            raise Refused(f"more than {MOST_EXPERTS} experts", node)
        found = _follow(sizes, {"logits": logits, "bias": bias})
        *chosen, weights = found.values()
        scaled = next((n for n in weights.users if target_name(n) == "mul"), None)
        scale = constant(scaled.args[1]) if scaled is not None and len(weights.users) == 1 else None
        if scaled is None or scale is None:
            raise Refused("its weights are not multiplied by a number", node)
        nodes, picks = (*chosen, weights, scaled), found["picks"]
        if any(user not in nodes for n in nodes if n not in (picks, scaled) for user in n.users):
            raise Refused("something else reads what leads to its choice", node)
        return _Match(logits, bias, sizes, scale, nodes, scaled, picks)

    def rewrite(self, graph: Graph, match: _Match, context: Context) -> str:
        s = match.sizes
        numbers = s.groups, s.topk_groups, s.topk, s.normalise, match.scale
        routed = emit(graph, match.nodes[1], _routed, match.logits, match.bias, numbers)
        for old, new in zip((match.weights, match.picks), routed):
            old.replace_all_uses_with(new)
        for node in reversed(match.nodes):
            graph.erase_node(node)
        return f"dsa::route to {s.topk} of {s.experts} experts"


def _routed(logits: Any, bias: Any, numbers: tuple[Any, ...]) -> tuple[Any, Any]:
    routed = torch.ops.dsa.route.default(logits, bias, *numbers)
    return routed[0], routed[1]


def _read(sigmoid: Node) -> tuple[_Sizes, Node]:
    """What the nodes from a sigmoid on say of sizes, and the bias; `_follow` then holds every node against it."""
    biased, gathered = _user(sigmoid, "add"), _user(sigmoid, "gather")
    grouped = biased and _user(biased, "view")
    masked = biased and _user(biased, "masked_fill")
    best = grouped and _user(grouped, "topk")
    values = best and _user(best, "getitem")
    worth = values and _user(values, "sum")
    by_group, by_expert = worth and _user(worth, "topk"), masked and _user(masked, "topk")
    if not (biased and gathered and grouped and by_group and by_expert) or not isinstance(biased.args[1], Node):
        raise Refused("it does not choose experts by groups under a bias", sigmoid)
    sizes = _Sizes(
        experts=value_of(sigmoid).shape[1],
        groups=grouped.args[2] if len(grouped.args) == 4 else None,  # type: ignore[arg-type]
        topk_groups=by_group.kwargs.get("k"),  # type: ignore[arg-type]
        topk=by_expert.kwargs.get("k"),  # type: ignore[arg-type]
        normalise=_user(gathered, "sum") is not None,
    )
    if not all(isinstance(n, int) for n in (sizes.experts, sizes.groups, sizes.topk_groups, sizes.topk)):
        raise Refused("its sizes are not known before a run", sigmoid)
    return sizes, biased.args[1]


def _choice(logits: Any, bias: Any, sizes: _Sizes, name: Callable[[str, Any], Any]) -> None:
    """The nodes of a router as transformers writes them, in order; weights come last."""
    each = sizes.experts // sizes.groups
    scores = logits.sigmoid()
    biased = scores + bias
    worth = biased.view(-1, sizes.groups, each).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(worth, k=sizes.topk_groups, dim=-1, sorted=False)[1]
    chosen = torch.zeros_like(worth)
    chosen.scatter_(1, best, 1)
    mask = chosen.unsqueeze(-1).expand(-1, sizes.groups, each).reshape(-1, sizes.experts)
    allowed = biased.masked_fill(~mask.bool(), float("-inf"))
    picks = name("picks", torch.topk(allowed, k=sizes.topk, dim=-1, sorted=False)[1])
    weights = scores.gather(1, picks)
    if sizes.normalise:
        total = weights.sum(dim=-1, keepdim=True) + 1e-20
        weights.tracer.create_proxy("call_function", operator.itruediv, (weights, total), {})


def _follow(sizes: _Sizes, inputs: dict[str, Node]) -> dict[str, Node]:
    """Nodes of a graph, by those of `_choice`, that do the same to ``inputs``."""
    pattern, special = Graph(), dict[str, str]()
    tracer = Tracer()
    tracer.graph = pattern
    proxies = [Proxy(pattern.placeholder(name), tracer) for name in inputs]

    def name(label: str, proxy: Proxy) -> Proxy:
        special[proxy.node.name] = label
        return proxy

    _choice(proxies[0], proxies[1], sizes, name)
    found = {proxy.node: node for proxy, node in zip(proxies, inputs.values())}
    given = len(found)
    for wanted in pattern.nodes:
        if wanted in found:
            continue
        args, kwargs = map_arg((wanted.args, wanted.kwargs), found.__getitem__)
        same = (n for n in _first(args).users if _does(n, wanted) and (n.args, n.kwargs) == (args, kwargs))
        node = next((n for n in same if n not in found.values()), None)
        if node is None:
            raise Refused(f"its {target_name(wanted)} is not that of a known router", _first(args))
        found[wanted] = node
    return {special.get(wanted.name, wanted.name): node for wanted, node in list(found.items())[given:]}


def _first(args: tuple[Any, ...]) -> Node:
    node = args[0]
    assert isinstance(node, Node)
    return node


def _does(node: Node, wanted: Node) -> bool:
    return (node.op, node.target) == (wanted.op, wanted.target)


def _user(node: Node, name: str) -> Node | None:
    """The first reader of a node that calls ``name``."""
    return next((user for user in node.users if target_name(user) == name), None)


def on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda
