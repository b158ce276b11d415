"""Steps with drafts: logits are processed inside a step's one graph, or by transformers between two graphs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from dsa_compile import compat
from dsa_compile.cache import DSACache
from dsa_compile.models.mtp_step import Graphs, Place
from dsa_compile.progress import Progress
from dsa_compile.sampling import Sampling

Stepped = tuple[Tensor, Tensor, Tensor, Tensor]
"""What a step gives: see `dsa_compile.models.mtp_step.step`."""


@dataclass(frozen=True)
class Arriving:
    """What a step with so many drafts gives.

    ``wait``: for each sequence how many drafts it accepted, and the block, once they are on the host.
    ``states``: [B, W, hidden], of the tokens that went in.
    """

    drafts: int
    wait: Callable[[], list[list[int]]]
    states: Tensor


class Stepper(Protocol):
    """Steps one after another."""

    looks_ahead: bool
    """Whether a step may be started before what the one before gave is seen."""

    def advance(self, drafts: int) -> Arriving:
        """Start a step."""

    def finish(self, finished: list[bool]) -> None:
        """Leave these sequences as they are from the next step on."""


class OneByOne:
    """Steps that the host sees before it starts another. ``step``: `InGraph` or `BetweenGraphs`.

    ``tokens``, ``place``: of the first, as in `dsa_compile.models.mtp_step.step`.
    """

    looks_ahead = False

    def __init__(self, step: Callable[[Tensor, Place], Stepped], tokens: Tensor, place: Place) -> None:
        self._step, self._tokens, self._place = step, tokens, place

    def advance(self, drafts: int) -> Arriving:
        # a copy, as under CUDA graphs a step's output lies where the next one writes
        block, accepted, self._tokens, states = self._step(_resized(self._tokens, drafts + 1), self._place)
        self._place = self._place._replace(valid=self._place.valid + accepted + 1)
        return Arriving(drafts, torch.cat([accepted[:, None], block], 1).tolist, states)

    def finish(self, finished: list[bool]) -> None:
        self._place = self._place._replace(alive=~torch.tensor(finished, device=self._place.alive.device))


def _resized(tokens: Tensor, width: int) -> Tensor:
    """A copy of tokens [B, W] for a step of another width; a draft that was not made is token 0, as good as any."""
    missing = width - tokens.shape[1]
    return torch.nn.functional.pad(tokens, (0, missing)) if missing > 0 else tokens[:, :width].clone()


class InGraph:
    """Steps of one graph each. Tokens so far stay on the device, for a repetition penalty."""

    def __init__(
        self, model: Any, graphs: Callable[[int], Graphs], cache: DSACache, sampling: Sampling, progress: Progress
    ) -> None:
        self._model, self._graphs, self._cache, self._sampling = model, graphs, cache, sampling
        self._history: Tensor | None = None
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            prompt = progress.input_ids
            rest = prompt.new_zeros(prompt.shape[0], progress.limit + model.dsa.drafts)
            self._history = torch.cat([prompt, rest], 1)
            self._seen = torch.full_like(prompt[:, 0], prompt.shape[1])
            compat.hint_dynamic(self._history, 1)

    def __call__(self, tokens: Tensor, place: Place) -> Stepped:
        if self._history is not None and self._seen is not None:
            columns = self._seen[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
            self._history.scatter_(1, columns.clamp(max=self._history.shape[1] - 1), tokens)
        uniforms = _uniforms(tokens, self._sampling.greedy)
        block, accepted, drafts, states = self._graphs(tokens.shape[1]).step(
            self._model, self._cache, tokens, place, self._sampling, uniforms, self._history, self._seen
        )
        if self._seen is not None:
            self._seen = self._seen + accepted + 1
        return block, accepted, drafts, states


class BetweenGraphs:
    """Steps of two graphs, between which transformers' processors see each row behind the tokens that precede it."""

    def __init__(
        self,
        model: Any,
        graphs: Callable[[int], Graphs],
        cache: DSACache,
        processors: LogitsProcessorList,
        progress: Progress,
        greedy: bool,
    ) -> None:
        self._model, self._graphs, self._cache = model, graphs, cache
        self._processors, self._progress, self._greedy = processors, progress, greedy

    def __call__(self, tokens: Tensor, place: Place) -> Stepped:
        graphs = self._graphs(tokens.shape[1])
        logits, states = graphs.verify(self._model, self._cache, tokens, place)
        states = states.clone()  # as under CUDA graphs the next graph may write where they lie
        target = self._processed(logits.float(), tokens[:, 1:].tolist())
        block, accepted, drafts = graphs.settle(
            self._model, self._cache, target, tokens, states, place, _uniforms(tokens, self._greedy), self._greedy
        )
        return block, accepted, drafts, states

    def _processed(self, logits: Tensor, drafts: list[list[int]]) -> Tensor:
        target = logits.clone()
        for row, finished in enumerate(self._progress.finished):
            for column in range(0 if finished else logits.shape[1]):
                prefix: Any = self._progress.prefix(row, drafts[row][:column])
                target[row, column] = self._processors(prefix, logits[row, column][None].clone())[0]  # type: ignore[arg-type]
        return target if self._greedy else target.softmax(-1)


def _uniforms(tokens: Tensor, greedy: bool) -> Tensor:
    made: Tensor = (torch.zeros if greedy else torch.rand)(tokens.shape, device=tokens.device)
    return made
