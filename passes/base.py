"""What every pass is, and how it finds and makes nodes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

from dsa_compile import compat
from dsa_compile.config import DSAConfig
from dsa_compile.errors import GraphContractError
from dsa_compile.report import Report


class Refused(Exception):
    """Why a pass leaves a place as it is; kept in the report."""

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason)
        self.reason, self.node = reason, node


@dataclass(frozen=True)
class Context:
    """What a pass may read beside the graph."""

    config: DSAConfig
    report: Report


class GraphPass(ABC):
    """One rewrite. Subclasses say which nodes they look at, when those match, and what becomes of them.

    Attributes:
        name: as in reports and ``disable_passes``.
        numerics: ``"exact"`` if outputs change by rounding alone, else ``"changes"``.
    """

    name: ClassVar[str]
    numerics: ClassVar[Literal["exact", "changes"]]

    @abstractmethod
    def candidates(self, graph: Graph) -> list[Node]:
        """Nodes to try, in order."""

    @abstractmethod
    def match(self, node: Node, context: Context) -> Any:
        """What `rewrite` needs. Raises `Refused`; changes nothing."""

    @abstractmethod
    def rewrite(self, graph: Graph, match: Any, context: Context) -> str:
        """Change the graph; returns what the place became."""

    def where(self, node: Node) -> str:
        """The place in the model that a report names for a candidate."""
        return attention_path(node)

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Run over a graph; returns how many places changed."""
        done = 0
        for node in self.candidates(gm.graph):
            where = self.where(node)
            try:
                found = self.match(node, context)
            except Refused as refused:
                context.report.skipped(self.name, where, refused.reason, refused.node or node)
                continue
            label = str(node)
            context.report.matched(self.name, where, self.rewrite(gm.graph, found, context), label)
            done += 1
        if done:
            gm.graph.lint()
            gm.recompile()
        return done


def is_op(node: object, *names: str) -> bool:
    """Whether a node calls one of the dsa:: ops ``names``."""
    return (
        isinstance(node, Node)
        and node.op == "call_function"
        and node.target in {getattr(torch.ops.dsa, name).default for name in names}
    )


def is_dsa_op(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "dsa"


def is_linear(node: object) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target is F.linear


def target_name(node: Node) -> str:
    """What a node calls: ``"view"`` for a method, ``"cat"`` for a function, whatever module spells it."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def value_of(node: Node) -> Any:
    """The fake value of a node.

    Raises:
        GraphContractError: it has none.
    """
    if "example_value" not in node.meta:
        raise GraphContractError(f"node {node}: expected a fake value in meta['example_value'], found none.")
    return node.meta["example_value"]


def constant(argument: object) -> float | None:
    """A float argument, also where ``dynamic=True`` made an input of it; None if it is known to a run alone."""
    return compat.constant_of(value_of(argument) if isinstance(argument, Node) else argument)


def attention_path(node: Node) -> str:
    """Path of the module whose forward made the node, such as ``model.layers.1.self_attn``."""
    stack = compat.module_stack(node)
    return stack[-1][0] if stack else ""


def arguments(node: Node) -> dict[str, Any]:
    """Arguments of a dsa:: op by name, defaults and keywords included."""
    declared = node.target._schema.arguments  # type: ignore[union-attr]
    defaults = {a.name: a.default_value for a in declared if a.has_default_value()}
    named = {a.name: value for a, value in zip(declared, node.args)}
    return defaults | named | dict(node.kwargs)


def set_arguments(node: Node, **changes: Any) -> None:
    """Replace arguments of a dsa:: op by name."""
    named = arguments(node) | changes
    node.args = tuple(named[a.name] for a in node.target._schema.arguments)  # type: ignore[union-attr]
    node.kwargs = {}


class Emitter(GraphAppendingTracer):
    """Makes nodes by calling torch functions on proxies; each gets its anchor's module stack and a fake value."""

    def __init__(self, graph: Graph, anchor: Node) -> None:
        super().__init__(graph)
        self.anchor = anchor

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        node = super().create_node(*args, **kwargs)
        for key in ("nn_module_stack", "stack_trace"):
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        set_value(node)
        return node


def set_value(node: Node) -> None:
    """Compute a new node's fake value from its inputs'; a graph without fake values stays without."""
    if any("example_value" not in n.meta for n in node.all_input_nodes):
        return
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
    fake_mode = next(
        (
            v.fake_mode
            for n in node.all_input_nodes
            if isinstance(v := n.meta["example_value"], torch._subclasses.FakeTensor)
        ),
        None,
    )
    with torch.no_grad(), compat.symbolic_dispatch(), fake_mode or torch.no_grad():
        if node.op == "call_method":
            node.meta["example_value"] = getattr(args[0], node.target)(*args[1:], **kwargs)  # type: ignore[arg-type]
        elif callable(node.target):
            node.meta["example_value"] = node.target(*args, **kwargs)


def emit(graph: Graph, before: Node, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Append what ``function`` does to nodes ``args`` in front of ``before``; returns its result as nodes.

    ``function`` is plain torch code; nodes in ``args`` and ``kwargs`` (lists included) reach it as proxies.
    """
    emitter = Emitter(graph, before)
    with graph.inserting_before(before):
        proxies, keywords = map_arg((args, kwargs), lambda n: Proxy(n, emitter))  # type: ignore[arg-type, return-value]
        result = function(*proxies, **keywords)
    return torch.utils._pytree.tree_map(lambda x: x.node if isinstance(x, Proxy) else x, result)


def erase_dead(graph: Graph, *roots: Any) -> None:
    """Erase nodes that nobody reads, and whatever only they read; in-place ops and inputs stay."""
    todo = [r for r in roots if isinstance(r, Node)]
    while todo:
        node = todo.pop()
        if node._erased or node.users or node.op in ("placeholder", "output") or mutates(node):
            continue
        inputs = node.all_input_nodes
        graph.erase_node(node)
        todo += inputs


_IN_PLACE = {"setitem", "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift"}
_IN_PLACE |= {"isub", "itruediv", "ixor"}
"""Operators of Python that change their first operand."""


def mutates(node: Node) -> bool:
    """Whether a node changes one of its inputs."""
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    name = target_name(node)
    in_place = name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_", "is_")
    by_keyword = node.kwargs.get("out") is not None or node.kwargs.get("inplace") is True
    return in_place or by_keyword or name.strip("_") in _IN_PLACE


def refuse_writes(start: Node, end: Node, but: tuple[Node, ...] = ()) -> None:
    """Refuse to read at ``end`` what ``start`` read, if a node other than ``but`` writes in place in between."""
    node = start
    while node is not end:
        if mutates(node) and node not in but:
            raise Refused(f"{node} writes in place before attention reads", node)
        node = node.next
