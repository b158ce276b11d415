"""Second derivations that optimized models are held against."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

ORACLE = "float64_topk_oracle"


def _topk_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Dense softmax per head, the K keys of highest mean over heads, softmax again over those alone."""
    T, S = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(1, 1, T, S, dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~mask, float("-inf"))
    mean = scores.softmax(-1).nan_to_num(0).mean(1, keepdim=True).masked_fill(~mask, -1)
    picks = torch.sort(mean, dim=-1, descending=True, stable=True).indices[..., : module.config.oracle_topk]
    picked = torch.zeros_like(mask.expand(mean.shape)).scatter(-1, picks, True)
    probs = scores.masked_fill(~picked, float("-inf")).softmax(-1).nan_to_num(0)
    return (probs @ value).transpose(1, 2), None


AttentionInterface.register(ORACLE, _topk_attention)
AttentionMaskInterface.register(ORACLE, sdpa_mask)


def float64_copy(model: nn.Module) -> Any:
    """A stock copy in float64 with transformers' own eager experts."""
    twin: Any = copy.deepcopy(model).double()
    twin.set_experts_implementation("eager")
    return twin


def topk_oracle(model: nn.Module, index_topk: int) -> Any:
    """A float64 copy whose attention keeps the ``index_topk`` keys of highest mean probability."""
    twin = float64_copy(model)
    twin.config.oracle_topk = index_topk
    twin.set_attn_implementation(ORACLE)
    return twin


def rewired(model: nn.Module, sources: Sequence[int], previous_step: bool = False) -> Any:
    """A stock copy in which the indexer of layer i answers with the selection that layer ``sources[i]`` made.

    ``previous_step``: that of layer 0 answers with what it selected for the token before, and the token.
    """
    twin: Any = copy.deepcopy(model)
    made: dict[int, Any] = {}
    for layer, source in zip(twin.model.layers, sources):
        indexer = layer.self_attn.indexer

        def answer(*args, own=indexer.forward, layer=layer.self_attn.layer_idx, source=source, **kwargs):
            made[layer] = own(*args, **kwargs)
            return _a_token_late(made[0]) if previous_step and layer == 0 else made[source]

        indexer.forward = answer
    return twin


def _a_token_late(selection: Tensor) -> Tensor:
    """[B, T, K] of unpadded sequences from position 0 on: of each row the row before, and the row's own position.

    Of K positions the second lowest goes; places that are left repeat the row's own.
    """
    late = torch.empty_like(selection)
    for b, t in itertools.product(*map(range, selection.shape[:2])):
        seen = sorted(s for s in selection[b, t - 1].tolist() if s < t) if t else []
        if len(seen) == selection.shape[2]:
            del seen[1]
        late[b, t] = torch.tensor(seen + [t] * (selection.shape[2] - len(seen)))
    return late
