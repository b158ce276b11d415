"""Reference of ``dsa::cache_write``."""

import torch
from torch import Tensor

from dsa_compile.lowering.fp8_keys import check_scales, quantise
from dsa_compile.lowering.fp8_rows import pack
from dsa_compile.lowering.pages import locate


def cache_write(
    latent: Tensor,
    index_keys: Tensor,
    slots: Tensor,
    c_kv: Tensor | None,
    k_pe: Tensor | None,
    index_key: Tensor | None,
    block_table: Tensor | None = None,
    index_scales: Tensor | None = None,
) -> None:
    """Write each valid row to its slot; rows of negative slots, or whose page is absent, leave no trace.

    Args:
        latent: pool[B, S, R+P], or of fp8 rows uint8[B, S, bytes]; changed in place where c_kv and k_pe are given.
        index_keys: pool[B, S, DI], or of codes uint8[B, S, DI]; changed in place where index_key is given.
        slots: int64[B, T], distinct within a sequence where they are not negative.
        c_kv: [B, T, R]. k_pe: [B, T, P]. index_key: [B, T, DI].
        block_table: int32[B, pages], with pools [pages of all sequences, page size, ...]; sequences share none.
        index_scales: float32[B, S], changed with a pool of codes; None with any other.

    Raises:
        InputError: index_scales are not those of index_keys.
    """
    check_scales("cache_write", index_keys, index_scales)
    if c_kv is not None and k_pe is not None:
        rows = pack(c_kv, k_pe) if latent.dtype == torch.uint8 else torch.cat([c_kv, k_pe], -1)
        _put(latent, slots, block_table, rows)
    if index_key is not None and index_scales is not None:
        codes, scales = quantise(index_key)
        _put(index_keys, slots, block_table, codes)
        _put(index_scales, slots, block_table, scales)
    elif index_key is not None:
        _put(index_keys, slots, block_table, index_key)


def _put(pool: Tensor, slots: Tensor, block_table: Tensor | None, rows: Tensor) -> None:
    """Every row is written, with no host synchronisation: one that must not be repeats the first that must."""
    page, place, present = locate(slots.clamp_min(0), pool, block_table)
    valid = (slots >= 0 if present is None else (slots >= 0) & present).flatten()
    steps = torch.arange(valid.numel(), device=slots.device)
    source = torch.where(valid, steps, valid.int().argmax())
    where = page.flatten()[source], place.flatten()[source]
    # where there is none to repeat, all rewrite what one row holds
    values = torch.where(valid.any(), rows.flatten(0, 1)[source].to(pool.dtype), pool[where])
    pool.index_put_(where, values)
