"""What ``dsa::route`` takes: every error is raised before anything is computed, at capture too."""

import torch
from torch import Tensor

from dsa_compile.errors import InputError

MOST_EXPERTS = 1024
"""That a program holds, each group padded to a power of two."""


def check(logits: Tensor, bias: Tensor, groups: int, topk_groups: int, topk: int) -> None:
    """Refuse inputs that the op would misread.

    Raises:
        InputError: naming the input, what was expected and what came.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise InputError(f"route: expected logits float32[T, E], came {logits.dtype}{list(logits.shape)}.")
    E = logits.shape[1]
    if bias.shape != (E,) or not bias.is_floating_point():
        raise InputError(f"route: expected bias [{E}] of floats for {E} experts, came {bias.dtype}{list(bias.shape)}.")
    if bias.device != logits.device:
        raise InputError(f"route: expected bias on {logits.device} as logits, came {bias.device}. Move it there.")
    if groups < 1 or E % groups or E // groups < 2:
        raise InputError(f"route: expected groups of equally many experts, 2 at least, came {groups} of {E} experts.")
    if not 0 < topk_groups <= groups:
        raise InputError(f"route: expected topk_groups of 1 to {groups}, came {topk_groups}.")
    most = topk_groups * (E // groups)
    if not 0 < topk <= most:
        raise InputError(f"route: expected topk of 1 to {most}, the experts of {topk_groups} groups, came {topk}.")
    if padded(groups, E) > MOST_EXPERTS:
        raise InputError(f"route: expected at most {MOST_EXPERTS} experts in {groups} padded groups, came {E}.")


def padded(groups: int, experts: int) -> int:
    """Places of a program's tile: groups, and experts of each, padded to powers of two."""
    return power_of_two(groups) * power_of_two(experts // groups)


def power_of_two(n: int) -> int:
    """The least that is no smaller."""
    return 1 << (n - 1).bit_length()
