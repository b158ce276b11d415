"""Speed and memory of a generation, for the console script and the demo."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True)
class Run:
    """One `timed_generate`; ``new_tokens`` is [B, T].

    Rates are tokens per second over the whole batch. ``decode_rate`` leaves out the first decode step, whose graph may
    have to be compiled; it is NaN where no step follows. ``prefill_rate`` includes compiling the prompt's graph.
    ``accept_length``: tokens that a step added to a sequence; None where nothing was drafted.
    """

    new_tokens: Tensor
    cache_bytes: int
    prefill_rate: float
    decode_rate: float
    accept_length: float | None


class Clock(BaseStreamer):
    """Takes the time of the prompt and of every token; ``advance`` is called for each."""

    def __init__(self, advance: Callable[[], object] = lambda: None) -> None:
        self.marks: list[float] = []
        self.advance = advance

    def put(self, value: Tensor) -> None:
        self.marks.append(time.perf_counter())
        if len(self.marks) > 1:
            self.advance()

    def end(self) -> None:
        return None


def timed_generate(model: Any, ids: Tensor, max_new_tokens: int, *, progress: bool = False, **arguments: Any) -> Run:
    """Generate from ``ids`` [B, T] and time prefill and decode; ``arguments`` go to ``model.generate``."""
    with Progress(console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("generating", total=max_new_tokens)
        clock = Clock(lambda: bar.advance(task))
        output = model.generate(
            ids, max_new_tokens=max_new_tokens, streamer=clock, return_dict_in_generate=True, **arguments
        )
    drafted = getattr(output, "mtp", None)
    start, first, *later = clock.marks
    steps = len(later) - 1
    return Run(
        new_tokens=output.sequences[:, ids.shape[1] :],
        cache_bytes=cache_bytes(output.past_key_values),
        prefill_rate=ids.numel() / (first - start),
        decode_rate=ids.shape[0] * steps / (later[-1] - later[0]) if steps > 0 else float("nan"),
        accept_length=drafted.accept_length if drafted else None,
    )


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors in a cache of transformers or of this package."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes())
    names = ("keys", "values", "indexer_keys")
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in names]
    return sum(t.nbytes for t in tensors if t is not None)


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: of the allocator on CUDA, of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_memory(device: torch.device) -> int | None:
    """Bytes of a GPU; None of a CPU, which can swap."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
