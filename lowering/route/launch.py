"""``dsa::route`` on CUDA: one Triton launch."""

import torch
from torch import Tensor

from dsa_compile.lowering.dependent import launch_options
from dsa_compile.lowering.route.limits import check, power_of_two


def route_cuda(
    logits: Tensor, bias: Tensor, groups: int, topk_groups: int, topk: int, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`reference.route` by Triton."""
    from dsa_compile.lowering.route import kernel

    check(logits, bias, groups, topk_groups, topk)
    T, E = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    weights, experts = logits.new_empty(T, topk), logits.new_empty(T, topk, dtype=torch.int64)
    if T == 0:
        return weights, experts
    with torch.cuda.device_of(logits):
        kernel.route_kernel[(T,)](
            logits,
            bias.contiguous(),
            weights,
            experts,
            logits.stride(0),
            scale,
            E=E,
            GROUPS=groups,
            TOPK_GROUPS=topk_groups,
            TOPK=topk,
            NORMALISE=normalise,
            BLOCK_GROUPS=power_of_two(groups),
            BLOCK_EXPERTS=power_of_two(E // groups),
            BLOCK_TOPK=power_of_two(topk),
            num_warps=1,
            **launch_options(logits.device),
        )
    return weights, experts
