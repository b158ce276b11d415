"""Fold the halves of kv_b_proj into query and output where attention is dense and there are few query rows.

Before::

    out = dsa.mla(q, c_kv, k_pe, kv_b_weight, visible, mask, None, ...)        # T <= 8

After::

    out, lse = dsa.sparse_mla(einsum(q_nope, w_uk), q_pe, latent, visible, mask, None, scale)
    out = einsum(out, w_uv)

A pair of query and key costs 1,088 FLOPs a head absorbed against 320 expanded (DeepSeek-V3), so dense prefill keeps
its keys expanded; a decode step, or one that verifies drafts, would expand every cached key for a few rows alone.
"""

from torch.fx import Graph, Node

from dsa_compile.passes.absorption import replace_by_sparse_mla
from dsa_compile.passes.base import Context, GraphPass, Refused, arguments, is_op, value_of

MOST_ROWS = 8
"""Query rows of a sequence in decoding and verification. Prefill has more, or a number that a run alone knows."""


class AbsorbMLA(GraphPass):
    """Dense ``dsa::mla`` of few query rows -> absorbed. Numerics: exact in exact arithmetic."""

    name = "absorb_mla"
    numerics = "exact"

    def candidates(self, graph: Graph) -> list[Node]:
        return [n for n in graph.nodes if is_op(n, "mla")]

    def match(self, node: Node, context: Context) -> Node:
        args = arguments(node)
        if args["topk_indices"] is not None:
            raise Refused("has a selection: left to sparsify", node)
        rows = value_of(args["q"]).shape[2]
        if not isinstance(rows, int) or rows > MOST_ROWS:
            raise Refused(f"more than {MOST_ROWS} query rows: expanded keys cost less than absorbed ones", node)
        return node

    def rewrite(self, graph: Graph, match: Node, context: Context) -> str:
        replace_by_sparse_mla(graph, match)
        return "dsa::sparse_mla over all visible slots"
