"""How prepared models run their routed experts: as transformers does, in the form that suits the number of tokens."""

from typing import Any

from torch import Tensor
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

EXPERTS_NAME = "dsa_experts"
"""``config._experts_implementation`` of a prepared model."""


def routed_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What the experts make of hidden_states [T, hidden], weighted and summed: [T, hidden].

    For one token Inductor reads the weights of its experts where they lie, in the kernel that multiplies; for more it
    would copy them for each token, so tokens are sorted by expert.

    Args:
        top_k_index, top_k_weights: [T, experts of a token].
    """
    form = batched_mm_experts_forward if hidden_states.shape[0] == 1 else grouped_mm_experts_forward
    result: Tensor = form(experts, hidden_states, top_k_index, top_k_weights)
    return result


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, routed_experts)
