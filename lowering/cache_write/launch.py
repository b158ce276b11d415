"""``dsa::cache_write`` on CUDA: one Triton launch a pool."""

import torch
from torch import Tensor

from dsa_compile.lowering.cache_write.reference import cache_write
from dsa_compile.lowering.dependent import launch_options
from dsa_compile.lowering.fp8_keys import check_scales
from dsa_compile.lowering.fp8_rows import TILE, row_bytes, tile_count
from dsa_compile.lowering.tiles import power_of_two


def cache_write_cuda(
    latent: Tensor,
    index_keys: Tensor,
    slots: Tensor,
    c_kv: Tensor | None,
    k_pe: Tensor | None,
    index_key: Tensor | None,
    block_table: Tensor | None = None,
    index_scales: Tensor | None = None,
) -> None:
    """`reference.cache_write` by Triton; by itself where a pool is in float64, which Triton code here leaves alone."""
    if torch.float64 in (latent.dtype, index_keys.dtype):
        return cache_write(latent, index_keys, slots, c_kv, k_pe, index_key, block_table, index_scales)
    check_scales("cache_write", index_keys, index_scales)
    if c_kv is not None and k_pe is not None:
        write(latent, slots, block_table, c_kv, k_pe)
    if index_key is not None and index_scales is not None:
        write_quantised(index_keys, index_scales, slots, block_table, index_key)
    elif index_key is not None:
        write(index_keys, slots, block_table, index_key, None)
    return None


def write(pool: Tensor, slots: Tensor, block_table: Tensor | None, first: Tensor, second: Tensor | None) -> None:
    """Rows [first | second] to their slots; into a pool of bytes as fp8 rows."""
    from dsa_compile.lowering.cache_write import kernel

    B, T, width = first.shape
    if B * T == 0 or width == 0:
        return
    rest = first if second is None else second
    first, rest = (x if x.stride(-1) == 1 else x.contiguous() for x in (first, rest))
    rest_width = 0 if second is None else second.shape[-1]
    sizes = {"FIRST_WIDTH": width, "SECOND_WIDTH": rest_width, "SECOND_BLOCK": power_of_two(rest_width)}
    sizes["PAGE"] = 0 if block_table is None else pool.shape[1]
    packed = pool.dtype == torch.uint8
    if packed:
        row_bytes(width, rest_width)
        tiles = tile_count(width)
        options = {"TILE": TILE, "TILES": tiles, "BLOCK_TILES": power_of_two(tiles)}
    else:
        options = {"FIRST_BLOCK": power_of_two(width)}
    with torch.cuda.device_of(pool):
        (kernel.pack_kernel if packed else kernel.copy_kernel)[(B * T,)](
            pool,
            slots.contiguous(),
            slots if block_table is None else block_table.contiguous(),
            first,
            rest,
            *first.stride()[:2],
            *rest.stride()[:2],
            *pool.stride()[:2],
            pool.shape[0],
            pool.shape[1] if block_table is None else block_table.shape[1],
            T,
            **sizes,
            **options,
            num_warps=1 if width <= 128 else 4,
            **launch_options(pool.device),
        )


def write_quantised(codes: Tensor, scales: Tensor, slots: Tensor, block_table: Tensor | None, keys: Tensor) -> None:
    """Index keys to their slots, as fp8."""
    from dsa_compile.lowering.cache_write import kernel

    B, T, width = keys.shape
    if B * T == 0:
        return
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    with torch.cuda.device_of(codes):
        kernel.quantise_kernel[(B * T,)](
            codes,
            scales,
            slots.contiguous(),
            slots if block_table is None else block_table.contiguous(),
            keys,
            *keys.stride()[:2],
            *codes.stride()[:2],
            *scales.stride()[:2],
            codes.shape[0],
            codes.shape[1] if block_table is None else block_table.shape[1],
            T,
            WIDTH=width,
            BLOCK=power_of_two(width),
            PAGE=0 if block_table is None else codes.shape[1],
            num_warps=1,
            **launch_options(codes.device),
        )
