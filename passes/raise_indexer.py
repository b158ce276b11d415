"""Bring the lightning indexer of a stock DeepSeek-V3.2 or GLM-5 graph to its canonical form.

Before::

    scores = relu(matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) * scale)
    scores = matmul(weights.unsqueeze(-2), scores).squeeze(-2).masked_fill(~mask, -inf)
    topk   = scores.topk(min(K, S)).indices.to(int32)
    out    = dsa.mla(..., topk, ...)

After::

    topk   = dsa.select(q, weights, k, visible, mask, K, scale, budget)
    out    = dsa.mla(..., topk, ...)

The graph's own RoPE, whatever its layout, stays in front of q and k. K is the model's, or ``index_topk`` among the
options.
"""

# mypy: disable-error-code="union-attr, arg-type, return-value, assignment, index, misc, call-overload, attr-defined"
# fx types every argument as one wide union; matching narrows it by the names of the operators around it

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from dsa_compile.passes.base import (
    Context,
    GraphPass,
    Refused,
    arguments,
    constant,
    emit,
    erase_dead,
    is_dsa_op,
    is_op,
    refuse_writes,
    target_name,
)
from dsa_compile.passes.masks import visibility


@dataclass(frozen=True)
class _Match:
    indices: Node
    q: Node
    weights: Node
    keys: Node
    mask: Node
    readers: tuple[Node, ...]
    index_topk: int
    scale: float


class RaiseIndexer(GraphPass):
    """Scores, mask and top-k -> ``dsa::select``. Numerics: exact given K, but for ties, which go to the lower slot."""

    name = "raise_indexer"
    numerics = "exact"

    def candidates(self, graph: Graph) -> list[Node]:
        picked = [arguments(n)["topk_indices"] for n in graph.nodes if is_op(n, "mla")]
        return list(dict.fromkeys(n for n in picked if n is not None and not is_dsa_op(n)))

    def match(self, node: Node, context: Context) -> _Match:
        readers = tuple(node.users)
        if not all(is_op(u, "mla") for u in readers):
            raise Refused("the selection is read by more than attention", node)
        topk = _call(_call(node, "to", torch.int32), "getitem", 1)
        _call(topk, "topk")
        masked = _operand(topk, 0, "masked_fill")
        mask = _operand(_operand(masked, 1, "invert"), 0, "getitem")
        if masked.args[2] != float("-inf") or mask.args[1] != (slice(None), 0, slice(None), slice(None)):
            raise Refused("the scores are masked in an unknown way", masked)
        if topk.args[2:] or topk.kwargs != {"dim": -1}:
            raise Refused("topk is not of the largest scores of a row", topk)
        product = _operand(_operand(masked, 0, "squeeze"), 0, "matmul")
        weights = _operand(product, 0, "unsqueeze")
        scaled = _operand(_operand(product, 1, "relu"), 0, "mul")
        scores = _operand(scaled, 0, "matmul")
        q = _operand(scores, 0, "float")
        keys = _operand(_operand(_operand(scores, 1, "unsqueeze"), 0, "float"), 0, "transpose")
        scale = constant(scaled.args[1])
        if scale is None or keys.args[1:] != (-1, -2):
            raise Refused("the scores are not q . k times a constant", scaled)
        refuse_writes(scores, min(readers))
        return _Match(
            node,
            q.args[0],
            weights.args[0],
            keys.args[0],
            mask.args[0],
            readers,
            context.config.index_topk or _configured_topk(topk),
            scale,
        )

    def rewrite(self, graph: Graph, match: _Match, context: Context) -> str:
        first = min(match.readers)
        query = arguments(first)["q"]
        visible, mask = visibility(match.mask, query, False, first)
        select = emit(
            graph,
            first,
            torch.ops.dsa.select.default,
            match.q,
            match.weights,
            match.keys,
            visible,
            mask,
            match.index_topk,
            match.scale,
            context.config.select_budget,
        )
        match.indices.replace_all_uses_with(select)
        erase_dead(graph, match.indices)
        return f"dsa::select of {match.index_topk}"


def _call(node: Node, name: str, *rest: Any) -> Node:
    """The first input of ``node``, which must call ``name`` with ``rest`` behind it."""
    if target_name(node) != name or (rest and node.args[1:] != rest) or not isinstance(node.args[0], Node):
        raise Refused(f"the selection does not come out of topk: expected {name}, found {target_name(node)}", node)
    return node.args[0]


def _operand(node: Node, position: int, name: str) -> Node:
    """An input of ``node`` that must be a call of ``name``."""
    operand = node.args[position]
    if not isinstance(operand, Node) or target_name(operand) != name:
        came = target_name(operand) if isinstance(operand, Node) else repr(operand)
        raise Refused(f"expected {name} in front of {target_name(node)}, found {came}", node)
    return operand


def _configured_topk(topk: Node) -> int:
    """K of ``topk(scores, min(K, S))``: the constant under a symbolic minimum, or the constant."""
    count = topk.args[1]
    if isinstance(count, Node) and target_name(count) in ("sym_min", "min"):
        count = next((a for a in count.args if isinstance(a, int)), None)
    if not isinstance(count, int):
        raise Refused("the number of selected keys is no constant", topk)
    return count
