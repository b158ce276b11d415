"""Latent rows in fp8: how R values kv_c and P values k_pe become the bytes of a cache, and back.

A row is R bytes of e4m3, then one float32 scale for each 128 of them (the last tile may be shorter), then P values of
bfloat16: R + 4 ceil(R / 128) + 2 P bytes, 656 for DeepSeek-V3.2. Scales are powers of two, so a value that is read is
exactly code * scale in float32 and in bfloat16 alike.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dsa_compile.errors import CacheError
from dsa_compile.lowering.fp8_keys import decode, quantise

TILE = 128
"""Values that share a scale."""


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
    """Rows uint8[..., row_bytes] of c_kv [..., R] and k_pe [..., P], each tile as `quantise` rounds it."""
    row_bytes(c_kv.shape[-1], k_pe.shape[-1])
    codes, scales = quantise(_in_tiles(c_kv))
    parts = codes.flatten(-2)[..., : c_kv.shape[-1]], scales, k_pe.to(torch.bfloat16)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def unpack(rows: Tensor, rank: int, rope: int, dtype: torch.dtype) -> Tensor:
    """Values [..., R+P] in ``dtype`` of rows uint8[..., row_bytes]."""
    codes, scale, k_pe = rows.split([rank, 4 * tile_count(rank), 2 * rope], -1)
    values = _in_tiles(decode(codes, torch.float32)) * _as(scale, torch.float32).unsqueeze(-1)
    return torch.cat([values.flatten(-2)[..., :rank].to(dtype), _as(k_pe, torch.bfloat16).to(dtype)], -1)


def tile_count(rank: int) -> int:
    """Tiles, and so scales, of R values."""
    return -(-rank // TILE)


def _in_tiles(values: Tensor) -> Tensor:
    """[..., R] -> [..., tiles, TILE], zeros behind the last."""
    tiles = tile_count(values.shape[-1])
    return F.pad(values, (0, tiles * TILE - values.shape[-1])).unflatten(-1, (tiles, TILE))


def _as(part: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of a slice of rows as ``dtype``; a copy, since rows themselves need not be aligned."""
    return part.clone(memory_format=torch.contiguous_format).view(dtype)
