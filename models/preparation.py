"""The least surgery that makes a model's captured graph rewritable. All checks come before the first change."""

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsa_compile.config import DEFAULT_INDEX_TOPK, DSAConfig
from dsa_compile.dims import LARGEST_TOPK, IndexerDims
from dsa_compile.errors import CheckpointError, ConfigError, IndexerWeightsError, UnsupportedModelError
from dsa_compile.lowering.select.projections import hadamard
from dsa_compile.models.experts import EXPERTS_NAME
from dsa_compile.models.family import Family, attention_modules, family_of, layer_dims
from dsa_compile.models.indexer import (
    LightningIndexer,
    indexers_from,
    load_indexer,
    new_indexer,
    randomize,
    read_indexer_weights,
    weights_by_layer,
)
from dsa_compile.models.latent_attention import ATTENTION_NAME, Selection
from dsa_compile.models.mtp import attach_mtp, new_mtp_layer
from dsa_compile.models.mtp_weights import has_mtp_layer, load_mtp_layer
from dsa_compile.models.prepared import EVALUATION, Preparation, PreparedModel
from dsa_compile.plan import PREVIOUS_STEP, UNMARKED, Plan, plan_of
from dsa_compile.record import read_record

RANDOM_SEED = 0


def prepare_modules(model: Any, config: DSAConfig) -> None:
    """Turn a stock model into a prepared one, in place; see `dsa_compile.prepare`."""
    if isinstance(model, PreparedModel):
        raise ConfigError(
            f"{type(model).__name__} is prepared already (selector={model.dsa.selector!r}); load it again to "
            "prepare it another way, or compile it with model.compile(backend='dsa')."
        )
    family = family_of(model)
    _check_placement(model)
    attentions: list[Any] = [*attention_modules(model)]
    layers, mtp = len(attentions), None
    if config.mtp is not None:
        mtp = new_mtp_layer(model, family)
        load_mtp_layer(mtp, model, config.mtp.module)
        attentions.append(mtp.self_attn)
    selector, indexers = _choose_selector(model, family, attentions, config)
    index_topk = config.index_topk or getattr(model.config, "index_topk", None) or DEFAULT_INDEX_TOPK
    if selector == "indexer" and index_topk > LARGEST_TOPK:
        raise ConfigError(
            f"index_topk: expected at most {LARGEST_TOPK} with an indexer, came {index_topk}. Choose fewer tokens, or "
            "selector='dense' for all of them."
        )
    plan, own = _plans(selector, indexers[:layers], config, model.config)
    owns = [layer in plan.owners or layer == layers for layer in range(len(attentions))]
    owned = [indexer if owns_it else None for indexer, owns_it in zip(indexers, owns)]
    dims = tuple(
        layer_dims(
            attention,
            _indexer_dims(attention, indexer) if selector == "indexer" else None,
            index_topk if layer < layers and plan.mark(layer) == PREVIOUS_STEP else 0,
        )
        for layer, (attention, indexer) in enumerate(zip(attentions, owned))
    )
    rotate = config.cache.rotate_index and selector == "indexer"
    rotations = [_rotation(indexer) if rotate and indexer is not None else None for indexer in indexers]
    name = type(model).__name__
    marks = (*(() if plan == own else plan.text()), *(("rotated",) if rotate else ()))
    preparation = Preparation(
        family_type=family.model_type,
        config=config,
        selector=selector,
        index_topk=index_topk,
        plan=plan,
        dims=dims,
        drafts=config.mtp.most if config.mtp else 0,
        share_drafts=_shares_drafts(config, model.config),
        fingerprint=_fingerprint((name, *marks), [a.kv_a_proj_with_mqa.weight[0] for a in attentions]),
        weights=_fingerprint((name,), _first_rows(attentions[:layers] + indexers[:layers])),
        mtp_weights=None if mtp is None else _fingerprint((name,), _first_rows([mtp.eh_proj, mtp.self_attn])),
    )
    _check_reuse(preparation, own)
    if model.config._experts_implementation in ("eager", "grouped_mm"):
        model.set_experts_implementation(EXPERTS_NAME)
    model.set_attn_implementation(ATTENTION_NAME)
    for layer, (attention, indexer, rotation) in enumerate(zip(attentions, indexers, rotations)):
        selection = Selection(
            selector=selector,
            index_topk=index_topk,
            index_rope=family.rope_layout(model.config),
            budget=config.select_budget,
            owned=owns[layer],
            mark=UNMARKED if layer == layers or plan.mark(layer) == own.mark(layer) else plan.mark(layer),
        )
        attention.selection = selection
        if indexer is not None:
            indexer.register_buffer("rotation", rotation, persistent=False)
        if isinstance(indexer, LightningIndexer):
            attention.indexer = indexer
        elif indexer is not None:
            indexer.selection = selection  # type: ignore[assignment]
    if mtp is not None:
        attach_mtp(model, mtp)
    for module in model.modules():
        if replacement := family.classes.get(type(module)):
            module.__class__ = replacement
    model.dsa = preparation


