"""Tiny seeded models of every family, for tests, benchmarks and trying things without a checkpoint."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from dsa_compile.errors import ConfigError

CLASSES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "deepseek_v32": "DeepseekV32",
    "glm_moe_dsa": "GlmMoeDsa",
    "glm4_moe_lite": "Glm4MoeLite",
}
_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_INDEXER_SIZES = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 8}


def miniature(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """A stock transformers model of ``family`` (a key of `CLASSES`) with three layers and random weights.

    ``overrides`` replace config fields. Weights are normal with standard deviation 0.08, so that attention is not flat.

    Raises:
        ConfigError: the family is unknown.
    """
    if family not in CLASSES:
        raise ConfigError(f"family: expected one of {', '.join(CLASSES)}, came {family!r}.")
    sizes = _SIZES | (_INDEXER_SIZES if family in ("deepseek_v32", "glm_moe_dsa") else {}) | overrides
    config = getattr(transformers, f"{CLASSES[family]}Config")(**sizes)
    model: PreTrainedModel = getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.to(dtype)  # type: ignore[arg-type]
