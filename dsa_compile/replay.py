"""Plain decode steps that feed themselves: on a GPU each is one replay of a CUDA graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsa_compile.cache import DSACache
from dsa_compile.models.mtp_step import Place
from dsa_compile.sampling import Sampling


@dataclass(frozen=True)
class Arriving:
    """Tokens [B, 1] on their way to the host. ``copied``: when they are there; None: they are."""

    tokens: Tensor
    copied: torch.cuda.Event | None

    def wait(self) -> list[list[int]]:
        if self.copied is not None:
            self.copied.synchronize()
        rows: list[list[int]] = self.tokens.tolist()
        return rows


class Decoder:
    """Steps of one token for each sequence of a cache.

    All that a step reads and writes lies in place: pools, weights, and here tokens, lengths and what is alive. So steps
    follow each other without the host. A recording holds addresses and neither model nor cache: it is good for as long
    as `addresses` stay.

    Args:
        step: `dsa_compile.models.plain_step.plain_step`, compiled or not.
        recorded: capture it in a CUDA graph, for which ``step`` must be compiled for the model's GPU.

    Attributes:
        bytes: of the device that the recording took.
    """

    def __init__(
        self, model: Any, step: Callable[..., Tensor], cache: DSACache, sampling: Sampling, *, recorded: bool
    ) -> None:
        B, device = cache.batch_size, cache.device
        self._tokens = torch.zeros(B, 1, dtype=torch.int64, device=device)
        self._place = Place(
            valid=torch.zeros(B, dtype=torch.int64, device=device),
            alive=torch.zeros(B, dtype=torch.bool, device=device),
            offset=torch.zeros(B, dtype=torch.int64, device=device),
        )
        self._uniforms = torch.zeros(B, 1, device=device)
        self._rows, self._greedy, self.bytes = B, sampling.greedy, 0

        def advance() -> None:
            self._tokens.copy_(step(model, cache, self._tokens, self._place, sampling, self._uniforms))
            self._place.valid.add_(self._place.alive)

        self._advance = self._record(advance) if recorded else advance

    def _record(self, advance: Callable[[], None]) -> Callable[[], None]:
        advance()  # compiles, which a capture cannot; no sequence is alive, so nothing is written
        torch.cuda.synchronize(self._tokens.device)
        torch.cuda.empty_cache()  # as a capture does first: what it frees is not what it takes
        free = torch.cuda.mem_get_info(self._tokens.device)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            advance()
        self.bytes = max(0, free - torch.cuda.mem_get_info(self._tokens.device)[0])
        replay: Callable[[], None] = graph.replay
        return replay

    def start(self, tokens: Tensor, valid: Tensor, positions: Tensor) -> None:
        """Set where sequences are.

        Args:
            tokens: int64[B, 1], the last ones, which no cache holds yet; the cache may have more rows.
            valid: int64[B], tokens in the cache. positions: int64[B], of ``tokens``.
        """
        B = tokens.shape[0]
        self._rows = B
        self._tokens[:B] = tokens
        self._place.valid[:B] = valid
        self._place.offset[:B] = positions - valid
        self._place.alive[:] = False
        self._place.alive[:B] = True

    def finish(self, finished: list[bool]) -> None:
        """Leave these sequences as they are from the next step on."""
        self._place.alive[: self._rows] = ~torch.tensor(finished, device=self._tokens.device)

    def launch(self) -> None:
        """Start a step, without a look at what it gives."""
        if not self._greedy:
            self._uniforms.uniform_()
        self._advance()

    def advance(self) -> Arriving:
        """Start a step; its tokens arrive while the next ones run."""
        self.launch()
        tokens = self._tokens[: self._rows].to("cpu", non_blocking=True, copy=True)
        if self._tokens.device.type != "cuda":
            return Arriving(tokens, None)
        copied = torch.cuda.Event()
        copied.record()
        return Arriving(tokens, copied)


def addresses(model: Any, cache: DSACache) -> tuple[int, ...]:
    """Where all lies that a recording of ``model`` over ``cache`` reads and writes."""
    pools = (pool for layer in cache.layers for pool in layer.pools().values())
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers(), *pools))
