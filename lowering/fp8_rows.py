"""Latent rows in fp8: how R values kv_c and P values k_pe become the bytes of a cache, and back.

A row is R bytes of e4m3, then one float32 scale for each 128 of them (the last tile may be shorter), then P values of
bfloat16: R + 4 ceil(R / 128) + 2 P bytes, 656 for DeepSeek-V3.2. Scales are powers of two, so a value that is read is
exactly code * scale in float32 and in bfloat16 alike.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dsa_compile.errors import CacheError

TILE = 128
"""Values that share a scale."""

SMALLEST_PEAK = 1e-4
"""A tile whose largest value is below this is scaled as if it were this."""


def row_bytes(rank: int, rope: int) -> int:
    """Bytes of one row of R = ``rank`` and P = ``rope`` values.

    Raises:
        CacheError: its scales would not be aligned.
    """
    if rank % 4 or rope % 2:
        raise CacheError(
            f"fp8 cache: expected a kv_lora_rank that is a multiple of 4 and an even qk_rope_head_dim, came {rank} and "
            f"{rope}. Leave CacheConfig(dtype=...) out: this model's cache can hold its own dtype."
        )
    return rank + 4 * tile_count(rank) + 2 * rope


def pack(c_kv: Tensor, k_pe: Tensor) -> Tensor:
    """Rows uint8[..., row_bytes] of c_kv [..., R] and k_pe [..., P].

    The scale of a tile is the smallest power of two that brings its largest value to 448 or less. A tile with NaN or
    inf gets the scale NaN and codes 0: everything that is read from it is NaN.
    """
    row_bytes(c_kv.shape[-1], k_pe.shape[-1])
    values = _in_tiles(c_kv.float())
    peak = values.abs().amax(-1, keepdim=True)
    good = peak.isfinite()
    scale = _scale(peak.clamp_min(SMALLEST_PEAK))
    codes = (values / scale).masked_fill(~good, 0).to(torch.float8_e4m3fn)
    scale = scale.masked_fill(~good, float("nan"))
    parts = codes.flatten(-2)[..., : c_kv.shape[-1]], scale.squeeze(-1), k_pe.to(torch.bfloat16)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def unpack(rows: Tensor, rank: int, rope: int, dtype: torch.dtype) -> Tensor:
    """Values [..., R+P] in ``dtype`` of rows uint8[..., row_bytes]."""
    codes, scale, k_pe = rows.split([rank, 4 * tile_count(rank), 2 * rope], -1)
    values = _in_tiles(codes.view(torch.float8_e4m3fn).float()) * _as(scale, torch.float32).unsqueeze(-1)
    return torch.cat([values.flatten(-2)[..., :rank].to(dtype), _as(k_pe, torch.bfloat16).to(dtype)], -1)


def tile_count(rank: int) -> int:
    """Tiles, and so scales, of R values."""
    return -(-rank // TILE)


def _in_tiles(values: Tensor) -> Tensor:
    """[..., R] -> [..., tiles, TILE], zeros behind the last."""
    tiles = tile_count(values.shape[-1])
    return F.pad(values, (0, tiles * TILE - values.shape[-1])).unflatten(-1, (tiles, TILE))


def _scale(peak: Tensor) -> Tensor:
    """peak / 448, rounded up to a power of two, of normal float32.

    448 is 1.75 * 2**8: the exponent grows by one where the mantissa lies above 1.75. No device rounds this otherwise.
    """
    exponent = (peak.view(torch.int32) + 0x1FFFFF) & 0x7F800000
    return (exponent - (8 << 23)).view(torch.float32)


def _as(part: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of a slice of rows as ``dtype``; a copy, since rows themselves need not be aligned."""
    return part.clone(memory_format=torch.contiguous_format).view(dtype)
