"""The harness fails a pass that breaks any part of its contract."""

import operator

import pytest
import torch
from harness import PassHarness

from dsa_compile.passes.base import GraphPass, Refused, emit


class Doubling(GraphPass):
    """sin(x) -> sin(x) with ``change`` done to it, on nodes that `_skip` lets through."""

    name, numerics = "doubling", "exact"

    def __init__(self, change, *, again=False, bare=False):
        self.change, self.again, self.bare = change, again, bare

    def candidates(self, graph):
        return [n for n in graph.nodes if n.target in (torch.sin, "sin")]

    def match(self, node, context):
        if not self.again and any(user.meta.get("made") for user in node.users):
            raise Refused("done already", node)
        return node

    def rewrite(self, graph, match, context):
        users = list(match.users)
        new = emit(graph, match.next, self.change, match)
        new.meta["made"] = True
        if self.bare:
            del new.meta["example_value"]
        for user in users:
            user.replace_input_with(match, new)
        return "something"


def sine(x):
    return torch.sin(x)


X = torch.randn(3, 4)
KEEP = Doubling(lambda y: y * 1.0)


def test_a_pass_that_keeps_its_contract_goes_through():
    outcome = PassHarness(KEEP)(sine, X, matches=1, ops={"mul": 1})
    assert outcome.nodes(operator.mul)
    PassHarness(KEEP)(lambda x: x.cos(), X, matches=0)


def test_a_graph_built_by_hand_is_taken():
    gm = torch.fx.symbolic_trace(sine)
    assert PassHarness(KEEP)(gm, X, matches=1, ops={"mul": 1}).values


@pytest.mark.parametrize(
    ("graph_pass", "declared", "message"),
    [
        (Doubling(lambda y: y * 1.5), {"mul": 1}, "Tensor-likes are not equal"),
        (Doubling(lambda y: y * 1.0, again=True), {"mul": 1}, "a second run matched"),
        (Doubling(lambda y: y * 1.0, bare=True), {"mul": 1}, "has no value"),
        (KEEP, {"mul": 2}, "operators changed by {'mul': 1}"),
        (KEEP, {"mul": 1, "add": 1}, "operators changed by {'mul': 1}"),
    ],
    ids=["outputs", "idempotence", "values", "counts", "missing"],
)
def test_a_broken_contract_fails(graph_pass, declared, message):
    with pytest.raises(AssertionError, match=message):
        PassHarness(graph_pass)(sine, X, matches=1, ops=declared)


def test_a_wrong_value_fails():
    class Wrong(Doubling):
        def rewrite(self, graph, match, context):
            super().rewrite(graph, match, context)
            made = next(n for n in graph.nodes if n.meta.get("made"))
            made.meta["example_value"] = made.meta["example_value"].double()
            return "something"

    with pytest.raises(AssertionError, match=r"expected \(\(3, 4\), torch.float32, 'cpu'\), carries .*float64"):
        PassHarness(Wrong(lambda y: y * 1.0))(sine, X, matches=1, ops={"mul": 1})


def test_a_wrong_number_of_matches_or_reason_fails():
    with pytest.raises(AssertionError):
        PassHarness(KEEP)(sine, X, matches=2, ops={"mul": 1})
    with pytest.raises(AssertionError):
        PassHarness(KEEP)(lambda x: x.cos(), X, matches=0, reason="no such reason")