def _plans(selector: str, indexers: list[nn.Module | None], config: DSAConfig, model_config: Any) -> tuple[Plan, Plan]:
    """The plan that the options name, and the model's own; the latter alone where the pass of plans is left out."""
    with_indexer = [selector != "indexer" or indexer is not None for indexer in indexers]
    plan = plan_of(config.plan, with_indexer, layer0=config.layer0, model_config=model_config)
    own = plan_of(None, with_indexer)
    if "plan_selection" in config.disable_passes:
        return own, own
    return plan, own


def _shares_drafts(config: DSAConfig, model_config: Any) -> bool:
    if config.mtp is None or config.mtp.share_selection is None:
        return bool(getattr(model_config, "index_share_for_mtp_iteration", False))
    return config.mtp.share_selection


def _check_reuse(preparation: Preparation, own: Plan) -> None:
    """Warn of a plan that nobody trained, unless the evaluation that the options name is of it."""
    config, plan = preparation.config, preparation.plan
    if config.evaluation is not None:
        read_record(Path(config.evaluation), EVALUATION, preparation.subject() | {"plan": list(plan.text())})
    elif plan.reuses and plan != own and config.plan != "model":
        warnings.warn(
            f"plan={config.plan!r} ({plan.letters}): layers attend to selections that the checkpoint was not trained "
            "to share, which can cost quality, long contexts above all. Measure it on your own texts with dsa-compile "
            "eval --out FILE, and give evaluation=FILE.",
            stacklevel=4,
        )


def _fingerprint(words: Iterable[str], rows: Iterable[torch.Tensor]) -> str:
    """Names a model by some of its weights: the same in every process and, where they are held exactly, dtype."""
    digest = hashlib.sha256(" ".join(words).encode())
    for row in rows:
        if not row.is_meta:
            digest.update(row.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _first_rows(modules: Iterable[nn.Module | None]) -> list[torch.Tensor]:
    return [p[:1] for m in modules if m is not None for p in m.parameters()]


def _check_placement(model: Any) -> None:
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__}: expected all parameters on one device, came {sorted(map(str, devices))}. "
            "Move the model to one device before preparing it."
        )


def _rotation(indexer: Any) -> torch.Tensor:
    weight = indexer.wk.weight
    return hadamard(indexer.head_dim, weight.dtype, weight.device)


def _indexer_dims(attention: Any, indexer: Any) -> IndexerDims | None:
    return None if indexer is None else IndexerDims(n_heads=indexer.n_heads, head_dim=indexer.head_dim)


