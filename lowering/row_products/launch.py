"""``dsa::row_products`` and ``dsa::expert_products`` on CUDA: one Triton launch each."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsa_compile.lowering.dependent import launch_options
from dsa_compile.lowering.row_products.limits import MOST_WEIGHTS
from dsa_compile.lowering.row_products.reference import expert_products, row_products

LONG = 4096
"""Values of a row from which on it is read in wide tiles."""
BYTES_WIDE = 2048


@dataclass(frozen=True)
class Config:
    """Rows and columns of a tile of weights, warps of a program, and registers of a thread at most (None: any)."""

    block_n: int
    block_k: int
    num_warps: int
    registers: int | None = None


def config(K: int, itemsize: int, rows: int = 1) -> Config:
    """For weights of rows of ``K`` values: 2 rows of 2 KiB or, of short ones, 1 KiB.

    On an H200 the best of 40 tiles for all weights of DeepSeek-V3.2 but the narrowest, within 3 %. With several rows to
    multiply a thread that held as many weights would spill its sums, as would two rows in the 64 registers that ptxas
    settles for.
    """
    wide = K >= LONG
    width = (BYTES_WIDE if wide else BYTES_WIDE // 2) // itemsize
    return Config(2, width, 2) if rows == 1 else Config(2, width, 4 if wide else 2, 128)


def row_products_cuda(x: Tensor, weights: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """`reference.row_products` by Triton; by itself in float64, which Triton code here leaves alone."""
    if x.dtype == torch.float64:
        return row_products(x, weights, dtype)
    from dsa_compile.lowering.row_products import kernel

    x = x if x.stride(-1) == 1 and not x.is_contiguous() else x.contiguous().flatten(1)
    rows, K = x.shape[0], x.shape[1:].numel()
    tile = config(K, x.element_size(), rows)
    weights = [weight.contiguous() for weight in weights]
    sizes = [weight.shape[0] for weight in weights]
    absent = MOST_WEIGHTS - len(weights)
    out = x.new_empty(rows * sum(sizes), dtype=dtype)
    with torch.cuda.device_of(x):
        kernel.row_kernel[(sum(-(-N // tile.block_n) for N in sizes),)](
            x,
            out,
            *weights,
            *weights[:1] * absent,
            *sizes,
            *[0] * absent,
            K,
            x.stride(0),
            x.stride(1),
            ROWS=rows,
            PART=x.shape[2] if x.dim() == 3 else 0,
            **_options(tile, K, x.device),
        )
    return out


def expert_products_cuda(x: Tensor, weights: Tensor, picks: Tensor) -> Tensor:
    """`reference.expert_products` by Triton; by itself in float64."""
    if x.dtype == torch.float64:
        return expert_products(x, weights, picks)
    from dsa_compile.lowering.row_products import kernel

    x, weights, picks = x.contiguous(), weights.contiguous(), picks.contiguous()
    E, N, K = weights.shape
    P = picks.shape[0]
    tile = config(K, x.element_size())
    out = x.new_empty(P, N)
    with torch.cuda.device_of(x):
        kernel.expert_kernel[(-(-N // tile.block_n), P)](
            x, out, weights, picks, P // x.shape[0], E, N, K, **_options(tile, K, x.device)
        )
    return out


def _options(tile: Config, K: int, device: torch.device) -> dict[str, Any]:
    return {
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "EVEN": K % tile.block_k == 0,
        "num_warps": tile.num_warps,
        "maxnreg": tile.registers,
        **_dependent(device),
    }


def _dependent(device: torch.device) -> dict[str, bool]:
    """Read weights while the kernel before runs, where the device can.

    In a CUDA graph alone, where no kernel changes them; elsewhere the one before might have.
    """
    options = launch_options(device)
    return options if options["DEPENDENT"] and torch.cuda.is_current_stream_capturing() else {"DEPENDENT": False}
