"""Attend to the selected slots only.

Before::

    topk = dsa.select(...)
    out  = dsa.mla(q, c_kv, k_pe, kv_b_weight, visible, None, topk, ...)

After::

    topk = dsa.select(...)
    out, lse = dsa.sparse_mla(einsum(q_nope, w_uk), q_pe, latent, visible, None, topk, scale)
    out  = einsum(out, w_uv)

Where it is statically known that the pool has at most K slots, everything is selected: the selection is dropped and
the attention stays dense, one decision for both.
"""

from dataclasses import dataclass

from torch.fx import Graph, Node

from dsa_compile.passes.absorption import replace_by_sparse_mla
from dsa_compile.passes.base import Context, GraphPass, Refused, arguments, erase_dead, is_op, set_arguments, value_of


@dataclass(frozen=True)
class _Match:
    mla: Node
    selects_all: bool


class Sparsify(GraphPass):
    """``dsa::mla`` with a selection -> ``dsa::sparse_mla``. Numerics: exact given the selection."""

    name = "sparsify"
    numerics = "exact"

    def candidates(self, graph: Graph) -> list[Node]:
        return [n for n in graph.nodes if is_op(n, "mla")]

    def match(self, node: Node, context: Context) -> _Match:
        args = arguments(node)
        topk = args["topk_indices"]
        if topk is None:
            raise Refused("no selection: attention stays dense", node)
        slots, width = value_of(args["c_kv"]).shape[1], value_of(topk).shape[-1]
        everything = isinstance(slots, int) and isinstance(width, int) and slots <= width
        return _Match(node, everything and is_op(topk, "select", "select_attention"))

    def rewrite(self, graph: Graph, match: _Match, context: Context) -> str:
        args = arguments(match.mla)
        if match.selects_all:
            set_arguments(match.mla, topk_indices=None)
            erase_dead(graph, args["topk_indices"])
            return f"dense: the {value_of(args['c_kv']).shape[1]} slots are no more than K"
        replace_by_sparse_mla(graph, match.mla)
        return "dsa::sparse_mla over the selection"
