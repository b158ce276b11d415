"""What the cases of all kernel benchmarks have in common, and the figures that they are held to on an H200."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ROTATED = 512 << 20
"""Bytes that the launches of one recording touch at least: several times any L2."""
UNITS = {
    "us": ("us", None, "<="),
    "MiB extra": ("extra_mib", None, "<="),
    "TFLOP/s": ("tflops", None, ">="),
    "x torch.topk": ("speedup", "torch.topk", ">="),
}
"""Of targets: the figure, the peer in whose row it stands (None: ours), and whether little or much of it is wanted."""


@dataclass(frozen=True)
class Target:
    """At most or at least ``bound`` of a unit of `UNITS`."""

    bound: float
    unit: str

    def met(self, rows: Sequence[dict[str, Any]]) -> bool:
        """Whether the rows of a case, ours and its peers', show it. A figure that they lack meets nothing."""
        figure, peer, way = UNITS[self.unit]
        values = [row[figure] for row in rows if row["peer"] == peer and figure in row]
        return bool(values) and all(value <= self.bound if way == "<=" else value >= self.bound for value in values)

    def __str__(self) -> str:
        return f"{UNITS[self.unit][2]} {self.bound:g} {self.unit}"


@dataclass(frozen=True)
class Case(ABC):
    """One call that is timed. ``targets``: what ours must reach, if anything."""

    name: str
    targets: tuple[Target, ...] = field(default=(), kw_only=True)

    @property
    @abstractmethod
    def flops(self) -> int:
        """Of the products of a launch."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """That a launch must move."""

    @property
    def fp8_products(self) -> bool:
        """Whether those are of fp8 values, whose ceiling is higher."""
        return False

    @property
    def sets(self) -> int:
        """Sets of inputs that keep a launch from finding its data in the L2."""
        return -(-ROTATED // self.bytes)

    @abstractmethod
    def inputs(self, device: torch.device, seed: int) -> tuple[Any, ...]:
        """Random arguments of one launch."""


def causal_tail(batch: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """``visible`` int32[B, 1, T, 2] of queries that are the last of ``keys`` tokens."""
    ends = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32, device=device)
    return torch.stack([torch.zeros_like(ends), ends], -1).repeat(batch, 1, 1, 1)


def spread(sets: int, rows: int, most: int) -> list[tuple[int, int]]:
    """At most so many rows, evenly spread over all launches: the set and the row in it of each."""
    total = sets * rows
    count = min(total, most)
    return [divmod(i * (total - 1) // max(1, count - 1), rows) for i in range(count)]
