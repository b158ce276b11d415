"""The attention that prepared models run: latents stay latents, and one ``dsa::mla`` stands for the whole layer."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from dsa_compile.lowering.cache_write.compact import compact_rows
from dsa_compile.lowering.select.projections import project

ATTENTION_NAME = "dsa_mla"
"""``config._attn_implementation`` of a prepared model."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What a prepared attention module writes into its ``dsa::mla`` for the passes, set by `prepare`.

    ``selector``: "indexer", "attention" or "dense". ``index_topk``: K. ``budget``: bytes of scores at once.
    ``owned``: some layer attends to the selection of this one. ``mark``: what this one attends to
    (`dsa_compile.plan.Plan.mark`), UNMARKED where it is what the model has.
    """

    selector: str
    index_topk: int
    index_rope: str
    budget: int
    owned: bool
    mark: int


class LatentAttention(nn.Module):
    """Mixin of every family's attention: keys and values are not expanded."""

    selection: Selection

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        return kv_nope, k_rot


class NativeIndexer(nn.Module):
    """Mixin of an indexer that the stock class brings: same parameters, but ``dsa::select`` and gradients.

    Its forward gets ``visible[:, 0]`` where the stock one gets a mask. Under another selector, and where no layer
    attends to its selection, it picks nothing: an empty selection, which `mla_attention` drops (None would be an error
    to GLM's shared layers).
    """

    selection: Selection
    rotation: Tensor | None
    n_heads: int
    head_dim: int
    qk_rope_head_dim: int
    softmax_scale: float
    layer_idx: int

    def forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        if self.selection.selector != "indexer" or not self.selection.owned:
            return attention_mask.new_empty(*hidden_states.shape[:2], 0)
        visible = attention_mask.unsqueeze(1)
        q, key, weights = project(
            hidden_states,
            q_resid,
            *position_embeddings,
            *indexer_parameters(self),
            n_heads=self.n_heads,
            head_dim=self.head_dim,
            rope_dim=self.qk_rope_head_dim,
            layout=self.selection.index_rope,
        )
        keys, scales = (
            (compact_rows(key, visible), None)
            if past_key_values is None
            else past_key_values.update_indexer(key, self.layer_idx)
        )
        return torch.ops.dsa.select.default(
            q,
            weights,
            keys,
            visible,
            None,
            self.selection.index_topk,
            self.softmax_scale,
            self.selection.budget,
            None,
            scales,
        )


def indexer_parameters(indexer: Any) -> list[Tensor]:
    """Parameters, and the rotation if there is one, in the order that `project` and ``dsa::mla`` take them."""
    parameters = [
        indexer.wq_b.weight,
        indexer.wk.weight,
        indexer.k_norm.weight,
        indexer.k_norm.bias,
        indexer.weights_proj.weight,
    ]
    return parameters if indexer.rotation is None else [*parameters, indexer.rotation]


def mla_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    dropout: float = 0.0,
    indices: Tensor | None = None,
    shares_selection: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention: query [B, H, T, N+P], ``attention_mask`` is ``visible``.

    ``key`` is the latent pool [B, S, R+P] of a cache (or its rows in fp8), or with ``value`` the call's own rows
    [B, 1, T, R], [B, 1, T, P]. ``shares_selection``: of a layer that a graph runs several times, attend to what it
    selected first.
    """
    rank, selection = module.kv_lora_rank, module.selection
    if key.dtype == torch.uint8:
        latent = torch.ops.dsa.cache_read.default(key, rank, module.qk_rope_head_dim, query.dtype)
    else:
        latent = key if key.dim() == 3 else compact_rows(torch.cat([key, value], -1)[:, 0], attention_mask)
    if selection.selector != "indexer" or (indices is not None and indices.shape[-1] == 0):
        indices = None
    inserted = indices is None and selection.selector != "dense" and selection.owned
    attached = inserted and selection.selector == "indexer"
    output = torch.ops.dsa.mla.default(
        query,
        latent[..., :rank],
        latent[..., rank:],
        module.kv_b_proj.weight,
        attention_mask,
        None,
        indices,
        module.qk_nope_head_dim,
        scaling,
        indexer_parameters(module.indexer) if attached else [],
        selection.index_topk if inserted else 0,
        selection.index_rope,
        module.layer_idx if shares_selection else selection.mark,
    )
    return output, None


AttentionInterface.register(ATTENTION_NAME, mla_attention)
