"""Score beside attention where a later layer reads the selection, as under the Multi-layer Indexer.

Before::

    topk_1 = dsa.select(q, w, index_keys_1, ...)
    out_1  = dsa.sparse_mla(..., topk_0, ...)
    ...output projection, MLP, projections of layer 2
    out_2  = dsa.sparse_mla(..., topk_1, ...)

After::

    topk_1 = dsa.select_start(q, w, index_keys_1, ...)
    out_1  = dsa.sparse_mla(..., topk_0, ...)
    ...
    dsa.select_wait(topk_1, [q, w, index_keys_1, ...])
    out_2  = dsa.sparse_mla(..., topk_1, ...)

One selection runs at a time: a wait also comes before the next start, which could not run earlier anyway.
"""

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from dsa_compile.passes.base import Context, GraphPass, Refused, arguments, emit, is_op, value_of

MOST_QUERIES = 8
"""Query rows of a sequence in decoding and verification. More of them fill the device by themselves."""


@dataclass(frozen=True)
class _Match:
    """``stop``: the node that the selection must be there for."""

    select: Node
    stop: Node


class OverlapIndexer(GraphPass):
    """``dsa::select`` that a later layer reads -> ``dsa::select_start`` and ``dsa::select_wait``. Numerics: exact."""

    name = "overlap_indexer"
    numerics = "exact"

    def candidates(self, graph: Graph) -> list[Node]:
        return graph.find_nodes(op="call_function", target=torch.ops.dsa.select.default)

    def match(self, node: Node, context: Context) -> _Match:
        rows = value_of(arguments(node)["q"]).shape[1]
        if not isinstance(rows, int) or rows > MOST_QUERIES:
            raise Refused(f"more than {MOST_QUERIES} query rows: scores fill the device by themselves", node)
        stop, beside = node.next, False
        while stop.op != "output" and stop not in node.users and not is_op(stop, "select"):
            beside |= is_op(stop, "sparse_mla", "mla")
            stop = stop.next
        if not beside:
            raise Refused("its own layer reads it: there is nothing to run beside", node)
        return _Match(node, stop)

    def rewrite(self, graph: Graph, match: _Match, context: Context) -> str:
        select = match.select
        started = emit(graph, select, torch.ops.dsa.select_start.default, *select.args, **select.kwargs)
        reads = [n for n in arguments(select).values() if isinstance(n, Node)]
        select.replace_all_uses_with(started)
        graph.erase_node(select)
        emit(graph, match.stop, torch.ops.dsa.select_wait.default, started, reads)
        return "scored beside the attention and the MLP of its layer"
