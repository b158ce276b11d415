"""A pass of your own: find nodes, refuse with a reason, rewrite. This one caps the keys a query attends to."""

import copy

import torch
from torch.fx import Graph, Node

import dsa_compile
from dsa_compile.models.miniature import miniature
from dsa_compile.passes import pipeline
from dsa_compile.passes.base import Context, GraphPass, Refused, arguments, is_op, set_arguments

CAP = 4


class CapSelection(GraphPass):
    """``dsa::select`` of more than CAP keys -> of CAP keys. Numerics: changes."""

    name = "cap_selection"
    numerics = "changes"

    def candidates(self, graph: Graph) -> list[Node]:
        return [n for n in graph.nodes if is_op(n, "select")]

    def match(self, node: Node, context: Context) -> Node:
        if arguments(node)["index_topk"] <= CAP:
            raise Refused(f"selects no more than {CAP} keys already", node)
        return node

    def rewrite(self, graph: Graph, match: Node, context: Context) -> str:
        before = arguments(match)["index_topk"]
        set_arguments(match, index_topk=CAP)
        match.meta["example_value"] = match.meta["example_value"][..., :CAP]
        return f"{before} -> {CAP} keys"


model = miniature("deepseek_v32")
plain = dsa_compile.optimize(copy.deepcopy(model), lowering="eager")
ids = torch.randint(3, 128, (1, 32), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    before = plain(ids, use_cache=False).logits

# after the indexers are in place, before attention becomes sparse
place = [p.name for p in pipeline.PIPELINE].index("sparsify")
pipeline.PIPELINE = (*pipeline.PIPELINE[:place], CapSelection(), *pipeline.PIPELINE[place:])
capped = dsa_compile.optimize(copy.deepcopy(model), lowering="eager")
with torch.no_grad():
    after = capped(ids, use_cache=False).logits

for entry in dsa_compile.recent_reports()[-1].of("cap_selection"):
    print(f"{entry.where}: {entry.reason}")
print(f"logits moved by {(after - before).abs().max():.3f}")
