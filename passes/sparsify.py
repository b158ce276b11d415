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

from torch import SymInt
from torch.fx import Graph, Node

from dsa_compile.passes.absorption import is_prompt, pool_of, replace_by_sparse_mla, whole_pool
from dsa_compile.passes.base import Context, GraphPass, Refused, arguments, erase_dead, is_op, set_arguments, value_of


@dataclass(frozen=True)
class _Match:
    mla: Node
    selects_all: bool


def _capacity(c_kv: Node) -> int | SymInt:
    """Slots of the pool of which ``c_kv`` may be the first ones, or its own."""
    pool = pool_of(c_kv)
    slots: int | SymInt = value_of(c_kv if pool is None else whole_pool(pool)).shape[1]
    return slots


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
        slots, width = _capacity(args["c_kv"]), value_of(topk).shape[-1]
        everything = isinstance(slots, int) and isinstance(width, int) and slots <= width
        everything = everything and is_op(topk, "select", "select_attention")
        if not everything and context.config.prefill != "sparse" and args["mask"] is None and is_prompt(node):
            raise Refused("a prompt: left to choose_form", node)
        return _Match(node, everything)

    def rewrite(self, graph: Graph, match: _Match, context: Context) -> str:
        args = arguments(match.mla)
        if match.selects_all:
            set_arguments(match.mla, topk_indices=None)
            erase_dead(graph, args["topk_indices"])
            return f"dense: the {_capacity(args['c_kv'])} slots are no more than K"
        replace_by_sparse_mla(graph, match.mla)
        return "dsa::sparse_mla over the selection"
