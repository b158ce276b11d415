"""Bring the attention of a stock model to its canonical form.

Before::

    kv    = linear(latent, kv_b_proj.weight).view(B, S, H, N + V).transpose(1, 2)
    k, v  = split(kv, [N, V], -1)
    key   = new_empty(B, H, S, N + P); key[..., :N].copy_(k); key[..., N:].copy_(k_rope.expand(-1, H, -1, -1))
    out   = scaled_dot_product_attention(q, key, v, attn_mask=mask, scale=scale).transpose(1, 2)

After::

    out   = dsa.mla(q, latent, k_rope, kv_b_proj.weight, visible, mask, topk_indices, N, scale, [], 0, "half")

``latent`` and ``k_rope`` are the call's own rows or what a stock cache holds (DeepSeek-V2 and V3 cache latents). Causal
and packed masks become ``visible``; any other stays a mask; the scattered selection of DeepSeek-V3.2 becomes
``topk_indices``. Classes that cache expanded keys are left as they are when they run with a stock cache.
"""

# mypy: disable-error-code="union-attr, arg-type, return-value, assignment, index, misc, call-overload, attr-defined"
# fx types every argument as one wide union; matching narrows it by the names of the operators around it

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from dsa_compile.passes.base import (
    Context,
    GraphPass,
    Refused,
    attention_path,
    emit,
    erase_dead,
    is_linear,
    target_name,
    value_of,
)
from dsa_compile.passes.masks import split_selection, visibility


@dataclass(frozen=True)
class _Match:
    linear: Node
    sdpa: Node
    k_rope: Node
    writes: tuple[Node, ...]
    nope: int
    scale: float


class RaiseMLA(GraphPass):
    """Expanded keys and values under SDPA -> ``dsa::mla``. Numerics: exact."""

    name = "raise_mla"
    numerics = "exact"

    def candidates(self, graph: Graph) -> list[Node]:
        return [n for n in graph.nodes if is_linear(n) and attention_path(n).endswith(".kv_b_proj")]

    def where(self, node: Node) -> str:
        return attention_path(node).removesuffix(".kv_b_proj")

    def match(self, node: Node, context: Context) -> _Match:
        if len(node.args) > 2 and node.args[2] is not None:
            raise Refused("kv_b_proj has a bias", node)
        view = _only_user(node, "view")
        split = next((u for u in _only_user(view, "transpose").users if target_name(u) == "split"), None)
        if split is None:
            raise Refused("the expanded keys and values are not split into keys and values", view)
        nope_part, value = _halves(split)
        sdpa = _attention_over(value)
        key = sdpa.args[1]
        writes = _written_halves(key)
        if writes is None or writes[0].args[1] is not nope_part:
            raise Refused("the keys are not made of the latent's and the rope key's halves", sdpa)
        k_rope = writes[1].args[1]
        while isinstance(k_rope, Node) and target_name(k_rope) == "expand":
            k_rope = k_rope.args[0]
        if not isinstance(k_rope, Node) or value_of(k_rope).shape[1] != 1:
            raise Refused("the rope key is not one for all heads", sdpa)
        _check_readers(split, {nope_part, value}, key)
        if sdpa.kwargs.get("dropout_p", 0.0) != 0.0:
            raise Refused(f"attention dropout {sdpa.kwargs['dropout_p']}", sdpa)
        if sdpa.kwargs.get("enable_gqa"):
            raise Refused("grouped queries", sdpa)
        mask = sdpa.kwargs.get("attn_mask")
        if isinstance(mask, Node) and value_of(mask).dtype != torch.bool:
            raise Refused(f"a mask of {value_of(mask).dtype}; only bool masks say who sees whom", sdpa)
        scale = sdpa.kwargs.get("scale") or value_of(key).shape[-1] ** -0.5
        return _Match(node, sdpa, k_rope, writes, value_of(nope_part).shape[-1], scale)

    def rewrite(self, graph: Graph, match: _Match, context: Context) -> str:
        sdpa, linear = match.sdpa, match.linear
        query, _, value = sdpa.args[:3]
        mask = sdpa.kwargs.get("attn_mask")
        base, topk = split_selection(mask)
        causal = bool(sdpa.kwargs.get("is_causal"))
        visible, base = visibility(base, query, causal, sdpa)
        output = emit(
            graph,
            sdpa,
            _raised,
            query,
            linear.args[0],
            match.k_rope,
            linear.args[1],
            visible,
            base,
            topk,
            nope=match.nope,
            scale=match.scale,
        )
        for user in list(sdpa.users):
            if target_name(user) == "transpose" and user.args[1:] == (1, 2):
                user.replace_all_uses_with(output)
                graph.erase_node(user)
        if sdpa.users:
            sdpa.replace_all_uses_with(emit(graph, sdpa, lambda x: x.transpose(1, 2), output))
        leaves = [value, mask, *(x for write in match.writes for x in write.args)]
        for node in (sdpa, *match.writes):
            graph.erase_node(node)
        erase_dead(graph, *leaves)
        return "dsa::mla" + (" with visible ranges" if visible is not None else " with a mask" if base else "")


