"""Warmed-up models as checkpoints."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from dsa_compile.distillation import Warmup
from dsa_compile.errors import CheckpointError, ConfigError
from dsa_compile.folders import whole_folder, writable
from dsa_compile.models.family import family_of
from dsa_compile.models.weights_file import opened

INDEXER_FILE = "indexer.safetensors"


def save_checkpoint(
    model: Any, warmed: Warmup, folder: str | Path, *, tokenizer: Any = None, max_shard_size: int | str = "5GB"
) -> str:
    """Write a model with the indexers that were trained for it, in place of what ``folder`` holds, at once or not.

    A DeepSeek-V3 whose every layer attends to its own selection becomes a DeepSeek-V3.2 checkpoint, which transformers
    loads as ``DeepseekV32ForCausalLM``; a model that brings indexers stays what it is, with the trained ones. Any other
    is written as it is, with its indexers beside it in `INDEXER_FILE`, where `optimize` finds them.

    Tensors of MTP layers, which transformers does not load, are carried over from the checkpoint that the model came
    from, with the indexer that ``warmed`` has for them; that there is none a warning says.

    Args:
        model: the stock model that ``warmed`` is of. tokenizer: saved with it. max_shard_size: as of transformers.

    Returns:
        The ``model_type`` of the checkpoint.

    Raises:
        ConfigError: ``folder`` is the model's own checkpoint, or holds something else than a checkpoint; or ``warmed``
            has an indexer for an MTP layer that the model's own checkpoint lacks.
        CheckpointError: it cannot be written; what was there is as before.
    """
    folder = Path(folder)
    check_place(model, folder)
    layers = model.config.num_hidden_layers
    mtp = _mtp_tensors(Path(model.config.name_or_path or ""), layers)
    mtp_indexer = {name: t for name, t in warmed.indexers.items() if _layer(name) >= layers}
    _check_mtp(model, mtp, mtp_indexer)
    indexers = {name: t for name, t in warmed.indexers.items() if name not in mtp_indexer}
    saved = _deepseek_v32(model, indexers, warmed.index_topk) if _becomes_v32(model, warmed) else model
    weights = saved.state_dict()
    if family_of(saved).native_indexer:
        weights |= indexers
        mtp |= {name: t.cpu().contiguous() for name, t in mtp_indexer.items()}
    try:
        with whole_folder(folder) as part:
            saved.save_pretrained(part, state_dict=weights, max_shard_size=max_shard_size)
            if tokenizer is not None:
                tokenizer.save_pretrained(part)
            if mtp:
                _add_mtp(part, mtp)
            if not family_of(saved).native_indexer:
                save_indexers(warmed, part)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be written ({error}); what was there is as before.") from error
    model_type: str = saved.config.model_type
    return model_type


def save_indexers(warmed: Warmup, folder: str | Path) -> None:
    """Put indexers and their K beside the model in a checkpoint folder, where `optimize` finds them.

    Raises:
        OSError, SafetensorError: they cannot be written.
    """
    folder = Path(folder)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in warmed.indexers.items()}
    save_file(tensors, folder / INDEXER_FILE, {"plan": " ".join(warmed.plan.text())})
    config = json.loads((folder / CONFIG_NAME).read_text()) | {"index_topk": warmed.index_topk}
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def check_place(model: Any, folder: Path) -> None:
    """Raise ConfigError where a checkpoint of ``model`` must not be written."""
    source = Path(model.config.name_or_path or "")
    if folder.exists() and source.exists() and folder.samefile(source):
        raise ConfigError(f"{folder}: expected another folder than the checkpoint that the model came from.")
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / CONFIG_NAME).is_file())):
        raise ConfigError(
            f"{folder}: expected a checkpoint to replace, an empty folder, or nothing; came something else."
        )
    if not writable(folder.absolute().parent):
        raise ConfigError(f"{folder}: expected a place that can be written to.")


def _becomes_v32(model: Any, warmed: Warmup) -> bool:
    """Whether DeepSeek-V3.2 computes what the sparse model does: the same projections, RoPE layouts and plan."""
    config = model.config
    return (
        config.model_type == "deepseek_v3"
        and config.q_lora_rank is not None
        and bool(config.rope_interleave)
        and family_of(model).rope_layout(config) == "half"
        and warmed.plan.sources == tuple(range(config.num_hidden_layers))
    )


def _check_mtp(model: Any, mtp: dict[str, Tensor], indexer: dict[str, Tensor]) -> None:
    """Refuse an indexer without its MTP layer, and warn of an MTP layer without indexer."""
    source = model.config.name_or_path or "no checkpoint"
    if indexer and not mtp:
        raise ConfigError(
            f"save_checkpoint: expected an MTP layer behind the last in the checkpoint of the model ({source}), which "
            f"the indexer of layer {model.config.num_hidden_layers} was trained for, found none. Load the model from a "
            "checkpoint that has the layer, or warm up without mtp=."
        )
    if mtp and not indexer and not any(".self_attn.indexer." in name for name in mtp):
        warnings.warn(
            f"{source}: its MTP layer gets no indexer: whoever drafts with the layer from a sparse checkpoint will "
            "miss it. warmup(..., mtp={}) trains one.",
            stacklevel=3,
        )


def _deepseek_v32(model: Any, indexers: dict[str, Tensor], index_topk: int) -> Any:
    """A stock DeepSeek-V3.2 on the weights of a V3 and indexers for it."""
    first = "model.layers.0.self_attn.indexer."
    fields = model.config.to_dict()
    for name in ("model_type", "architectures", "transformers_version", "rope_interleave"):
        fields.pop(name, None)
    config = DeepseekV32Config(
        **fields
        | {
            "index_topk": index_topk,
            "index_n_heads": len(indexers[f"{first}weights_proj.weight"]),
            "index_head_dim": len(indexers[f"{first}wk.weight"]),
        }
    )
    with torch.device("meta"):
        sparse = DeepseekV32ForCausalLM(config)
    sparse.load_state_dict(model.state_dict() | indexers, strict=True, assign=True)
    sparse.generation_config = model.generation_config
    return sparse


def _add_mtp(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Put ``tensors`` into one more shard."""
    shards = sorted(folder.glob("model*.safetensors"))
    names = [f"model-{number + 1:05}-of-{len(shards) + 1:05}.safetensors" for number in range(len(shards) + 1)]
    for shard, name in reversed([*zip(shards, names)]):
        shard.rename(folder / name)
    save_file(tensors, folder / names[-1], {"format": "pt"})
    weight_map: dict[str, str] = {}
    size = 0
    for name in names:
        with safe_open(folder / name, framework="pt") as shard:
            weight_map |= dict.fromkeys(shard.keys(), name)
        size += (folder / name).stat().st_size
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _mtp_tensors(source: Path, layers: int) -> dict[str, Tensor]:
    """Tensors of layers from ``layers`` on in a checkpoint folder; none where there is no such folder."""
    found = {}
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else []
    for file in [file for file in files if file.name != INDEXER_FILE]:  # what is saved has other indexers
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if _layer(name) >= layers:
                    found[name] = tensors.get_tensor(name)
    return found


def _layer(name: str) -> int:
    """Number of the layer that a tensor is of; -1 where it is of none."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1
