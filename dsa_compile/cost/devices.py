"""What GPUs can do, by their data sheets: dense rates without sparsity, decimal bytes."""

from dataclasses import dataclass

from dsa_compile.config import nearest
from dsa_compile.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Device:
    """``memory`` in bytes, ``bandwidth`` and ``network`` (one way, of the GPU's own adapter) in bytes a second."""

    memory: float
    bandwidth: float
    bf16_flops: float
    fp8_flops: float
    network: float


_HOPPER = {"bf16_flops": 989e12, "fp8_flops": 1979e12, "network": 50e9}

DEVICES = {
    "h100": Device(memory=80e9, bandwidth=3.35e12, **_HOPPER),
    "h800": Device(memory=80e9, bandwidth=3.35e12, **_HOPPER),
    "h20": Device(memory=96e9, bandwidth=4.0e12, bf16_flops=148e12, fp8_flops=296e12, network=50e9),
    "h200": Device(memory=141e9, bandwidth=4.8e12, **_HOPPER),
    "b200": Device(memory=180e9, bandwidth=8.0e12, bf16_flops=2.25e15, fp8_flops=4.5e15, network=50e9),
}
"""SXM modules with a 400 Gbit/s adapter each. NVIDIA's sheets of the H100, H200, H20 and HGX B200."""


def device_named(name: str) -> Device:
    """One of `DEVICES`.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in DEVICES:
        raise ConfigError(f"gpu: unknown name {name!r}; {nearest(name, list(DEVICES), 'names')}")
    return DEVICES[name]
