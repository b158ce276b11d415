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

    For few tokens a kernel reads the weights of each one's experts where they lie; more tokens are sorted by expert, as
    most weights would be read more than once. On a GPU the host counts those, but for bfloat16, and no CUDA graph can
    wait for it: there few tokens are worth copies, which Inductor makes for each token.

    Args:
        top_k_index, top_k_weights: [T, experts of a token].
    """
    if _plain(experts, hidden_states) and _few(top_k_index, experts):
        return _few_tokens(experts, hidden_states, top_k_index, top_k_weights)
    waits = hidden_states.is_cuda and hidden_states.dtype != torch.bfloat16
    apart = hidden_states.shape[0] == 1 or (waits and top_k_index.numel() * _expert_bytes(experts) <= MOST_COPIED)
    form = batched_mm_experts_forward if apart else grouped_mm_experts_forward
    result: Tensor = form(experts, hidden_states, top_k_index, top_k_weights)
    return result


def _few_tokens(experts: Any, hidden_states: Tensor, picks: Tensor, weights: Tensor) -> Tensor:
    """[T, hidden]. ``picks``, ``weights``: [T, experts of a token]."""
    tokens, each = picks.shape
    multiply, experts_of = torch.ops.dsa.expert_products.default, picks.flatten()
    gated = experts._apply_gate(multiply(hidden_states, experts.gate_up_proj, experts_of))
    products = multiply(gated, experts.down_proj, experts_of)
    return (products.view(tokens, each, -1) * weights[..., None]).sum(1).to(hidden_states.dtype)


def _few(picks: Tensor, experts: Any) -> bool:
    """One token, or so few that by chance hardly two of them pick the same expert."""
    return picks.shape[0] == 1 or 2 * picks.numel() <= experts.gate_up_proj.shape[0]


def _plain(experts: Any, hidden_states: Tensor) -> bool:
    """Whether `_few_tokens` serves: experts with gates and without biases, in their own dtype, on a GPU."""
    usual = experts.has_gate and not experts.has_bias and not experts.is_transposed
    return usual and on_gpu(hidden_states) and experts.gate_up_proj.dtype == hidden_states.dtype


def on_gpu(x: Tensor) -> bool:
    """Where a kernel of ours runs, which has no gradient."""
    return x.is_cuda and not torch.is_grad_enabled()


def _expert_bytes(experts: Any) -> int:
    """Of the weights of one."""
    weights: list[Tensor] = [experts.gate_up_proj, experts.down_proj]
    return sum(w.numel() // w.shape[0] * w.element_size() for w in weights)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, routed_experts)
