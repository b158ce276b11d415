"""The MTP layer: a decoder layer of the family that reads a hidden state beside the embedding of the next token.

DeepSeek-V3 report (arXiv 2412.19437), section 2.2, as its checkpoints mean it: the embedding comes first in
``eh_proj``, the hidden state is that behind ``model.norm``, or behind ``shared_head.norm`` where the layer reads its
own. Embedding and head are the model's.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from dsa_compile.cache import DSACache, visible_from
from dsa_compile.errors import UnsupportedModelError
from dsa_compile.models.family import Family


class MTPLayer(nn.Module):
    """Mixin of a family's decoder layer; parameters are named as in checkpoints, behind ``model.layers.{L}.``."""

    input_layernorm: nn.Module
    shared_head: Any

    def __init__(self, config: PretrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        norm: Any = type(self.input_layernorm)
        width = config.hidden_size
        self.enorm, self.hnorm = (norm(width, eps=config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.shared_head = nn.Module()
        self.shared_head.norm = norm(width, eps=config.rms_norm_eps)

    def forward(self, states: Tensor, embeddings: Tensor, **kwargs: Any) -> Tensor:
        """The state [B, T, hidden] whose logits are of the token behind the embedded one.

        Args:
            states: [B, T, hidden], of the token before. embeddings: [B, T, hidden].
            kwargs: as for the decoder layer.
        """
        output = super().forward(self.join(states, embeddings), **kwargs)
        state: Tensor = self.shared_head.norm(output[0] if isinstance(output, tuple) else output)
        return state

    def join(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """What the decoder layer reads [B, T, hidden]; arguments as for `forward`."""
        joined: Tensor = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(states)], -1))
        return joined


def new_mtp_layer(model: Any, family: Family) -> Any:
    """The MTP layer of a stock model, without weights (on the meta device), for the place behind its last layer.

    Raises:
        UnsupportedModelError: models of this family have none.
    """
    if family.mtp_layer is None:
        raise UnsupportedModelError(
            f"{type(model).__name__}: mtp= needs a model whose checkpoints hold an MTP layer, which those of "
            f"{family.model_type} do not. Leave mtp= out."
        )
    config, place = copy.copy(model.config), model.config.num_hidden_layers
    for name, kind in (("mlp_layer_types", None), ("indexer_types", "full")):
        if types := getattr(config, name, None):
            setattr(config, name, [*types[:place], kind or types[place - 1]])
    with torch.device("meta"):
        layer = family.mtp_layer(config, place)
    for module in layer.modules():
        if hasattr(module, "config"):
            module.config = model.config
    return layer.eval()


def attach_mtp(model: Any, layer: MTPLayer) -> None:
    """Put the layer behind the last one, where stock forwards do not run it, and fill its cache from now on."""
    model.model.layers.append(layer)
    model.model.register_forward_hook(fill, with_kwargs=True)


def run_mtp(
    backbone: Any,
    cache: DSACache,
    states: Tensor,
    embeddings: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    shares_selection: bool = False,
) -> Tensor:
    """Append rows to the cache of the MTP layer of ``backbone`` and run it on them.

    Args:
        states, embeddings: [B, T, hidden], see `MTPLayer.forward`.
        slots, positions: int64[B, T]; a negative slot is padding.
        shares_selection: attend to the selection of the layer's first rows in this graph.
    """
    outside, cache.lengths.slots = cache.lengths.slots, slots
    positions = positions.clamp(min=0)
    output: Tensor = backbone.layers[-1](
        states,
        embeddings,
        attention_mask=visible_from(slots),
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        position_embeddings=backbone.rotary_emb(embeddings, position_ids=positions),
        shares_selection=shares_selection,
    )
    cache.lengths.slots = outside
    return output


def fill(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of the model: row i of the MTP layer's cache holds the state of token i beside token i + 1.

    So the rows are one fewer than the tokens, and the state of the last token waits in the cache for the call that
    brings the next. What the layer makes of the rows is not read, so that a compiler drops it.
    """
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, DSACache) or (state := cache.lengths.state) is None:
        return
    slots, embeddings = cache.layers[-1].slots(), _embeddings(backbone, kwargs)
    states, cache.lengths.next_state = _states_before(output[0], slots >= 0, state)
    run_mtp(backbone, cache, states, embeddings, (slots - 1).clamp(min=-1), kwargs["position_ids"] - 1)


def attend_without_cache(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook that runs the attention of the MTP layer in a call without a cache, on the rows that `fill` has.

    The column of token i + 1 has row i, of slot and position i. That of the first token of a sequence or a packed
    document has none, and sees nothing: no row is of two documents. Who captures the call reads its ``dsa::mla``.
    """
    layer = backbone.layers[-1]
    start, end = kwargs["attention_mask"].unbind(-1)
    embeddings, positions = _embeddings(backbone, kwargs), (kwargs["position_ids"] - 1).clamp(min=0)
    states, _ = _states_before(output[0], (end > start)[:, 0], torch.zeros_like(output[0][:, 0]))
    layer.self_attn(
        hidden_states=layer.input_layernorm(layer.join(states, embeddings)),
        attention_mask=torch.stack([start, torch.maximum(start, end - 1)], -1),
        position_ids=positions,
        position_embeddings=backbone.rotary_emb(embeddings, position_ids=positions),
    )


def _embeddings(backbone: Any, kwargs: dict[str, Any]) -> Tensor:
    """[B, T, hidden] of the tokens of a call."""
    given: Tensor | None = kwargs.get("inputs_embeds")
    return backbone.embed_tokens(kwargs["input_ids"]) if given is None else given


def _states_before(states: Tensor, real: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """The state of the token before each column, and of the last token of all, over what is padding.

    Args:
        states: [B, T, hidden], of the columns. real: bool[B, T], which of them hold a token.
        first: [B, hidden], the state before them.

    Returns:
        [B, T, hidden] and [B, hidden].
    """
    columns = torch.arange(1, real.shape[1] + 1, device=real.device)
    last = torch.where(real, columns, 0).cummax(1).values
    known = torch.cat([first[:, None], states], 1)
    before = torch.cat([torch.zeros_like(last[:, :1]), last[:, :-1]], 1)
    return rows_at(known, before), rows_at(known, last[:, -1:])[:, 0]


def rows_at(states: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` int64[B, T] of states [B, S, hidden]."""
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))
