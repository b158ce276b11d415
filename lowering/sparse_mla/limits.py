"""What ``dsa::sparse_mla`` takes: every error is raised before anything is computed, at capture too."""

import torch
from torch import Tensor

from dsa_compile.errors import InputError
from dsa_compile.lowering.fp8_rows import row_bytes


def check(
    q_absorbed: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    topk_indices: Tensor | None,
    block_table: Tensor | None = None,
) -> None:
    """Refuse inputs that an implementation would misread.

    Raises:
        InputError: naming the input, what was expected and what came.
        CacheError: latent is uint8 and R or P have no fp8 rows.
    """
    tensors = {
        "q_pe": q_pe,
        "latent": latent,
        "visible": visible,
        "mask": mask,
        "topk_indices": topk_indices,
        "block_table": block_table,
    }
    given = {name: x for name, x in tensors.items() if x is not None}
    if q_absorbed.shape[2] == 0:
        raise InputError(
            f"sparse_mla: expected q_absorbed[B, T, H, R] with at least one head, came {list(q_absorbed.shape)}. "
            "Leave the call out where a device has no heads."
        )
    for name, x in given.items():
        if x.device != q_absorbed.device:
            raise InputError(
                f"sparse_mla: expected {name} on {q_absorbed.device} as q_absorbed, came {x.device}. Move it there."
            )
        if name in ("visible", "topk_indices", "block_table") and x.dtype != torch.int32:
            raise InputError(f"sparse_mla: expected {name} in int32, came {x.dtype}. Convert it with .int().")
    _check_rows(q_absorbed, q_pe, latent)
    _check_batch(given, q_absorbed.shape[0])


def check_backward(latent: Tensor, block_table: Tensor | None) -> None:
    """Refuse gradients that there are none of.

    Raises:
        InputError: latent is a pool in fp8 or in pages.
    """
    if latent.dtype == torch.uint8 or block_table is not None:
        kind = "quantised" if latent.dtype == torch.uint8 else "paged"
        raise InputError(
            f"sparse_mla: expected latent values [B, S, R+P] to compute gradients, came a {kind} cache, through which "
            "there is no gradient. Call it under torch.no_grad(), or train without a cache."
        )


def _check_rows(q_absorbed: Tensor, q_pe: Tensor, latent: Tensor) -> None:
    rank, rope = q_absorbed.shape[-1], q_pe.shape[-1]
    fp8 = latent.dtype == torch.uint8
    dtype, width = (torch.uint8, row_bytes(rank, rope)) if fp8 else (q_absorbed.dtype, rank + rope)
    if latent.dtype != dtype or latent.shape[-1] != width:
        raise InputError(
            f"sparse_mla: expected latent {dtype}[..., {width}] for q_absorbed {q_absorbed.dtype}[..., {rank}] and "
            f"q_pe [..., {rope}], came {latent.dtype}[..., {latent.shape[-1]}]. Latent rows are [kv_c | k_pe] in the "
            "dtype of the queries, or uint8 as dsa::cache_write packs them."
        )
    if latent.stride(-1) != 1:
        raise InputError(
            f"sparse_mla: expected latent contiguous in its last dimension, came strides {list(latent.stride())}. "
            "Call .contiguous() on it."
        )


def _check_batch(given: dict[str, Tensor], batch: int) -> None:
    """``mask`` may be shared by all sequences; the first dimension of a paged pool is no batch."""
    for name, x in given.items():
        paged = name == "latent" and "block_table" in given
        if not paged and x.shape[0] != batch and not (name == "mask" and x.shape[0] == 1):
            raise InputError(
                f"sparse_mla: expected {name} of {batch} sequences as q_absorbed, came {x.shape[0]}. Expand it, or "
                "give a block_table if its first dimension counts pages."
            )