def _choose_selector(
    model: Any, family: Family, attentions: list[Any], config: DSAConfig
) -> tuple[str, list[nn.Module | None]]:
    """The selector, and for each layer the indexer it will have (of the class it has, or a new one)."""
    present: list[nn.Module | None] = [getattr(a, "indexer", None) for a in attentions]
    if config.selector in ("attention", "dense"):
        return config.selector, present if family.native_indexer else [None] * len(attentions)
    if family.native_indexer:
        if config.indexer is not None:
            _reload_native(family, attentions, model.config.num_hidden_layers, config.indexer)
        return "indexer", present
    if config.indexer == "random":
        return "indexer", _random_indexers(attentions, config)
    optional = 0 if config.plan is None else model.config.num_hidden_layers  # no plan reaches the MTP layer
    if config.indexer is not None:
        weights, source = _weights_of(config.indexer, family)
        return "indexer", [*indexers_from(weights, attentions, family, source, optional=optional)]
    checkpoint = Path(model.config.name_or_path or "")
    weights = _checkpoint_weights(checkpoint, family)
    if weights:
        return "indexer", [*indexers_from(weights, attentions, family, str(checkpoint), optional=optional)]
    raise IndexerWeightsError(
        f"{type(model).__name__} is a dense model and its checkpoint ({checkpoint or 'none'}) holds no tensors "
        f"{family.indexer_key}*. Three ways on: selector='dense' (latent cache and compilation, no selection); "
        "selector='attention' (exact top-k by the model's own attention, slow); or indexer=<safetensors file, "
        "checkpoint folder or state dict> with indexer weights that dsa-compile convert or dsa_compile.warmup trained "
        "(indexer='random' makes untrained ones)."
    )


def trained_indexers(model: Any) -> bool:
    """Whether a stock model, or the checkpoint that it was loaded from, has indexers."""
    family = family_of(model)
    return family.native_indexer or bool(_checkpoint_weights(Path(model.config.name_or_path or ""), family))


def brings_mtp(model: Any) -> bool:
    """Whether ``mtp={}`` finds an MTP layer for a stock model."""
    return family_of(model).mtp_layer is not None and has_mtp_layer(model)


def _checkpoint_weights(checkpoint: Path, family: Family) -> dict[str, torch.Tensor]:
    """Indexer tensors of the folder that the model was loaded from; none where there is no such folder."""
    if str(checkpoint) in ("", ".") or not checkpoint.is_dir():
        return {}
    return read_indexer_weights(checkpoint, family)


def _weights_of(indexer: str | Path | Mapping[str, Any], family: Family) -> tuple[Mapping[str, torch.Tensor], str]:
    if isinstance(indexer, Mapping):
        return indexer, "indexer state dict"
    weights = read_indexer_weights(indexer, family)
    if not weights:
        raise CheckpointError(f"{indexer}: holds no indexer tensors; looked for {family.indexer_key}*.")
    return weights, str(indexer)


def _random_indexers(attentions: list[Any], config: DSAConfig) -> list[nn.Module | None]:
    dims = IndexerDims(n_heads=config.index_n_heads, head_dim=config.index_head_dim)
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    indexers = [new_indexer(a, dims) for a in attentions]
    for indexer in indexers:
        randomize(indexer, generator)
    return [*indexers]


def _reload_native(family: Family, attentions: list[Any], needed: int, source: str | Path | Mapping[str, Any]) -> None:
    """Replace the weights of a model's own indexers, all or none; behind ``needed`` layers where ``source`` has any."""
    if source == "random":
        raise ConfigError(f"indexer='random': {family.model_type} has trained indexers of its own; leave indexer= out.")
    weights, name = _weights_of(source, family)
    layers = weights_by_layer(weights, family)
    owners = [a for a in attentions if a.indexer is not None and (a.layer_idx < needed or a.layer_idx in layers)]
    for attention in owners:
        copy = type(attention.indexer)(attention.config, attention.layer_idx)
        load_indexer(copy, layers.get(attention.layer_idx, {}), f"{name}: layer {attention.layer_idx}")
    for attention in owners:
        load_indexer(attention.indexer, layers[attention.layer_idx], f"{name}: layer {attention.layer_idx}")
