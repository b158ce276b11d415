"""``dsa::sparse_mla`` by `gluon_kernel`: which calls it serves, in which configurations, and its launch."""

import warnings
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dsa_compile.lowering.device import Device
from dsa_compile.lowering.sparse_mla.configs import Call

CAPABILITY = (9, 0)
HEADS = 64
"""Of a query row, to a program: the rows of a wgmma."""
MIXER_REGISTERS = 160
"""A thread: 128 sums and what it takes to add to them."""
GATHER_REGISTERS = 32


@dataclass(frozen=True)
class Config:
    """One way to compile the kernel.

    Attributes:
        keys: latent rows of a block. stages: blocks in shared memory.
        ahead: a block is scored while the one before it is weighed.
    """

    keys: int
    stages: int
    ahead: bool

    def constants(self, call: Call) -> dict[str, object]:
        """The kernel's compile-time arguments that follow from the configuration and the call."""
        return {
            "H": call.heads,
            "KEYS": self.keys,
            "STAGES": self.stages,
            "AHEAD": self.ahead,
            "MIXER_REGISTERS": MIXER_REGISTERS,
            "GATHER_REGISTERS": GATHER_REGISTERS,
            "num_warps": 4,
        }


CONFIGS = (Config(32, 5, True), Config(32, 5, False), Config(64, 2, False))
"""The likeliest first."""


def refusal(call: Call, device: Device, paged: bool, scale: float) -> str | None:
    """Why the kernel cannot serve a call that the Triton kernel serves, or None."""
    if device.capability != CAPABILITY:
        return f"it needs compute capability 9.0, the device has {device.capability[0]}.{device.capability[1]}"
    if call.dtype not in (torch.bfloat16, torch.float16) or call.fp8:
        return "it reads latent rows of 16-bit floats"
    if (call.rank, call.rope) != (512, 64) or call.heads % HEADS:
        return f"it takes multiples of {HEADS} heads of 512 + 64 values, came {call.heads} of {call.rank} + {call.rope}"
    if call.topk is None or paged:
        return "it gathers a selection from a pool without pages"
    if not scale > 0:
        return f"it takes the largest score before scaling, by {scale}"
    if not available():
        return "Gluon cannot be imported"
    return None


@cache
def available() -> bool:
    """Whether the installed triton has what the kernel is written in; warns once where it has not."""
    try:
        from dsa_compile.lowering.sparse_mla import gluon_kernel  # noqa: F401
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"dsa::sparse_mla runs as its portable Triton kernel, not as the faster one for Hopper: {error}.",
            stacklevel=2,
        )
        return False
    return True


def launch(
    q_absorbed: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    visible: Tensor | None,
    topk_indices: Tensor,
    scale: float,
    call: Call,
    config: Config,
) -> tuple[Tensor, Tensor]:
    """Run one configuration on a call that `refusal` has nothing against; out and lse as of `reference.sparse_mla`."""
    from dsa_compile.lowering.sparse_mla import gluon_kernel

    B, T, H, R = q_absorbed.shape
    out = q_absorbed.new_empty(B, T, H, R)
    lse = q_absorbed.new_empty(B, T, H, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    with torch.cuda.device_of(out):
        gluon_kernel.attend_kernel[(B * T * (H // HEADS),)](
            q_absorbed,
            q_pe,
            latent,
            latent if visible is None else visible.contiguous(),
            topk_indices.contiguous(),
            out,
            lse,
            *q_absorbed.stride()[:3],
            *q_pe.stride()[:3],
            latent.stride(0),
            latent.stride(1),
            latent.shape[1],
            T,
            topk_indices.shape[-1],
            scale,
            HAS_VISIBLE=visible is not None,
            **config.constants(call),
        )
    return out, lse
