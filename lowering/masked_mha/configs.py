"""Which configuration of the masked kernel serves a call, what none serves, and how many heads are expanded at once."""

from dataclasses import dataclass

import torch

from dsa_compile.dims import LayerDims
from dsa_compile.lowering.device import Device
from dsa_compile.lowering.tiles import power_of_two

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_NOPE = 256
LARGEST_ROPE = 64
LARGEST_VALUE = 256
WORD = 32
"""Slots of a word of bits."""
BITS_BUDGET = 256 << 20
"""Bytes of bits at once: rows of a prompt that has more run one part after another."""


@dataclass(frozen=True)
class Config:
    """One way to compile the kernel: ``rows`` of queries by ``keys`` at a time, a multiple of `WORD`."""

    rows: int
    keys: int
    warps: int
    stages: int

    def constants(self, dims: LayerDims) -> dict[str, int]:
        """The kernel's compile-time arguments and options."""
        N, P, V = dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim
        return {
            "N": N,
            "P": P,
            "V": V,
            "BLOCK_M": self.rows,
            "BLOCK_S": self.keys,
            "BLOCK_N": block(N),
            "BLOCK_P": block(P),
            "BLOCK_V": block(V),
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


_HOPPER = (Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(64, 64, 4, 2))
_OTHERS = (Config(64, 32, 4, 2), Config(32, 32, 4, 2), Config(16, 32, 4, 1))
_FLOAT32 = (Config(32, 32, 4, 1), Config(16, 32, 4, 1))
"""Exact float32 products run on no tensor core: the tile is bound by registers."""


def refusal(dims: LayerDims, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot serve heads of these sizes, or None."""
    if dtype not in DTYPES:
        return f"it computes in float32 at most, the queries are {dtype}"
    sizes = dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim
    if any(size > most for size, most in zip(sizes, (LARGEST_NOPE, LARGEST_ROPE, LARGEST_VALUE))):
        most = (
            f"qk_nope_head_dim <= {LARGEST_NOPE}, qk_rope_head_dim <= {LARGEST_ROPE} and v_head_dim <= {LARGEST_VALUE}"
        )
        return f"its tiles hold {most}, came {sizes[0]}, {sizes[1]} and {sizes[2]}"
    return None


def config(dims: LayerDims, dtype: torch.dtype, device: Device) -> Config:
    """The first configuration that fits the device, else the smallest."""
    table = _FLOAT32 if dtype == torch.float32 else _HOPPER if device.major == 9 else _OTHERS
    fitting = (choice for choice in table if shared_bytes(dims, dtype, choice) <= device.shared)
    return next(fitting, _OTHERS[-1])


def shared_bytes(dims: LayerDims, dtype: torch.dtype, config: Config) -> int:
    """Bytes of shared memory that the kernel takes, from above."""
    key, value = block(dims.qk_nope_head_dim) + block(dims.qk_rope_head_dim), block(dims.v_head_dim)
    tiles = config.rows * key + config.stages * config.keys * (key + value)
    return tiles * dtype.itemsize + 4 * config.stages * config.rows * config.keys // WORD + 1024


def heads_at_once(dims: LayerDims, rows: int, slots: int) -> int:
    """Heads whose keys and values of S slots take no more than the absorbed form would for T rows, at least one."""
    absorbed = rows * (dims.kv_lora_rank + dims.latent_width)
    expanded = slots * (dims.qk_nope_head_dim + dims.v_head_dim)
    return min(dims.n_heads, max(1, dims.n_heads * absorbed // max(1, expanded)))


def block(width: int) -> int:
    """The power of two, at least 16, that a tile's side of ``width`` takes."""
    return max(16, power_of_two(width))
