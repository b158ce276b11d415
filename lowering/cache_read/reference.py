"""Reference of ``dsa::cache_read``."""

import torch
from torch import Tensor

from dsa_compile.errors import InputError
from dsa_compile.lowering.fp8_rows import row_bytes, unpack


def cache_read(latent: Tensor, rank: int, rope: int, dtype: torch.dtype) -> Tensor:
    """The values [B, S, R+P] that a pool of fp8 rows holds.

    Args:
        latent: pool uint8[B, S, bytes], rows as in `fp8_rows`. rank, rope: R and P. dtype: of the result.

    Raises:
        InputError: ``latent`` is no such pool.
    """
    width = row_bytes(rank, rope)
    if latent.dtype != torch.uint8 or latent.shape[-1] != width:
        raise InputError(
            f"cache_read: expected a pool of fp8 rows, uint8[..., {width}] for R = {rank} and P = {rope}, came "
            f"{latent.dtype}[..., {latent.shape[-1]}]. A pool of another dtype is read as it is."
        )
    return unpack(latent, rank, rope, dtype)
