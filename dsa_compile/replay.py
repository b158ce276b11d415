"""Plain decode steps that feed themselves: on a GPU each is one replay of a CUDA graph."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsa_compile.cache import DSACache
from dsa_compile.models.mtp_step import Place
from dsa_compile.sampling import Sampling


class Landing:
    """Where the tokens of a step arrive on the host while the device goes on. ``like``: int64[B, n], a step's."""

    def __init__(self, like: Tensor) -> None:
        self._there = torch.zeros(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        self._copied = torch.cuda.Event() if like.is_cuda else None
        self._rows = 0

    def send(self, tokens: Tensor, rows: int, beside: torch.cuda.Stream | None = None) -> None:
        """Start a copy of ``tokens``, of which the first ``rows`` are asked for.

        ``beside``: the stream to copy on, so that what comes next need not wait; then ``tokens`` must stay meanwhile.
        """
        self._rows = rows
        if self._copied is None:
            self._there.copy_(tokens)
            return
        main = torch.cuda.current_stream(tokens.device)
        stream = main if beside is None else beside
        if stream is not main:
            stream.wait_stream(main)
        with torch.cuda.stream(stream):
            self._there.copy_(tokens, non_blocking=True)
            self._copied.record(stream)

    def wait(self) -> list[list[int]]:
        """What was sent last, once it is there."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[list[int]] = self._there.tolist()
        return tokens[: self._rows]


class Landings:
    """Two places that steps fill in turn: what one gave travels to the host while the next fills the other.

    Attributes:
        turn: int64[1], the place that the next step fills; a step changes it.
        tokens: int64[2, B, n], the places.
    """

    def __init__(self, batch_size: int, columns: int, device: torch.device) -> None:
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(2, batch_size, columns, dtype=torch.int64, device=device)
        self._place, self._landings = 0, [Landing(self.tokens[0]) for _ in range(2)]
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self) -> None:
        """The first step is next."""
        self.turn.zero_()
        self._place = 0

    def send(self, rows: int) -> tuple[Landing, int]:
        """Behind a step: where its first ``rows`` arrive, and the place that it filled.

        Both are gone when the step behind the next one is started.
        """
        place, self._place = self._place, 1 - self._place
        self._landings[place].send(self.tokens[place], rows, self._beside)
        return self._landings[place], place


class Decoder:
    """Steps of one token for each sequence of a cache.

    All that a step reads and writes lies in place: pools, weights, and here tokens, lengths, what is alive and, for a
    repetition penalty, what was seen. So steps follow each other without the host. A recording holds addresses and
    neither model nor cache: it is good for as long as `addresses` stay.

    Args:
        step: `dsa_compile.models.plain_step.plain_step`, compiled or not.
        recorded: capture it in a CUDA graph, for which ``step`` must be compiled for the model's GPU.

    Attributes:
        bytes: of the device that the recording took. As it is made no sequence is alive, so that nothing is written.
    """

    def __init__(
        self, model: Any, step: Callable[..., None], cache: DSACache, sampling: Sampling, *, recorded: bool
    ) -> None:
        B, device = cache.batch_size, cache.device
        self._tokens = torch.zeros(B, 1, dtype=torch.int64, device=device)
        self._place = nowhere(B, device)
        self._uniforms = torch.zeros(B, 1, device=device)
        self._rows, self._greedy, self.bytes = B, sampling.greedy, 0
        self._landings = Landings(B, 1, device)
        self._seen: Tensor | None = None
        if sampling.penalises:
            self._seen = torch.zeros(B, model.config.vocab_size, dtype=torch.bool, device=device)
            sampling = replace(sampling, seen=self._seen)
        turn, landed = self._landings.turn, self._landings.tokens

        def advance() -> None:
            step(model, cache, self._tokens, self._place, sampling, self._uniforms, turn, landed)

        self._advance = advance
        if recorded:
            self._advance, self.bytes = record(advance, device)

    def start(self, tokens: Tensor, valid: Tensor, positions: Tensor, history: Tensor) -> None:
        """Set where sequences are.

        Args:
            tokens: int64[B, 1], the last ones, which no cache holds yet; the cache may have more rows.
            valid: int64[B], tokens in the cache. positions: int64[B], of ``tokens``.
            history: int64[B, S], what precedes ``tokens``, padding included: all that a repetition penalty counts.
        """
        B = tokens.shape[0]
        self._rows = B
        self._landings.begin()
        self._tokens[:B] = tokens
        put(self._place, Place(valid, torch.ones_like(valid, dtype=torch.bool), positions - valid))
        if self._seen is not None:
            self._seen.zero_()
            self._seen[:B].scatter_(1, torch.cat([history, tokens], 1), True)

    def finish(self, finished: list[bool]) -> None:
        """Leave these sequences as they are from the next step on, without a wait for the device."""
        end(self._place, finished)

    def launch(self) -> None:
        """Start a step, without a look at what it gives."""
        if not self._greedy:
            self._uniforms.uniform_()
        self._advance()

    def advance(self) -> Landing:
        """Start a step; its tokens arrive while the next one runs, and are gone when the one behind that is started."""
        self.launch()
        return self._landings.send(self._rows)[0]


def nowhere(batch_size: int, device: torch.device) -> Place:
    """For steps that read it in place: no sequence is alive."""
    zeros = torch.zeros(batch_size, dtype=torch.int64, device=device)
    return Place(zeros, zeros.bool(), zeros.clone())


def put(place: Place, first: Place) -> None:
    """Set where the first sequences of a place are; the others are not alive."""
    place.alive.zero_()
    for own, given in zip(place, first):
        own[: given.shape[0]] = given


def end(place: Place, finished: list[bool]) -> None:
    """Let the first sequences of a place live on but for these, without a wait for the device."""
    alive = torch.tensor([not row for row in finished], pin_memory=place.alive.is_cuda)
    place.alive[: len(finished)].copy_(alive, non_blocking=True)


def record(advance: Callable[[], None], device: torch.device) -> tuple[Callable[[], None], int]:
    """A replay of what ``advance`` does, and the bytes that the recording takes. It runs once before."""
    advance()  # compiles, which a capture cannot
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # as a capture does first: what it frees is not what it takes
    free = torch.cuda.mem_get_info(device)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        advance()
    return graph.replay, max(0, free - torch.cuda.mem_get_info(device)[0])


def addresses(model: Any, cache: DSACache) -> tuple[int, ...]:
    """Where all lies that a recording of ``model`` over ``cache`` reads and writes."""
    pools = (pool for layer in cache.layers for pool in layer.pools().values())
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers(), *pools))
