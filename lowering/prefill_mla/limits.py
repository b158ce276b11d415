"""What ``dsa::prefill_mla`` takes: every error is raised before anything is computed, at capture too."""

import torch
from torch import Tensor

from dsa_compile.errors import InputError
from dsa_compile.lowering.fp8_rows import row_bytes

FORMS = ("auto", "masked", "sparse")


def check(
    q: Tensor,
    latent: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor | None,
    topk_indices: Tensor | None,
    nope: int,
    form: str,
) -> None:
    """Refuse inputs that an implementation would misread.

    Raises:
        InputError: naming the input, what was expected and what came.
        CacheError: latent is uint8 and R or P have no fp8 rows.
    """
    if form not in FORMS:
        raise InputError(f"prefill_mla: expected form as one of {', '.join(map(repr, FORMS))}, came {form!r}.")
    rank, rope = kv_b_weight.shape[-1], q.shape[-1] - nope
    given = {"latent": latent, "kv_b_weight": kv_b_weight, "visible": visible, "topk_indices": topk_indices}
    for name, x in given.items():
        if x is None:
            continue
        if x.device != q.device:
            raise InputError(f"prefill_mla: expected {name} on {q.device} as q, came {x.device}. Move it there.")
        if name in ("visible", "topk_indices") and x.dtype != torch.int32:
            raise InputError(f"prefill_mla: expected {name} in int32, came {x.dtype}. Convert it with .int().")
        if name != "kv_b_weight" and x.shape[0] != q.shape[0]:
            raise InputError(
                f"prefill_mla: expected {name} of {q.shape[0]} sequences as q, came {x.shape[0]}. Expand it."
            )
    fp8 = latent.dtype == torch.uint8
    dtype, width = (torch.uint8, row_bytes(rank, rope)) if fp8 else (q.dtype, rank + rope)
    if latent.dtype != dtype or latent.shape[-1] != width:
        raise InputError(
            f"prefill_mla: expected latent {dtype}[..., {width}] for q {q.dtype}[..., {nope} + {rope}] and "
            f"kv_b_weight [..., {rank}], came {latent.dtype}[..., {latent.shape[-1]}]. Latent rows are [kv_c | k_pe] "
            "in the dtype of the queries, or uint8 as dsa::cache_write packs them."
        )


def check_backward(latent: Tensor) -> None:
    """Refuse gradients that there are none of.

    Raises:
        InputError: latent is a pool in fp8.
    """
    if latent.dtype == torch.uint8:
        raise InputError(
            "prefill_mla: expected latent values [B, S, R+P] to compute gradients, came a quantised cache, through "
            "which there is no gradient. Call it under torch.no_grad(), or train without a cache."
        )
