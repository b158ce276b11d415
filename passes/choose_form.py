"""Leave the form in which a prompt attends to the run, which knows how long it is.

Before::

    topk = dsa.select(...)
    out  = dsa.mla(q, c_kv, k_pe, kv_b_weight, visible, None, topk, ...)       # T of a prompt

After::

    topk = dsa.select(...)
    out  = dsa.prefill_mla(q, latent, kv_b_weight, visible, topk, nope, scale, "auto")

Absorbed attention over K latents costs the same behind any context; over expanded keys and values, under a mask, it
costs less behind a short one. One graph serves all lengths, so the operator takes what either form needs.
``prefill="masked"`` fixes the form; with ``"sparse"`` `sparsify` has been here before. Under ``prefill="dense"``
prompts attend to everything that they see, and selections that nobody else reads go.
"""

from torch import ops
from torch.fx import Graph, Node

from dsa_compile.passes.absorption import is_prompt, latent_pool
from dsa_compile.passes.base import Context, GraphPass, Refused, arguments, emit, erase_dead, is_op


class ChooseForm(GraphPass):
    """``dsa::mla`` of a prompt -> ``dsa::prefill_mla``. Numerics: exact, but for ``prefill="dense"``."""

    name = "choose_form"
    numerics = "exact"

    def candidates(self, graph: Graph) -> list[Node]:
        return [n for n in graph.nodes if is_op(n, "mla")]

    def match(self, node: Node, context: Context) -> Node:
        if not is_prompt(node):
            raise Refused("few query rows: no prompt", node)
        if arguments(node)["mask"] is not None:
            raise Refused("a mask operand says who sees whom: a row is no range of slots", node)
        return node

    def rewrite(self, graph: Graph, match: Node, context: Context) -> str:
        args, prefill = arguments(match), context.config.prefill
        topk = None if prefill == "dense" else args["topk_indices"]
        made: Node = emit(
            graph,
            match,
            ops.dsa.prefill_mla.default,
            args["q"],
            latent_pool(graph, match, args["c_kv"], args["k_pe"]),
            args["kv_b_weight"],
            args["visible"],
            topk,
            args["nope"],
            args["scale"],
            "auto" if prefill == "dense" else prefill,
        )
        match.replace_all_uses_with(made)
        graph.erase_node(match)
        erase_dead(graph, args["c_kv"], args["k_pe"], args["topk_indices"])
        return f"dsa::prefill_mla, {'dense' if topk is None else prefill}"
