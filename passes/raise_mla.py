"""Bring the attention of a stock model to its canonical form.

Before::

    kv    = linear(latent, kv_b_proj.weight).view(B, S, H, N + V).transpose(1, 2)
    k, v  = split(kv, [N, V], -1)
    key   = new_empty(B, H, S, N + P); key[..., :N].copy_(k); key[..., N:].copy_(k_rope.expand(-1, H, -1, -1))
    out   = scaled_dot_product_attention(q, key, v, attn_mask=mask, scale=scale).transpose(1, 2)

After::

    out   = dsa.mla(q, latent, k_rope, kv_b_proj.weight, visible, mask, topk_indices, N, scale, [], 0, "half", -1)

``latent`` and ``k_rope`` are the call's own rows or what a stock cache holds (DeepSeek-V2 and V3 cache latents). Causal
and packed masks become ``visible``; any other stays a mask; the scattered selection of DeepSeek-V3.2 becomes
``topk_indices``. Classes that cache expanded keys are left as they are when they run with a stock cache.
"""

# mypy: disable-error-code="union-attr, arg-type, return-value, assignment, index, misc, call-overload, attr-defined"
# fx types every argument as one wide union; matching narrows it by the names of the operators around it

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from dsa_compile.passes.base import (
    Context,
    GraphPass,
    Refused,
    attention_path,
    constant,
    emit,
    erase_dead,
    is_linear,
    refuse_writes,
    target_name,
    value_of,
)
from dsa_compile.passes.masks import split_selection, visibility

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Positional parameters of scaled_dot_product_attention."""


@dataclass(frozen=True)
class _Match:
    linear: Node
    sdpa: Node
    query: Node
    value: Node
    k_rope: Node
    writes: tuple[Node, Node]
    mask: Node | None
    is_causal: bool
    nope: int
    scale: float


class RaiseMLA(GraphPass):
    """Expanded keys and values under SDPA -> ``dsa::mla``. Numerics: exact."""

    name = "raise_mla"
    numerics = "exact"

    def candidates(self, graph: Graph) -> list[Node]:
        return [n for n in graph.nodes if is_linear(n) and attention_path(n).split(".")[-1] == "kv_b_proj"]

    def where(self, node: Node) -> str:
        return attention_path(node).removesuffix("kv_b_proj").removesuffix(".")

    def match(self, node: Node, context: Context) -> _Match:
        nope_part, value = _expanded(node)
        sdpa = _attention_over(value)
        call: dict[str, Any] = dict(zip(_SDPA, sdpa.args)) | dict(sdpa.kwargs)
        nope, key = value_of(nope_part).shape[-1], call["key"]
        writes = _written_halves(key, nope)
        if writes is None or writes[0].args[1] is not nope_part:
            raise Refused("the keys are not made of the latent's and the rope key's halves", sdpa)
        k_rope = _shared_by_heads(writes[1].args[1], node.args[0], sdpa)
        _check_readers((nope_part, value), key)
        refuse_writes(node, sdpa, but=writes)
        mask, is_causal = _check_call(call, sdpa)
        scale = call.get("scale")
        scale = value_of(key).shape[-1] ** -0.5 if scale is None else constant(scale)
        if scale is None:
            raise Refused("the scale is no constant", sdpa)
        return _Match(node, sdpa, call["query"], call["value"], k_rope, writes, mask, is_causal, nope, scale)

    def rewrite(self, graph: Graph, match: _Match, context: Context) -> str:
        sdpa, linear = match.sdpa, match.linear
        base, topk = split_selection(match.mask)
        visible, base = visibility(base, match.query, match.is_causal, sdpa)
        output = emit(
            graph,
            sdpa,
            _raised,
            match.query,
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
        leaves = [match.value, match.mask, *(x for write in match.writes for x in write.args)]
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
    return torch.ops.dsa.mla.default(
        query, c_kv, k_pe, weight, visible, mask, topk_indices, nope, scale, [], 0, "half", -1
    )


def _expanded(linear: Node) -> tuple[Node, Node]:
    """The nodes of the keys without position [B, H, S, N] and the values [B, H, S, V] that kv_b_proj expands."""
    latent = value_of(linear.args[0])
    if len(linear.args) > 2 and linear.args[2] is not None:
        raise Refused("kv_b_proj has a bias", linear)
    if latent.dim() != 4 or latent.shape[1] != 1:
        raise Refused(f"expected latents [B, 1, S, R], found {list(latent.shape)}", linear)
    view = _only_user(linear, "view")
    transposed = _only_user(view, "transpose")
    batch, slots = latent.shape[0], latent.shape[2]
    if value_of(view).shape[:2] != (batch, slots) or transposed.args[1:] != (1, 2):
        raise Refused("the expanded keys and values are not brought to [B, H, S, N + V]", view)
    split = next((u for u in transposed.users if target_name(u) == "split"), None)
    parts = {u.args[1]: u for u in split.users if u.target is operator.getitem} if split is not None else {}
    if set(parts) != {0, 1} or [*split.args[2:], *split.kwargs.values()] != [-1]:
        raise Refused("the expanded keys and values are not split in two", transposed)
    return parts[0], parts[1]


def _only_user(node: Node, name: str) -> Node:
    users = list(node.users)
    if [target_name(u) for u in users] != [name]:
        raise Refused(f"expected {name} alone to read {node}, found {', '.join(map(target_name, users))}", node)
    return users[0]


def _attention_over(value: Node) -> Node:
    """The SDPA call whose values are ``value``, or a contiguous copy of it."""
    for node in (value, *(u for u in value.users if target_name(u) == "contiguous")):
        for user in node.users:
            if target_name(user) == "scaled_dot_product_attention" and node in (
                user.kwargs.get("value"),
                *user.args[2:3],
            ):
                return user
    names = {target_name(u) for u in value.users}
    if names & {"cat", "index_copy_"}:
        raise Refused("this class caches expanded keys and values in a stock cache; optimize() caches latents", value)
    raise Refused("the values do not feed scaled_dot_product_attention (use attn_implementation='sdpa')", value)


def _written_halves(key: object, nope: int) -> tuple[Node, Node] | None:
    """The two ``copy_`` that fill a new buffer's [..., :N] and [..., N:]."""
    if not isinstance(key, Node) or target_name(key) != "new_empty" or len(key.users) != 3:
        return None
    halves = [(Ellipsis, slice(None, nope, None)), (Ellipsis, slice(nope, None, None))]
    parts = [part for half in halves for part in key.users if part.target is operator.getitem and part.args[1] == half]
    writes = [write for part in parts for write in part.users]
    if len(parts) != 2 or len(writes) != 2 or any(target_name(w) != "copy_" or w.users for w in writes):
        return None
    return writes[0], writes[1]


