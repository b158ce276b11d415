"""Whole models, cut in depth, experts and vocabulary alone, and one rank's share of them."""

from typing import Any

import torch

from dsa_compile.bench.plan_slice import COMMON, LOCAL_EXPERTS, SLICES, random_model

RANKS = 8
"""Tensor-parallel ranks whose heads a whole model has."""
LAYERS, DENSE_LAYERS, VOCABULARY = 4, 3, 32_000
DENSE_WIDTHS = {"deepseek_v32": 18432, "glm_moe_dsa": 12288}
"""Of the MLP of a layer without experts: DeepSeek-V3.2's and GLM-5's."""
RANK = "_rank"
"""How the names of a rank's shares end: its heads, all its layers with experts."""
MODELS = (*DENSE_WIDTHS, *(name + RANK for name in DENSE_WIDTHS))


def title(name: str) -> str:
    """What a model of `MODELS` is, in words."""
    if name.endswith(RANK):
        heads = SLICES[name.removesuffix(RANK)].sizes["num_attention_heads"]
        return f"{LAYERS} layers of {heads} heads, {LOCAL_EXPERTS} experts each"
    return f"{LAYERS} layers, {DENSE_LAYERS} of them dense, {LOCAL_EXPERTS} experts, vocabulary {VOCABULARY:,}"


def whole_model(name: str, device: torch.device) -> Any:
    """`LAYERS` layers in the widths of a model of `MODELS`, with random weights in bfloat16."""
    if name.endswith(RANK):
        return SLICES[name.removesuffix(RANK)].model(LAYERS, True, device)
    depth = {"num_hidden_layers": LAYERS, "first_k_dense_replace": DENSE_LAYERS, "vocab_size": VOCABULARY}
    return random_model(SLICES[name].classes, _widths(name) | depth, device)


def attention_layer(name: str, device: torch.device) -> Any:
    """One attention layer of the same widths as a model of `DENSE_WIDTHS`, beside whose other parts it weighs all."""
    rest = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "intermediate_size": 128}
    return random_model(SLICES[name].classes, _widths(name) | rest, device)


def _widths(name: str) -> dict[str, Any]:
    sizes = SLICES[name].sizes
    heads = {key: sizes[key] * RANKS for key in ("num_attention_heads", "num_key_value_heads")}
    return COMMON | sizes | heads | {"intermediate_size": DENSE_WIDTHS[name]}
