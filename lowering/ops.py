"""Schemas and shape functions of all dsa:: ops. Dimensions and conventions: `dsa_compile.dims`.

The implementations live in the op folders beside this file; a backward pass is an op of its own, so that a graph of
any length keeps one node for it.

A pool of latents holds values [B, S, R+P], or as uint8 rows in fp8 (`dsa_compile.lowering.fp8_rows`). A pool of index
keys holds values [B, S, DI], or uint8 codes with ``index_scales`` float32[B, S] (`dsa_compile.lowering.fp8_keys`). With
a ``block_table`` pools are [pages, page size, ...] (`dsa_compile.dims`).
"""

import torch
from torch import Tensor

from dsa_compile.lowering.fp8_keys import check_scales

SCHEMAS = {
    # Append rows at `slots` int64[B, T] (negative: padding, not written) to the pools latent[B, S, R+P] and
    # index_keys[B, S, DI], in fp8 with index_scales[B, S]. All pools of a layer are always named, so that they are
    # graph inputs before a pass needs them.
    "cache_write": (
        "(Tensor(a!) latent, Tensor(b!) index_keys, Tensor slots, Tensor? c_kv, Tensor? k_pe, Tensor? index_key, "
        "Tensor? block_table=None, Tensor(c!)? index_scales=None) -> ()"
    ),
    # The values [B, S, R+P] of a pool of fp8 rows, for those who do not read such rows themselves.
    "cache_read": "(Tensor latent, int rank, int rope, ScalarType dtype) -> Tensor",
    # The canonical attention: q[B, H, T, N+P], c_kv[B, S, R], k_pe[B, S, P], kv_b_weight[H*(N+V), R] -> [B, T, H, V].
    # The next three say what `insert_indexer` makes of it: parameters of an attached indexer as
    # `select.projections.project` takes them (else none), K (0: dense) and the indexer's RoPE layout. The last is for
    # `plan_selection`: the layer whose selection replaces topk_indices, or a mark of `dsa_compile.plan`.
    "mla": (
        "(Tensor q, Tensor c_kv, Tensor k_pe, Tensor kv_b_weight, Tensor? visible, Tensor? mask, "
        "Tensor? topk_indices, int nope, float scale, Tensor[] indexer_params, int index_topk, str index_rope, "
        "int selection_of) -> Tensor"
    ),
    "mla_backward": (
        "(Tensor grad, Tensor q, Tensor c_kv, Tensor k_pe, Tensor kv_b_weight, Tensor? visible, Tensor? mask, "
        "Tensor? topk_indices, int nope, float scale) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    # Index queries q[B, T, HI, DI], signed head weights[B, T, HI], index_keys[B, S, DI], in fp8 with
    # index_scales[B, S] -> topk_indices int32[B, T, K].
    "select": (
        "(Tensor q, Tensor weights, Tensor index_keys, Tensor? visible, Tensor? mask, int index_topk, float scale, "
        "int budget, Tensor? block_table=None, Tensor? index_scales=None) -> Tensor"
    ),
    # A program that ends in `select`, in two halves: what runs between them may run beside it. It takes ``writes``,
    # which it changes, ``gate`` and ``reads``. The first half returns what the program will have returned when the
    # second has run, which names what the graph computed for the program, so that nobody reuses it before. Both are
    # said to change ``gate``, and do not: what reads it later stays behind them.
    "select_start": ("(Tensor(a!)[] writes, Tensor(b!) gate, Tensor[] reads, str program, int index_topk) -> Tensor"),
    "select_wait": "(Tensor(a!) topk_indices, Tensor(b!) gate, Tensor[] held) -> ()",
    # Keep of topk_indices int32[B, T, K] each sequence's last row that has a slot in kept int32[B, K], for the token
    # behind it. A cache names its kept selections without topk_indices, which is nothing yet: `plan_selection` fills
    # them in. `current`: kept is of the token before the first row, in every sequence.
    "keep_selection": "(Tensor(a!) kept, Tensor slots, Tensor? topk_indices, bool current) -> ()",
    # Exact selection by the head-mean attention of the layer itself -> topk_indices int32[B, T, K].
    "select_attention": (
        "(Tensor q, Tensor c_kv, Tensor k_pe, Tensor kv_b_weight, Tensor? visible, Tensor? mask, int nope, "
        "float scale, int index_topk, int budget) -> Tensor"
    ),
    # Absorbed attention: q_absorbed[B, T, H, R], q_pe[B, T, H, P], latent[B, S, R+P] -> out[B, T, H, R] and
    # lse float32[B, T, H]. Without topk_indices it is dense over what is visible.
    "sparse_mla": (
        "(Tensor q_absorbed, Tensor q_pe, Tensor latent, Tensor? visible, Tensor? mask, Tensor? topk_indices, "
        "float scale, Tensor? block_table=None) -> (Tensor, Tensor)"
    ),
    "sparse_mla_backward": (
        "(Tensor grad_out, Tensor grad_lse, Tensor q_absorbed, Tensor q_pe, Tensor latent, Tensor? visible, "
        "Tensor? mask, Tensor? topk_indices, float scale, Tensor? block_table=None) -> (Tensor, Tensor, Tensor)"
    ),
    # Rows x[R, K] or [R, H, K / H] by linear layers without biases, weights [N_i, K] -> [R * sum of N_i], rows [R, N_i]
    # of one behind those of the other, in dtype (None: that of x). Whoever names a weight says that no kernel of a step
    # changes it.
    "row_products": "(Tensor x, Tensor[] weights, ScalarType? dtype=None) -> Tensor",
    # Rows x[R, K], each by the weights[E, N, K] of the P / R experts that its part of picks int64[P] names -> [P, N].
    "expert_products": "(Tensor x, Tensor weights, Tensor picks) -> Tensor",
    # Router logits float32[T, E] and the bias [E] of the choice -> weights float32[T, topk] and experts int64[T, topk].
    "route": (
        "(Tensor logits, Tensor bias, int groups, int topk_groups, int topk, bool normalise, float scale) "
        "-> (Tensor, Tensor)"
    ),
    # `mla` over a pool, latent[B, S, R+P], of the rows of a prompt, of which a run chooses the form unless `form` says
    # it (`prefill_mla.limits.FORMS`): absorbed over the selected latents, or over expanded keys under a mask.
    "prefill_mla": (
        "(Tensor q, Tensor latent, Tensor kv_b_weight, Tensor? visible, Tensor? topk_indices, int nope, float scale, "
        "str form) -> Tensor"
    ),
    # Target probabilities (logits if greedy)[B, M+1, vocab], draft_tokens int64[B, M], their probabilities[B, M, vocab]
    # (None: not drawn) and uniforms[B, M+1] -> accepted int64[B] and next_token int64[B].
    "mtp_verify": (
        "(Tensor target_probs, Tensor draft_tokens, Tensor? draft_probs, Tensor uniforms, bool greedy) "
        "-> (Tensor, Tensor)"
    ),
}

for _name, _schema in SCHEMAS.items():
    torch.library.define(f"dsa::{_name}", _schema, tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.register_fake("dsa::cache_write")
def _cache_write(
    latent: Tensor,
    index_keys: Tensor,
    slots: Tensor,
    c_kv: Tensor | None,
    k_pe: Tensor | None,
    index_key: Tensor | None,
    block_table: Tensor | None = None,
    index_scales: Tensor | None = None,
) -> None:
    check_scales("cache_write", index_keys, index_scales)


@torch.library.register_fake("dsa::cache_read")
def _cache_read(latent: Tensor, rank: int, rope: int, dtype: torch.dtype) -> Tensor:
    return latent.new_empty(*latent.shape[:-1], rank + rope, dtype=dtype)


@torch.library.register_fake("dsa::mla")
def _mla(
    q: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    topk_indices: Tensor | None,
    nope: int,
    scale: float,
    indexer_params: list[Tensor],
    index_topk: int,
    index_rope: str,
    selection_of: int,
) -> Tensor:
    B, H, T, _ = q.shape
    return q.new_empty(B, T, H, kv_b_weight.shape[0] // H - nope)


@torch.library.register_fake("dsa::mla_backward")
def _mla_backward(
    grad: Tensor, q: Tensor, c_kv: Tensor, k_pe: Tensor, kv_b_weight: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        q.new_empty(q.shape),
        c_kv.new_empty(c_kv.shape),
        k_pe.new_empty(k_pe.shape),
        kv_b_weight.new_empty(kv_b_weight.shape),
    )


@torch.library.register_fake("dsa::select")
def _select(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    index_topk: int,
    scale: float,
    budget: int,
    block_table: Tensor | None = None,
    index_scales: Tensor | None = None,
) -> Tensor:
    from dsa_compile.lowering.select.limits import check  # its package needs the schemas above

    check(q, weights, index_keys, visible, mask, index_topk, budget, block_table, index_scales)
    return q.new_empty(q.shape[0], q.shape[1], index_topk, dtype=torch.int32)


@torch.library.register_fake("dsa::select_start")
def _select_start(writes: list[Tensor], gate: Tensor, reads: list[Tensor], program: str, index_topk: int) -> Tensor:
    return gate.new_empty(gate.shape[0], gate.shape[1], index_topk, dtype=torch.int32)


@torch.library.register_fake("dsa::select_wait")
def _select_wait(topk_indices: Tensor, gate: Tensor, held: list[Tensor]) -> None:
    return None


@torch.library.register_fake("dsa::keep_selection")
def _keep_selection(kept: Tensor, slots: Tensor, topk_indices: Tensor | None, current: bool) -> None:
    return None


@torch.library.register_fake("dsa::select_attention")
def _select_attention(
    q: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    nope: int,
    scale: float,
    index_topk: int,
    budget: int,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], index_topk, dtype=torch.int32)


@torch.library.register_fake("dsa::sparse_mla")
def _sparse_mla(
    q_absorbed: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    topk_indices: Tensor | None,
    scale: float,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from dsa_compile.lowering.sparse_mla.limits import check  # its package needs the schemas above

    check(q_absorbed, q_pe, latent, visible, mask, topk_indices, block_table)
    lse_dtype = torch.promote_types(q_absorbed.dtype, torch.float32)
    return q_absorbed.new_empty(q_absorbed.shape), q_absorbed.new_empty(q_absorbed.shape[:3], dtype=lse_dtype)


@torch.library.register_fake("dsa::sparse_mla_backward")
def _sparse_mla_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q_absorbed: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    topk_indices: Tensor | None,
    scale: float,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    from dsa_compile.lowering.sparse_mla.limits import check_backward

    check_backward(latent, block_table)
    return q_absorbed.new_empty(q_absorbed.shape), q_pe.new_empty(q_pe.shape), latent.new_empty(latent.shape)


@torch.library.register_fake("dsa::row_products")
def _row_products(x: Tensor, weights: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    from dsa_compile.lowering.row_products.limits import check_rows

    check_rows(x, weights, dtype)
    return x.new_empty(x.shape[0] * sum(weight.shape[0] for weight in weights), dtype=dtype)


@torch.library.register_fake("dsa::expert_products")
def _expert_products(x: Tensor, weights: Tensor, picks: Tensor) -> Tensor:
    from dsa_compile.lowering.row_products.limits import check_experts

    check_experts(x, weights, picks)
    return x.new_empty(picks.shape[0], weights.shape[1])


@torch.library.register_fake("dsa::route")
def _route(
    logits: Tensor, bias: Tensor, groups: int, topk_groups: int, topk: int, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    from dsa_compile.lowering.route.limits import check

    check(logits, bias, groups, topk_groups, topk)
    return logits.new_empty(logits.shape[0], topk), logits.new_empty(logits.shape[0], topk, dtype=torch.int64)


@torch.library.register_fake("dsa::prefill_mla")
def _prefill_mla(
    q: Tensor,
    latent: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor | None,
    topk_indices: Tensor | None,
    nope: int,
    scale: float,
    form: str,
) -> Tensor:
    from dsa_compile.lowering.prefill_mla.limits import check  # its package needs the schemas above

    check(q, latent, kv_b_weight, visible, topk_indices, nope, form)
    B, H, T, _ = q.shape
    return q.new_empty(B, T, H, kv_b_weight.shape[0] // H - nope)


@torch.library.register_fake("dsa::mtp_verify")
def _mtp_verify(
    target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None, uniforms: Tensor, greedy: bool
) -> tuple[Tensor, Tensor]:
    from dsa_compile.lowering.mtp_verify.limits import check

    check(target_probs, draft_tokens, draft_probs, uniforms, greedy)
    B = target_probs.shape[0]
    return draft_tokens.new_empty(B), draft_tokens.new_empty(B)
