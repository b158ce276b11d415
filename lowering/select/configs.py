"""Which configuration of the score kernel serves a call of ``dsa::select``, what none serves, and how it is split."""

from dataclasses import dataclass

import torch

from dsa_compile.lowering.device import Device
from dsa_compile.lowering.tiles import power_of_two

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_HEADS = 128
LARGEST_DIM = 128
FEWEST_COLUMNS = 16
"""Of a product on tensor cores."""
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Call:
    """What decides about the kernel. ``queries``: T of a sequence."""

    dtype: torch.dtype
    keys_dtype: torch.dtype
    heads: int
    dim: int
    batch: int
    queries: int
    slots: int
    masked: bool

    @property
    def fp8(self) -> bool:
        """Whether keys are codes."""
        return self.keys_dtype == torch.uint8


@dataclass(frozen=True)
class Config:
    """One way to compile the kernel: tiles of ``keys`` by ``columns``, heads of one query or of several.

    ``registers``: most of a thread, so that more programs fit; None: as many as it takes. ``precision``: of products of
    float32 values.
    """

    columns: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    precision: str = "ieee"

    def queries(self, call: Call, most: int) -> int:
        """Query rows that a program takes together, at most ``most``."""
        rows = min(self.columns // _head_block(call), power_of_two(call.queries), 1 << max(0, most.bit_length() - 1))
        return max(1, rows)

    def constants(self, call: Call, queries: int) -> dict[str, int | str]:
        """The kernel's compile-time arguments and options for programs of ``queries`` rows."""
        options: dict[str, int | str] = {"num_warps": self.warps, "num_stages": self.stages}
        if self.registers is not None:
            options["maxnreg"] = self.registers
        return options | {
            "HEADS": call.heads,
            "DI": call.dim,
            "QUERIES": queries,
            "BLOCK_N": self.keys,
            "BLOCK_H": max(_head_block(call), FEWEST_COLUMNS // queries),
            "BLOCK_D": max(32 if call.fp8 else 16, power_of_two(call.dim)),
            "STAGES": self.stages,
            "PRECISION": self.precision,
        }


_HOPPER = {
    "fp8 decode": Config(64, 128, 4, 3),
    "fp8 prefill": Config(128, 64, 4, 3, 128),
    "fp8 long prefill": Config(256, 64, 8, 4, 128),
    "16-bit decode": Config(64, 64, 4, 3),
    "16-bit prefill": Config(128, 128, 8, 2),
    "16-bit long prefill": Config(128, 128, 8, 2),
}
"""Measured on an H200 with 64 heads of 128."""
LONG = 65536
"""Slots from which prefill is long."""
_OTHERS = Config(64, 64, 4, 2)
_FLOAT32 = Config(32, 32, 4, 1)
"""Exact float32 products run on no tensor core: the tile is bound by registers."""
DECODE_WAVES, PREFILL_WAVES = 2, 4
"""Programs a processor that a call is split into, if its rows are fewer."""


def refusal(call: Call, device: Device) -> str | None:
    """Why no kernel can serve the call on this device, or None."""
    if call.dtype not in DTYPES:
        return f"it computes in float32 at most, the index queries are {call.dtype}"
    if not call.fp8 and call.keys_dtype != call.dtype:
        return f"it multiplies values of one dtype, came queries in {call.dtype} and keys in {call.keys_dtype}"
    if call.masked:
        return "it takes ranges of visible slots, no mask operand"
    if call.heads > MOST_HEADS or call.dim > LARGEST_DIM:
        most = f"index_n_heads <= {MOST_HEADS} and index_head_dim <= {LARGEST_DIM}"
        return f"its tiles hold {most}, came {call.heads} and {call.dim}"
    if call.fp8 and device.capability < FP8_CAPABILITY:
        return "fp8 products take compute capability 8.9, this device has {}.{}".format(*device.capability)
    return None


def config(call: Call, device: Device) -> Config:
    """The configuration for a call on this device."""
    if call.dtype == torch.float32 and not call.fp8:
        return _FLOAT32
    if device.major != 9:
        return _OTHERS
    phase = "decode" if call.queries == 1 else "prefill" if call.slots < LONG else "long prefill"
    return _HOPPER[f"{'fp8' if call.fp8 else '16-bit'} {phase}"]


def splits(blocks: int, call: Call, config: Config, device: Device) -> int:
    """Shares that the keys of a block of query rows are dealt to, so that few blocks fill the device too."""
    waves = DECODE_WAVES if call.queries == 1 else PREFILL_WAVES
    wanted = device.processors * waves // max(1, blocks)
    return max(1, min(wanted, -(-call.slots // config.keys)))


def _head_block(call: Call) -> int:
    return power_of_two(call.heads)
