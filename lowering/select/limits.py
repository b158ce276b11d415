"""What ``dsa::select`` takes: every error is raised before anything is computed, at capture too."""

import torch
from torch import Tensor

from dsa_compile.dims import LARGEST_TOPK
from dsa_compile.errors import InputError
from dsa_compile.lowering.fp8_keys import WIDTH_STEP, check_scales
from dsa_compile.lowering.pages import slot_count


def check(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    index_topk: int,
    budget: int,
    block_table: Tensor | None,
    index_scales: Tensor | None,
) -> None:
    """Refuse inputs that an implementation would misread.

    Raises:
        InputError: naming the input, what was expected and what came.
    """
    if not 1 <= index_topk <= LARGEST_TOPK:
        raise InputError(
            f"select: expected index_topk from 1 to {LARGEST_TOPK}, came {index_topk}. Choose one in that range; "
            "selector='dense' attends to every token."
        )
    tensors = {
        "weights": weights,
        "index_keys": index_keys,
        "visible": visible,
        "mask": mask,
        "block_table": block_table,
        "index_scales": index_scales,
    }
    for name, x in tensors.items():
        if x is None:
            continue
        if x.device != q.device:
            raise InputError(f"select: expected {name} on {q.device} as q, came {x.device}. Move it there.")
        if name in ("visible", "block_table") and x.dtype != torch.int32:
            raise InputError(f"select: expected {name} in int32, came {x.dtype}. Convert it with .int().")
    _check_shapes(q, weights, index_keys, visible, mask, block_table)
    check_scales("select", index_keys, index_scales)
    if index_scales is not None:
        check_width(index_keys)
    check_budget(slot_count(index_keys, block_table), budget)


def check_width(index_keys: Tensor) -> None:
    """Refuse keys whose rows are not aligned: of any dtype in the kernels, of fp8 everywhere.

    Raises:
        InputError: DI is no multiple of 16.
    """
    if index_keys.shape[-1] % WIDTH_STEP:
        raise InputError(
            f"select: expected an index_head_dim that is a multiple of {WIDTH_STEP}, came {index_keys.shape[-1]} with "
            f"index_keys in {index_keys.dtype}. Pad the queries and keys with zeros."
        )


def check_budget(num_slots: int, budget: int) -> None:
    """Refuse a budget that cannot hold the float32 scores of one row.

    Raises:
        InputError: it has less than 4 bytes a slot.
    """
    if budget < 4 * num_slots:
        raise InputError(
            f"select: expected a budget of at least {4 * num_slots} bytes, a float32 score for each of {num_slots} "
            f"slots, came {budget}. Raise select_budget."
        )


def _check_shapes(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    block_table: Tensor | None,
) -> None:
    """``mask`` may be shared by all sequences; the first dimension of a paged pool is no batch."""
    if weights.shape != q.shape[:3]:
        raise InputError(
            f"select: expected weights {list(q.shape[:3])} for q {list(q.shape)}, came {list(weights.shape)}. Give one "
            "weight an index head."
        )
    if index_keys.shape[-1] != q.shape[-1]:
        raise InputError(
            f"select: expected index_keys of {q.shape[-1]} values as q, came {index_keys.shape[-1]}. Give the keys of "
            "the same indexer."
        )
    if index_keys.stride(-1) != 1:
        raise InputError(
            "select: expected index_keys contiguous in its last dimension, came strides "
            f"{list(index_keys.stride())}. Call .contiguous() on it."
        )
    rows = None if block_table is not None else index_keys
    batched = {"index_keys": rows, "visible": visible, "mask": mask, "block_table": block_table}
    for name, x in batched.items():
        if x is not None and x.shape[0] != q.shape[0] and not (name == "mask" and x.shape[0] == 1):
            raise InputError(
                f"select: expected {name} of {q.shape[0]} sequences as q, came {x.shape[0]}. Expand it, or give a "
                "block_table if its first dimension counts pages."
            )
