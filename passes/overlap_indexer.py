"""Run a layer's indexer beside the layer where a later one reads its selection, as under the Multi-layer Indexer.

Before::

    q, k, w = project(x, q_latent, ...)
    dsa.cache_write(..., index_keys_1, ..., k, ...)
    topk_1  = dsa.select(q, w, index_keys_1, ...)
    out_1   = dsa.sparse_mla(q_1, ..., topk_0, ...)
    ...output projection, MLP, projections of layer 2
    out_2   = dsa.sparse_mla(q_2, ..., topk_1, ...)

After::

    topk_1  = dsa.select_start([index_keys_1], q_latent, [x, ...], program, K)
    out_1   = dsa.sparse_mla(q_1, ..., topk_0, ...)
    ...
    dsa.select_wait(topk_1, q_2, [q_latent, x, ...])
    out_2   = dsa.sparse_mla(q_2, ..., topk_1, ...)

``program`` is a graph of its own: the selection, the index key's write, and all that is computed for them alone. Both
ops are said to change a tensor that the layer reads on, ``q_latent`` and ``q_2``: no compiler moves them past it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dsa_compile.passes.absorption import whole_pool
from dsa_compile.passes.base import (
    Context,
    GraphPass,
    Refused,
    arguments,
    emit,
    is_dsa_op,
    is_op,
    mutates,
    refuse_writes,
    set_arguments,
    value_of,
)
from dsa_compile.programs import register

MOST_QUERIES = 8
"""Query rows of a sequence in decoding and verification. More of them fill the device by themselves."""
QUERY = {"sparse_mla": "q_absorbed", "mla": "q"}
"""What attention reads first, by op."""


@dataclass(frozen=True)
class _Match:
    """``gate``: what the program reads that is computed last; from there on it can run.

    ``reader``: the attention that the selection must be there for.
    """

    select: Node
    gate: Node
    reader: Node


class OverlapIndexer(GraphPass):
    """An indexer that a later layer reads -> ``dsa::select_start`` and ``dsa::select_wait``. Numerics: exact."""

    name = "overlap_indexer"
    numerics = "exact"

    def candidates(self, graph: Graph) -> list[Node]:
        return graph.find_nodes(op="call_function", target=torch.ops.dsa.select.default)

    def match(self, node: Node, context: Context) -> _Match:
        rows = value_of(arguments(node)["q"]).shape[1]
        if not isinstance(rows, int) or rows > MOST_QUERIES:
            raise Refused(f"more than {MOST_QUERIES} query rows: scores fill the device by themselves", node)
        reader, beside = node.next, False
        while reader.op != "output" and reader not in node.users:
            beside |= is_op(reader, *QUERY)
            reader = reader.next
        if not beside:
            raise Refused("its own layer reads it: there is nothing to run beside", node)
        if not is_op(reader, *QUERY):
            raise Refused("what reads it is no attention", reader)
        inputs = _inputs(_body(node))
        odd = next((n for n in inputs if not isinstance(value_of(n), Tensor)), None)
        if odd is not None:
            raise Refused("its indexer reads what is no tensor", odd)
        order = {n: place for place, n in enumerate(node.graph.nodes)}
        gate = max(inputs, key=order.__getitem__)
        if gate.op == "placeholder" or value_of(gate).shape[:2] != value_of(node).shape[:2]:
            raise Refused("its indexer waits for nothing that the layer reads on", gate)
        refuse_writes(gate.next, node, but=tuple(n for n in node.graph.nodes if is_dsa_op(n)))
        return _Match(node, gate, reader)

    def rewrite(self, graph: Graph, match: _Match, context: Context) -> str:
        _split_write(graph, _key_write(match.select))
        body = _body(match.select)
        inputs = _inputs(body)
        written = [n for n in inputs if any(n in _written_by(part) for part in body)]
        read = [n for n in inputs if n is not match.gate and n not in written]
        taken = [*written, match.gate, *read]
        how = f"{context.config.lowering} {context.config.mode}"
        program = register(_program(body, taken), [value_of(n) for n in taken], how)
        index_topk = arguments(match.select)["index_topk"]
        start = torch.ops.dsa.select_start.default
        started = emit(graph, match.gate.next, start, written, match.gate, read, program, index_topk)
        match.select.replace_all_uses_with(started)
        for node in reversed(body):
            graph.erase_node(node)
        query = arguments(match.reader)["q_absorbed" if is_op(match.reader, "sparse_mla") else "q"]
        held = [n for n in inputs if n.op != "placeholder"]  # what a graph is given outlives it
        emit(graph, match.reader, torch.ops.dsa.select_wait.default, started, query, held)
        return "beside the attention and the MLP of its layer"


def started_programs(graph: Graph) -> dict[str, list[Tensor]]:
    """Fake inputs of the programs that a graph starts, by name."""
    starts = [arguments(n) for n in graph.nodes if is_op(n, "select_start")]
    taken = {named["program"]: [*named["writes"], named["gate"], *named["reads"]] for named in starts}
    return {name: [value_of(n) for n in nodes] for name, nodes in taken.items()}


def _body(select: Node) -> tuple[Node, ...]:
    """The selection, the write of the index keys that it scores, and what nobody but they reads, in order."""
    body, write = {select}, _key_write(select)
    key = None if write is None else arguments(write)["index_key"]
    if write is not None and arguments(write)["c_kv"] is None:
        body.add(write)
    node = select
    while node.op != "placeholder":
        inside = all(user in body or (node is key and user is write) for user in node.users)
        if node.users and inside and not mutates(node):
            body.add(node)
        node = node.prev
    return tuple(n for n in select.graph.nodes if n in body)


def _inputs(body: tuple[Node, ...]) -> tuple[Node, ...]:
    return tuple(dict.fromkeys(n for part in body for n in part.all_input_nodes if n not in body))


def _key_write(select: Node) -> Node | None:
    """The last write of index keys before a selection into the pool that it scores."""
    pool = whole_pool(arguments(select)["index_keys"])
    writes = [n for n in pool.users if is_op(n, "cache_write") and arguments(n)["index_keys"] is pool and n < select]
    return max((write for write in writes if arguments(write)["index_key"] is not None), default=None)


def _split_write(graph: Graph, write: Node | None) -> None:
    """Give index keys that are written with latents a write of their own."""
    if write is not None and (named := arguments(write))["c_kv"] is not None:
        set_arguments(write, index_key=None)
        emit(graph, write, torch.ops.dsa.cache_write.default, **named | {"c_kv": None, "k_pe": None})


def _written_by(node: Node) -> list[Node]:
    """Inputs that a dsa:: op changes."""
    if not is_dsa_op(node):
        return []
    changed = [a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]  # type: ignore[union-attr]
    return [value for name in changed if isinstance(value := arguments(node)[name], Node)]


def _program(body: tuple[Node, ...], inputs: list[Node]) -> GraphModule:
    """A module that takes ``inputs`` and returns what the last node of ``body`` is, in a tuple."""
    graph = Graph()
    made = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(inputs)}
    for i, node in enumerate(body):  # names of its own: layers that do the same share a text
        args, kwargs = map_arg((node.args, node.kwargs), made.__getitem__)
        made[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"step_{i}")
    for node, copy in made.items():
        copy.meta = dict(node.meta)
    graph.output((made[body[-1]],))
    return GraphModule(nn.Module(), graph)
