"""How prepared models run their routed experts: as transformers does, in the form that suits the number of tokens."""

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

EXPERTS_NAME = "dsa_experts"
"""``config._experts_implementation`` of a prepared model."""
MOST_COPIED = 256 << 20
"""Bytes of experts' weights that are copied so that a step need not wait for the host."""


def routed_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What the experts make of hidden_states [T, hidden], weighted and summed: [T, hidden].

    For one token Inductor reads the weights of its experts where they lie, in the kernel that multiplies; for more it
    copies them for each token, so tokens are sorted by expert. On a GPU the host counts those, but for bfloat16, and no
    CUDA graph can wait for it: there few tokens are worth copies.

    Args:
        top_k_index, top_k_weights: [T, experts of a token].
    """
    waits = hidden_states.is_cuda and hidden_states.dtype != torch.bfloat16
    apart = hidden_states.shape[0] == 1 or (waits and top_k_index.numel() * _expert_bytes(experts) <= MOST_COPIED)
    form = batched_mm_experts_forward if apart else grouped_mm_experts_forward
    result: Tensor = form(experts, hidden_states, top_k_index, top_k_weights)
    return result


def _expert_bytes(experts: Any) -> int:
    """Of the weights of one."""
    weights: list[Tensor] = [experts.gate_up_proj, experts.down_proj]
    return sum(w.numel() // w.shape[0] * w.element_size() for w in weights)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, routed_experts)
