"""Models with an MTP layer of random weights, and a second derivation of what it drafts."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases import FAMILIES, NATIVE, optimized, stock
from oracles import float64_copy
from safetensors.torch import save_file
from torch import Tensor

import dsa_compile
from dsa_compile.models.mtp_step import Place, draft

LAYERS = 2
FAMILIES_WITH_MTP = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")
FAULTS = ("halves swapped", "state before the norm", "prompt not filled", "selection of the target")


@functools.cache
def mtp_weights(case: str, device: torch.device) -> dict[str, Tensor]:
    """An MTP layer for `stock` models of `LAYERS` layers: the decoder layer that a deeper one has there, and norms."""
    weights = dict(stock(case, device, LAYERS + 1).model.layers[LAYERS].state_dict())
    generator, width = torch.Generator().manual_seed(5), stock(case, device, LAYERS).config.hidden_size
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{name}.weight"] = (1 + 0.3 * torch.randn(width, generator=generator)).to(device)
    weights["eh_proj.weight"] = (0.2 * torch.randn(width, 2 * width, generator=generator)).to(device)
    return weights


def add_mtp_layer(folder: Path, case: str, device: torch.device) -> None:
    """Put `mtp_weights` into the checkpoint of a miniature, beside what `transformers` wrote."""
    layer = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    weights = {f"model.layers.{layer}.{name}": t.cpu().contiguous() for name, t in mtp_weights(case, device).items()}
    save_file(weights, folder / "mtp.safetensors")


def drafting(
    case: str, device: torch.device, *, drafts: int | str = 1, lowering: str | None = None, **fields: Any
) -> Any:
    """A prepared model that drafts; uncompiled, or with a ``lowering`` optimized."""
    share = fields.pop("share_selection", None)
    mtp = {"drafts": drafts, "module": mtp_weights(case, device), "share_selection": share}
    if lowering is not None:
        return optimized(case, device, lowering, LAYERS, mtp=mtp, **fields)
    return prepared(case, device, mtp=mtp, **fields)


def prepared(case: str, device: torch.device, **fields: Any) -> Any:
    """An uncompiled model whose selection is the stock model's."""
    if FAMILIES[case][0] not in NATIVE:
        fields.setdefault("selector", "dense")
    return dsa_compile.prepare(copy.deepcopy(stock(case, device, LAYERS)), **fields)


def draft_logits(model: Any, cache: Any, last: Tensor) -> Tensor:
    """[B, M, vocab], by which an uncompiled ``model`` drafts behind tokens ``last`` [B], which follow the cache's."""
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.no_grad():
        tokens = draft(*draft_inputs(model, cache, last))
    hook.remove()
    logits = torch.cat(seen, 1)
    assert torch.equal(tokens, torch.cat([last[:, None], logits.argmax(-1)], 1))
    return logits


def draft_inputs(model: Any, cache: Any, last: Tensor) -> tuple[Any, ...]:
    """Arguments of `draft` behind tokens ``last`` [B], which follow the cache's."""
    valid, width = cache.lengths.valid, model.dsa.drafts + 1
    place = Place(valid, torch.ones_like(valid, dtype=torch.bool), torch.zeros_like(valid))
    states = cache.lengths.state[:, None].repeat(1, width, 1)
    return model, cache, last[:, None].repeat(1, width), states, torch.ones_like(valid), place


def naive_draft_logits(case: str, device: torch.device, ids: Tensor, drafts: int, fault: str | None = None) -> Tensor:
    """`draft_logits` [M, vocab] behind tokens ``ids`` [T]: one sequence, everything anew each time, in float64.

    ``fault``: one of `FAULTS` to make.
    """
    model = float64_copy(stock(case, device, LAYERS))
    layer = float64_copy(stock(case, device, LAYERS + 1)).model.layers[LAYERS]
    weights = {name: t.double() for name, t in mtp_weights(case, device).items() if t.is_floating_point()}
    before_norm: list[Tensor] = []
    picked: list[Tensor] = []
    model.model.norm.register_forward_hook(lambda _, args, __: before_norm.append(args[0]))
    if fault == "selection of the target":
        source = next(x.self_attn.indexer for x in reversed(model.model.layers) if x.self_attn.indexer is not None)
        source.register_forward_hook(lambda _, __, output: picked.append(output))
        layer.self_attn.indexer.forward = lambda *args, **kwargs: picked[0]
    with torch.no_grad():
        states = model.model(ids[None, :-1]).last_hidden_state
        if fault == "state before the norm":
            states = before_norm[0]
        tokens, logits = ids[None, 1:], []
        for _ in range(drafts):
            rows = naive_rows(model, weights, states, tokens, swapped=fault == "halves swapped")
            T = rows.shape[1]
            mask = torch.ones(1, 1, T, T, dtype=torch.bool, device=device).tril()
            if fault == "prompt not filled":
                mask[..., : len(ids) - 2] = False
            turned = model.model.rotary_emb(rows, position_ids=torch.arange(T, device=device)[None])
            output = layer(rows, attention_mask=mask, position_embeddings=turned)
            output = output[0] if isinstance(output, tuple) else output
            last = _rms(output[:, -1:], weights["shared_head.norm.weight"], model.config)
            logits.append(model.lm_head(last))
            states = torch.cat([states, last], 1)
            tokens = torch.cat([tokens, logits[-1].argmax(-1)], 1)
    return torch.cat(logits, 1)[0]


def naive_rows(
    model: Any, weights: dict[str, Tensor], states: Tensor, tokens: Tensor, *, swapped: bool = False
) -> Tensor:
    """What the decoder layer of an MTP layer reads [B, T, hidden]: of each token, and the state of the one before."""
    halves = [_rms(model.model.embed_tokens(tokens), weights["enorm.weight"], model.config)]
    halves.insert(not swapped, _rms(states, weights["hnorm.weight"], model.config))
    return torch.cat(halves, -1) @ weights["eh_proj.weight"].T


def _rms(x: Tensor, weight: Tensor, config: Any) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, config.rms_norm_eps)
