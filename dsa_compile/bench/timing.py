"""Times of GPU work inside CUDA graphs, and what the device reaches at best."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsa_compile import compat
from dsa_compile.errors import ConfigError
from dsa_compile.lowering.select.configs import FP8_CAPABILITY

WARM_UP = 5
REPLAYS = 50
MATMUL = 8192
"""Rows and columns of the products that stand for the device's peaks."""
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
    """What the device reaches: TFLOP/s of a large matmul in bf16 and, where asked for, in fp8; GB/s of a kernel."""

    tflops: float
    gbytes: float
    fp8_tflops: float | None = None

    def share(self, tflops: float, gbytes: float, fp8_products: bool) -> float:
        """How much of the ceiling that is nearer a launch with these rates reaches."""
        peak = self.fp8_tflops if fp8_products else self.tflops
        assert peak is not None
        return max(tflops / peak, gbytes / self.gbytes)

    def __str__(self) -> str:
        fp8 = "" if self.fp8_tflops is None else f"fp8 matmul {self.fp8_tflops:.0f} TFLOP/s, "
        return f"bf16 matmul {self.tflops:.0f} TFLOP/s, {fp8}memory {self.gbytes:.0f} GB/s"


@dataclass(frozen=True)
class Recording:
    """One launch for each set of inputs, run together by ``replay``.

    ``outputs``: what each launch returns; every replay writes the same tensors again.
    """

    outputs: list[tuple[Tensor, ...]]
    replay: Callable[[], None]

    def rewritten(self) -> list[tuple[Tensor, ...]]:
        """The outputs of a replay over NaN and the lowest integers: what no launch writes is wrong."""
        for outputs in self.outputs:
            for output in outputs:
                output.fill_(float("nan") if output.is_floating_point() else torch.iinfo(output.dtype).min)
        self.replay()
        return self.outputs


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

    def seconds(self, work: Callable[[], object]) -> float:
        """Wall-clock seconds of ``work``, with all that it leaves running on the device."""
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        work()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def host_seconds(self, work: Callable[[], object]) -> float:
        """Wall-clock seconds until ``work`` returns, on an idle device, whatever it leaves running there."""
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        work()
        spent = time.perf_counter() - start
        torch.cuda.synchronize(self.device)
        return spent

    def extra_bytes(self, launch: Launch, inputs: tuple[Any, ...]) -> int:
        """Most that an eager launch allocates at once, beside its outputs."""
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        outputs = launch(*inputs)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        return peak - before - sum(output.untyped_storage().nbytes() for output in outputs)

    def ceilings(self, fp8: bool) -> Ceilings:
        """Measured now, on random data: they depend on the card, its clocks and its neighbours.

        Raises:
            ConfigError: fp8 is asked for, and the device has no such products.
        """
        capability = torch.cuda.get_device_capability(self.device)
        if fp8 and capability < FP8_CAPABILITY:
            wanted, found = (f"{major}.{minor}" for major, minor in (FP8_CAPABILITY, capability))
            raise ConfigError(
                f"bench: expected a GPU that multiplies fp8 values, of compute capability {wanted} or later, found "
                f"{self.name} of {found}. Choose cases in bf16 with --case, where there are any."
            )
        factors = [torch.randn(MATMUL, MATMUL, dtype=torch.bfloat16, device=self.device) for _ in range(2)]
        product = self.time(self.record(lambda a, b: (a @ b,), [tuple(factors)]))
        fp8_tflops = None
        if fp8:
            codes = [x.to(torch.float8_e4m3fn) for x in factors]
            one = torch.ones((), device=self.device)
            fp8_product = self.time(self.record(lambda a, b: (compat.fp8_matmul(a, b, one),), [tuple(codes)]))
            fp8_tflops = 2 * MATMUL**3 / fp8_product.median / 1e6
        # no copy: in a graph that is a memcpy node, which moved 2.7 TB/s on an H200 whose kernels move 4.3
        source = torch.randn(MOVED // 2, dtype=torch.bfloat16, device=self.device)
        moved = self.time(self.record(lambda a, b: (torch.neg(a, out=b),), [(source, torch.empty_like(source))]))
        return Ceilings(2 * MATMUL**3 / product.median / 1e6, 2 * MOVED / moved.median / 1e3, fp8_tflops)

    def release(self) -> None:
        """Give the memory of dropped recordings and inputs back, and forget how much that was."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """Most that was reserved at once since `release` or `extra_bytes`, recordings included."""
        return torch.cuda.max_memory_reserved(self.device)
