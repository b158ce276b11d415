"""Masked attention by `gluon_kernel`: which calls it serves, and its launch."""

import torch
from torch import Tensor

from dsa_compile.dims import LayerDims
from dsa_compile.lowering.device import Device
from dsa_compile.lowering.gluon import available
from dsa_compile.lowering.masked_mha.configs import Config

CONFIG = Config(rows=128, keys=128, warps=12, stages=2)
CAPABILITY = (9, 0)
KERNEL = "dsa_compile.lowering.masked_mha.gluon_kernel"


def refusal(dims: LayerDims, dtype: torch.dtype, scale: float, device: Device) -> str | None:
    """Why the kernel does not serve a call that the Triton kernel serves, or None."""
    sizes = dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim
    if device.capability != CAPABILITY:
        return f"it is for compute capability 9.0, the device has {device.capability[0]}.{device.capability[1]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it multiplies 16-bit floats, came {dtype}"
    if sizes != (128, 64, 128):
        return f"it takes heads of 128 + 64 and 128 values, came {sizes[0]} + {sizes[1]} and {sizes[2]}"
    if not scale > 0:
        return f"it takes the largest score before it scales by a number above 0, came {scale}"
    return None if available("prefill_mla", KERNEL) else "the installed triton lacks what it is written in"


def attend(
    q: Tensor, expanded: Tensor, k_pe: Tensor, mask: tuple[Tensor, Tensor, Tensor], scale: float, out: Tensor
) -> None:
    """Write out [B, T, h, 128] of q [B, h, T, 128+64] over expanded [B, S, h, 256] and k_pe [B, S, 64], contiguous.

    Rows of q lie a multiple of 16 bytes apart.
    """
    from dsa_compile.lowering.masked_mha import gluon_kernel as kernel

    bits, blocks, counts = mask
    tiles = blocks.shape[0]

    with torch.cuda.device_of(q):
        kernel.attend_masked_kernel[(tiles * q.shape[1],)](
            q,
            kernel.described(expanded.flatten(2).flatten(0, 1), 128),
            kernel.described(k_pe.flatten(0, 1), 64),
            bits,
            blocks,
            counts,
            out,
            *q.stride()[:3],
            *out.stride()[:3],
            expanded.shape[1],
            q.shape[2],
            blocks.shape[1],
            tiles,
            scale,
            num_warps=4,
        )
