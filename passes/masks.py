"""From the mask graphs of transformers to what dsa:: ops take: ``visible`` where they are ranges, else the mask."""

# mypy: disable-error-code="union-attr, arg-type, return-value, assignment, index, misc, call-overload, attr-defined"
# fx types every argument as one wide union; matching narrows it by the names of the operators around it

import math
import operator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from dsa_compile.passes.base import emit, target_name, value_of


@dataclass(frozen=True)
class _Ranges:
    """A mask that is ``causal`` (row t sees up to ``q_positions[t]``) and, with ``documents`` [B, T], within one."""

    q_positions: Node
    documents: Node | None


def visibility(mask: Node | None, query: Node, is_causal: bool, before: Node) -> tuple[Node | None, Node | None]:
    """(visible, mask) of an attention call; one of them is None, both where everything is visible.

    Args:
        mask: bool[B or 1, 1, T, S], True for what a row sees, or None.
        query: [B, H, T, D]. is_causal: SDPA's flag, top-left aligned, read where there is no mask.
        before: where new nodes go if there is no mask; else they follow the mask, once for all its readers.
    """
    if mask is None:
        return (emit(query.graph, before, _causal, query) if is_causal else None), None
    visible = mask.meta.get("dsa_visible")
    if visible is None or visible.graph is not mask.graph or visible._erased:
        visible = mask.meta["dsa_visible"] = _emit_visible(mask, query)
    return (visible, None) if visible is not None else (None, mask)


def split_selection(mask: Node | None) -> tuple[Node | None, Node | None]:
    """(base mask, topk_indices) of ``base & ~scatter(ones, -1, topk_indices.long(), False)``, else (mask, None)."""
    if mask is not None and target_name(mask) in ("and_", "__and__"):
        for base, other in (mask.args[:2], mask.args[1::-1]):
            if isinstance(base, Node) and (topk := _inverted_scatter(other)) is not None:
                return base, topk
    return mask, None


def _inverted_scatter(node: object) -> Node | None:
    chain = ("invert", "unsqueeze", "scatter")
    for name in chain:
        if not isinstance(node, Node) or target_name(node) != name:
            return None
        scatter, node = node, node.args[0]
    if target_name(node) != "new_ones" or scatter.args[1] != -1 or scatter.args[3] is not False:
        return None
    index = scatter.args[2]
    widened = isinstance(index, Node) and target_name(index) in ("long", "to")
    return index.args[0] if widened else None


def _emit_visible(mask: Node, query: Node) -> Node | None:
    ranges = _read(mask)
    if ranges is None:
        return None
    batch, place = value_of(mask).shape[0], mask.next
    if not isinstance(batch, int):
        batch = emit(query.graph, place, lambda m: m.size(0), mask)
    visible: Node = emit(query.graph, place, _ranges, ranges.q_positions, ranges.documents, batch)
    return visible


def _ranges(q_positions: Tensor, documents: Tensor | None, batch: int) -> Tensor:
    end = (q_positions + 1).to(torch.int32).unsqueeze(0)
    start = torch.zeros_like(end)
    if documents is not None:
        # documents are numbered in ascending order, so the first of its kind is where a row's own begins
        start = torch.searchsorted(documents, documents).to(torch.int32)
        end = end.expand_as(start)
    return torch.stack([start, end], -1).unsqueeze(1).expand(batch, -1, -1, -1)


def _causal(query: Tensor) -> Tensor:
    end = torch.ones_like(query[:, 0, :, 0], dtype=torch.int32).cumsum(-1, dtype=torch.int32)
    return torch.stack([torch.zeros_like(end), end], -1).unsqueeze(1)


def _read(mask: Node) -> _Ranges | None:
    """The ranges of a mask made of ``le`` and at most one document comparison; None for any other."""
    q_positions, documents = None, None
    for term in _terms(mask):
        if _is_true(term):
            continue
        if target_name(term) in ("le", "__le__") and q_positions is None:
            q_positions = _positions(term.args[1], query=True)
            if q_positions is None or not _counts_from_zero(_positions(term.args[0], query=False)):
                return None
        elif target_name(term) in ("eq", "__eq__") and documents is None:
            documents = _documents(term)
            if documents is None:
                return None
        else:
            return None
    if q_positions is None or (documents is not None and not _counts_from_zero(q_positions)):
        return None
    return _Ranges(q_positions, documents)


def _terms(node: Node) -> list[Node]:
    """The conjuncts of a mask, past moves and broadcasts."""
    name = target_name(node)
    if name in ("expand", "to", "contiguous") and isinstance(node.args[0], Node):
        return _terms(node.args[0])
    if name in ("and_", "__and__", "logical_and"):
        return [t for side in node.args[:2] if isinstance(side, Node) for t in _terms(side)]
    return [node]


def _is_true(node: Node) -> bool:
    return target_name(node) == "new_ones" and math.prod(value_of(node).shape) == 1


def _positions(node: object, *, query: bool) -> Node | None:
    """The 1-D tensor that was broadcast to [1, 1, T, 1] (queries) or [1, 1, 1, S] (keys)."""
    whole = slice(None)
    return _broadcast(node, (None, None, whole, None) if query else (None, None, None, whole))


def _broadcast(node: object, wanted: tuple[slice | None, ...]) -> Node | None:
    """What ``node`` is a view of, if it indexes with ``wanted``."""
    if not isinstance(node, Node) or node.target is not operator.getitem or node.args[1] != wanted:
        return None
    return node.args[0] if isinstance(node.args[0], Node) else None


def _counts_from_zero(node: Node | None) -> bool:
    """Whether a node is ``arange(n)``, or that plus a constant zero."""
    while node is not None and target_name(node) == "add" and node.args[1] == 0 and isinstance(node.args[0], Node):
        node = node.args[0]
    return node is not None and target_name(node) == "arange" and len(node.args) == 1


def _documents(term: Node) -> Node | None:
    """``documents`` [B, T] of ``documents[b, q] == documents[b, k]``, where it is a running count."""
    query, key = term.args[:2]
    source, queries = _lookup(query, query=True)
    if source is None or _lookup(key, query=False) != (source, queries):
        return None
    if target_name(source) != "cumsum" or source.args[1:] != (-1,) or value_of(source).dim() != 2:
        return None
    return source if value_of(source.args[0]).dtype == torch.bool else None


def _lookup(node: object, *, query: bool) -> tuple[Node | None, Node | None]:
    """(table, batch index) of ``table[arange(B)[:, None, None, None], arange(n)[...]]``, else Nones."""
    index = node.args[1] if isinstance(node, Node) and node.target is operator.getitem else None
    if not isinstance(index, tuple) or len(index) != 2 or not isinstance(node.args[0], Node):
        return None, None
    rows = _broadcast(index[0], (slice(None), None, None, None))
    if not _counts_from_zero(rows) or not _counts_from_zero(_positions(index[1], query=query)):
        return None, None
    return node.args[0], rows
