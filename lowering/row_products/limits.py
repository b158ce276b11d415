"""What ``dsa::row_products`` and ``dsa::expert_products`` take: errors are raised at capture too."""

import torch
from torch import Tensor

from dsa_compile.errors import InputError

MOST_WEIGHTS = 4
"""Weights that one launch multiplies."""
MOST_ROWS = 4
"""Rows that are worth it: more of them are work for tensor cores."""


def check_rows(x: Tensor, weights: list[Tensor], dtype: torch.dtype | None) -> None:
    """Refuse inputs that a kernel would misread.

    Raises:
        InputError: naming the input, what was expected and what came.
    """
    if x.dim() not in (2, 3) or not 0 < x.shape[0] <= MOST_ROWS or 0 in x.shape:
        raise InputError(
            f"row_products: expected x[R, K] or x[R, H, K / H] of 1 to {MOST_ROWS} rows, came {list(x.shape)}. Use "
            "F.linear for more."
        )
    K = x.shape[1:].numel()
    if dtype not in (None, x.dtype, torch.float32):
        raise InputError(f"row_products: expected dtype {x.dtype} as x or torch.float32, came {dtype}.")
    if not 0 < len(weights) <= MOST_WEIGHTS:
        raise InputError(
            f"row_products: expected 1 to {MOST_WEIGHTS} weights, came {len(weights)}. Call it once for each four."
        )
    for place, weight in enumerate(weights):
        if weight.dim() != 2 or weight.shape[1] != K:
            raise InputError(
                f"row_products: expected weights[{place}] [N, {K}] for x {list(x.shape)}, came {list(weight.shape)}."
            )
        _check_kind("row_products", f"weights[{place}]", weight, x)


def check_experts(x: Tensor, weights: Tensor, picks: Tensor) -> None:
    """Refuse inputs that a kernel would misread.

    Raises:
        InputError: naming the input, what was expected and what came.
    """
    if weights.dim() != 3 or x.dim() != 2 or x.shape[1] != weights.shape[2] or 0 in weights.shape:
        raise InputError(
            f"expert_products: expected x[P, K] and weights[E, N, K], came {list(x.shape)} and {list(weights.shape)}."
        )
    if picks.dim() != 1 or not x.shape[0] or picks.shape[0] % x.shape[0] or picks.is_floating_point():
        raise InputError(
            f"expert_products: expected picks[P] of integers for x {list(x.shape)}, came {list(picks.shape)} of "
            f"{picks.dtype}. Give each row equally many picks."
        )
    _check_kind("expert_products", "weights", weights, x)
    if picks.device != x.device:
        raise InputError(f"expert_products: expected picks on {x.device} as x, came {picks.device}. Move them there.")


def _check_kind(op: str, name: str, weight: Tensor, x: Tensor) -> None:
    if (weight.dtype, weight.device) != (x.dtype, x.device):
        raise InputError(
            f"{op}: expected {name} in {x.dtype} on {x.device} as x, came {weight.dtype} on "
            f"{weight.device}. Convert one."
        )
