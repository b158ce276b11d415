"""Give a dense layer its selection.

Before::

    dsa.cache_write(latent, index_keys, slots, c_kv, k_pe, None, None, index_scales)
    out = dsa.mla(q, c_kv, k_pe, kv_b_weight, visible, None, None, nope, scale, indexer_params, K, rope, -1)

After::

    iq, ik, iw = project(x, q_latent, cos, sin, *indexer_params)
    dsa.cache_write(latent, index_keys, slots, c_kv, k_pe, ik, None, index_scales)
    topk = dsa.select(iq, iw, index_keys, visible, None, K, DI ** -0.5, budget, None, index_scales)
    out = dsa.mla(q, c_kv, k_pe, kv_b_weight, visible, None, topk, nope, scale, [], 0, rope, -1)

With no parameters but a K, or ``selector="attention"`` among the options, the selection is ``dsa.select_attention`` of
the layer's own queries and keys. Without a cache the index keys are compacted instead of written.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from dsa_compile import compat
from dsa_compile.config import DEFAULT_INDEX_TOPK
from dsa_compile.lowering.cache_write.compact import compact_rows
from dsa_compile.lowering.select.projections import project
from dsa_compile.passes.absorption import as_far_as, pool_of, whole_pool
from dsa_compile.passes.base import (
    Context,
    GraphPass,
    Refused,
    arguments,
    attention_path,
    emit,
    is_op,
    set_arguments,
    value_of,
)


@dataclass(frozen=True)
class _Match:
    """``x``, ``q_latent`` and ``rope`` (cos and sin, or one complex node) are None for the exact selection."""

    mla: Node
    index_topk: int
    x: Node | None = None
    q_latent: Node | None = None
    rope: tuple[Node, ...] = ()
    write: Node | None = None


class InsertIndexer(GraphPass):
    """A dense ``dsa::mla`` that asks for a selection gets one. Numerics: changes, unless K covers every slot."""

    name = "insert_indexer"
    numerics = "changes"

    def candidates(self, graph: Graph) -> list[Node]:
        return [n for n in graph.nodes if is_op(n, "mla")]

    def match(self, node: Node, context: Context) -> _Match:
        args, config = arguments(node), context.config
        if args["topk_indices"] is not None:
            raise Refused("has a selection already", node)
        if args["index_topk"] == 0 and config.selector != "attention":
            raise Refused("no selector: attention stays dense", node)
        index_topk = args["index_topk"] or config.index_topk or DEFAULT_INDEX_TOPK
        if not args["indexer_params"]:
            return _Match(node, index_topk)
        path = attention_path(node)
        x = _input_of(node, f"{path}.kv_a_proj_with_mqa")
        if x is None:
            raise Refused(f"no projection {path}.kv_a_proj_with_mqa in the graph", node)
        q_latent = _input_of(node, f"{path}.q_b_proj") or _input_of(node, f"{path}.q_proj")
        if q_latent is None:
            raise Refused(f"no projection {path}.q_b_proj or {path}.q_proj in the graph", node)
        rope = _rotary_outputs(node)
        if not rope:
            raise Refused("no cos and sin (or complex frequencies) that come out of a rotary_emb module", node)
        return _Match(node, index_topk, x, q_latent, rope, _write_of(args["c_kv"], node))

    def rewrite(self, graph: Graph, match: _Match, context: Context) -> str:
        args, budget = arguments(match.mla), context.config.select_budget
        if match.x is None:
            topk = emit(
                graph,
                match.mla,
                torch.ops.dsa.select_attention.default,
                args["q"],
                args["c_kv"],
                args["k_pe"],
                args["kv_b_weight"],
                args["visible"],
                args["mask"],
                args["nope"],
                args["scale"],
                match.index_topk,
                budget,
            )
            became = f"dsa::select_attention of {match.index_topk}"
        else:
            topk = _emit_indexer(graph, match, budget)
            became = f"dsa::select of {match.index_topk}"
        set_arguments(match.mla, topk_indices=topk, indexer_params=[], index_topk=0)
        return became


def _emit_indexer(graph: Graph, match: _Match, budget: int) -> Node:
    args = arguments(match.mla)
    params = args["indexer_params"]
    n_heads, head_dim = value_of(params[4]).shape[0], value_of(params[1]).shape[0]
    place = match.write or match.mla
    cos, sin = match.rope if len(match.rope) == 2 else emit(graph, place, _real_rope, *match.rope, match.x)
    q, key, weights = emit(
        graph,
        place,
        project,
        match.x,
        match.q_latent,
        cos,
        sin,
        *params,
        n_heads=n_heads,
        head_dim=head_dim,
        rope_dim=value_of(args["k_pe"]).shape[-1],
        layout=args["index_rope"],
    )
    if match.write is None:
        keys, scales = emit(graph, match.mla, compact_rows, key, args["visible"]), None
    else:
        set_arguments(match.write, index_key=key)
        pools = (arguments(match.write)[name] for name in ("index_keys", "index_scales"))
        keys, scales = (pool and as_far_as(pool, pool_of(args["c_kv"]), match.mla) for pool in pools)
    topk: Node = emit(
        graph,
        match.mla,
        torch.ops.dsa.select.default,
        q,
        weights,
        keys,
        args["visible"],
        args["mask"],
        match.index_topk,
        head_dim**-0.5,
        budget,
        None,
        scales,
    )
    return topk


def _real_rope(freqs: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [B or 1, T, P], two equal halves, of complex frequencies [B or 1, T, P/2] (DeepSeek-V2)."""
    parts = torch.view_as_real(freqs).to(like.dtype)
    cos, sin = parts[..., 0], parts[..., 1]
    return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)


def _input_of(mla: Node, module_path: str) -> Node | None:
    """What the linear layer at ``module_path`` is applied to, the last time before ``mla``."""
    linears = mla.graph.find_nodes(op="call_function", target=F.linear)
    return next((n.args[0] for n in reversed(linears) if attention_path(n) == module_path and n < mla), None)


def _rotary_outputs(mla: Node) -> tuple[Node, ...]:
    """(cos, sin) or (complex frequencies,) that a ``rotary_emb`` module handed to the layers last before ``mla``."""
    cos, sin, freqs = (_leaving_rotary(mla, name) for name in ("cos", "sin", "polar"))
    if cos is not None and sin is not None:
        return cos, sin
    return () if freqs is None else (freqs,)


def _leaving_rotary(mla: Node, name: str) -> Node | None:
    """What a ``rotary_emb`` module hands out last before ``mla`` of the values that it makes by calling ``name``."""
    todo = [
        *mla.graph.find_nodes(op="call_method", target=name),
        *mla.graph.find_nodes(op="call_function", target=getattr(torch, name)),
    ]
    found = []
    while todo:
        node = todo.pop(0)
        if _in_rotary(node) and node < mla:
            if any(not _in_rotary(u) for u in node.users):
                found.append(node)
            else:
                todo += node.users
    return max(found, default=None)


def _in_rotary(node: Node) -> bool:
    return any(path.endswith("rotary_emb") for path, _ in compat.module_stack(node))


def _write_of(c_kv: Node, mla: Node) -> Node | None:
    """The last cache write before ``mla`` into the pool that ``c_kv`` is a slice of."""
    pool = pool_of(c_kv)
    if pool is None:
        return None
    pool = whole_pool(pool)
    return max((u for u in pool.users if is_op(u, "cache_write") and u.args[0] is pool and u < mla), default=None)
