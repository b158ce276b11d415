"""What a family is, and the registry that finds the family of a model."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from dsa_compile.dims import IndexerDims, LayerDims
from dsa_compile.errors import UnsupportedModelError

FAMILIES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")
"""``model_type`` of each family, and the module of `dsa_compile.models` that holds its ``FAMILY``."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What preparation needs to know of one Hugging Face model class.

    Attributes:
        model_type: of the config.
        classes: stock class -> our importable subclass of the same name, for the model and its attention (and indexer).
        index_rope: layout of an indexer's RoPE, ``"half"`` or ``"interleaved"``, where the config does not say.
        native_indexer: the class brings indexers of its own.
        indexer_key: checkpoint name of an indexer's tensors, with ``{layer}``.
        mtp_layer: our subclass of the stock decoder layer; None where no checkpoint holds an MTP layer.
    """

    model_type: str
    classes: dict[type[nn.Module], type[nn.Module]]
    index_rope: str
    native_indexer: bool = False
    indexer_key: str = "model.layers.{layer}.self_attn.indexer."
    mtp_layer: type[nn.Module] | None = None

    @property
    def causal_lm(self) -> type[nn.Module]:
        """The stock class of the whole model."""
        return next(c for c in self.classes if issubclass(c, PreTrainedModel))

    def rope_layout(self, config: PretrainedConfig) -> str:
        """The indexer's RoPE layout: the config's flag, except where the stock class fixes it."""
        flag = getattr(config, "indexer_rope_interleave", None)
        if self.native_indexer or flag is None:
            return self.index_rope
        return "interleaved" if flag else "half"


def family_named(model_type: str) -> Family:
    """The family of one of `FAMILIES`."""
    family: Family = import_module(f"dsa_compile.models.{model_type}").FAMILY
    return family


def family_of(model: nn.Module) -> Family:
    """The family of a stock model.

    Raises:
        UnsupportedModelError: it has none; the message names the class and what was looked for.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type in FAMILIES:
        family = family_named(model_type)
        if type(model) in family.classes:
            return family
    raise UnsupportedModelError(
        f"{type(model).__name__}: no Multi-head Latent Attention that this package knows. Looked for a causal language "
        f"model of transformers whose config.model_type is one of {', '.join(FAMILIES)}; came "
        f"model_type={model_type!r}. Such models have attention modules with kv_a_proj_with_mqa and kv_b_proj."
    )


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The MLA modules of a model in the order of its layers."""
    return [m for m in model.modules() if hasattr(m, "kv_b_proj") and hasattr(m, "kv_a_proj_with_mqa")]


def layer_dims(module: Any, indexer: IndexerDims | None, kept_topk: int = 0) -> LayerDims:
    """Sizes of one attention module, checked against its weights."""
    dims = LayerDims(
        n_heads=module.num_heads,
        kv_lora_rank=module.kv_lora_rank,
        qk_nope_head_dim=module.qk_nope_head_dim,
        qk_rope_head_dim=module.qk_rope_head_dim,
        v_head_dim=module.v_head_dim,
        indexer=indexer,
        kept_topk=kept_topk,
    )
    expected = (dims.n_heads * (dims.qk_nope_head_dim + dims.v_head_dim), dims.kv_lora_rank)
    weight = getattr(module.kv_b_proj, "weight", None)
    if weight is None or tuple(weight.shape) != expected or not weight.dtype.is_floating_point:
        came = None if weight is None else (tuple(weight.shape), weight.dtype)
        raise UnsupportedModelError(
            f"layer {module.layer_idx}: kv_b_proj.weight: expected a floating-point tensor {expected}, came {came}. "
            "Quantised or sharded weights are not supported; load the model in bfloat16, float16 or float32."
        )
    return dims
