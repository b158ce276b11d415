"""One rank's share of a large model's decode step, with random weights over a cache of random rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from dsa_compile.cache import DSACache
from dsa_compile.config import nearest
from dsa_compile.errors import ConfigError
from dsa_compile.lowering.fp8_keys import quantise

LOCAL_EXPERTS = 32
TUNED = "max-autotune-no-cudagraphs"
"""The mode of ``torch.compile`` that is fastest in a decode step; the graph is the benchmark's own."""
COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "index_topk": 2048,
    "index_head_dim": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 1 << 18,
    "n_routed_experts": LOCAL_EXPERTS,
    "num_local_experts": LOCAL_EXPERTS,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "intermediate_size": 4096,
}


@dataclass(frozen=True)
class Slice:
    """The attention heads of one of eight tensor-parallel ranks, the whole indexer, and an MLP.

    The MLP is dense and 4096 wide, about what a rank's experts read for a token, or 32 real experts.
    """

    classes: str
    sizes: dict[str, Any]

    def model(self, layers: int, experts: bool, device: torch.device) -> Any:
        """Random weights in bfloat16 of standard deviation 0.02."""
        depth = {"num_hidden_layers": layers, "first_k_dense_replace": 0 if experts else layers}
        return random_model(self.classes, COMMON | self.sizes | depth, device)


def random_model(classes: str, sizes: dict[str, Any], device: torch.device) -> Any:
    """A stock model with random weights in bfloat16 of standard deviation 0.02. ``classes``: how its names begin."""
    config = getattr(transformers, f"{classes}Config")(**sizes)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return getattr(transformers, f"{classes}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(before)


SLICES = {
    "deepseek_v32": Slice(
        "DeepseekV32",
        {
            "hidden_size": 7168,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "index_n_heads": 64,
        },
    ),
    "glm_moe_dsa": Slice(
        "GlmMoeDsa",
        {
            "hidden_size": 6144,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "index_n_heads": 32,
        },
    ),
}


@dataclass(frozen=True)
class Setting:
    """What all rows of a table share. ``layers``: of the slice; ``experts``: whether its MLPs are real experts."""

    slice: str
    layers: int
    batch: int
    experts: bool
    contexts: tuple[int, ...]
    mode: str

    @property
    def title(self) -> str:
        mlp = f"{LOCAL_EXPERTS} experts" if self.experts else "a dense MLP"
        return f"{self.slice}, {self.layers} layers with {mlp}, batch {self.batch}, {self.mode}"


def check_slices(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError for the first of ``names`` that is no slice, naming the nearest."""
    for name in names:
        if name not in known:
            raise ConfigError(f"--slice: unknown slice {name!r}; {nearest(name, list(known), 'slices')}")


def fill(cache: DSACache, seed: int = 0) -> None:
    """Random rows in every slot: what a decode step reads does not depend on what stands there."""
    generator = torch.Generator(cache.device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=cache.dtype, device=cache.device, generator=generator)

    for layer in cache.layers:
        for sequence in range(cache.batch_size):
            layer.latent[sequence] = normal(*layer.latent.shape[1:])
            if layer.index_scales is not None:
                codes, scales = quantise(normal(*layer.index_keys.shape[1:]))
                layer.index_keys[sequence], layer.index_scales[sequence] = codes, scales
            else:
                layer.index_keys[sequence] = normal(*layer.index_keys.shape[1:])


def held(cache: DSACache, tokens: int) -> tuple[Tensor, Tensor, int]:
    """``valid``, ``seen`` and ``bound`` of the lengths of a cache whose sequences all hold ``tokens``."""
    valid = torch.full((cache.batch_size,), tokens, device=cache.device)
    return valid, torch.ones(cache.batch_size, tokens, dtype=torch.bool, device=cache.device), tokens
