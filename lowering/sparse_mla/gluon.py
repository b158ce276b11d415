"""``dsa::sparse_mla`` by `gluon_kernel`: which calls it serves, and its launch."""

import torch
from torch import Tensor

from dsa_compile.lowering.device import Device
from dsa_compile.lowering.gluon import available
from dsa_compile.lowering.sparse_mla import configs
from dsa_compile.lowering.sparse_mla.configs import Call, Config

CONFIG = Config(heads=64, keys=64, warps=16, stages=2)
CAPABILITY = (9, 0)
KERNEL = "dsa_compile.lowering.sparse_mla.gluon_kernel"
ALIGNED = 16
"""Bytes at a time that latent rows are copied in, and elements that strides are multiples of."""
MIXER_REGISTERS = 160
"""Of a thread: 128 sums and what it takes to add to them."""
SCORE_REGISTERS = {False: 160, True: 128}
"""The latter where rows are fp8. What is left of 512 is the gatherer's: 32, or 64 to make bfloat16 of fp8 with."""


MOST_SPLITS_OF_PADDING = 2
"""Shares of a row up to which heads are padded to a tile; where fewer rows wait, smaller tiles are sooner done."""


def refusal(call: Call, device: Device, paged: bool, scale: float) -> str | None:
    """Why the kernel does not serve a call that the Triton kernel serves, or None."""
    if device.capability != CAPABILITY:
        return f"it is for compute capability 9.0, the device has {device.capability[0]}.{device.capability[1]}"
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"it multiplies 16-bit floats, came {call.dtype}"
    if call.fp8 and call.dtype != torch.bfloat16:
        return f"it makes bfloat16 of fp8 rows, the queries are {call.dtype}"
    if (call.rank, call.rope) != (512, 64):
        return f"it takes latent rows of 512 + 64 values, came {call.rank} + {call.rope}"
    if call.topk is None or paged:
        return "it gathers a selection from pools, came " + ("pages" if paged else "none")
    if not scale > 0:
        return f"it takes the largest score before it scales by a number above 0, came {scale}"
    if call.heads % CONFIG.heads and splits(call, device) > MOST_SPLITS_OF_PADDING:
        return f"its tiles are of {CONFIG.heads} heads, too much padding for {call.heads} where {call.rows} rows wait"
    return None if available("sparse_mla", KERNEL) else "the installed triton lacks what it is written in"


def splits(call: Call, device: Device) -> int:
    """Shares of a row that run side by side, so that few rows fill the device too."""
    return configs.splits(call, CONFIG, device)


def aligned(*tensors: Tensor) -> bool:
    """Whether the rows of all of them can be copied in pieces of `ALIGNED` bytes."""
    return all(
        x.stride(-1) == 1 and x.data_ptr() % ALIGNED == 0 and not any(stride % ALIGNED for stride in _strides(x))
        for x in tensors
    )


def _strides(x: Tensor) -> list[int]:
    """Of all dimensions but the last; 0 for one of size 1, whose stride may be anything."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape[:-1], x.stride())]


def constants(fp8: bool) -> dict[str, object]:
    """The kernel's compile-time arguments that follow from the dtype of latent rows."""
    registers = {"MIXER_REGISTERS": MIXER_REGISTERS, "SCORE_REGISTERS": SCORE_REGISTERS[fp8]}
    return {"FP8": fp8, **registers, "num_warps": 4}


def launch(
    q_absorbed: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    visible: Tensor | None,
    topk_indices: Tensor,
    scale: float,
    splits: int = 1,
) -> tuple[Tensor, Tensor]:
    """Run the kernel on a call that `refusal` has nothing against, of `aligned` tensors; see `reference.sparse_mla`.

    ``splits``: shares of a row that run side by side.
    """
    from dsa_compile.lowering.sparse_mla import gluon_kernel, kernel

    B, T, H, R = q_absorbed.shape
    out = q_absorbed.new_empty(B, T, H, R)
    lse = q_absorbed.new_empty(B, T, H, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    parts = (out, lse) if splits == 1 else (out.new_empty(B, T, splits, H, R), lse.new_empty(B, T, splits, H))
    with torch.cuda.device_of(out):
        gluon_kernel.attend_kernel[(B * T * splits * -(-H // CONFIG.heads),)](
            q_absorbed,
            q_pe,
            latent,
            latent if visible is None else visible.contiguous(),
            topk_indices.contiguous(),
            *parts,
            *_strides(q_absorbed),
            *_strides(q_pe),
            *_strides(latent),
            latent.shape[1],
            T,
            topk_indices.shape[-1],
            splits,
            scale,
            H=H,
            HAS_VISIBLE=visible is not None,
            **constants(latent.dtype == torch.uint8),
        )
        if splits > 1:
            kernel.merge_kernel[(B * T * H,)](*parts, out, lse, **configs.merge_constants(H, R, splits))
    return out, lse
