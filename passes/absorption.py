"""Absorbed attention as nodes: the halves of kv_b_proj move to the query and the output side."""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from dsa_compile.config import MOST_DRAFTS
from dsa_compile.passes.base import arguments, emit, erase_dead, is_op, mutates, value_of


def replace_by_sparse_mla(graph: Graph, mla: Node) -> Node:
    """``dsa::mla`` -> einsum, ``dsa::sparse_mla``, einsum, with the same visibility and selection."""
    args = arguments(mla)
    latent = latent_pool(graph, mla, args["c_kv"], args["k_pe"])
    q_nope, q_pe = _halves(graph, mla, args["q"], args["nope"])
    result: Node = emit(
        graph,
        mla,
        _absorbed,
        q_nope,
        q_pe,
        latent,
        args["kv_b_weight"],
        args["visible"],
        args["mask"],
        args["topk_indices"],
        n_heads=int(value_of(args["q"]).shape[1]),
        nope=args["nope"],
        scale=args["scale"],
    )
    mla.replace_all_uses_with(result)
    graph.erase_node(mla)
    erase_dead(graph, args["q"], args["c_kv"], args["k_pe"])
    return result


def _halves(graph: Graph, before: Node, q: Node, nope: int) -> tuple[Node, Node]:
    """q[..., :nope] and q[..., nope:]; what a concatenation, which copies them, was made of."""
    parts = q.args[0] if q.target is torch.cat and q.args else None
    dim = q.kwargs.get("dim", q.args[1] if len(q.args) > 1 else 0)
    if isinstance(parts, (list, tuple)) and len(parts) == 2 and dim in (-1, 3):
        first, second = parts
        if isinstance(first, Node) and isinstance(second, Node) and value_of(first).shape[-1] == nope:
            return first, second
    halves: tuple[Node, Node] = emit(graph, before, lambda q: (q[..., :nope], q[..., nope:]), q)
    return halves


def _absorbed(
    q_nope: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    topk_indices: Tensor | None,
    *,
    n_heads: int,
    nope: int,
    scale: float,
) -> Tensor:
    weight = kv_b_weight.unflatten(0, (n_heads, -1))
    q_absorbed = torch.einsum("bhtn,hnr->bthr", q_nope, weight[:, :nope])
    out = torch.ops.dsa.sparse_mla.default(q_absorbed, q_pe.transpose(1, 2), latent, visible, mask, topk_indices, scale)
    return torch.einsum("bthr,hvr->bthv", out[0], weight[:, nope:])


def latent_pool(graph: Graph, before: Node, c_kv: Node, k_pe: Node) -> Node:
    """The pool that c_kv and k_pe are the halves of, in the format that it is kept in, or their concatenation."""
    base, pool = _sliced(c_kv), pool_of(c_kv)
    rank, rope = value_of(c_kv).shape[-1], value_of(k_pe).shape[-1]
    if (
        base is not None
        and pool is not None
        and base is _sliced(k_pe)
        and value_of(base).shape[-1] == rank + rope
        and _last_slice(c_kv) in (slice(None, rank), slice(0, rank))
        and _last_slice(k_pe) in (slice(rank, None), slice(rank, rank + rope))
    ):
        return base if _written_between(base, before) else pool
    joined: Node = emit(graph, before, lambda a, b: torch.cat([a, b], -1), c_kv, k_pe)
    return joined


def is_prompt(mla: Node) -> bool:
    """Whether an attention's query rows are more than a step of decoding has, or a number that a run alone knows."""
    rows = value_of(arguments(mla)["q"]).shape[2]
    return not isinstance(rows, int) or rows > MOST_DRAFTS + 1


def pool_of(rows: Node) -> Node | None:
    """The pool that ``rows`` is a slice of the last dimension of, as it is or as ``dsa::cache_read`` reads it."""
    base = _sliced(rows)
    return base.args[0] if base is not None and is_op(base, "cache_read") else base  # type: ignore[return-value]


def whole_pool(pool: Node) -> Node:
    """The pool whose first slots ``pool`` is, or ``pool`` itself."""
    return pool.args[0] if _first_slots(pool) is not None else pool  # type: ignore[return-value]


def readers(pool: Node) -> list[Node]:
    """What reads or writes a whole pool, or its first slots."""
    parts = [part for part in pool.users if _first_slots(part) is not None]
    return [user for part in (pool, *parts) for user in part.users if user not in parts]


def as_far_as(pool: Node, like: Node | None, before: Node) -> Node:
    """The slots of a whole ``pool`` that ``like`` is of another."""
    count = None if like is None else _first_slots(like)
    return pool if count is None else emit(before.graph, before, lambda rows, n: rows[:, :n], pool, count)


def _first_slots(pool: Node) -> Any:
    """n of ``pool[:, :n]``; None of anything else."""
    if pool.op != "call_function" or pool.target is not operator.getitem:
        return None
    match pool.args[1]:
        case (slice(start=None, stop=None, step=None), slice(start=None, stop=count, step=None)):
            return count
    return None


def _written_between(start: Node, end: Node) -> bool:
    """Whether something is written in place behind ``start`` and in front of ``end``: then what it read is stale."""
    while start is not end:
        start = start.next
        if mutates(start):
            return True
    return False


def _sliced(rows: Node) -> Node | None:
    """The node that ``rows`` is a slice of the last dimension of."""
    if rows.op == "call_function" and rows.target is operator.getitem and _last_slice(rows) is not None:
        return rows.args[0] if isinstance(rows.args[0], Node) else None
    return None


def _last_slice(rows: Node) -> Any:
    index = rows.args[1]
    plain = isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and isinstance(index[1], slice)
    return index[1] if plain else None  # type: ignore[index]
