"""The lightning indexer that a dense model gets, and where its weights come from."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsa_compile.dims import IndexerDims
from dsa_compile.errors import CheckpointError, IndexerWeightsError
from dsa_compile.lowering.select.projections import K_NORM_EPS
from dsa_compile.models.family import Family
from dsa_compile.models.weights_file import opened

PARAMETERS = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")


class LightningIndexer(nn.Module):
    """Parameters of an attached indexer, under DeepSeek-V3.2's names.

    Attributes:
        wq_b: [HI*DI, L], from the normed query latent (the layer's input where the model has no query latent).
        wk: [DI, hidden]. k_norm: LayerNorm over DI. weights_proj: [HI, hidden], float32.
    """

    def __init__(self, dims: IndexerDims, query_width: int, hidden_size: int, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        made = {"dtype": dtype, "device": device}
        self.n_heads, self.head_dim = dims.n_heads, dims.head_dim
        self.wq_b = nn.Linear(query_width, dims.n_heads * dims.head_dim, bias=False, **made)
        self.wk = nn.Linear(hidden_size, dims.head_dim, bias=False, **made)
        self.k_norm = nn.LayerNorm(dims.head_dim, eps=K_NORM_EPS, **made)
        self.weights_proj = nn.Linear(
            hidden_size, dims.n_heads, bias=False, dtype=torch.promote_types(dtype, torch.float32), device=device
        )


def new_indexer(attention: Any, dims: IndexerDims) -> LightningIndexer:
    """An indexer of ``dims`` that fits an attention module, on its device and in its dtype."""
    if dims.head_dim < attention.qk_rope_head_dim:
        raise IndexerWeightsError(
            f"layer {attention.layer_idx}: index_head_dim {dims.head_dim} is smaller than the "
            f"{attention.qk_rope_head_dim} dimensions that RoPE turns; use at least as many."
        )
    weight = attention.kv_b_proj.weight
    query_width = attention.q_lora_rank or attention.hidden_size
    return LightningIndexer(dims, query_width, attention.hidden_size, weight.dtype, weight.device)


def randomize(indexer: LightningIndexer, generator: torch.Generator) -> None:
    """Initialise as transformers does linear layers: normal of standard deviation 0.02, identity norm."""
    with torch.no_grad():
        for linear in (indexer.wq_b, indexer.wk, indexer.weights_proj):
            linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) * 0.02)
        indexer.k_norm.reset_parameters()


def read_indexer_weights(source: str | Path, family: Family) -> dict[str, Tensor]:
    """The indexer tensors in a safetensors file or a checkpoint folder; empty where it holds none.

    Raises:
        CheckpointError: the path is neither, or a file cannot be read.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if not (path / "config.json").is_file() or not files:
            raise CheckpointError(f"{path}: expected a checkpoint folder with config.json and *.safetensors files.")
    elif path.is_file():
        files = [path]
    else:
        raise CheckpointError(f"{path}: expected a safetensors file or a checkpoint folder, found neither.")
    pattern = _key_pattern(family)
    found: dict[str, Tensor] = {}
    for file in files:
        with opened(file) as tensors:
            found.update({k: tensors.get_tensor(k) for k in tensors.keys() if pattern.search(k)})  # noqa: SIM118
    return found


def _key_pattern(family: Family) -> re.Pattern[str]:
    prefix, _, suffix = family.indexer_key.partition("{layer}")
    return re.compile(f"(?:^|\\.)?{re.escape(prefix)}(\\d+){re.escape(suffix)}(.+)$")


def weights_by_layer(weights: Mapping[str, Tensor], family: Family) -> dict[int, dict[str, Tensor]]:
    """Split a state dict into the indexers of its layers; other keys are left out."""
    pattern = _key_pattern(family)
    layers: dict[int, dict[str, Tensor]] = {}
    for key, tensor in weights.items():
        if match := pattern.search(key):
            layers.setdefault(int(match[1]), {})[match[2]] = tensor
    return layers


def indexers_from(
    weights: Mapping[str, Tensor], attentions: list[Any], family: Family, source: str, *, optional: int
) -> list[LightningIndexer | None]:
    """An indexer with ``weights`` for each attention module; None where the first ``optional`` ones have none.

    Raises:
        IndexerWeightsError: a layer or a tensor is missing, has another shape, or holds NaN or inf.
    """
    layers = weights_by_layer(weights, family)
    missing = [a.layer_idx for a in attentions if a.layer_idx not in layers]
    if any(layer >= optional for layer in missing) or len(missing) == len(attentions):
        raise IndexerWeightsError(
            f"{source}: expected tensors {family.indexer_key}* for layers 0 to {len(attentions) - 1}, found none for "
            f"layers {missing}. Give weights for every layer (that of mtp= included), the plan that those there are "
            "were trained for, or selector='attention' or 'dense'."
        )
    return [
        None if a.layer_idx in missing else _indexer_from(layers[a.layer_idx], a, f"{source}: layer {a.layer_idx}")
        for a in attentions
    ]


def _indexer_from(tensors: Mapping[str, Tensor], attention: Any, where: str) -> LightningIndexer:
    if absent := [name for name in PARAMETERS if name not in tensors]:
        raise IndexerWeightsError(f"{where}: the indexer lacks {', '.join(absent)}.")
    heads, head_dim = tensors["weights_proj.weight"].shape[0], tensors["wk.weight"].shape[0]
    indexer = new_indexer(attention, IndexerDims(n_heads=heads, head_dim=head_dim))
    load_indexer(indexer, tensors, where)
    return indexer


def load_indexer(indexer: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy ``tensors`` into an indexer of the same sizes, or raise IndexerWeightsError and change nothing."""
    parameters = dict(indexer.named_parameters())
    for name in PARAMETERS:
        if name not in tensors:
            raise IndexerWeightsError(f"{where}: the indexer lacks {name}.")
        expected, came = tuple(parameters[name].shape), tuple(tensors[name].shape)
        if expected != came:
            raise IndexerWeightsError(f"{where}: {name}: expected shape {expected}, came {came}.")
        if not tensors[name].dtype.is_floating_point:
            raise IndexerWeightsError(f"{where}: {name}: expected floating-point values, came {tensors[name].dtype}.")
        if not tensors[name].is_meta and not bool(tensors[name].float().isfinite().all()):
            raise IndexerWeightsError(f"{where}: {name} holds NaN or inf.")
    with torch.no_grad():
        for name in PARAMETERS:
            parameters[name].copy_(tensors[name])