def _raised(
    query: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    topk_indices: Tensor | None,
    *,
    nope: int,
    scale: float,
) -> Tensor:
    c_kv, k_pe = latent.squeeze(1), k_rope.squeeze(1)
    return torch.ops.dsa.mla.default(query, c_kv, k_pe, weight, visible, mask, topk_indices, nope, scale, [], 0, "half")


def _only_user(node: Node, name: str) -> Node:
    users = [u for u in node.users if target_name(u) == name]
    if len(node.users) != 1 or not users:
        raise Refused(f"expected {name} alone to read {node}, found {', '.join(map(target_name, node.users))}", node)
    return users[0]


def _halves(split: Node) -> tuple[Node, Node]:
    parts = {u.args[1]: u for u in split.users if u.target is operator.getitem}
    if set(parts) != {0, 1}:
        raise Refused("the expanded keys and values are not split in two", split)
    return parts[0], parts[1]


def _attention_over(value: Node) -> Node:
    """The SDPA call that reads ``value``, past copies that keep it."""
    for user in _through(value, ("contiguous",)):
        if (
            target_name(user) == "scaled_dot_product_attention"
            and len(user.args) == 3
            and isinstance(user.args[0], Node)
        ):
            return user
    names = {target_name(u) for u in value.users}
    if names & {"cat", "index_copy_"}:
        raise Refused("this class caches expanded keys and values in a stock cache; optimize() caches latents", value)
    raise Refused("the values do not feed scaled_dot_product_attention (use attn_implementation='sdpa')", value)


def _through(node: Node, names: tuple[str, ...]) -> Iterator[Node]:
    for user in node.users:
        if target_name(user) in names:
            yield from _through(user, names)
        else:
            yield user


def _written_halves(key: object) -> tuple[Node, Node] | None:
    """The two ``copy_`` that fill a new buffer's [..., :N] and [..., N:]."""
    if not isinstance(key, Node) or target_name(key) != "new_empty":
        return None
    writes = {}
    for part in key.users:
        if part.target is operator.getitem and len(part.users) == 1 and isinstance(part.args[1], tuple):
            (write,) = part.users
            if target_name(write) == "copy_" and not write.users:
                writes[part.args[1][-1].start or 0] = write
    if len(writes) != 2 or len(key.users) != 3:
        return None
    return tuple(writes[start] for start in sorted(writes))


def _check_readers(split: Node, parts: set[Node], key: Node) -> None:
    for node, allowed in [(split, parts), (split.args[0], {split, key})]:
        if others := set(node.users) - allowed:
            raise Refused(f"the expanded keys and values are read by {', '.join(map(str, others))} too", node)
    if any(len(p.users) != 1 for p in parts):
        raise Refused("the expanded keys or values are read by others than this attention", split)
