"""Where the weights of an MTP layer come from. Nothing else of a checkpoint is read.

Checkpoints repeat ``embed_tokens`` and ``shared_head.head`` for it, which are the model's and stay unread.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsa_compile.errors import CheckpointError, MTPWeightsError
from dsa_compile.models.weights_file import opened

SHARED = ("embed_tokens.weight", "shared_head.head.weight")
INDEX = "model.safetensors.index.json"


def load_mtp_layer(layer: Any, model: Any, source: str | Path | Mapping[str, Tensor] | nn.Module | None) -> None:
    """Give a layer that is on the meta device its weights, on the device and in the dtypes of the last of ``model``.

    Args:
        layer: of `dsa_compile.models.mtp.new_mtp_layer`; left as it is where ``model`` has no weights either.
        source: see `dsa_compile.config.MTPConfig.module`.

    Raises:
        CheckpointError: ``source`` is no checkpoint, or a file cannot be read.
        MTPWeightsError: a tensor is missing, of another shape, in fp8, or holds NaN or inf.
    """
    if model.device.type == "meta":
        return
    prefix = f"model.layers.{layer.self_attn.layer_idx}."
    if isinstance(source, nn.Module):
        source = source.state_dict()
    if isinstance(source, Mapping):
        found, where = {name.removeprefix(prefix): tensor for name, tensor in source.items()}, "the MTP state dict"
    else:
        path = Path(source or model.config.name_or_path or "")
        found, where = _read(path, prefix), str(path)
    found, expected = _fuse_experts(found), layer.state_dict()
    _check(expected, found, f"{where}: {prefix}*")
    like = model.model.layers[layer.self_attn.layer_idx - 1].state_dict()
    placed = {
        name: found[name].to(model.device, like[name].dtype if name in like else model.dtype, copy=True)
        for name in expected
    }
    layer.load_state_dict(placed, assign=True)


def has_mtp_layer(model: Any) -> bool:
    """Whether the checkpoint that a stock model was loaded from holds an MTP layer, behind the last of the model's."""
    path, prefix = Path(model.config.name_or_path or ""), f"model.layers.{model.config.num_hidden_layers}."
    if str(path) == "." or not path.is_dir() or not any(path.glob("*.safetensors")):
        return False
    for file in _files(path, prefix):
        with opened(file) as tensors:
            if any(name.startswith(prefix) for name in tensors.keys()):  # noqa: SIM118
                return True
    return False


def _read(path: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors under ``prefix`` in a checkpoint folder or a safetensors file, without it."""
    found: dict[str, Tensor] = {}
    for file in _files(path, prefix):
        with opened(file) as tensors:
            names = [n for n in tensors.keys() if n.startswith(prefix) and not n.endswith(SHARED)]  # noqa: SIM118
            found |= {name.removeprefix(prefix): tensors.get_tensor(name) for name in names}
    if not found:
        raise MTPWeightsError(
            f"{path}: holds no tensors {prefix}*, the MTP layer behind the last of the model's. Not every checkpoint "
            "keeps it: name one that does with mtp=MTPConfig(module=...), or leave mtp= out."
        )
    return found


def _files(path: Path, prefix: str) -> list[Path]:
    """The safetensors files that may hold tensors under ``prefix``."""
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.safetensors")) if str(path) != "." else []
    if not files:
        raise CheckpointError(
            f"mtp: expected a checkpoint folder with *.safetensors files or such a file, came {str(path)!r}. Name the "
            "one that holds the MTP layer with mtp=MTPConfig(module=...)."
        )
    if not (path / INDEX).is_file():
        return files
    try:
        places = json.loads((path / INDEX).read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / INDEX}: expected JSON with a weight_map ({error!r}).") from error
    return sorted({path / file for name, file in places.items() if name.startswith(prefix)})


def _fuse_experts(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts that lie apart, ``experts.{e}.gate_proj.weight``, as transformers holds them: ``experts.gate_up_proj``.

    [experts, 2 * intermediate, hidden], the gate first, and ``experts.down_proj`` [experts, hidden, intermediate].
    """
    apart: dict[tuple[int, str], Tensor] = {}
    for name in list(found):
        if match := re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", name):
            apart[int(match[1]), match[2]] = found.pop(name)
    experts = sorted({expert for expert, _ in apart})
    if not experts:
        return found
    if absent := [f"{e}.{kind}_proj" for e in experts for kind in ("gate", "up", "down") if (e, kind) not in apart]:
        raise MTPWeightsError(f"the MTP layer's experts lack {', '.join(absent)}.")
    halves = [torch.cat([apart[e, "gate"], apart[e, "up"]]) for e in experts]
    return found | {
        "mlp.experts.gate_up_proj": torch.stack(halves),
        "mlp.experts.down_proj": torch.stack([apart[e, "down"] for e in experts]),
    }


def _check(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    if scaled := next((name for name in found if name.endswith("weight_scale_inv")), None):
        raise MTPWeightsError(
            f"{where}: holds fp8 weights ({scaled}); expected bfloat16, float16 or float32, as the model's must be."
        )
    if absent := sorted(expected.keys() - found.keys()):
        raise MTPWeightsError(f"{where}: the MTP layer lacks {', '.join(absent)}.")
    for name in expected:
        tensor = found[name]
        if tensor.shape != expected[name].shape:
            raise MTPWeightsError(
                f"{where}: {name}: expected shape {tuple(expected[name].shape)}, came {tuple(tensor.shape)}. It is the "
                "MTP layer of another model."
            )
        if not tensor.dtype.is_floating_point:
            raise MTPWeightsError(f"{where}: {name}: expected floating-point values, came {tensor.dtype}.")
        if not bool(tensor.float().isfinite().all()):
            raise MTPWeightsError(f"{where}: {name} holds NaN or inf.")
