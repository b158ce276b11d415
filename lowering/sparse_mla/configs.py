"""Which kernel configurations serve a call of ``dsa::sparse_mla``, what none can serve, and how a row is split."""

from dataclasses import dataclass

import torch

from dsa_compile.lowering.device import Device
from dsa_compile.lowering.tiles import power_of_two

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_RANK = 512
LARGEST_ROPE = 64
MOST_SPLITS = 64


@dataclass(frozen=True)
class Call:
    """What decides about a kernel: static sizes, and ``rows`` = B T as a hint.

    ``topk``: K, None where attention is dense over ``slots``. ``fp8``: latent rows are bytes.
    """

    dtype: torch.dtype
    heads: int
    rank: int
    rope: int
    topk: int | None
    slots: int
    rows: int
    fp8: bool
    masked: bool


@dataclass(frozen=True)
class Config:
    """One way to compile the kernel: ``heads`` of a query row and ``keys`` at a time."""

    heads: int
    keys: int
    warps: int
    stages: int

    def constants(self, call: Call, splits: int) -> dict[str, object]:
        """The kernel's compile-time arguments that follow from the configuration and the call."""
        return {
            "H": call.heads,
            "R": call.rank,
            "P": call.rope,
            "SELECTED": call.topk is not None,
            "K": call.topk or 0,
            "SPLITS": splits,
            "BLOCK_H": self.heads,
            "BLOCK_N": self.keys,
            "BLOCK_R": block(call.rank),
            "BLOCK_P": block(call.rope),
            "num_warps": self.warps,
            "num_stages": self.stages,
        }

    @property
    def programs_per_processor(self) -> int:
        """How many fit at once, by their registers."""
        return 1 if self.warps > 4 else 2


_HOPPER = {
    "64 heads": (Config(64, 64, 8, 2),),
    "64 heads fp8": (Config(64, 64, 8, 2),),
    "32 heads": (Config(32, 64, 4, 2),),
    "32 heads fp8": (Config(32, 64, 8, 2),),
    "16 heads": (Config(16, 32, 4, 3), Config(16, 64, 4, 2)),
    "16 heads fp8": (Config(16, 32, 4, 2),),
}
"""Measured on an H200 at R = 512, P = 64, the best first."""
_OTHERS = (Config(16, 64, 4, 2), Config(16, 32, 4, 2), Config(16, 16, 4, 2), Config(16, 16, 4, 1))
_FLOAT32 = (Config(16, 32, 4, 1), Config(16, 16, 4, 1))
"""Exact float32 products run on no tensor core: the tile is bound by registers."""


def refusal(call: Call) -> str | None:
    """Why no kernel can serve the call, or None."""
    if call.dtype not in DTYPES:
        return f"it computes in float32 at most, the queries are {call.dtype}"
    if call.masked:
        return "it takes ranges of visible slots, no mask operand"
    if call.rank > LARGEST_RANK or call.rope > LARGEST_ROPE:
        most = f"kv_lora_rank <= {LARGEST_RANK} and qk_rope_head_dim <= {LARGEST_ROPE}"
        return f"its tiles hold {most}, came {call.rank} and {call.rope}"
    return None


def configs(call: Call, device: Device) -> list[Config]:
    """The configurations worth trying on this device, the likeliest first; never none."""
    if call.dtype == torch.float32:
        return _fitting(_FLOAT32, call, device)[:1] or [_FLOAT32[-1]]
    measured: list[Config] = []
    if device.major == 9:
        tile = 64 if call.heads > 32 else 32 if call.heads > 16 else 16
        measured = _fitting(_HOPPER[f"{tile} heads" + " fp8" * call.fp8], call, device)
    return measured or _fitting(_OTHERS, call, device)[:1] or [_OTHERS[-1]]


def _fitting(table: tuple[Config, ...], call: Call, device: Device) -> list[Config]:
    return [config for config in table if shared_bytes(call, config) <= device.shared]


def shared_bytes(call: Call, config: Config) -> int:
    """Bytes of shared memory that the kernel takes, from above."""
    width = block(call.rank) + block(call.rope)
    queries = config.heads * width * call.dtype.itemsize
    tile = config.keys * width * call.dtype.itemsize
    waiting = config.keys * (width + block(call.rope)) if call.fp8 else tile
    return queries + tile + (config.stages - 1) * waiting + 10 * 1024


def splits(call: Call, config: Config, device: Device) -> int:
    """Shares of a row's slots that run side by side, so that few rows fill the device too."""
    programs = call.rows * -(-call.heads // config.heads)
    blocks = -(-(call.slots if call.topk is None else call.topk) // config.keys)
    wanted = device.processors * config.programs_per_processor // max(1, programs)
    share = -(-blocks // max(1, min(wanted, blocks, MOST_SPLITS)))
    return max(1, -(-blocks // max(1, share)))


def block(width: int) -> int:
    """The power of two, at least 16, that a tile's side of ``width`` takes."""
    return max(16, power_of_two(width))


def merge_constants(heads: int, rank: int, splits: int) -> dict[str, int]:
    """The merging kernel's compile-time arguments: 128 values a thread."""
    rows, columns = power_of_two(splits), block(rank)
    warps = max(1, min(8, rows * columns // 4096))
    return {
        "H": heads,
        "R": rank,
        "SPLITS": splits,
        "BLOCK_S": rows,
        "BLOCK_R": columns,
        "num_warps": warps,
        "num_stages": 1,
    }
