"""What kernel configurations are chosen by: the sizes of a GPU."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Device:
    """Compute capability, processors, and ``shared``: bytes of shared memory that a program may have."""

    capability: tuple[int, int]
    processors: int
    shared: int

    @property
    def major(self) -> int:
        return self.capability[0]

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        properties: Any = torch.cuda.get_device_properties(device)
        capability = properties.major, properties.minor
        return cls(capability, properties.multi_processor_count, properties.shared_memory_per_block_optin)
