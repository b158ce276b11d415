"""Which calls the kernels of teaching serve, why others are not, and in which tiles."""

from dataclasses import dataclass, replace

import torch

from dsa_compile.lowering.device import Device
from dsa_compile.lowering.select.configs import LARGEST_DIM, MOST_HEADS
from dsa_compile.lowering.select.configs import Config as ScoreConfig
from dsa_compile.lowering.tiles import power_of_two

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_NOPE, LARGEST_ROPE, LARGEST_VALUE = 256, 64, 256
WIDE = 128
"""Values of a key's nope part, or of a value, beyond which tiles are narrower."""
SHARED = 160 << 10
"""Bytes of shared memory that tiles take at most on devices other than Hopper GPUs."""
NARROW = 64
"""Values of a head, of attention or an indexer, up to which wide tiles of float32 fit."""
WAVES = 4
"""Programs a processor that sums over rows are split into."""


@dataclass(frozen=True)
class Call:
    """What decides about the kernels. ``index_dtype``: of index queries and keys."""

    dtype: torch.dtype
    index_dtype: torch.dtype
    heads: int
    nope: int
    rope: int
    value: int
    index_heads: int
    index_dim: int
    batch: int
    tokens: int


@dataclass(frozen=True)
class Tile:
    """One way to compile a kernel: ``rows`` (of queries, or queries by index heads) by ``slots``."""

    rows: int
    slots: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int | str]:
        """What all kernels take of it."""
        return {"BLOCK_N": self.slots, "STAGES": self.stages, "num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Tiles:
    """Of each kernel."""

    attend: Tile
    target: Tile
    scores: ScoreConfig
    rows: Tile
    columns: Tile


_HOPPER = Tiles(
    attend=Tile(128, 64, 8, 3),
    target=Tile(128, 64, 4, 3),
    scores=ScoreConfig(128, 128, 8, 2),
    rows=Tile(128, 128, 8, 3),
    columns=Tile(64, 64, 4, 3),
)
_HOPPER_FLOAT32 = Tiles(
    attend=Tile(64, 32, 4, 2),
    target=Tile(64, 64, 4, 4),
    scores=ScoreConfig(64, 64, 4, 2),
    rows=Tile(64, 32, 4, 3),
    columns=Tile(32, 64, 4, 3),
)
_HOPPER_NARROW = Tiles(
    attend=Tile(128, 32, 8, 3),
    target=Tile(64, 64, 4, 3),
    scores=ScoreConfig(64, 64, 4, 3),
    rows=Tile(128, 64, 8, 3),
    columns=Tile(32, 128, 8, 3),
)
"""Of an H200: the first for DeepSeek-V3's sizes in bfloat16, the last in TF32 for heads of at most NARROW values."""
_ROWS_OF_64_HEADS = Tile(64, 128, 4, 3)
"""A tenth faster; with any other number of index heads it spills."""
_OTHERS = Tiles(
    attend=Tile(64, 32, 4, 1),
    target=Tile(64, 32, 4, 1),
    scores=ScoreConfig(64, 32, 4, 1),
    rows=Tile(64, 32, 4, 1),
    columns=Tile(64, 32, 4, 1),
)
_WIDE, _WIDE_FLOAT32, _WIDE_OTHERS = Tile(128, 32, 8, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)
"""That attend."""


def refusal(call: Call, device: Device) -> str | None:
    """Why no kernel can serve the call on this device, or None."""
    for dtype in (call.dtype, call.index_dtype):
        if dtype not in DTYPES:
            return f"they compute in float32 at most, came {dtype}"
    if call.nope > LARGEST_NOPE or call.rope > LARGEST_ROPE or call.value > LARGEST_VALUE:
        most = f"qk_nope <= {LARGEST_NOPE}, qk_rope <= {LARGEST_ROPE} and v_head_dim <= {LARGEST_VALUE}"
        return f"their tiles hold {most}, came {call.nope}, {call.rope} and {call.value}"
    if call.index_heads > MOST_HEADS or call.index_dim > LARGEST_DIM:
        most = f"index_n_heads <= {MOST_HEADS} and index_head_dim <= {LARGEST_DIM}"
        return f"their tiles hold {most}, came {call.index_heads} and {call.index_dim}"
    if device.shared < SHARED:
        return f"their tiles take {SHARED} bytes of shared memory, this device has {device.shared}"
    return None


def tiles(call: Call, device: Device) -> Tiles:
    """The tiles for a call on this device."""
    exact = torch.float32 in (call.dtype, call.index_dtype)
    if device.major != 9:
        chosen, wide = _OTHERS, _WIDE_OTHERS
    elif exact:
        narrow = precision() == "tf32" and max(call.nope, call.value, call.index_dim) <= NARROW
        chosen, wide = _HOPPER_NARROW if narrow else _HOPPER_FLOAT32, _WIDE_FLOAT32
    else:
        rows = _ROWS_OF_64_HEADS if power_of_two(call.index_heads) == 64 else _HOPPER.rows
        chosen, wide = replace(_HOPPER, rows=rows), _WIDE
    if max(call.nope, call.value) > WIDE:
        chosen = replace(chosen, attend=wide)
    return replace(chosen, scores=replace(chosen.scores, precision=precision()))


def precision() -> str:
    """Of products of float32 values: TF32 where torch's own are; else three of them for one, which err by 2^-22."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def attend_constants(call: Call, tile: Tile) -> dict[str, int | str]:
    """Compile-time arguments of the kernel that attends, all but SELECTED."""
    return _teacher_constants(call, tile) | {
        "BLOCK_NOPE": _side(call.nope),
        "BLOCK_ROPE": _side(call.rope),
        "BLOCK_V": _side(call.value),
    }


def target_constants(call: Call, tile: Tile) -> dict[str, int | str]:
    """Compile-time arguments of the kernel that makes targets; a head's values are taken in parts of BLOCK_K."""
    return _teacher_constants(call, tile) | {"BLOCK_K": _side(max(min(call.nope, LARGEST_ROPE), call.rope))}


def _teacher_constants(call: Call, tile: Tile) -> dict[str, int | str]:
    return tile.options | {
        "H": call.heads,
        "N": call.nope,
        "P": call.rope,
        "V": call.value,
        "PRECISION": precision(),
        "BLOCK_M": tile.rows,
    }


def queries(call: Call, tile: Tile) -> int:
    """Query rows that a program takes with all their index heads."""
    return max(1, tile.rows // power_of_two(call.index_heads))


def row_constants(call: Call, tile: Tile) -> dict[str, int | str]:
    """Compile-time arguments of the kernel that sums over slots."""
    return _student_constants(call, tile) | {
        "QUERIES": queries(call, tile),
        "BLOCK_H": power_of_two(call.index_heads),
    }


def column_constants(call: Call, tile: Tile) -> dict[str, int | str]:
    """Compile-time arguments of the kernel that sums over rows."""
    return _student_constants(call, tile) | {"BLOCK_M": tile.rows}


def _student_constants(call: Call, tile: Tile) -> dict[str, int | str]:
    return tile.options | {
        "HEADS": call.index_heads,
        "DI": call.index_dim,
        "PRECISION": precision(),
        "BLOCK_D": _side(call.index_dim),
    }


def splits(call: Call, tile: Tile, sequences: int, rows: int, processors: int) -> int:
    """Shares of the rows that sums over them are split into, so that few index keys fill the device too."""
    programs = sequences * -(-call.tokens // tile.slots)
    return max(1, min(-(-processors * WAVES // programs), -(-rows // tile.rows)))


def _side(width: int) -> int:
    """The power of two, at least 16, that a tile's side of ``width`` takes."""
    return max(16, power_of_two(width))
