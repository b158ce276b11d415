"""Vectors in fp8: e4m3 codes and one float32 scale, as index keys and queries take it, and each tile of `fp8_rows`.

A pool of index keys in fp8 is two pools: codes uint8[B, S, DI] and scales float32[B, S]. Scales are written as powers
of two, so a value is exactly code * scale in float32 and in bfloat16 alike; who reads takes any float32.
"""

import torch
from torch import Tensor

from dsa_compile.errors import InputError

SMALLEST_PEAK = 1e-4
"""A vector whose largest value is below this is scaled as if it were this."""

WIDTH_STEP = 16
"""DI of index keys in fp8 is a multiple of this, so that every row of codes is aligned to 16 bytes."""


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8[..., D] and scales float32[...] of vectors x [..., D] in any float dtype, read as float32.

    The scale is the smallest power of two that brings the largest value to 448 or less. A vector with NaN or inf gets
    the scale NaN and codes 0: everything that is read from it is NaN.
    """
    x = x.float()
    peak = x.abs().amax(-1)
    good = peak.isfinite()
    scales = _scale(peak.clamp_min(SMALLEST_PEAK))
    codes = (x / scales.unsqueeze(-1)).masked_fill(~good.unsqueeze(-1), 0).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales.masked_fill(~good, float("nan"))


def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """What codes uint8[..., D] are in ``dtype``, exactly, before their scale."""
    return codes.view(torch.float8_e4m3fn).to(dtype)


def check_scales(op: str, index_keys: Tensor, index_scales: Tensor | None) -> None:
    """Refuse a pool of index keys and scales that do not belong together.

    Raises:
        InputError: scales lack for uint8 keys, come with keys of another dtype, or are not one float32 a key.
    """
    if index_scales is None:
        if index_keys.dtype == torch.uint8:
            raise InputError(
                f"{op}: expected index_scales with index_keys in uint8, came None. Give the scales that lie beside "
                "the codes in the cache."
            )
        return
    if index_keys.dtype != torch.uint8:
        raise InputError(
            f"{op}: expected index_keys in uint8 with index_scales, came {index_keys.dtype}. Leave index_scales out: "
            "such keys are values."
        )
    if index_scales.dtype != torch.float32 or index_scales.shape != index_keys.shape[:2]:
        raise InputError(
            f"{op}: expected index_scales torch.float32{list(index_keys.shape[:2])}, one a key, came "
            f"{index_scales.dtype}{list(index_scales.shape)}. Make them with the pool of codes."
        )


def _scale(peak: Tensor) -> Tensor:
    """peak / 448, rounded up to a power of two, of normal float32.

    448 is 1.75 * 2**8: the exponent grows by one where the mantissa lies above 1.75. No device rounds this otherwise.
    """
    exponent = (peak.view(torch.int32) + 0x1FFFFF) & 0x7F800000
    return (exponent - (8 << 23)).view(torch.float32)
