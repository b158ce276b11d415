"""Times of GPU work inside CUDA graphs, and what the device reaches at best."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsa_compile.errors import ConfigError

WARM_UP = 5
REPLAYS = 50
MATMUL = 8192
"""Rows and columns of the bf16 product that stands for the device's peak."""
MOVED = 2 << 30
"""Bytes that are read, and as many written, for its bandwidth."""


@dataclass(frozen=True)
class Times:
    """Microseconds of one launch: median of the replays, and what a tenth and nine tenths of them stay below."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches: TFLOP/s of a large bf16 matmul, GB/s of a kernel that reads and writes."""

    tflops: float
    gbytes: float

    def share(self, tflops: float, gbytes: float) -> float:
        """How much of the ceiling that is nearer a launch with these rates reaches."""
        return max(tflops / self.tflops, gbytes / self.gbytes)


@dataclass(frozen=True)
class Recording:
    """One launch for each set of inputs, run together by ``replay``.

    ``outputs``: what each launch returns; every replay writes the same tensors again.
    """

    outputs: list[tuple[Tensor, ...]]
    replay: Callable[[], None]


Launch = Callable[..., tuple[Tensor, ...]]
"""What is timed: a function of one set of inputs."""


class Gpu:
    """The current CUDA device as a stopwatch.

    Raises:
        ConfigError: there is none.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("bench: expected a CUDA device, found none. Kernels are timed on a GPU; run it there.")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.device)

    def record(self, launch: Launch, sets: Sequence[tuple[Any, ...]]) -> Recording:
        """Capture ``launch`` of each set in one CUDA graph.

        What a launch allocates lies in the graph's own pool. Outputs are kept apart, so that no launch finds those of
        another in the L2; what it frees may serve the next, as in use.
        """
        launch(*sets[0])  # compiles, which a capture cannot
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [launch(*inputs) for inputs in sets]
        return Recording(outputs, graph.replay)

    def time(self, recording: Recording) -> Times:
        """Replay again and again without a pause."""
        for _ in range(WARM_UP):
            recording.replay()
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
        for start, end in marks:
            start.record()
            recording.replay()
            end.record()
        torch.cuda.synchronize(self.device)
        launches = len(recording.outputs)
        micros = [start.elapsed_time(end) * 1e3 / launches for start, end in marks]
        tenths = statistics.quantiles(micros, n=10)
        return Times(statistics.median(micros), tenths[0], tenths[-1])

    def ceilings(self) -> Ceilings:
        """Measured now, on random data: both depend on the card, its clocks and its neighbours."""
        factors = [torch.randn(MATMUL, MATMUL, dtype=torch.bfloat16, device=self.device) for _ in range(2)]
        product = self.time(self.record(lambda a, b: (a @ b,), [tuple(factors)]))
        # no copy: in a graph that is a memcpy node, which moved 2.7 TB/s on an H200 whose kernels move 4.3
        source = torch.randn(MOVED // 2, dtype=torch.bfloat16, device=self.device)
        moved = self.time(self.record(lambda a, b: (torch.neg(a, out=b),), [(source, torch.empty_like(source))]))
        return Ceilings(2 * MATMUL**3 / product.median / 1e6, 2 * MOVED / moved.median / 1e3)

    def release(self) -> None:
        """Give the memory of dropped recordings and inputs back."""
        torch.cuda.empty_cache()
