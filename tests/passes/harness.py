"""One call that holds everything a pass must keep."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from dsa_compile.config import DSAConfig
from dsa_compile.passes.base import Context, GraphPass
from dsa_compile.passes.pipeline import op_counts
from dsa_compile.report import Entry, Report


@dataclass
class Captured:
    """A graph with fake values, and the inputs that it was captured with."""

    gm: GraphModule
    inputs: tuple[Any, ...]

    def run(self) -> tuple[Any, tuple[Any, ...]]:
        """Outputs on fresh copies of the inputs, and what became of those copies."""
        inputs = copy.deepcopy(self.inputs)
        with torch.no_grad():
            return self.gm(*inputs), inputs


@dataclass
class Outcome:
    """What a pass left behind; ``values`` holds what each node is in a real run."""

    gm: GraphModule
    entries: list[Entry]
    values: dict[Node, Any]
    inputs: tuple[Any, ...]

    def nodes(self, target: Any) -> list[Node]:
        return [n for n in self.gm.graph.nodes if n.target is target]


@dataclass
class PassHarness:
    """Captures a function, a model or takes a graph, runs ``graph_pass`` and checks its contract.

    Attributes:
        graph_pass: the pass under test.
        config: what it reads.
    """

    graph_pass: GraphPass
    config: DSAConfig = field(default_factory=DSAConfig)

    def __call__(
        self,
        subject: Callable[..., Any] | GraphModule | Captured,
        *args: Any,
        matches: int,
        ops: dict[str, int] | None = None,
        reason: str | None = None,
        atol: float | None = 0.0,
        dynamic: bool | None = None,
        **kwargs: Any,
    ) -> Outcome:
        """Run the pass over ``subject(*args, **kwargs)``.

        Args:
            matches: places that must match; 0 also means that the graph must stay untouched.
            ops: change of the count of each dsa:: op whose count changes, and of any other operator worth naming.
            reason: what the report must say of a refused place.
            atol: difference allowed in outputs and written inputs, 0 for bitwise equality. A pass that changes numerics
                may write to more inputs than before; None leaves the outputs of such a one to the caller.
        """
        before = subject if isinstance(subject, Captured) else capture(subject, *args, dynamic=dynamic, **kwargs)
        after = Captured(copy.deepcopy(before.gm), before.inputs)
        graph, name = after.gm.graph, self.graph_pass.name
        old, placeholders = set(graph.nodes), [n for n in graph.nodes if n.op == "placeholder"]
        context = Context(self.config, Report())

        done = self.graph_pass(after.gm, context)

        graph.lint()
        assert done == matches == len(context.report.of(name, matched=True)), context.report.entries
        assert {e.pass_name for e in context.report.entries} <= {name}
        assert all(e.reason and e.node for e in context.report.entries), context.report.entries
        assert [n for n in graph.nodes if n.op == "placeholder"] == placeholders
        before_ops, after_ops, declared = op_counts(before.gm), op_counts(after.gm), ops or {}
        changes = {o: after_ops[o] - before_ops[o] for o in before_ops | after_ops if after_ops[o] != before_ops[o]}
        named = {o: n for o, n in changes.items() if o in declared or o.startswith("dsa.")}
        assert named == declared, f"operators changed by {changes}"
        if reason is not None:
            refused = [e.reason for e in context.report.of(name, matched=False)]
            assert any(reason in text for text in refused), refused
        if matches == 0:
            assert text_of(after.gm) == text_of(before.gm)
            assert set(graph.nodes) == old
        values = check_values(after, old)
        self._check_numerics(before, after, atol)

        settled = text_of(after.gm)
        assert self.graph_pass(after.gm, Context(self.config, Report())) == 0, "a second run matched"
        assert text_of(after.gm) == settled, "a second run changed the graph"
        return Outcome(after.gm, context.report.entries, values, after.run()[1])

    def _check_numerics(self, before: Captured, after: Captured, atol: float | None) -> None:
        if atol is None:
            assert self.graph_pass.numerics == "changes"
            return
        (outputs_1, inputs_1), (outputs_2, inputs_2) = before.run(), after.run()
        torch.testing.assert_close(outputs_2, outputs_1, atol=atol, rtol=0, equal_nan=True)
        exact = self.graph_pass.numerics == "exact"
        for given, one, two in zip(before.inputs, inputs_1, inputs_2):
            if isinstance(given, Tensor) and (exact or not torch.equal(given, one)):
                torch.testing.assert_close(two, one, atol=atol, rtol=0, equal_nan=True)
        assert _aliases(outputs_1, inputs_1) == _aliases(outputs_2, inputs_2)


def capture(
    subject: Callable[..., Any] | GraphModule, *args: Any, dynamic: bool | None = None, **kwargs: Any
) -> Captured:
    """The one graph of ``subject(*args, **kwargs)`` as Dynamo hands it to a backend.

    A prepared model is captured behind its guard. A graph built by hand gets fake values from ``args``.
    """
    if isinstance(subject, GraphModule):
        _Values(subject).run(*args)
        return Captured(subject, args)
    graphs: list[Captured] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        untouched = copy.deepcopy(gm)

        def run(*inputs: Any) -> Any:
            graphs.append(Captured(untouched, _detached(inputs)))
            return gm(*inputs)

        return run

    torch._dynamo.reset()
    if hasattr(subject, "dsa_guard"):
        subject.compile(backend=backend, dynamic=dynamic)
        call = subject
    else:
        call = torch.compile(subject, backend=backend, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        call(*args, **kwargs)
    assert len(graphs) == 1, f"expected one graph, came {len(graphs)}"
    return graphs[0]


class _Values(Interpreter):
    """Gives each node of a hand-built graph the value that Dynamo would have given it."""

    def run_node(self, n: Node) -> Any:
        n.meta["example_value"] = value = super().run_node(n)
        return value


def _detached(inputs: Any) -> tuple[Any, ...]:
    return tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in inputs)


def text_of(gm: GraphModule) -> str:
    """Every node with all its arguments."""
    return "\n".join(n.format_node() or f"{n.name} {n.args}" for n in gm.graph.nodes)


def check_values(captured: Captured, old: set[Node]) -> dict[Node, Any]:
    """Check that nodes carry the shape, dtype and device that they have in a real run, and return their real values.

    Dynamo leaves some nodes without (calls that return nothing); a pass may not.
    """
    seen: dict[Node, Any] = {}

    class Recorder(Interpreter):
        def run_node(self, n: Node) -> Any:
            seen[n] = super().run_node(n)
            return seen[n]

    with torch.no_grad():
        Recorder(captured.gm, garbage_collect_values=False).run(*copy.deepcopy(captured.inputs))
    for node, real in seen.items():
        if node.op == "output" or (node in old and "example_value" not in node.meta):
            continue
        assert "example_value" in node.meta, f"{node} has no value"
        for fake, true in zip(_leaves(node.meta["example_value"]), _leaves(real), strict=True):
            assert _looks(fake) == _looks(true), f"{node}: expected {_looks(true)}, carries {_looks(fake)}"
    return seen


def _leaves(value: Any) -> list[Any]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if x is not None]


def _looks(value: Any) -> Any:
    """Shape, dtype and device of a tensor with its symbols at the sizes they were captured with."""
    if isinstance(value, Tensor):
        return tuple(_looks(size) for size in value.shape), value.dtype, value.device.type
    return value.node.hint if isinstance(value, torch.SymInt) else value


def _aliases(outputs: Any, inputs: Any) -> list[bool]:
    """Which outputs share memory with an input."""
    pools = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, Tensor) and x.numel()}
    tensors = [x for x in _leaves(outputs) if isinstance(x, Tensor)]
    return [x.untyped_storage().data_ptr() in pools for x in tensors]