def _shared_by_heads(k_rope: Node, latent: Node, sdpa: Node) -> Node:
    """The rope key [B, 1, S, P] in front of its broadcast to the heads."""
    if target_name(k_rope) == "expand":
        k_rope = k_rope.args[0]
    if value_of(k_rope).shape[:-1] != value_of(latent).shape[:-1]:
        raise Refused("the rope key is not one for all heads", sdpa)
    return k_rope


def _check_readers(parts: tuple[Node, Node], key: Node) -> None:
    split = parts[0].args[0]
    for node, allowed in ((split, set(parts)), (split.args[0], {split, key})):
        if others := set(node.users) - allowed:
            raise Refused(f"the expanded keys and values are read by {', '.join(map(str, others))} too", node)
    if any(len(p.users) != 1 for p in parts):
        raise Refused("the expanded keys or values are read by others than this attention", split)


def _check_call(call: dict[str, Any], sdpa: Node) -> tuple[Node | None, bool]:
    """The mask and the causal flag of an SDPA call that ``dsa::mla`` can stand for."""
    mask, is_causal = call.get("attn_mask"), call.get("is_causal", False)
    if call.get("dropout_p", 0.0) != 0.0:
        raise Refused(f"attention dropout {call['dropout_p']}", sdpa)
    if call.get("enable_gqa"):
        raise Refused("grouped queries", sdpa)
    if not isinstance(is_causal, bool):
        raise Refused("is_causal is no constant", sdpa)
    if mask is not None:
        value, slots = value_of(mask), value_of(call["key"]).shape[2]
        if value.dtype != torch.bool:
            raise Refused(f"a mask of {value.dtype}; only bool masks say who sees whom", sdpa)
        if value.dim() != 4 or value.shape[1] != 1 or value.shape[3] != slots:
            raise Refused(f"expected a mask [B or 1, 1, T, {slots}], found {list(value.shape)}", sdpa)
    return mask, is_causal
