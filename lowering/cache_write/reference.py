"""Reference of ``dsa::cache_write``."""

import torch
from torch import Tensor


def cache_write(
    latent: Tensor,
    index_keys: Tensor,
    slots: Tensor,
    c_kv: Tensor | None,
    k_pe: Tensor | None,
    index_key: Tensor | None,
) -> None:
    """Write each valid row to its slot; rows of negative slots leave no trace.

    Args:
        latent: pool[B, S, R+P], changed in place where c_kv and k_pe are given.
        index_keys: pool[B, S, DI], changed in place where index_key is given.
        slots: int64[B, T], distinct within a sequence where they are not negative.
        c_kv: [B, T, R]. k_pe: [B, T, P]. index_key: [B, T, DI].
    """
    rows, places = _addresses(slots)
    if c_kv is not None and k_pe is not None:
        _put(latent, rows, places, torch.cat([c_kv, k_pe], -1))
    if index_key is not None:
        _put(index_keys, rows, places, index_key)


def _addresses(slots: Tensor) -> tuple[Tensor, Tensor]:
    """For each of T writes the row to write and its slot, with no host synchronisation.

    A padded row repeats its sequence's first valid write; a sequence without one writes to place -1.
    """
    valid = slots >= 0
    steps = torch.arange(slots.shape[1], device=slots.device).expand_as(slots)
    rows = torch.where(valid, steps, valid.int().argmax(1, keepdim=True))
    return rows, slots.gather(1, rows)


def _put(pool: Tensor, rows: Tensor, places: Tensor, values: Tensor) -> None:
    width = (*rows.shape, values.shape[-1])
    slots = places.clamp_min(0).unsqueeze(-1).expand(width)
    values = values.gather(1, rows.unsqueeze(-1).expand(width))
    # a sequence of padding alone rewrites what slot 0 holds
    values = torch.where(places.unsqueeze(-1) < 0, pool.gather(1, slots), values.to(pool.dtype))
    pool.scatter_(1, slots, values)
